"""Batches as packed tensors; invariant 12: packing-independent gradient."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from training import (
    distance,
    gradients_of,
    make_batch,
    make_group,
    make_trajectory,
    near_policy,
    plain_model,
    reference_loss,
    rows_of,
    trained_gradients,
)

from headway.algorithm import AlgorithmSection
from headway.errors import ConfigError
from headway.training.batches import arranged, micro_batches, minibatches_of, samples_of
from headway.training.packing import pack
from headway.types import Batch, Group, Sample

GROUPWISE = AlgorithmSection()
FP32_ROUNDING = 2e-6


def long_batch(temperature: float = 1.0) -> Batch:
    """Sequences of 17 to 32 tokens, so that a budget of 32 holds one and a budget of 64 two or three."""
    random = np.random.default_rng(5)
    groups = []
    for id in range(3):
        rewards = (1.0, 0.0, float(id == 1))
        made = [
            make_trajectory(random, index, reward, (int(random.integers(12, 28)),), temperature=temperature)
            for index, reward in enumerate(rewards)
        ]
        groups.append(Group(id, id, 0, 3, tuple(made)))
    return Batch(0, tuple(groups))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_invariant_12_the_gradient_does_not_depend_on_packing(tiny_model: str, temperature: float) -> None:
    model = plain_model(tiny_model)
    batch = near_policy(long_batch(temperature), model)
    reference_loss(model, rows_of(batch.groups)).backward()
    reference = gradients_of(model)
    for budget in (32, 64, 100, 4096):
        found = trained_gradients(tiny_model, batch, token_budget=budget)
        assert distance(found, reference) < FP32_ROUNDING, f"budget {budget}"


def test_budgets_of_the_packing_test_reach_from_one_sequence_each_to_all_in_one() -> None:
    samples = minibatches_of(long_batch(), GROUPWISE, 1)[0]
    counts = [len(micro_batches(samples, budget, float)) for budget in (32, 64, 100, 4096)]
    assert counts[0] == len(samples) and counts[-1] == 1 and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("family", ["llama-untied", "qwen2", "qwen3-tied"])
def test_invariant_12_holds_for_every_family_and_head(tiny_variant: Callable[[str], str], family: str) -> None:
    path = tiny_variant(family)
    model = plain_model(path)
    batch = near_policy(long_batch(), model)
    reference_loss(model, rows_of(batch.groups)).backward()
    reference = gradients_of(model)
    assert distance(trained_gradients(path, batch, token_budget=64), reference) < FP32_ROUNDING


def test_dropping_one_sequence_changes_the_gradient_by_far_more_than_rounding(tiny_model: str) -> None:
    batch = near_policy(long_batch(), plain_model(tiny_model))
    kept = dataclasses.replace(batch.groups[0], size=2, trajectories=batch.groups[0].trajectories[1:])
    fewer = Batch(0, (kept, *batch.groups[1:]))
    whole, part = (trained_gradients(tiny_model, each) for each in (batch, fewer))
    assert distance(part, whole) > 1000 * FP32_ROUNDING


def advantages_in(samples: list[Sample]) -> list[float]:
    for sample in samples:
        assert len(sample.advantages) == len(sample.where) and len(set(sample.advantages.tolist())) == 1
    return [round(float(sample.advantages[0]), 3) for sample in samples]


def test_groups_are_dealt_out_by_turns_and_never_split() -> None:
    batch = make_batch(num_groups=5)
    dealt = minibatches_of(batch, GROUPWISE, 2)
    expected = [[0, 2, 4], [1, 3]]
    for samples, ids in zip(dealt, expected, strict=True):
        groups = [group for group in batch.groups if group.id in ids]
        sequences = [t.sequences[0] for group in groups for t in group.trajectories]
        assert [sample.tokens.tolist() for sample in samples] == [s.tokens.tolist() for s in sequences]


def test_more_minibatches_than_groups_leave_empty_ones_rather_than_repeat_a_group() -> None:
    assert [len(samples) for samples in minibatches_of(make_batch(num_groups=2), GROUPWISE, 3)] == [4, 4, 0]


def test_advantages_are_normalised_over_the_batch_not_over_the_minibatch() -> None:
    groups = (make_group(0, (1.0, 1.0)), make_group(1, (0.0, 0.0)))
    dealt = minibatches_of(Batch(0, groups), AlgorithmSection(baseline="none", normalise="batch"), 2)
    assert [advantages_in(samples) for samples in dealt] == [[1.0, 1.0], [-1.0, -1.0]]


def test_invariant_8_an_incomplete_group_is_normalised_over_the_trajectories_it_has() -> None:
    group = make_group(0, (3.0, 1.0), num_failed=2)
    assert not group.complete
    assert advantages_in(minibatches_of(Batch(0, (group,)), GROUPWISE, 1)[0]) == [1.0, -1.0]


def test_a_group_of_one_trajectory_or_of_one_reward_has_no_advantage() -> None:
    batch = Batch(0, (make_group(0, (1.0,)), make_group(1, (0.5, 0.5, 0.5))))
    assert advantages_in(minibatches_of(batch, GROUPWISE, 1)[0]) == [0.0] * 4


def test_a_completion_without_tokens_is_counted_in_the_mean_but_not_trained() -> None:
    random = np.random.default_rng(0)
    silent = make_trajectory(random, 0, reward=0.0, lengths=(0,))
    spoken = make_trajectory(random, 1, reward=1.0, lengths=(4,))
    samples = minibatches_of(Batch(0, (Group(0, 0, 0, 2, (silent, spoken)),)), GROUPWISE, 1)[0]
    assert [len(sample.where) for sample in samples] == [4] and advantages_in(samples) == [1.0]


def test_every_sequence_of_a_trajectory_carries_its_advantage_and_its_own_tokens() -> None:
    random = np.random.default_rng(0)
    branched = make_trajectory(random, 0, reward=1.0, lengths=(3, 0, 5), temperature=0.5)
    other = make_trajectory(random, 1, reward=0.0, lengths=(2,))
    group = Group(7, 7, 0, 2, (branched, other))
    by_token = {(7, 0): np.arange(8, dtype=np.float32), (7, 1): np.array([-1.5, -2.5], np.float32)}
    assert [(s.advantages.tolist(), s.temperature) for s in samples_of(group, by_token)] == [
        ([0, 1, 2], 0.5),
        ([3, 4, 5, 6, 7], 0.5),
        ([-1.5, -2.5], 1.0),
    ]


def test_packed_tensors_name_the_same_tokens_as_their_samples() -> None:
    samples = minibatches_of(long_batch(), GROUPWISE, 1)[0]
    packed = micro_batches(samples, 64, float)
    assert sum(len(micro_batch.samples) for micro_batch in packed) == len(samples)
    for micro_batch in packed:
        assert len(micro_batch.tokens_T) == sum(micro_batch.lengths) <= 64
        chosen = np.concatenate([sample.tokens[sample.where] for sample in micro_batch.samples])
        assert micro_batch.tokens_T[micro_batch.where_M].tolist() == chosen.tolist()
        behaviour = np.concatenate([sample.behaviour for sample in micro_batch.samples])
        assert torch.equal(micro_batch.behaviour_M, torch.from_numpy(behaviour))
        starts = (micro_batch.positions_T == 0).nonzero().flatten().tolist()
        assert starts == np.cumsum([0, *micro_batch.lengths[:-1]]).tolist()


def test_long_and_short_sequences_are_spread_over_as_few_micro_batches_as_the_budget_allows() -> None:
    """Filled one after another, the first would hold the long ones and cost far more than the last."""
    lengths = np.random.default_rng(0).integers(5, 60, 60).tolist()
    parts = arranged(lengths, 300, square)
    assert len(parts) == math.ceil(sum(lengths) / 300) and sorted(i for part in parts for i in part) == list(range(60))
    assert all(sum(lengths[i] for i in part) <= 300 for part in parts)
    even, greedy = (
        [sum(square(lengths[i]) for i in part) for part in found] for found in (parts, pack(lengths, 300, cost=square))
    )
    assert max(even) < 1.1 * min(even) and max(greedy) > 1.5 * min(greedy)


def square(length: int) -> float:
    return float(length**2)


def test_a_sequence_longer_than_the_token_budget_is_one_sentence() -> None:
    samples = minibatches_of(long_batch(), GROUPWISE, 1)[0]
    longest = max(len(sample.tokens) for sample in samples)
    with pytest.raises(ConfigError) as error:
        micro_batches(samples, 16, float)
    said = f"a sequence of {longest} tokens does not fit into a micro-batch of 16; raise trainer.token_budget"
    assert str(error.value) == said
