"""Invariant 14: crash safety. Killed anywhere, the run resumes; no prompt is skipped, none trained twice.

Invariant 16: replay. From the record, the training of a finished run is repeated to identical weights.
"""

import asyncio
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from system import (
    DEADLINE_S,
    HeadwayProcess,
    check_finished,
    check_record,
    events_of,
    make_config,
    run_inline,
    task_of,
    write_config,
)
from torch import Tensor

from headway.config import Config, load
from headway.control.resume import replay
from headway.errors import ConfigError, HeadwayError
from headway.record.events import Event
from headway.record.run import fold
from headway.training.batches import MicroBatch
from headway.training.trainer import Trainer

Moment = Callable[[list[Event]], bool]


def count(events: list[Event], kind: str) -> int:
    return sum(event.kind == kind for event in events)


def starting(events: list[Event]) -> bool:
    return bool(events) and not any(event.kind in ("resumed", "swapped") for event in events)


def before_the_first_step(events: list[Event]) -> bool:
    return count(events, "admitted") > 0 and count(events, "taken") == 0


def in_the_middle_of_a_step(events: list[Event]) -> bool:
    """With a step since the last checkpoint, which the next incarnation must train again."""
    num_trained = count(events, "trained")
    return count(events, "taken") > num_trained and num_trained % 2 == 1


def during_a_checkpoint(events: list[Event]) -> bool:
    num_trained = count(events, "trained")
    saved = max((event.version for event in events if event.kind == "checkpointed"), default=0)
    return num_trained % 2 == 0 and num_trained > saved


def at_the_end(events: list[Event]) -> bool:
    return count(events, "trained") == STEPS and count(events, "ended") == 0


STEPS = 6
KILLS: list[tuple[Moment, bool]] = [
    (starting, False),
    (before_the_first_step, True),
    (in_the_middle_of_a_step, False),
    (during_a_checkpoint, True),
    (at_the_end, False),
]


def local_config(tmp_path: Path, model: str) -> Path:
    # A verifier of 50 ms leaves each moment wide enough to be met.
    task = {"train": f"{tmp_path}/task.py:rows", "verifier": f"{tmp_path}/task.py:slowly"}
    return write_config(tmp_path, model, run={"runtime": "local", "steps": STEPS}, task=task)


@pytest.mark.timeout(900)
def test_invariant_14_five_kills_lose_nothing_and_the_run_replays_to_identical_weights(
    tmp_path: Path, tiny_model: str
) -> None:
    """The same run is killed five times, each time at another moment: the whole of it, or the controller alone."""
    path = local_config(tmp_path, tiny_model)
    config = load(path)
    directory = Path(config.run.dir)
    for number, (moment, everything) in enumerate(KILLS):
        with HeadwayProcess("train", path, *["--resume"] * bool(number), run=directory) as run:
            written = run.kill_at(moment, moment.__name__, everything)
            check_record(config, written)
            assert count(written, "resumed") == number or moment is starting
    with HeadwayProcess("train", path, "--resume", run=directory) as run:
        assert run.wait() == 0, run.output
        assert not run.descendants()
    events = run.events()
    check_finished(config, events)
    assert count(events, "resumed") == len(KILLS)
    assert events[: len(written)] == written
    check_replay(config)


def check_replay(config: Config) -> None:
    directory = Path(config.run.dir)
    version, digest = asyncio.run(replay(directory, lambda event: None))
    state = fold(events_of(config))
    assert (version, digest) == (state.num_trained, state.digests[state.num_trained])
    weights = "model.safetensors"
    assert (directory / "model" / weights).read_bytes() == (directory / "replay" / "model" / weights).read_bytes()


# Stopping in order


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "runtime", "moment"),
    [
        (signal.SIGTERM, "local", in_the_middle_of_a_step),
        (signal.SIGINT, "local", starting),
        (signal.SIGINT, "inline", in_the_middle_of_a_step),
        pytest.param(signal.SIGHUP, "local", at_the_end, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_in_order_and_resume_goes_on(
    tmp_path: Path, tiny_model: str, number: signal.Signals, runtime: str, moment: Moment
) -> None:
    path = local_config(tmp_path, tiny_model)
    config = load(path, ["--run.runtime=inline"])
    with HeadwayProcess("train", path, f"--run.runtime={runtime}", run=Path(config.run.dir)) as run:
        run.wait_until(moment, moment.__name__)
        run.process.send_signal(number)
        for again in (number, signal.SIGINT, signal.SIGTERM):  # an impatient person
            time.sleep(0.2)
            with suppress(ProcessLookupError):
                run.process.send_signal(again)
        assert run.wait() == 1
        assert not run.descendants()
        assert re.search(r"error: stopped after (the last of )?\d+ steps; `--resume` (goes|evaluates)", run.output)
        assert (Path(config.run.dir) / "summary.json").exists() and (Path(config.run.dir) / "report.png").exists()
        assert "Traceback" not in run.output
    stopped = run.events()
    assert stopped[-1].kind == "ended" and stopped[-1].status == "stopped"
    assert check_record(config, stopped).status == "stopped"
    run_inline(config, resume=True)
    check_finished(config, events_of(config))


@pytest.mark.timeout(600)
def test_an_impatient_person_sees_no_stack_trace(tmp_path: Path, tiny_model: str) -> None:
    """Interrupts while the workers are ended, one after the other until the run is gone."""
    path = local_config(tmp_path, tiny_model)
    with HeadwayProcess("train", path, run=Path(load(path).run.dir)) as run:
        run.wait_until(in_the_middle_of_a_step, "a step")
        deadline = time.monotonic() + DEADLINE_S
        while run.process.poll() is None:
            assert time.monotonic() < deadline, run.output
            run.process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert run.wait() in (1, 130), run.output  # 130 when it came after the last worker had ended
        assert "Traceback" not in run.output
        assert not run.descendants()
    ended = run.events()[-1]
    assert ended.kind == "ended" and ended.status == "stopped"


# Checkpoints that are damaged


def flip_a_byte(slot: Path) -> None:
    tensors = slot / "state-0-of-1.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-100] ^= 1
    tensors.write_bytes(data)


def cut_short(slot: Path) -> None:
    tensors = slot / "state-0-of-1.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])


def remove(slot: Path) -> None:
    shutil.rmtree(slot)


def empty_the_description(slot: Path) -> None:
    (slot / "checkpoint.json").write_text("[]")


@pytest.fixture(scope="module")
def synchronous_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> tuple[Config, str]:
    """A finished run of four steps with checkpoints of 2 (slot a) and 4 (slot b); its last digest after two more steps.

    At η = 0 in deterministic mode one outcome is possible, so whatever befalls it, it must come to the same weights.
    """
    home = tmp_path_factory.mktemp("synchronous")
    config = make_config(home, tiny_model, staleness={"max_staleness": 0})
    run_inline(config)
    longer = config_at(config, home / "longer")
    run_inline(longer, resume=True)
    return config, fold(events_of(longer)).digests[6]


def config_at(config: Config, directory: Path) -> Config:
    """The same run, copied, with two more steps to go."""
    shutil.copytree(config.run.dir, directory)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(directory), "steps": 6})})


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, remove, empty_the_description])
def test_a_damaged_newest_checkpoint_is_named_and_the_other_slot_leads_to_the_same_weights(
    tmp_path: Path, synchronous_run: tuple[Config, str], damage: Callable[[Path], None]
) -> None:
    finished, expected = synchronous_run
    config = config_at(finished, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoint" / "b")
    _, seen = run_inline(config, resume=True)
    events = events_of(config)
    check_finished(config, events)
    (resumed,) = [event for event in events if event.kind == "resumed"]
    assert (resumed.version, resumed.checkpoint_version) == (4, 2)
    assert f"checkpoint {tmp_path}/run/checkpoint/b" in seen and "trying the one before" in seen
    assert fold(events).digests[6] == expected


def test_with_both_checkpoints_damaged_the_run_is_trained_again_from_the_beginning(
    tmp_path: Path, synchronous_run: tuple[Config, str]
) -> None:
    finished, expected = synchronous_run
    config = config_at(finished, tmp_path / "run")
    for slot in ("a", "b"):
        flip_a_byte(tmp_path / "run" / "checkpoint" / slot)
    run_inline(config, resume=True)
    events = events_of(config)
    assert [event.checkpoint_version for event in events if event.kind == "resumed"] == [0]
    assert fold(events).digests[6] == expected


def test_invariant_14_a_run_that_ran_out_of_memory_resumes_with_the_fit_each_step_was_trained_with(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other micro-batches round differently, so retraining with the configured fit would give other weights."""
    config = make_config(tmp_path, tiny_model, run={"steps": 3}, staleness={"max_staleness": 0})
    forward = Trainer._forward

    def short_of_memory(trainer: Trainer, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and trainer.version == 2 and len(micro_batch.lengths) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(trainer, micro_batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", short_of_memory)
        run_inline(config)
    longer = config_at(config, tmp_path / "longer")
    shutil.rmtree(tmp_path / "longer" / "checkpoint" / "b")  # of version 3
    run_inline(longer, resume=True)
    events = events_of(longer)
    assert [event.checkpoint_version for event in events if event.kind == "resumed"] == [2]
    budgets = [event.metrics["token_budget"] for event in events if event.kind == "trained"]
    assert budgets[0] == budgets[1] == config.trainer.token_budget
    assert len(set(budgets[2:])) == 1 and budgets[2] < budgets[1]


# What cannot be resumed


def test_a_finished_run_is_not_resumed_but_reported(tmp_path: Path, synchronous_run: tuple[Config, str]) -> None:
    finished, _ = synchronous_run
    before = events_of(finished)
    summary, seen = run_inline(finished, resume=True)
    assert summary.status == "finished" and "is finished; nothing to resume" in seen
    assert len(events_of(finished)) == len(before)


def test_a_damaged_record_is_refused_with_the_place_of_the_damage(
    tmp_path: Path, synchronous_run: tuple[Config, str]
) -> None:
    config = config_at(synchronous_run[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    (shard,) = (tmp_path / "run" / "record").iterdir()
    data = bytearray(shard.read_bytes())
    run = fold(events_of(config))
    ref = run.ref(run.batches[0][1][0])
    data[ref.offset + 40] ^= 1
    shard.write_bytes(data)
    with pytest.raises(HeadwayError, match=rf"groups-00000.bin is damaged at byte {ref.offset}; restore it"):
        run_inline(config, resume=True)
    assert events_of(config)[-1].status == "failed"


def test_a_resume_with_fewer_rows_is_refused_because_prompts_would_change_places(
    tmp_path: Path, tiny_model: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    task = {"train": str(rows), "verifier": task_of(tmp_path, "verify")}
    run_inline(make_config(tmp_path, tiny_model, task=task, run={"steps": 1}))
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    config = make_config(tmp_path, tiny_model, task=task, run={"steps": 2})
    before = events_of(config)
    with pytest.raises(ConfigError, match=r"was begun with 4 prompts, and its tasks now have 3; restore their rows"):
        run_inline(config, resume=True)
    assert len(events_of(config)) == len(before)
