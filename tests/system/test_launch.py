"""Whole runs: what a finished one leaves behind, and inputs that are odd without being wrong.

Invariant 2: conservation. Invariant 6: parity. Invariant 10: errors are never rewards. Invariant 15: nothing
hangs. The ledger adds up in every one of them.
"""

import asyncio
import json
import os
import shutil
import stat
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil
import pytest
from system import (
    DEADLINE_S,
    HeadwayProcess,
    check_fates,
    check_finished,
    check_record,
    events_of,
    make_config,
    run_inline,
    task_of,
    write_config,
)

from headway.config import Config, load
from headway.control.workers import open_runtime
from headway.errors import ConfigError, RunFailed
from headway.launch import prepare
from headway.record.events import Event
from headway.record.shards import RECORD_NAME, Record
from headway.trained_tokens import TOKEN_FATES
from headway.types import StopReason

SUMMARY_KEYS = {
    *("steps", "wall_s", "wall_s_sync", "eval_before", "eval_after", "tokens_generated", "tokens_trained"),
    *("staleness_mean", "staleness_max", "parity_max_abs", "pause_ms_mean", "pause_ms_max", "dropped"),
}


def check_results(config: Config, events: list[Event]) -> None:
    """What a run that came to its end leaves in its directory."""
    check_finished(config, events)
    directory = Path(config.run.dir)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == config.run.steps and summary["status"] == "finished"
    assert summary["eval_before"] is not None and summary["eval_after"] is not None
    assert summary["staleness_max"] <= summary["staleness_bound"] == config.staleness.max_staleness + 1
    assert summary["pause_ms_mean"] <= summary["pause_ms_max"]
    assert (directory / "report.png").stat().st_size > 10_000
    fates = check_fates(events)
    assert summary["tokens_generated"] == fates.generated == fates.trained + fates.dropped.total()
    assert summary["tokens_trained"] == fates.trained > 0
    swapped = [event for event in events if event.kind == "swapped"]
    assert [event.version for event in swapped] == list(range(config.run.steps + 1))
    # Invariant 6: parity, of the probe at every swap and of what was sampled and trained on under the same weights.
    assert max(event.parity_max_abs for event in swapped) < 1e-5
    assert summary["parity_max_abs"] < 1e-5
    digests = [event.digest for event in events if event.kind == "trained"]
    assert len(set(digests)) == config.run.steps, "every step must have moved the weights"
    check_model(directory / "model", config)


def check_model(directory: Path, config: Config) -> None:
    """An ordinary transformers directory, with the weights of the last version and not of the first."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoModelForCausalLM.from_pretrained(directory)
    start = AutoModelForCausalLM.from_pretrained(config.model.path)
    text = AutoTokenizer.from_pretrained(directory)("1+2=", return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        assert not torch.equal(saved(**text).logits, start(**text).logits)
    assert {name: tuple(tensor.shape) for name, tensor in saved.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in start.state_dict().items()
    }


def test_a_run_in_one_process_finishes_and_everything_adds_up(tmp_path: Path, tiny_model: str) -> None:
    config = make_config(tmp_path, tiny_model, evaluate={"every": 2}, rollout={"workers": 2})
    began = time.time()
    _, seen = run_inline(config)
    events = events_of(config)
    check_results(config, events)
    assert events[0].startup_s <= events[0].time - began + 0.1, "of this run, not of the process it was called from"
    assert {event.label for event in events if event.kind == "evaluated"} == {"before", "step", "after"}
    assert [event.version for event in events if event.kind == "checkpointed"] == [2, 4]
    assert "step 4/4" in seen and "run finished" in seen
    check_what_a_viewer_reads(config, events)


def check_what_a_viewer_reads(config: Config, events: list[Event]) -> None:
    """The completions of every evaluation and what the loss saw of every token are in the record."""
    record = Record(Path(config.run.dir) / RECORD_NAME)
    finished = {event.group: event for event in events if event.kind == "finished"}
    for event in events:
        if event.kind == "evaluated":
            groups = record.load_batch(event.groups_at).groups
            assert fmean(group.trajectories[0].reward for group in groups) == pytest.approx(event.accuracy)
            assert len(groups) == event.num and all(group.reference for group in groups)
        elif event.kind == "trained":
            tokens = record.load_tokens(event.tokens_at)
            for number in event.groups:
                group = record.load(finished[number].place)
                for trajectory in group.trajectories:
                    (sequence,) = trajectory.sequences
                    own = tokens.place(number, trajectory.index, 0)
                    exact = np.exp(tokens.proximal[own] - sequence.logprobs[sequence.loss_mask > 0])
                    capped = tokens.all_fates[own] == TOKEN_FATES.index("capped")
                    np.testing.assert_allclose(tokens.weights[own][~capped], exact[~capped], rtol=1e-5)


def test_a_run_in_processes_finishes_leaves_none_behind_and_everything_adds_up(tmp_path: Path, tiny_model: str) -> None:
    path = write_config(tmp_path, tiny_model, run={"runtime": "local"}, rollout={"workers": 2})
    config = load(path)
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(lambda events: any(event.kind == "trained" for event in events), "a training step")
        names = [" ".join(process.cmdline()) for process in run.descendants()]
        assert run.wait() == 0, run.output
        assert not run.descendants()
        assert "tokens by fate" in run.output
    for worker in ("engine", "trainer", "rollout-0", "rollout-1", "reward"):
        assert any(f"headway.runtime.worker {worker} " in name for name in names), names
    events = run.events()
    check_results(config, events)
    assert 0.5 < events[0].startup_s < DEADLINE_S, "with the imports of its process"


def test_24_a_run_directory_is_private_whether_new_or_not(tmp_path: Path, tiny_model: str) -> None:
    async def modes(config: Config) -> list[int]:
        directory = Path(config.run.dir)
        async with open_runtime(config, directory):
            return [stat.S_IMODE(path.stat().st_mode) for path in (directory.parent, directory)]

    config = make_config(tmp_path, tiny_model, run={"runtime": "local", "dir": str(tmp_path / "runs" / "new")})
    run = Path(config.run.dir)
    before = os.umask(0o022)
    try:
        assert asyncio.run(modes(config)) == [0o755, 0o700]
        shutil.rmtree(run)
        for name, expected in (("", 0o700), ("events.jsonl", 0o700), ("thesis.txt", 0o777)):
            run.mkdir()
            run.chmod(0o777)
            if name:
                (run / name).touch()
            assert asyncio.run(modes(config)) == [0o755, expected], name
            shutil.rmtree(run)
    finally:
        os.umask(before)


@pytest.mark.parametrize("rows", ["one_row", "two_rows"])
def test_a_dataset_smaller_than_a_batch_is_repeated(tmp_path: Path, tiny_model: str, rows: str) -> None:
    run_with(tmp_path, tiny_model, "verify", task={"train": task_of(tmp_path, rows)})


def run_with(tmp_path: Path, model: str, verifier: str, /, **sections: dict[str, Any]) -> tuple[Config, list[Event]]:
    """A short run without evaluation, to its end."""
    task = {"verifier": task_of(tmp_path, verifier), "eval": ""} | sections.pop("task", {})
    sections = {"run": {"steps": 3}, "reward": {"retries": 0, "workers": 2}, "task": task} | sections
    config = make_config(tmp_path, model, **sections)
    run_inline(config)
    events = events_of(config)
    check_finished(config, events)
    return config, events


def failures_of(events: list[Event]) -> list[str]:
    return [one.reason for event in events if event.kind == "finished" for one in event.failures]


@pytest.mark.parametrize(
    ("verifier", "sentence"),
    [
        ("sometimes_raises", "raised ValueError at task.py"),
        ("sometimes_nan", "returned nan, and a score is one finite number"),
        ("sometimes_text", "returned a value of type str, and a score is one finite number"),
    ],
)
def test_invariant_10_an_error_is_never_a_reward_and_the_run_goes_on(
    tmp_path: Path, tiny_model: str, verifier: str, sentence: str
) -> None:
    config, events = run_with(tmp_path, tiny_model, verifier)
    failures = failures_of(events)
    assert failures and all(sentence in failure for failure in failures)
    fates = check_fates(events)
    assert fates.dropped["trajectory: verifier"] == sum(
        one.tokens for event in events if event.kind == "finished" for one in event.failures
    )
    state, record = check_record(config, events), Record(Path(config.run.dir) / "record")
    for group in map(record.load, [group.ref for group in state.groups if group.ref]):
        assert len(group.trajectories) + len(group.failures) == config.rollout.group_size
        assert {trajectory.reward for trajectory in group.trajectories} <= {0.0, 1.0}


def test_prompts_whose_verifier_always_fails_are_dropped_and_others_take_their_place(
    tmp_path: Path, tiny_model: str
) -> None:
    config, events = run_with(tmp_path, tiny_model, "fails_for_some_prompts", run={"steps": 8})
    state = check_record(config, events)
    assert state.dropped and set(state.dropped.values()) == {"failed"}
    assert check_fates(events).dropped["failed"] > 0


def test_a_verifier_that_always_raises_ends_the_run_with_one_sentence(tmp_path: Path, tiny_model: str) -> None:
    with pytest.raises(
        RunFailed, match=r"in each of the first \d+ groups, the last with 'verifier: .*ConnectionError.*; check"
    ):
        run_with(tmp_path, tiny_model, "always_raises")
    events = events_of(make_config(tmp_path, tiny_model))
    fates = check_fates(events)
    assert events[-1].status == "failed" and "the judge is away" in events[-1].cause
    assert fates.trained == 0 and fates.dropped["failed"] > 0


def test_invariant_15_a_verifier_that_hangs_is_killed_at_its_deadline_and_the_run_goes_on(
    tmp_path: Path, tiny_model: str
) -> None:
    config, events = run_with(tmp_path, tiny_model, "hangs_for_one_prompt", reward={"deadline_s": 0.5, "retries": 0})
    assert len(check_record(config, events).dropped) >= 1
    lost = [event for event in events if event.kind == "dropped"]
    assert all(event.reason == "failed" and event.tokens > 0 for event in lost)


def test_a_verifier_that_forks_leaves_no_process_behind(tmp_path: Path, tiny_model: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    _, events = run_with(tmp_path, tiny_model, "forks", run={"steps": 1})
    assert not failures_of(events)
    deadline = time.monotonic() + DEADLINE_S
    while left := set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < deadline, left


def test_a_prompt_of_the_context_less_one_gets_its_one_token(tmp_path: Path, tiny_model: str) -> None:
    config, events = run_with(tmp_path, tiny_model, "verify", task={"train": task_of(tmp_path, "full_rows")})
    assert {length for event in events if event.kind == "finished" for length in event.lengths} == {1}
    assert check_fates(events).generated == 3 * 3 * config.run.steps


WORKFLOW = """
import numpy as np

from headway.types import Reward, Sequence, Trajectory

class FillsTheContext:
    "Asks for tokens where there is no room for one."

    def is_full(self, episode):
        return True

    async def run(self, episode):
        tokens = np.resize(episode.prompt.tokens, 32) if self.is_full(episode) else episode.prompt.tokens
        completion = await episode.generate(tokens)
        score = await episode.verify(episode.text(completion.tokens))
        sequence = Sequence.single_turn(tokens, completion)
        rewards = (Reward(0, len(sequence.tokens) - 1, score),)
        return Trajectory(episode.index, (sequence,), rewards, episode.temperature, (completion.stop,))

class SometimesFillsTheContext(FillsTheContext):
    def is_full(self, episode):
        return episode.index == 0
"""


def run_workflow(tmp_path: Path, tiny_model: str, name: str) -> list[Event]:
    (tmp_path / "workflow.py").write_text(WORKFLOW)
    rollout = {"workflow": f"{tmp_path}/workflow.py:{name}", "group_size": 3}
    return run_with(tmp_path, tiny_model, "verify", rollout=rollout)[1]


def check_zero_tokens(events: list[Event], share: float) -> None:
    """This share of the completions has none, each with its reason."""
    lengths = [length for event in events if event.kind == "finished" for length in event.lengths]
    assert lengths.count(0) == len(lengths) * share
    assert sum(event.stops.count(StopReason.CONTEXT) for event in events if event.kind == "finished") >= 9


def test_completions_of_zero_tokens_are_counted_and_the_others_are_trained(tmp_path: Path, tiny_model: str) -> None:
    events = run_workflow(tmp_path, tiny_model, "SometimesFillsTheContext")
    check_zero_tokens(events, share=1 / 3)


def test_batches_of_zero_tokens_add_no_version_and_end_the_run(tmp_path: Path, tiny_model: str) -> None:
    with pytest.raises(RunFailed, match=r"skipped \(version 0: no trajectory of the batch has a token to train\)"):
        run_workflow(tmp_path, tiny_model, "FillsTheContext")
    events = events_of(make_config(tmp_path, tiny_model))
    check_zero_tokens(events, share=1)
    assert not [event for event in events if event.kind == "trained"]
    assert check_fates(events).generated == 0


def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run_with_a_sentence(
    tmp_path: Path, tiny_model: str
) -> None:
    (tmp_path / "huge.py").write_text("def verify(task, text):\n    return -3e38\n")  # finite; a sum of three is not
    trainer = {"batch_groups": 3, "token_budget": 128, "threads": 1, "max_skipped": 2}
    algorithm = {"baseline": "none", "normalise": "none"}
    task = {"verifier": f"{tmp_path}/huge.py:verify"}
    with pytest.raises(RunFailed, match=r"2 training steps in a row were skipped \(version 0: loss .*\); lower tr"):
        run_with(tmp_path, tiny_model, "verify", run={"steps": 9}, trainer=trainer, algorithm=algorithm, task=task)
    events = events_of(make_config(tmp_path, tiny_model))
    assert not [event for event in events if event.kind == "trained"]
    assert [event.version for event in events if event.kind == "skipped"] == [0, 0]
    dropped = [event for event in events if event.kind == "dropped"]
    assert [event.reason for event in dropped] == ["skipped", "skipped"]
    assert check_fates(events).dropped["skipped"] == sum(event.tokens for event in dropped) > 0
    assert events[-1].status == "failed" and "gradient norm nan" in events[-1].cause


def test_weights_that_give_nan_after_a_finite_step_are_named_before_an_engine_gets_them(
    tmp_path: Path, tiny_model: str
) -> None:
    trainer = {"batch_groups": 3, "lr": 1e38, "token_budget": 128, "threads": 1}
    with pytest.raises(RunFailed, match=r"the model of version 1 gives the probe NaN .* training diverged; lower tr"):
        run_with(tmp_path, tiny_model, "verify", trainer=trainer)
    events = events_of(make_config(tmp_path, tiny_model))
    assert [event.version for event in events if event.kind == "swapped"] == [0]
    assert not [event for event in events if event.kind == "trained"]


def test_completions_end_at_every_token_that_config_generation_config_and_the_user_name(
    tmp_path: Path, tiny_model: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    listed = {"eos_token_id": [1, 40], "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(listed))
    prepared = prepare(make_config(tmp_path, str(model), sampling={"stop_tokens": ["a", 7, "<unk>"]}))
    assert prepared.sampling.stop_tokens == prepared.eval_sampling.stop_tokens == (1, 2, 7, 13, 40)
    for named in ("<|im_end|>", 5000):
        with pytest.raises(ConfigError, match=f"sampling.stop_tokens names {named!r}, which is no token of the model"):
            prepare(make_config(tmp_path, str(model), sampling={"stop_tokens": [named]}))


def test_training_warns_of_truncated_sampling_as_a_dry_run_does(tmp_path: Path, tiny_model: str) -> None:
    assert not prepare(make_config(tmp_path, tiny_model)).notes
    for sampling in ({"top_p": 0.9}, {"top_k": 4}):
        assert "truncates sampling" in prepare(make_config(tmp_path, tiny_model, sampling=sampling)).notes[-1]
