"""The reference policy and the critic: what they add to a step, and what of them is kept and published."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import make_batch, make_trainer, map_sequences, plain_model, reference_logprobs, save_state, stale_batch

from headway.training import checkpoint
from headway.training.algorithms.credit import batch_advantages
from headway.training.batches import MicroBatch
from headway.training.companions import Critic, each_token
from headway.types import NOT_SAMPLED, Batch, Sequence, Trajectory

PPO: dict[str, Any] = {"preset": "ppo", "critic_lr": 1e-2}


def test_a_reference_is_the_model_it_starts_from_and_stays_so(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model, kl_coef=0.1, lr=3e-2)
    first = trainer.train(stale_batch(tiny_model)).metrics
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    second = trainer.train(stale_batch(tiny_model, version=1, first=10)).metrics
    assert second["reference_kl"] > 1e-3


def test_kl_in_the_loss_pulls_towards_the_reference(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)

    def distance(coef: float) -> float:
        trainer = make_trainer(tiny_model, kl_coef=coef, lr=1e-3)
        for version in range(10):
            metrics = trainer.train(Batch(version, batch.groups)).metrics
        return metrics["reference_kl"]

    assert distance(10.0) < 0.5 * distance(1e-9)


def test_kl_in_the_reward_is_subtracted_before_normalisation(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)
    trainer = make_trainer(tiny_model, kl_coef=0.5, kl_place="reward", kl_estimator="k1")
    found = trainer._companions.advantages(batch, trainer._pack)
    model, expected = plain_model(tiny_model), {}
    for group in batch.groups:
        for trajectory in group.trajectories:
            (sequence,) = trajectory.sequences
            with torch.no_grad():
                exact = reference_logprobs(model, [sequence.tokens], [trajectory.temperature])[0].numpy()
            where = sequence.loss_mask > 0
            expected[group.id, trajectory.index] = 0.5 * (sequence.logprobs - exact)[where]
    by_hand = batch_advantages(batch, trainer.algorithm.chosen, expected)
    for key, advantages in by_hand.by_trajectory.items():
        assert found.by_trajectory[key] == pytest.approx(advantages, abs=1e-4)
    plain = batch_advantages(batch, trainer.algorithm.chosen)
    assert any(abs(plain.by_trajectory[key][0] - found.by_trajectory[key][0]) > 1e-2 for key in expected)


def test_a_critic_learns_the_returns_of_a_batch(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model, lr=1e-6, **PPO)
    batches = [Batch(version, make_batch().groups) for version in range(12)]
    losses = [trainer.train(batch).metrics["critic_loss"] for batch in batches]
    assert losses[-1] < 0.7 * losses[0]


def test_a_critic_is_saved_and_continued_and_never_published(tiny_model: str, tmp_path: Path) -> None:
    batch, after = make_batch(), make_batch(version=1, first=10)
    trainer = make_trainer(tiny_model, lr=1e-3, **PPO)
    trainer.train(batch)
    assert trainer.published_weights().keys() == make_trainer(tiny_model).published_weights().keys()
    save_state(trainer, tmp_path / "slot")
    assert any(name.startswith("critic/weights/") for name in checkpoint.load(tmp_path / "slot").tensors)
    again = make_trainer(tiny_model, lr=1e-3, **PPO)
    again.read(str(tmp_path / "slot"))
    assert again.adopt() == 1
    ours, theirs = (each.train(after).metrics for each in (trainer, again))
    assert ours == theirs and ours["critic_loss"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_computes_in_the_types_of_the_policy_from_fp32_masters(
    tiny_model: str, dtype: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_model, dtype=dtype, lr=1e-6, **PPO)
    batches = [Batch(version, make_batch().groups) for version in range(12)]
    losses = [trainer.train(batch).metrics["critic_loss"] for batch in batches]
    assert losses[-1] < 0.7 * losses[0]
    critic = trainer._companions._critic
    assert critic is not None
    computed = {weight.dtype for weight in critic._model.parameters()}
    assert computed == {getattr(torch, dtype)} and critic._head.weight.dtype == torch.float32
    assert {tensor.dtype for tensor in critic.state().values()} == {torch.float32}
    save_state(trainer, tmp_path / "slot")
    again = make_trainer(tiny_model, dtype=dtype, lr=1e-6, **PPO)
    again.read(str(tmp_path / "slot"))
    again.adopt()
    after = make_batch(version=12, first=10)
    assert again.train(after).metrics == trainer.train(after).metrics


@pytest.mark.parametrize("what", ["advantages", "learn"])
def test_a_critic_short_of_memory_gets_smaller_micro_batches_and_no_second_step(
    tiny_model: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, tight = (make_trainer(tiny_model, token_budget=4096, minibatches=2, lr=1e-3, **PPO) for _ in range(2))
    forward = Critic.forward

    def forward_with_little_room(critic: Critic, micro_batch: MicroBatch) -> torch.Tensor:
        is_this_pass = torch.is_grad_enabled() == (what == "learn")
        if critic is tight._companions._critic and is_this_pass and len(micro_batch.tokens_T) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(critic, micro_batch)

    monkeypatch.setattr(Critic, "forward", forward_with_little_room)
    one, other = (trainer.train(make_batch()) for trainer in (calm, tight))
    assert tight.version == 1 and tight.fit.token_budget < 4096
    assert {name: other.metrics[name] for name in ("critic_loss", "critic_grad_norm", "grad_norm")} == pytest.approx(
        {name: one.metrics[name] for name in ("critic_loss", "critic_grad_norm", "grad_norm")}, rel=1e-4
    )


@pytest.mark.parametrize(("before", "after"), [({}, PPO), (PPO, {})])
def test_a_resume_may_add_a_critic_or_leave_it_out(
    tiny_model: str, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    first, second = (make_trainer(tiny_model, lr=1e-3, **knobs) for knobs in (before, after))
    first.train(stale_batch(tiny_model))
    save_state(first, tmp_path / "slot")
    second.read(str(tmp_path / "slot"))
    assert second.adopt() == 1
    metrics = second.train(stale_batch(tiny_model, version=1, first=10)).metrics
    assert ("critic_loss" in metrics) == bool(after) and metrics["loss"] == metrics["loss"]


def test_figures_of_tokens_come_back_under_their_trajectories(tiny_model: str) -> None:
    """Of several sequences one after the other, whatever micro-batches they were in; of one without tokens, nothing."""
    trainer, batch = make_trainer(tiny_model, token_budget=24), make_batch()

    def lengthened(id: int, trajectory: Trajectory, sequence: Sequence) -> Sequence:
        mask = np.zeros_like(sequence.loss_mask) if (id, trajectory.index) == (1, 2) else sequence.loss_mask
        return replace(sequence, loss_mask=mask, versions=np.where(mask > 0, 0, NOT_SAMPLED).astype(np.int32))

    batch = map_sequences(batch, lengthened)
    first = batch.groups[0].trajectories[0]
    twice = replace(first, sequences=(first.sequences[0], batch.groups[2].trajectories[1].sequences[0]))
    groups = (replace(batch.groups[0], trajectories=(twice, *batch.groups[0].trajectories[1:])), *batch.groups[1:])
    batch = Batch(0, groups)
    found = each_token(batch, trainer._pack, lambda micro_batch: micro_batch.behaviour_M)
    for group in batch.groups:
        for trajectory in group.trajectories:
            expected = np.concatenate([sequence.logprobs[sequence.loss_mask > 0] for sequence in trajectory.sequences])
            assert found[group.id, trajectory.index].tolist() == expected.tolist()
