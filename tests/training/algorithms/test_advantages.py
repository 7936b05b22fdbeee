"""Rewards to advantages, against scalar references; invariant 8: group identity."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithm import AlgorithmSection
from headway.training.algorithms.advantages import EPSILON, Units, unit_advantages
from headway.training.algorithms.credit import batch_advantages
from headway.types import (
    NOT_SAMPLED,
    Batch,
    Failure,
    Group,
    Reward,
    Sequence,
    StopReason,
    Trajectory,
)

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=150)
rewards = st.one_of(st.sampled_from([0.0, 1.0, -5.0, 5.0, 0.1]), st.floats(-100, 100, allow_nan=False))
rows = st.lists(st.tuples(st.integers(0, 5), rewards), max_size=40)


def scalar_normalised(values: list[float]) -> list[float]:
    if len(set(values)) <= 1:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / (std + EPSILON) for value in values]


def scalar_group_relative(rows: list[tuple[int, float]]) -> list[float]:
    by_group: dict[int, list[float]] = {}
    for group_id, reward in rows:
        by_group.setdefault(group_id, []).append(reward)
    left = {group_id: iter(scalar_normalised(values)) for group_id, values in by_group.items()}
    return [next(left[group_id]) for group_id, _ in rows]


def units(values: list[float], ids: list[int]) -> Units:
    """Each trajectory a unit of one token."""
    num = len(values)
    return Units(np.array(values, np.float64), np.array(ids, np.int64), np.arange(num), np.ones(num, np.int64))


def computed(rows: list[tuple[int, float]]) -> np.ndarray:
    return unit_advantages(units([row[1] for row in rows], [row[0] for row in rows]), "group", "group")


def global_batch(values: list[float]) -> np.ndarray:
    return unit_advantages(units(values, [0] * len(values)), "none", "batch")


def trajectory(index: int, *values: float) -> Trajectory:
    sequence = Sequence(
        tokens=np.array([7, 8, 9, 10], np.int32),
        loss_mask=np.array([0, 1, 0, 1], np.float32),
        logprobs=np.array([0, -1, 0, -2], np.float32),
        versions=np.array([NOT_SAMPLED, 3, NOT_SAMPLED, 4], np.int32),
    )
    placed = tuple(Reward(number, 3, value) for number, value in enumerate(values))
    return Trajectory(index, (sequence,) * len(values), placed, 1.0, (StopReason.STOP,))


def test_a_reward_of_another_group_never_enters_a_groups_mean() -> None:
    mixed = [(7, 1.0), (3, 100.0), (7, 0.0), (3, 300.0), (7, 1.0), (3, 200.0), (7, 0.0)]
    advantages = computed(mixed)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages[[0, 2, 4, 6]], [1, -1, 1, -1], atol=1e-5)
    np.testing.assert_allclose(advantages[[1, 3, 5]], [-1.2247449, 1.2247449, 0], atol=1e-5)


def test_groups_without_spread_or_with_one_member_get_exactly_zero() -> None:
    # The mean of three times 0.1 is not 0.1, and dividing that error by a tiny number would be an advantage.
    assert np.mean([0.1, 0.1, 0.1]) != 0.1
    assert computed([(0, 0.1), (0, 0.1), (0, 0.1), (1, 5.0), (2, -5.0), (2, 5.0)])[:4].tolist() == [0, 0, 0, 0]
    assert global_batch([0.1, 0.1, 0.1]).tolist() == [0, 0, 0]
    assert global_batch([3.0]).tolist() == [0]
    assert global_batch([]).tolist() == []


def test_rewards_that_differ_by_rounding_give_no_advantage_to_speak_of() -> None:
    assert 0.1 + 0.2 != 0.3
    assert np.abs(computed([(0, 0.1 + 0.2), (0, 0.3)])).max() < 1e-9


@repeatable
@given(rows)
def test_group_relative_equals_the_scalar_reference(rows: list[tuple[int, float]]) -> None:
    np.testing.assert_allclose(computed(rows), scalar_group_relative(rows), rtol=1e-5, atol=1e-6)


@repeatable
@given(st.lists(rewards, max_size=40))
def test_global_batch_equals_the_scalar_reference(values: list[float]) -> None:
    np.testing.assert_allclose(global_batch(values), scalar_normalised(values), rtol=1e-5, atol=1e-6)


@repeatable
@given(rows, st.randoms(use_true_random=False))
def test_shuffling_rows_moves_advantages_with_them_and_changes_none(
    rows: list[tuple[int, float]], chance: random.Random
) -> None:
    order = list(range(len(rows)))
    chance.shuffle(order)
    shuffled = computed([rows[index] for index in order])
    np.testing.assert_allclose(shuffled, computed(rows)[order], rtol=1e-5, atol=1e-6)


@repeatable
@given(rows.filter(bool), st.data())
def test_removing_a_member_changes_its_own_group_only(rows: list[tuple[int, float]], data: st.DataObject) -> None:
    removed = data.draw(st.integers(0, len(rows) - 1))
    others = [index for index, row in enumerate(rows) if row[0] != rows[removed][0]]
    kept = [index for index in range(len(rows)) if index != removed]
    after = computed([rows[index] for index in kept])
    assert [after[kept.index(index)] for index in others] == computed(rows)[others].tolist()


def test_rewards_and_group_ids_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 returns for 2 group ids"):
        units([0.0] * 3, [0] * 2)


def test_batch_advantages_are_keyed_by_group_and_trajectory_and_survive_incomplete_groups() -> None:
    incomplete = Group(4, 0, 1, 3, (trajectory(0, 1.0), trajectory(2, 0.0)), (Failure(1, "verifier", 9),))
    alone = Group(5, 1, 1, 2, (trajectory(1, 1.0),), (Failure(0, "verifier", 9),))
    complete = Group(9, 2, 1, 2, (trajectory(0, 1.0, 1.0), trajectory(1, 4.0)))
    batch = Batch(6, (incomplete, alone, complete))
    found = batch_advantages(batch, AlgorithmSection())
    by_group = found.by_trajectory
    assert list(by_group) == [(4, 0), (4, 2), (5, 1), (9, 0), (9, 1)]
    assert [len(advantages_T) for advantages_T in by_group.values()] == [2, 2, 2, 4, 2]
    assert [set(values.tolist()) for values in by_group.values()] == [{values[0]} for values in by_group.values()]
    assert [values[0] for values in by_group.values()] == pytest.approx([1, -1, 0, -1, 1], abs=1e-5)
    assert found.figures["incomplete_groups"] == 2 and found.figures["single_groups"] == 1
    by_batch = batch_advantages(batch, AlgorithmSection(baseline="none", normalise="batch")).by_trajectory
    assert [values[0] for values in by_batch.values()] == pytest.approx(scalar_normalised([1, 0, 1, 2, 4]))
