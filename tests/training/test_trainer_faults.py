"""What a trainer refuses, skips, repeats exactly, and does when memory runs out.

Invariant 12: packing-independent gradient.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from training import (
    digest_of,
    make_batch,
    make_trainer,
    make_trajectory,
    map_sequences,
    same_bits,
    stale_batch,
    state_of,
)

from headway.errors import InvariantBroken, RunFailed, WorkerDied
from headway.model.sharding import Masters
from headway.training.batches import MicroBatch
from headway.training.trainer import Trainer
from headway.types import Batch, Group, Sequence, StopReason, Trajectory

# What is refused


def test_a_batch_for_another_version_is_refused(tiny_model: str) -> None:
    with pytest.raises(InvariantBroken) as error:
        make_trainer(tiny_model).train(make_batch(version=3))
    assert str(error.value) == "a batch for version 3 reached a trainer at version 0"


def test_a_batch_beyond_the_staleness_bound_is_refused_and_one_at_it_is_trained(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model, worst_staleness=2)
    trainer.version = 5
    with pytest.raises(InvariantBroken) as error:
        trainer.train(make_batch(version=5, data_version=2))
    assert str(error.value) == "a batch is 3 versions stale, beyond the bound of 2"
    assert trainer.train(make_batch(version=5, data_version=3)).version == 6


def test_without_a_bound_any_age_is_trained(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model, worst_staleness=None)
    trainer.version = 500
    assert trainer.train(make_batch(version=500, data_version=0)).version == 501


# What is not finite


def nonfinite_logprob(batch: Batch, group: int, value: float) -> Batch:
    def change(id: int, trajectory: Trajectory, sequence: Sequence) -> Sequence:
        logprobs = sequence.logprobs.copy()
        if id == group and trajectory.index == 1:
            logprobs[-1] = value
        return dataclasses.replace(sequence, logprobs=logprobs)

    return map_sequences(batch, change)


def nonfinite_temperature(batch: Batch, group: int) -> Batch:
    """Logits divided by 0: the loss itself is not a number."""
    groups = [
        dataclasses.replace(g, trajectories=tuple(dataclasses.replace(t, temperature=0.0) for t in g.trajectories))
        if g.id == group
        else g
        for g in batch.groups
    ]
    return Batch(batch.version, tuple(groups))


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_behaviour_log_prob_that_is_not_finite_skips_the_step(
    tiny_model: str, tmp_path: Path, value: float, minibatches: int
) -> None:
    trainer = make_trainer(tiny_model, lr=1e-2, minibatches=minibatches)
    trainer.train(make_batch(0))
    before = state_of(trainer, tmp_path / "before")
    report = trainer.train(nonfinite_logprob(make_batch(1, first=10), 13, value))
    assert report.skipped == "a behaviour log-prob is not finite"
    assert report.version == trainer.version == 1
    assert same_bits(state_of(trainer, tmp_path / "after"), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("culprit", [10, 11])
def test_a_loss_that_is_not_finite_in_either_minibatch_leaves_no_trace(
    tiny_model: str, tmp_path: Path, dtype: str, culprit: int
) -> None:
    trainer, untroubled = (make_trainer(tiny_model, lr=1e-2, minibatches=2, dtype=dtype) for _ in range(2))
    for each in (trainer, untroubled):
        each.train(make_batch(0))
    trainer.score((np.arange(9, dtype=np.int32),), 1.0)
    before = state_of(trainer, tmp_path / "before")
    report = trainer.train(nonfinite_temperature(make_batch(1, first=10), culprit))
    assert report.skipped == "loss nan, gradient norm nan" and report.version == trainer.version == 1
    assert same_bits(state_of(trainer, tmp_path / "after"), before)
    for each in (trainer, untroubled):
        assert each.train(make_batch(1, first=20)).version == 2
    assert same_bits(state_of(trainer, tmp_path / "one"), state_of(untroubled, tmp_path / "other"))


def test_a_first_step_that_is_skipped_leaves_the_optimizer_as_new(tiny_model: str, tmp_path: Path) -> None:
    trainer, fresh = (make_trainer(tiny_model, minibatches=2, warmup_steps=3) for _ in range(2))
    assert trainer.train(nonfinite_temperature(make_batch(), 1)).skipped
    assert same_bits(state_of(trainer, tmp_path / "a"), state_of(fresh, tmp_path / "b"))
    reports = [each.train(make_batch()) for each in (trainer, fresh)]
    assert reports[0].metrics == reports[1].metrics
    assert same_bits(state_of(trainer, tmp_path / "c"), state_of(fresh, tmp_path / "d"))


def test_weights_that_are_not_finite_skip_every_step_rather_than_spread(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model)
    with torch.no_grad():
        next(trainer.policy.parameters())[5, 0] = math.inf
    report = trainer.train(make_batch())
    assert report.skipped.startswith("loss nan") and trainer.version == 0


# Where there is nothing to train


def test_a_batch_of_cut_off_trajectories_alone_is_skipped_with_its_reason(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model, mask_truncated=True)
    before, batch = state_of(trainer, tmp_path / "before"), make_batch()
    groups = (
        dataclasses.replace(
            group, trajectories=tuple(dataclasses.replace(t, stops=(StopReason.LENGTH,)) for t in group.trajectories)
        )
        for group in batch.groups
    )
    report = trainer.train(Batch(0, tuple(groups)))
    assert report.version == 0 and report.skipped == "no trajectory of the batch has a token to train, not cut off"
    assert same_bits(state_of(trainer, tmp_path / "after"), before)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_momentum_alone_moves_no_weight_where_every_token_is_masked(
    tiny_model: str, tmp_path: Path, minibatches: int
) -> None:
    knobs = {"mask_token_low": 0.5, "behaviour_cap": 0.0, "minibatches": minibatches, "lr": 1e-2}
    trainer = make_trainer(tiny_model, **knobs)
    assert trainer.train(stale_batch(tiny_model)).version == 1

    def less_likely(id: int, trajectory: Trajectory, sequence: Sequence) -> Sequence:
        return dataclasses.replace(sequence, logprobs=np.where(sequence.loss_mask > 0, -0.001, 0).astype(np.float32))

    before = state_of(trainer, tmp_path / "before")
    report = trainer.train(map_sequences(make_batch(version=1, first=10), less_likely))
    assert report.version == 1 and report.skipped == "every token of the batch is masked or capped"
    assert report.metrics["masked_token"] == report.num_tokens > 0
    assert same_bits(state_of(trainer, tmp_path / "after"), before)
    assert trainer.train(stale_batch(tiny_model, 1, 20)).version == 2


def test_training_twice_gives_the_same_bits(tiny_model: str) -> None:
    digests = []
    for _ in range(2):
        trainer = make_trainer(tiny_model, lr=1e-3, minibatches=2, token_budget=48)
        for version in range(3):
            trainer.train(make_batch(version, first=10 * version))
        digests.append(digest_of(trainer))
    assert digests[0] == digests[1]


def test_invariant_12_running_out_of_memory_makes_micro_batches_smaller_and_nothing_else(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing-independent gradient, so a step that did not fit is the same step in more pieces."""
    calm, tight = make_trainer(tiny_model, token_budget=4096), make_trainer(tiny_model, token_budget=4096)
    forward = Trainer._forward

    def forward_with_little_room(trainer: Trainer, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if trainer is tight and len(micro_batch.tokens_T) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(trainer, micro_batch)

    monkeypatch.setattr(Trainer, "_forward", forward_with_little_room)
    one, other = (trainer.train(make_batch(0)) for trainer in (calm, tight))
    assert one.metrics["num_micro_batches"] < other.metrics["num_micro_batches"]
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-6)
    assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-4)
    assert tight.version == 1


def test_micro_batches_that_were_made_smaller_still_hold_a_longer_sequence_that_comes_later(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_model, token_budget=180)
    forward = Trainer._forward

    def forward_with_little_room(trainer: Trainer, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if len(micro_batch.tokens_T) > 96:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(trainer, micro_batch)

    monkeypatch.setattr(Trainer, "_forward", forward_with_little_room)
    trainer.train(make_batch(0))
    assert trainer.fit.token_budget == 90 and not trainer.fit.recompute
    random = np.random.default_rng(0)
    pair = tuple(make_trajectory(random, index, float(index), lengths=(90,), version=1) for index in range(2))
    assert trainer.train(Batch(1, (Group(0, 0, 0, 2, pair),))).version == 2


def test_a_sequence_that_cannot_be_trained_at_all_ends_the_run_with_what_to_do(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(trainer: Trainer, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "_forward", never)
    trainer = make_trainer(tiny_model)
    with pytest.raises(
        RunFailed, match=r"too little memory to train a sequence of \d+ tokens; lower sampling\.max_tok"
    ):
        trainer.train(make_batch(0))
    assert trainer.version == 0


def test_running_out_of_memory_in_the_first_optimizer_step_neither_half_initialises_it_nor_trains_twice(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may have moved: a new trainer continues from the record."""
    trainer = make_trainer(tiny_model)
    assert all(len(state) == 3 for state in trainer.optimizer.state.values())
    assert len(trainer.optimizer.state) == len(trainer.masters.named)
    step, refresh, steps = trainer.optimizer.step, Masters.refresh, []

    def short_of_memory(masters: Masters) -> None:
        steps.append(step)
        refresh(masters)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Masters, "refresh", short_of_memory)
    with pytest.raises(
        WorkerDied, match=r"the trainer ran out of memory with micro-batches of .*, while weights moved"
    ):
        trainer.train(make_batch(0))
    assert len(steps) == 1 and trainer.version == 0


def test_activations_are_recomputed_once_micro_batches_cannot_be_any_smaller(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calm, tight = (make_trainer(tiny_model, token_budget=180, minibatches=2) for _ in range(2))
    forward, recomputed = Trainer._forward, []

    def forward_with_little_room(trainer: Trainer, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if trainer is tight:
            if not trainer._model.is_gradient_checkpointing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            recomputed.append(len(micro_batch.tokens_T))
        return forward(trainer, micro_batch)

    monkeypatch.setattr(Trainer, "_forward", forward_with_little_room)
    for version in range(2):
        batch = make_batch(version, first=10 * version)
        one, other = (trainer.train(batch) for trainer in (calm, tight))
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-6)
        assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-4)
    longest = max(
        len(sequence.tokens) for group in make_batch(0).groups for t in group.trajectories for sequence in t.sequences
    )
    assert (tight.fit.token_budget, tight.fit.recompute) == (longest, True) and max(recomputed) <= longest
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("out of memory with micro-batches of 180 tokens: ") and "recomputed" not in said[-1]
