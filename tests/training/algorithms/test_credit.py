"""Every baseline, normalisation and reward level against a plain loop over units; invariant 8: group identity."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import make_group, make_trajectory

from headway.algorithm import AlgorithmSection
from headway.training.algorithms.advantages import EPSILON, gae, overlong_penalty, to_go
from headway.training.algorithms.credit import batch_advantages, was_cut
from headway.types import NOT_SAMPLED, Batch, Group, Reward, Sequence, StopReason, Trajectory

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=25)


def turns(index: int, shape: list[tuple[int, float]]) -> Trajectory:
    """One sequence of a trajectory: turns of sampled tokens, a tool's token before each, a reward at each one's end."""
    lengths, values = [length for length, _ in shape], [value for _, value in shape]
    mask = [bit for length in lengths for bit in (0, *[1] * length)]
    sequence = Sequence(
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, np.float32),
        logprobs=np.array([-1.0 * bit for bit in mask], np.float32),
        versions=np.array([0 if bit else NOT_SAMPLED for bit in mask], np.int32),
    )
    ends = np.cumsum([length + 1 for length in lengths]) - 1
    rewards = tuple(Reward(0, int(end), value) for end, value in zip(ends, values, strict=True))
    return Trajectory(index, (sequence,), rewards, 1.0, (StopReason.STOP,) * len(lengths))


rewards = st.sampled_from([-1.0, 0.0, 0.5, 1.0])
shapes = st.lists(st.tuples(st.integers(1, 4), rewards), min_size=1, max_size=3)


def batch_of(groups: list[list[list[tuple[int, float]]]]) -> Batch:
    made = [[turns(index, shape) for index, shape in enumerate(own)] for own in groups]
    return Batch(0, tuple(Group(7 * number, 0, 0, len(own), tuple(own)) for number, own in enumerate(made)))


batches = st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3).map(batch_of)


def discounted(values: list[float], factor: float) -> float:
    return math.fsum(value * factor**place for place, value in enumerate(values))


def units_of(trajectory: Trajectory, chosen: AlgorithmSection) -> list[tuple[int, float, int]]:
    """Of each unit: which of the group's units it is compared with, its return, and how many tokens it has."""
    mask = trajectory.sequences[0].loss_mask
    lengths = [len(run) for run in "".join(str(int(bit)) for bit in mask).split("0") if run]
    values = [reward.value for reward in trajectory.rewards]
    if chosen.reward_level == "trajectory":
        return [(0, sum(values), sum(lengths))]
    if chosen.reward_level == "turn":
        return [(turn, discounted(values[turn:], chosen.gamma), length) for turn, length in enumerate(lengths)]
    by_token = [r for length, value in zip(lengths, values, strict=True) for r in (*[0.0] * (length - 1), value)]
    return [(0, discounted(by_token[place:], chosen.gamma), 1) for place in range(len(by_token))]


def scalar(batch: Batch, chosen: AlgorithmSection) -> dict[tuple[int, int], list[float]]:
    """The advantage of each token, by the formulas."""
    units = [
        ((group.id, t.index), (group.id, number), value, tokens)
        for group in batch.groups
        for t in group.trajectories
        for number, value, tokens in units_of(t, chosen)
    ]
    advantages = []
    for owner, key, value, _ in units:
        peers = [other for _, theirs, other, _ in units if theirs == key]
        others = [other for whose, theirs, other, _ in units if theirs == key and whose != owner]
        mean = sum(peers) / len(peers)
        base = {"group": mean, "leave_one_out": sum(others) / len(others) if others else value, "none": 0.0}
        deviation = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / len(peers))
        advantage = value - base[chosen.baseline]
        if len(set(peers)) == 1 and chosen.baseline != "none":
            advantage = 0.0
        advantages.append(advantage / (deviation + EPSILON) if chosen.normalise == "group" else advantage)
    if chosen.normalise in ("batch", "token"):
        sizes = [sum(other[0] == unit[0] for other in units) for unit in units]
        by_token = chosen.normalise == "token"
        weights = [unit[3] if by_token else 1 / size for unit, size in zip(units, sizes, strict=True)]
        mean = math.fsum(w * a for w, a in zip(weights, advantages, strict=True)) / sum(weights)
        squares = (w * (a - mean) ** 2 for w, a in zip(weights, advantages, strict=True))
        deviation = math.sqrt(math.fsum(squares) / sum(weights))
        alike = len(set(advantages)) == 1
        advantages = [0.0 if alike else (a - mean) / (deviation + EPSILON) for a in advantages]
    found: dict[tuple[int, int], list[float]] = {}
    for (owner, _, _, tokens), advantage in zip(units, advantages, strict=True):
        found.setdefault(owner, []).extend([advantage] * tokens)
    return found


COMBINATIONS = [
    {"baseline": baseline, "normalise": normalise, "reward_level": level, "gamma": gamma}
    for baseline in ("group", "leave_one_out", "none")
    for normalise in ("group", "batch", "token", "none")
    for level, gamma in (("trajectory", 1.0), ("turn", 0.9), ("token", 0.95))
    if not (baseline == "none" and normalise == "group")
]


@pytest.mark.parametrize("knobs", COMBINATIONS, ids=lambda knobs: " ".join(str(value) for value in knobs.values()))
@settings(derandomize=True, deadline=None, database=None, max_examples=5)
@given(batch=batches)
def test_advantages_equal_the_scalar_reference(knobs: dict[str, Any], batch: Batch) -> None:
    chosen = AlgorithmSection.model_validate(knobs)
    found = batch_advantages(batch, chosen).by_trajectory
    for key, expected in scalar(batch, chosen).items():
        assert found[key].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4), key


@repeatable
@given(batches, st.randoms(use_true_random=False))
def test_invariant_8_the_order_of_trajectories_changes_no_advantage(batch: Batch, chance: Random) -> None:
    chosen = AlgorithmSection(baseline="leave_one_out", normalise="token", reward_level="turn")
    shuffled = []
    for group in batch.groups:
        order = list(group.trajectories)
        chance.shuffle(order)
        shuffled.append(replace(group, trajectories=tuple(order)))
    one, other = (batch_advantages(each, chosen).by_trajectory for each in (batch, Batch(0, tuple(shuffled))))
    for key, advantages in one.items():
        np.testing.assert_allclose(other[key], advantages, rtol=1e-5, atol=1e-6)


values = st.lists(st.floats(-2, 2).map(lambda value: round(value, 3)), max_size=9)


@repeatable
@given(st.lists(values, min_size=1, max_size=5), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_sums_to_go_equal_a_loop_and_stop_at_the_end(rows: list[list[float]], factor: float) -> None:
    flat = np.array([value for row in rows for value in row])
    expected = [discounted(row[place:], factor) for row in rows for place in range(len(row))]
    found = to_go(flat, np.array([len(row) for row in rows]), factor)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@repeatable
@given(st.lists(values, min_size=1, max_size=4), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_generalised_advantages_equal_the_recursion(rows: list[list[float]], gamma: float, lam: float) -> None:
    estimates = [[0.3 * place - 0.5 for place in range(len(row))] for row in rows]
    expected = []
    for row, values in zip(rows, estimates, strict=True):
        advantage, backwards = 0.0, []
        for place in reversed(range(len(row))):
            following = values[place + 1] if place + 1 < len(row) else 0.0
            advantage = row[place] + gamma * following - values[place] + gamma * lam * advantage
            backwards.append(advantage)
        expected += backwards[::-1]
    joined = [np.array([value for row in each for value in row]) for each in (rows, estimates)]
    advantages, returns = gae(*joined, np.array([len(row) for row in rows]), gamma, lam)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert (returns - joined[1]).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_ten_thousand_tokens_neither_overflow_nor_lose_the_first() -> None:
    found = to_go(np.append(np.zeros(9999), 1.0), np.array([10000]), 0.999)
    assert found[0] == pytest.approx(0.999**9999) and found[-1] == 1.0


def test_a_long_completion_loses_reward_linearly_up_to_the_penalty() -> None:
    found = overlong_penalty(np.array([50, 80, 90, 100, 120]), 100, 0.2, 2.0)
    assert found.tolist() == pytest.approx([0, 0, 1, 2, 2])
    assert not overlong_penalty(np.array([100]), 100, 0.0, 2.0).any()
    random = np.random.default_rng(0)
    short, long = (make_trajectory(random, number, 1.0, (5 + 5 * number,)) for number in range(2))
    group = Group(0, 0, 0, 2, (short, long))
    chosen = AlgorithmSection(overlong_share=0.5, overlong_penalty=1.0, length_limit=10, normalise="none")
    advantages = batch_advantages(Batch(0, (group,)), chosen).by_trajectory
    assert advantages[0, 0][0] == pytest.approx(0.5) and advantages[0, 1][0] == pytest.approx(-0.5)


def test_the_figures_say_what_the_batch_is_like() -> None:
    cut = replace(make_group(3, (1.0, 0.0)).trajectories[0], stops=(StopReason.LENGTH,))
    groups = (make_group(0, (1.0, 1.0)), make_group(1, (1.0,)), make_group(2, (0.0, 1.0), num_failed=1))
    groups += (replace(make_group(3, (1.0, 0.0)), trajectories=(cut, make_group(3, (1.0, 0.0)).trajectories[1])),)
    found = batch_advantages(Batch(0, groups), AlgorithmSection())
    assert found.figures == {
        "zero_variance_groups": 1,
        "single_groups": 1,
        "incomplete_groups": 1,
        "truncated_trajectories": 1,
    }
    assert was_cut(cut) and not was_cut(groups[0].trajectories[0])
