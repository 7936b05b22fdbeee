"""Four trainer ranks against one; odd shapes; ranks that die, hang, break or run out of memory; whole runs.

Invariant 12: packing-independent gradient, for any rank count. Invariant 14: crash safety.
Invariant 15: bounded waits. Invariant 16: replay to identical weights on the same rank count.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray_cluster
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import Stage
from system import HeadwayProcess, check_finished, check_record, write_config
from test_ranks import FP32_ROUNDING, SEQUENCES, batch_of, stale
from test_ranks_saved import losses
from training import distance, load_state, make_batch, plain_model, save_state, trained_gradients
from transformers import AutoModelForCausalLM, Qwen3Config

from headway.config import Config, load
from headway.control.resume import replay
from headway.errors import DeadlineExceeded, RunFailed, WorkerDied
from headway.model.loading import load_model, named_weights
from headway.model.tokenizer import build_character_tokenizer
from headway.record.events import Event
from headway.record.run import Run, fold
from headway.runtime.channel import RemoteError
from headway.runtime.ray import RayRuntime
from headway.training import checkpoint
from headway.weights.shadow import ShadowWeights
from headway.weights.stream import own_address

pytestmark = pytest.mark.slow

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=().,:?\n"


@pytest.fixture(scope="module")
def four(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tiny_model, 4, tmp_path_factory.mktemp("four"))
    yield made
    made.close()


@pytest.fixture
def make_stage(tiny_model: str, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(num_ranks: int = 2, **knobs: Any) -> Stage:
        made.append(Stage(tiny_model, num_ranks, tmp_path / f"stage-{len(made)}", **knobs))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


# Four ranks


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=7),
    budget=st.sampled_from([45, 64, 90, 4096]),
)
def test_invariant_12_four_ranks_have_the_gradient_of_one(
    four: Stage, pairs: list[tuple[int, int]], budget: int
) -> None:
    lengths = [length for pair in pairs for length in pair]
    batch = stale(four.path, batch_of(np.random.default_rng(sum(lengths)), *lengths))
    report = four.run(four.begin(clip_norm=1e9, token_budget=budget).train(batch))
    assert not report.skipped
    assert distance(four.gradients(), trained_gradients(four.path, batch)) < FP32_ROUNDING


@pytest.mark.parametrize("minibatches", [1, 3])
def test_steps_of_four_ranks_are_those_of_one(four: Stage, minibatches: int) -> None:
    knobs: dict[str, Any] = {"lr": 1e-3, "minibatches": minibatches, "token_budget": 48, "clip_norm": 0.5}
    ranked, one = four.begin(**knobs), four.one(**knobs)
    for version in range(3):
        batch = stale(four.path, make_batch(version, num_groups=6, first=10 * version))
        found, expected = four.run(ranked.train(batch)), one.train(batch)
        for name in found.metrics.keys() - {"num_micro_batches"}:
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3, abs=1e-5), name
    scores, exact = four.run(ranked.score(SEQUENCES, 0.8)), one.score(SEQUENCES, 0.8)
    assert max(float(np.abs(a - b).max()) for a, b in zip(scores.logprobs, exact.logprobs, strict=True)) < 1e-4


def test_checkpoints_of_four_ranks_go_on_with_the_same_loss_on_one_two_and_four(
    four: Stage, make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    knobs: dict[str, Any] = {"lr": 1e-3, "minibatches": 2, "token_budget": 64, "warmup_steps": 3}
    ranked = four.begin(**knobs)
    losses(lambda batch: four.run(ranked.train(batch)), range(2))
    four.save(tmp_path / "a")
    expected = losses(lambda batch: four.run(ranked.train(batch)), range(2, 4))
    assert four.run(ranked.load(str(tmp_path / "a"))) == 2
    assert losses(lambda batch: four.run(ranked.train(batch)), range(2, 4)) == expected
    one = four.one(**knobs)
    assert load_state(one, tmp_path / "a") == 2
    save_state(one, tmp_path / "one")
    assert losses(one.train, range(2, 4)) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert four.run(four.begin(**knobs).load(str(tmp_path / "one"))) == 2
    assert losses(lambda batch: four.run(ranked.train(batch)), range(2, 4)) == expected
    two = make_stage(2, **knobs)
    assert two.run(two.trainer.load(str(tmp_path / "a"))) == 2
    assert losses(lambda batch: two.run(two.trainer.train(batch)), range(2, 4)) == pytest.approx(expected, rel=1e-4)


# Tensors that no number of ranks divides


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """53 tokens, width 22, heads of 2 dimensions, whose norms have fewer rows than there are ranks; a tied head."""
    path = tmp_path_factory.mktemp("odd") / "model"
    config = Qwen3Config(
        vocab_size=53,
        hidden_size=22,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    checkpoint.save_model(path, AutoModelForCausalLM.from_config(config), build_character_tokenizer(ALPHABET))
    return str(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_uneven_empty_and_tied_pieces_are_trained_published_saved_and_written(
    odd_model: str, tmp_path: Path, dtype: str
) -> None:
    stage = Stage(odd_model, 3, tmp_path / "stage", dtype=dtype, clip_norm=1e9, lr=1e-2, token_budget=64)
    try:
        batch = stale(odd_model, make_batch())
        stage.run(stage.trainer.train(batch))
        rounding = FP32_ROUNDING if dtype == "float32" else 0.02
        assert distance(stage.gradients(), trained_gradients(odd_model, batch, dtype=dtype)) < rounding
        update = stage.run(stage.trainer.publish())
        norms = [info.rows for info in update.pieces if info.name.endswith("0.self_attn.q_norm.weight")]
        assert norms == [range(1), range(1, 2)], "the third rank has none of it"
        model = load_model(odd_model, getattr(torch, dtype))
        shadow = ShadowWeights(named_weights(model))
        shadow.stage(update)
        assert shadow.swap() == update.fingerprints
        stage.save(tmp_path / "a")
        one = stage.one(dtype=dtype)
        assert load_state(one, tmp_path / "a") == 1
        exact = one.published_weights()
        assert all(torch.equal(tensor, exact[name]) for name, tensor in named_weights(model).items())
        stage.run(stage.trainer.save_model(str(tmp_path / "model")))
        written = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
        assert all(torch.equal(written[name], tensor) for name, tensor in exact.items())
        assert stage.run(stage.trainer.load(str(tmp_path / "a"))) == 1
        scores, known = stage.run(stage.trainer.score(SEQUENCES, 1.0)), one.score(SEQUENCES, 1.0)
        gap = max(float(np.abs(a - b).max()) for a, b in zip(scores.logprobs, known.logprobs, strict=True))
        assert gap < (1e-5 if dtype == "float32" else 0.05)
    finally:
        stage.close()


# Ranks that fail


def gone(pids: list[int]) -> bool:
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    return not left


def test_invariant_15_a_rank_that_dies_in_the_middle_of_a_pass_is_named_and_all_can_begin_again(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    stage = make_stage(3, lr=1e-3)
    batches = [make_batch(version, first=10 * version) for version in range(3)]
    expected = [stage.run(stage.trainer.train(batch)).metrics["loss"] for batch in batches]
    stage.begin(lr=1e-3)
    stage.run(stage.trainer.train(batches[0]))
    stage.save(tmp_path / "a")
    pids = stage.each("pid")
    stage.run(stage.ranks[1].stop_in_the_next_pass(int(signal.SIGKILL)))
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"worker trainer-1 ended \(signal 9\) while it was still needed"):
            stage.run(stage.trainer.train(batches[1]))
    assert time.monotonic() - started < 30 and gone(pids)
    assert "trainer-1" in str(stage.run(stage.runtime.failure()))
    stage.run(stage.trainer.start())
    assert stage.run(stage.trainer.load(str(tmp_path / "a"))) == 1
    assert [stage.run(stage.trainer.train(batch)).metrics["loss"] for batch in batches[1:]] == expected[1:]


def test_invariant_15_a_rank_that_hangs_is_named_when_the_deadline_has_passed(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(2)
    pids = stage.each("pid")
    stage.run(stage.ranks[1].stop_in_the_next_pass(int(signal.SIGSTOP)))
    for rank in stage.ranks:
        rank._deadline_s = 3.0  # type: ignore[attr-defined]
    with pytest.raises(DeadlineExceeded, match=r"within 3 s; .*; no answer to a ping from trainer-1$"):
        stage.run(stage.trainer.train(make_batch()))
    assert gone(pids)


def test_a_ping_is_answered_in_the_middle_of_a_training_step(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(2, token_budget=256)
    batch = batch_of(np.random.default_rng(0), *[200] * 256)

    async def look() -> tuple[int, float]:
        training, waits = asyncio.ensure_future(stage.trainer.train(batch)), list[float]()
        while not training.done():
            started = time.monotonic()
            await stage.trainer.ping(10.0)
            waits.append(time.monotonic() - started)
            await asyncio.sleep(0.1)
        assert not training.result().skipped
        return len(waits), max(waits)

    started = time.monotonic()
    num_signs, longest_wait_s = stage.run(look())
    assert num_signs > 5 and longest_wait_s < (time.monotonic() - started) / 3


def test_invariant_15_an_error_on_one_rank_does_not_leave_the_others_waiting_for_it(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(2)
    pids = stage.each("pid")
    stage.run(stage.ranks[1].break_in_the_next_pass("a bug"))
    with pytest.raises(RemoteError, match=r"^trainer-1.train failed with ZeroDivisionError: a bug"):
        stage.run(stage.trainer.train(make_batch()))
    assert gone(pids)


def test_one_rank_without_enough_memory_makes_the_micro_batches_of_all_smaller_and_nothing_else(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs out in the second training step, whose state is carried over; so are steps to come."""
    monkeypatch.setenv("HEADWAY_TEST_SHORT_OF_MEMORY", "1")
    knobs: dict[str, Any] = {"lr": 1e-3, "token_budget": 100, "minibatches": 2}
    stage = make_stage(2, **knobs)
    pids, one = stage.each("pid"), stage.one(**knobs)
    random = np.random.default_rng(0)
    small, large, third = (
        stale(stage.path, batch_of(random, *lengths, version=version))
        for version, lengths in enumerate([(9, 9, 9, 9), (9, 9, 30, 30, 9, 9, 30, 30), (30, 30, 30, 30)])
    )
    reports = [stage.run(stage.trainer.train(batch)) for batch in (small, large, third)]
    exact = [one.train(batch) for batch in (small, large, third)]
    assert [report.version for report in reports] == [1, 2, 3]
    for found, expected in zip(reports, exact, strict=True):
        assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-3, abs=1e-5)
        assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-3)
    assert gone(pids) and len(stage.each("pid")) == 2
    assert not (stage.directory / "rescued").exists()
    impossible = batch_of(random, 70, 70, version=3)
    with pytest.raises(RunFailed, match="too little memory to train a sequence of 75 tokens"):
        stage.run(stage.trainer.train(impossible))


# Whole runs


def count(events: list[Event], kind: str) -> int:
    return sum(event.kind == kind for event in events)


def in_a_step_after_a_checkpoint(events: list[Event]) -> bool:
    return count(events, "trained") >= 3 and count(events, "taken") > count(events, "trained")


def ranked_run(home: Path, model: str, eta: int = 0, **sections: dict[str, Any]) -> tuple[Path, Config]:
    home.mkdir(exist_ok=True)
    task = {"train": f"{home}/task.py:rows", "verifier": f"{home}/task.py:slowly"}
    trainer, staleness = {"ranks": 2, "minibatches": 2}, {"max_staleness": eta}
    run = {"runtime": "local", "steps": 5}
    path = write_config(home, model, run=run, task=task, trainer=trainer, staleness=staleness, **sections)
    return path, load(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> list[str]:
    """Every version's weights: at η = 0 in deterministic mode, of two ranks, the only possible ones."""
    path, config = ranked_run(tmp_path_factory.mktemp("undisturbed"), tiny_model)
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        assert run.wait() == 0, run.output
        assert not run.descendants()
    digests = digests_of(check_finished(config, run.events()))
    assert len(set(digests)) == 5
    return digests


def digests_of(state: Run) -> list[str]:
    return [state.digests[version] for version in range(1, 6)]


def rank_process(run: HeadwayProcess, name: str) -> psutil.Process:
    marked = f"headway.runtime.worker {name} "
    (found,) = [process for process in run.descendants() if marked in " ".join(process.cmdline())]
    return found


@pytest.mark.timeout(900)
def test_invariants_14_and_16_a_run_of_two_ranks_killed_and_resumed_comes_to_the_same_weights_and_replays(
    tmp_path: Path, tiny_model: str, undisturbed: list[str]
) -> None:
    path, config = ranked_run(tmp_path, tiny_model)
    directory = Path(config.run.dir)
    with HeadwayProcess("train", path, run=directory) as run:
        check_record(config, run.kill_at(in_a_step_after_a_checkpoint, "step after a checkpoint"))
    with HeadwayProcess("train", path, "--resume", run=directory) as run:
        assert run.wait() == 0, run.output
        assert not run.descendants()
    events = run.events()
    assert digests_of(check_finished(config, events)) == undisturbed
    assert max(event.parity_max_abs for event in events if event.kind == "swapped") < 1e-5
    (resumed,) = [event for event in events if event.kind == "resumed"]
    assert resumed.checkpoint_version == 2 and resumed.version >= 3
    version, found = asyncio.run(replay(directory, lambda event: None))
    assert (version, found) == (5, fold(events).digests[5])
    one, other = (sorted((directory / folder).glob("*.safetensors")) for folder in ("model", "replay/model"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other] and len(one) == 2
    assert plain_model(str(directory / "model")).config.model_type == "llama"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("eta", [0, 2])
def test_invariant_14_a_rank_that_is_killed_costs_no_group_and_its_trainer_begins_at_the_last_checkpoint(
    tmp_path: Path, tiny_model: str, undisturbed: list[str], eta: int
) -> None:
    path, config = ranked_run(tmp_path, tiny_model, eta)
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(in_a_step_after_a_checkpoint, "step after a checkpoint")
        ranks = [rank_process(run, f"trainer-{rank}") for rank in range(2)]
        ranks[1].kill()
        lost = replaced(config, run, ranks)
    assert "worker trainer-1 ended (signal 9)" in lost.cause
    if eta == 0:
        assert digests_of(fold(run.events())) == undisturbed


@pytest.mark.timeout(900)
def test_invariant_15_a_rank_that_falls_silent_is_named_and_its_trainer_replaced_in_time(
    tmp_path: Path, tiny_model: str, undisturbed: list[str]
) -> None:
    path, config = ranked_run(tmp_path, tiny_model, supervise={"health_s": 10.0})
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(in_a_step_after_a_checkpoint, "step after a checkpoint")
        ranks = [rank_process(run, f"trainer-{rank}") for rank in range(2)]
        ranks[1].suspend()
        stopped = time.time()
        lost = replaced(config, run, ranks)
    assert lost.time - stopped < 10.0 + 2.0
    assert lost.cause.startswith("a health check of trainer took longer than ")
    assert lost.cause.endswith("no answer to a ping from trainer-1")
    assert digests_of(fold(run.events())) == undisturbed


def replaced(config: Config, run: HeadwayProcess, ranks: list[psutil.Process]) -> Event:
    """The run came to its end with other ranks than these, and everything generated was trained; of whom it tells."""
    assert run.wait() == 0, run.output
    assert not run.descendants() and not any(rank.is_running() for rank in ranks)
    assert "retraining" in run.output and "Traceback" not in run.output
    events = run.events()
    check_finished(config, events)
    (lost,) = [event for event in events if event.kind == "worker_lost"]
    (restarted,) = [event for event in events if event.kind == "worker_restarted"]
    assert lost.worker == restarted.worker == "trainer" and lost.groups == ()
    groups = [event.group for event in events if event.kind == "finished"]
    assert len(groups) == len(set(groups)) == count(events, "admitted"), "no group was generated a second time"
    assert fold(events).tokens.lost == 0
    return lost


class OnNodes(Stage):
    """Each rank on a node of its own, with an address of its own."""

    async def _make_runtime(self, deadline_s: float) -> Any:
        needs = {"trainer": {"ranks": 1}}
        return RayRuntime(self.directory / "logs", deadline_s, ray_cluster.cluster().address, needs)


def test_ranks_on_two_nodes_of_a_ray_cluster_train_as_on_one_machine(
    make_stage: Callable[..., Stage], tiny_model: str, tmp_path: Path
) -> None:
    apart, together = OnNodes(tiny_model, 2, tmp_path / "nodes"), make_stage()
    try:
        assert apart.trainer._rendezvous is not None and apart.trainer._rendezvous.specs[0].host == own_address()
        digests = []
        for stage in (apart, together):
            stage.run(stage.trainer.train(make_batch(0)))
            digests.append(stage.run(stage.trainer.publish()).digest)
        assert digests[0] == digests[1]
    finally:
        apart.close()
