"""The training step against a plain loop, and batches that are not all alike.

Invariant 7: the loss is Eq. 5, and π_prox is the weights before this training step.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training import (
    CLIP_EPS,
    Row,
    distance,
    gradients_of,
    make_batch,
    make_group,
    make_trainer,
    make_trajectory,
    map_sequences,
    near_policy,
    plain_model,
    reference_logprobs,
    reference_loss,
    row_logprobs,
    rows_of,
    same_bits,
    stale_batch,
    trained_gradients,
    weights_of,
    write_model,
)

from headway.algorithm import AlgorithmSection
from headway.config import ModelSection, TrainerSection, WeightsSection
from headway.runtime.inline import InlineRuntime
from headway.training import trainer as trainer_module
from headway.training.batches import Share
from headway.training.ranks import RankedTrainer
from headway.types import Batch, Group, Sequence, Trajectory

OBJECTIVES = ["decoupled", "naive"]


# Invariant 7


def scalar_loss(rows: list[Row], current: list[list[float]], objective: str) -> float:
    """Eq. 5 or plain PPO, token by token, where the current policy is the proximal one."""
    total, count = 0.0, 0
    for row, logprobs in zip(rows, current, strict=True):
        for place, logprob in zip(row.trained, logprobs, strict=True):
            behind = math.exp(logprob - float(row.sequence.logprobs[place]))
            weight, u = (behind, 1.0) if objective == "decoupled" else (1.0, behind)
            clipped = min(max(u, 1 - CLIP_EPS), 1 + CLIP_EPS)
            total -= weight * min(u * row.advantage, clipped * row.advantage)
            count += 1
    return total / count


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_invariant_7_the_loss_of_a_stale_batch_is_that_of_a_scalar_reference(tiny_model: str, objective: str) -> None:
    batch = stale_batch(tiny_model)
    report = make_trainer(tiny_model, objective=objective).train(batch)
    rows = rows_of(batch.groups)
    current = [logprobs.tolist() for logprobs in row_logprobs(plain_model(tiny_model), rows)]
    expected = {name: scalar_loss(rows, current, name) for name in OBJECTIVES}
    assert report.metrics["loss"] == pytest.approx(expected[objective], rel=1e-5, abs=1e-6)
    assert abs(expected["decoupled"] - expected["naive"]) > 1e-2  # so that taking one for the other is seen


def test_invariant_7_in_the_first_minibatch_the_proximal_policy_is_the_current_one(tiny_model: str) -> None:
    metrics = make_trainer(tiny_model).train(stale_batch(tiny_model)).metrics
    assert metrics["clip_fraction"] == 0 and metrics["kl"] == 0
    assert metrics["behaviour_kl"] > 0 and metrics["behaviour_weight_max"] > 1


class PlainLoop:
    """Minibatches by hand: padded forward passes, autograd, torch's AdamW."""

    def __init__(self, path: str, lr: float, objective: str, prox_before_step: bool = True):
        self.model = plain_model(path)
        self.objective, self.prox_before_step = objective, prox_before_step
        named = list(self.model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.05},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-5)

    def train(self, batch: Batch, num_minibatches: int) -> float:
        minibatches = [rows_of(batch.groups[start::num_minibatches]) for start in range(num_minibatches)]
        with torch.no_grad():
            proximal = [row_logprobs(self.model, rows) for rows in minibatches]
        total = count = 0.0
        for number, rows in enumerate(minibatches):
            before = proximal[number] if self.prox_before_step else None
            loss = reference_loss(self.model, rows, before, self.objective)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            num_tokens = sum(len(row.trained) for row in rows)
            total, count = total + loss.item() * num_tokens, count + num_tokens
        return total / count


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_invariant_7_two_steps_of_two_minibatches_are_those_of_a_plain_loop(tiny_model: str, objective: str) -> None:
    trainer = make_trainer(tiny_model, lr=3e-3, minibatches=2, objective=objective, token_budget=64)
    loop = PlainLoop(tiny_model, 3e-3, objective)
    for version in range(2):
        batch = stale_batch(tiny_model, version, first=10 * version)
        report = trainer.train(batch)
        assert report.metrics["loss"] == pytest.approx(loop.train(batch, 2), rel=1e-4, abs=1e-5)
    expected = {name: parameter.detach() for name, parameter in loop.model.named_parameters()}
    start = {name: parameter.detach() for name, parameter in plain_model(tiny_model).named_parameters()}
    moved = distance(expected, start)
    assert distance(weights_of(trainer), expected) < 1e-3 * moved


def test_invariant_7_later_minibatches_are_measured_from_the_weights_before_the_step(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)
    knobs: dict[str, Any] = {"lr": 3e-2, "minibatches": 2}
    metrics = make_trainer(tiny_model, **knobs).train(batch).metrics
    right, wrong = (PlainLoop(tiny_model, 3e-2, "decoupled", before).train(batch, 2) for before in (True, False))
    assert abs(right - wrong) > 1e-2
    assert metrics["loss"] == pytest.approx(right, rel=1e-3)
    assert metrics["clip_fraction"] > 0 and metrics["kl"] > 0


def test_a_capped_behaviour_weight_counts_its_tokens(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)
    free, capped = (make_trainer(tiny_model, behaviour_cap=cap).train(batch).metrics for cap in (0.0, 1.5))
    assert free["capped_fraction"] == 0 < capped["capped_fraction"] < 1
    assert free["behaviour_weight_max"] == capped["behaviour_weight_max"] > 1.5 and free["loss"] != capped["loss"]


# The step


@pytest.mark.parametrize(
    ("knobs", "metric"),
    [
        ({"mask_token_low": 0.8, "mask_token_high": 1.2}, "masked_token"),
        ({"mask_sequence_high": 1.1}, "masked_sequence"),
        ({"mask_second_moment": 0.05}, "masked_moment"),
        ({"mask_negative_kl": 0.01}, "masked_negative"),
    ],
)
def test_a_mask_that_is_chosen_takes_tokens_out_of_a_step_and_says_how_many(
    tiny_model: str, knobs: dict[str, float], metric: str
) -> None:
    report = make_trainer(tiny_model, minibatches=2, **knobs).train(stale_batch(tiny_model))
    plain = make_trainer(tiny_model, minibatches=2).train(stale_batch(tiny_model))
    assert not report.skipped and 0 < report.metrics[metric] < report.num_tokens
    assert report.metrics["loss"] != plain.metrics["loss"] and metric not in plain.metrics


def test_a_bonus_keeps_the_entropy_higher_than_it_would_be(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)

    def entropy(coef: float) -> float:
        trainer = make_trainer(tiny_model, lr=3e-3, entropy_coef=coef)
        return [trainer.train(Batch(version, batch.groups)).metrics["entropy"] for version in range(6)][-1]

    assert entropy(3.0) > entropy(0.0) + 0.01


def test_gradients_are_clipped_to_the_norm_and_reported_as_they_were(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)
    whole = trained_gradients(tiny_model, batch)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in whole.values()))
    trainer = make_trainer(tiny_model, clip_norm=norm / 10)
    assert trainer.train(batch).metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = gradients_of(trainer.masters, "model.")
    assert distance(clipped, {name: gradient / 10 for name, gradient in whole.items()}) < 1e-4


def test_the_learning_rate_rises_linearly_and_then_stays(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model, lr=1e-3, warmup_steps=4)
    rates = [trainer.train(make_batch(version)).metrics["lr"] for version in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_weight_decay_moves_matrices_and_nothing_else(tiny_variant: Callable[[str], str]) -> None:
    path = tiny_variant("qwen2")  # it has biases
    trainer = make_trainer(path, lr=0.1, weight_decay=0.5)
    before = weights_of(trainer)
    indifferent = Batch(0, (make_group(0, (1.0, 1.0)), make_group(1, (0.0, 0.0))))
    report = trainer.train(indifferent)
    assert report.version == 1 and report.metrics["grad_norm"] == 0 == report.metrics["loss"]
    for name, after in weights_of(trainer).items():
        expected = before[name] * (1 - 0.1 * 0.5) if after.ndim == 2 else before[name]
        assert torch.equal(after, expected), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_gives_identical_gradients(tiny_model: str, dtype: str) -> None:
    batch = stale_batch(tiny_model)
    plain, checkpointed = (
        trained_gradients(tiny_model, batch, dtype=dtype, token_budget=64, gradient_checkpointing=on)
        for on in (False, True)
    )
    assert same_bits(plain, checkpointed)


def test_bf16_gradients_point_where_the_fp32_ones_do(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)
    coarse, fine = (trained_gradients(tiny_model, batch, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert all(gradient.dtype == torch.float32 for gradient in coarse.values())
    assert 1e-4 < distance(coarse, fine) < 0.05


def test_fp16_gradients_point_where_the_fp32_ones_do_however_many_tokens_share_the_loss(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of a loss divided by many tokens would vanish in fp16 if they were not scaled."""
    batch = stale_batch(tiny_model)
    coarse, fine = (trained_gradients(tiny_model, batch, dtype=dtype) for dtype in ("float16", "float32"))
    assert 1e-5 < distance(coarse, fine) < 0.01
    share_of = trainer_module.share_of

    def among_many(*args: Any) -> Share:
        share = share_of(*args)
        return dataclasses.replace(share, num_trained=[n * 2**24 for n in share.num_trained])

    monkeypatch.setattr(trainer_module, "share_of", among_many)
    many = trained_gradients(tiny_model, batch, dtype="float16")
    assert distance({name: gradient * 2.0**24 for name, gradient in many.items()}, coarse) < 1e-3
    monkeypatch.setattr(trainer_module, "gradient_scale", lambda *_: 1.0)
    lost = trained_gradients(tiny_model, batch, dtype="float16")
    assert distance({name: gradient * 2.0**24 for name, gradient in lost.items()}, coarse) > 0.5


def test_fp16_gradients_that_overflow_are_computed_again_at_a_smaller_scale(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, asked = stale_batch(tiny_model), []
    expected = trained_gradients(tiny_model, batch, dtype="float16")
    gradient_scale = trainer_module.gradient_scale

    def too_large(dtype: torch.dtype, num_trained: int, shift: int) -> float:
        asked.append(shift)
        return gradient_scale(dtype, num_trained, shift) * 2.0**24

    monkeypatch.setattr(trainer_module, "gradient_scale", too_large)
    assert distance(trained_gradients(tiny_model, batch, dtype="float16"), expected) < 0.01
    assert len(set(asked)) > 1 and asked == sorted(asked)


def test_published_weights_are_the_cast_masters_and_the_forward_pass_uses_exactly_those(
    tiny_model: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_model, dtype="bfloat16", lr=1e-3)
    trainer.train(stale_batch(tiny_model))
    masters, published = weights_of(trainer), trainer.published_weights()
    assert published.keys() == masters.keys() | {"lm_head.weight"}
    assert all(torch.equal(published[name], master.bfloat16()) for name, master in masters.items())
    assert any(not torch.equal(published[name].float(), master) for name, master in masters.items())
    write_model(trainer, tmp_path / "model")
    rows = [np.arange(3, 40, dtype=np.int32), np.arange(50, 20, -1, dtype=np.int32)]
    scores = trainer.score(tuple(rows), 0.7)
    assert scores.version == 1
    model = plain_model(str(tmp_path / "model"), torch.bfloat16)
    model.set_attn_implementation("sdpa")
    for row, found in zip(rows, scores.logprobs, strict=True):
        tokens = torch.from_numpy(row).long()
        with torch.no_grad():
            hidden: Tensor = model.model(input_ids=tokens[None]).last_hidden_state[0]
        logits = hidden.float() @ published["lm_head.weight"].float().T / 0.7
        expected = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(found[1:]), expected, rtol=0, atol=1e-5)
        assert found[0] == 0


def test_scores_are_the_log_probs_of_plain_transformers_in_the_order_they_were_asked_for(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model, token_budget=40)
    random = np.random.default_rng(0)
    rows = [random.integers(3, 52, length).astype(np.int32) for length in (3, 40, 1, 17, 2)]
    with torch.no_grad():
        expected = reference_logprobs(plain_model(tiny_model), rows, [1.3] * len(rows))
    scores = trainer.score(tuple(rows), 1.3)
    for found, exact in zip(scores.logprobs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), exact, rtol=0, atol=1e-5)


def test_the_gap_between_engine_and_trainer_is_measured_on_tokens_of_this_version_only(tiny_model: str) -> None:
    """Log-probs as an engine of these weights would give them, off by 0.25 at one token; older tokens are far off."""
    exact = near_policy(make_batch(), plain_model(tiny_model), spread=0.0)

    def change(group: int, trajectory: Trajectory, sequence: Sequence) -> Sequence:
        logprobs, versions = sequence.logprobs.copy(), np.where(sequence.versions < 0, -1, 1).astype(np.int32)
        if group == 2:
            logprobs[-1], versions[-1] = -30.0, 0
        if group == 1 and trajectory.index == 0:
            logprobs[-1] -= 0.25
        return dataclasses.replace(sequence, logprobs=logprobs, versions=versions)

    trainer = make_trainer(tiny_model)
    trainer.version = 1
    batch = map_sequences(Batch(1, exact.groups), change)
    assert trainer.train(batch).metrics["logprob_gap_max"] == pytest.approx(0.25, abs=1e-5)


def test_metrics_are_per_token_and_count_what_was_trained(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)
    report = make_trainer(tiny_model, token_budget=32, minibatches=2).train(batch)
    assert report.num_tokens == batch.num_sampled and report.version == 1 and not report.skipped
    assert 0 < report.metrics["entropy"] <= math.log(52) and report.metrics["num_micro_batches"] > 4
    assert report.started > 0 and report.seconds > 0
    assert all(isinstance(value, float) and math.isfinite(value) for value in report.metrics.values())


def test_a_trainer_behind_a_runtime_does_what_its_methods_do(tiny_model: str, tmp_path: Path) -> None:
    async def run() -> dict[str, str]:
        runtime = InlineRuntime()
        sections = ModelSection(path=tiny_model), TrainerSection(lr=2e-5), AlgorithmSection(behaviour_cap=0.0), None
        ranked = RankedTrainer(runtime, *sections, WeightsSection(transport="shared_memory"), tmp_path, 60.0)
        await ranked.start()
        await ranked.train(make_batch())
        await ranked.snapshot()
        await asyncio.gather(ranked.save(str(tmp_path / "a")), ranked.train(make_batch(1)))
        assert await ranked.load(str(tmp_path / "a")) == 1
        await ranked.save_model(str(tmp_path / "model"))
        assert (await ranked.score((np.arange(5, dtype=np.int32),), 1.0)).version == 1
        await ranked.ping(1.0)
        fingerprints = (await ranked.publish()).fingerprints
        await runtime.close()
        return fingerprints

    fingerprints = asyncio.run(run())
    other = make_trainer(tiny_model)
    other.train(make_batch())
    assert other.publish().fingerprints == fingerprints
    assert plain_model(str(tmp_path / "model")).config.model_type == "llama"


# Batches that are not all alike


def odd_batch() -> Batch:
    random = np.random.default_rng(9)
    silent = make_trajectory(random, 0, 0.0, lengths=(0,))
    spoken = make_trajectory(random, 1, 1.0, lengths=(6,))
    turns = make_trajectory(random, 2, 0.5, lengths=(3, 0, 4), temperature=0.6)
    return Batch(
        0,
        (
            Group(0, 0, 0, 3, (silent, spoken, turns)),
            make_group(1, (1.0, 0.0, 0.0), num_failed=2),
            make_group(2, (1.0,)),
            make_group(3, (0.0, 0.0, 0.0)),
        ),
    )


def test_silent_incomplete_single_and_multi_sequence_groups_give_the_reference_gradient(tiny_model: str) -> None:
    model = plain_model(tiny_model)
    batch = near_policy(odd_batch(), model)
    reference_loss(model, rows_of(batch.groups)).backward()
    found = trained_gradients(tiny_model, batch, token_budget=24)
    assert distance(found, gradients_of(model)) < 2e-6


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_batch_in_which_nothing_was_said_is_skipped_and_moves_no_weight(tiny_model: str, minibatches: int) -> None:
    random = np.random.default_rng(0)
    silent = [tuple(make_trajectory(random, index, 1.0 - index, lengths=(0,)) for index in range(2)) for _ in range(2)]
    trainer = make_trainer(tiny_model, minibatches=minibatches)
    before = weights_of(trainer)
    report = trainer.train(Batch(0, tuple(Group(id, id, 0, 2, pair) for id, pair in enumerate(silent))))
    assert report.version == trainer.version == 0 and report.num_tokens == 0
    assert report.skipped == "no trajectory of the batch has a token to train"
    assert same_bits(weights_of(trainer), before)


def test_a_minibatch_in_which_nothing_was_said_leaves_the_step_to_the_other(tiny_model: str) -> None:
    random = np.random.default_rng(0)
    pair = tuple(make_trajectory(random, index, 1.0 - index, lengths=(0,)) for index in range(2))
    spoken = make_group(1)
    both = make_trainer(tiny_model, minibatches=2)
    alone = make_trainer(tiny_model, minibatches=1)
    both.train(Batch(0, (Group(0, 0, 0, 2, pair), spoken)))
    alone.train(Batch(0, (spoken,)))
    assert distance(weights_of(both), weights_of(alone)) < 1e-6
