"""A batch's rewards as advantages of its trained tokens: which unit each token belongs to, and what the batch is like.

Everything is by group id and trajectory index. No torch: with several trainer ranks this runs in the controller.

Shape suffix: T trained tokens of one trajectory, over all its sequences in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.algorithm import AlgorithmSection
from headway.training.algorithms.advantages import Doubles, Units, gae, overlong_penalty, to_go, unit_advantages
from headway.types import Batch, Floats, StopReason, Trajectory

Key = tuple[int, int]  # group id, trajectory index
_CUT = (StopReason.LENGTH, StopReason.CONTEXT)


@dataclass(frozen=True, eq=False)
class Advantages:
    """Of each trajectory, the advantages of its trained tokens; with a critic also the returns it learns."""

    by_trajectory: dict[Key, Floats]
    returns: dict[Key, Floats]
    figures: dict[str, float]  # of the batch: groups without spread, incomplete, of one trajectory


@dataclass(frozen=True, eq=False)
class _Row:
    """One trajectory: its trained tokens' rewards and turns. `total` is exact, without going by way of tokens."""

    key: Key
    rewards_T: Doubles
    turns_T: NDArray[np.int64]
    total: float


def batch_advantages(
    batch: Batch,
    chosen: AlgorithmSection,
    penalties: Mapping[Key, Floats] | None = None,
    values: Mapping[Key, Floats] | None = None,
) -> Advantages:
    """The advantages of a batch. `penalties` are subtracted from tokens' rewards (KL); `values` are a critic's."""
    rows = [
        _row((group.id, trajectory.index), trajectory, chosen, penalties)
        for group in batch.groups
        for trajectory in group.trajectories
    ]
    returns: dict[Key, Floats] = {}
    if chosen.needs_critic:
        assert values is not None
        units, places, returns = _estimated(rows, values, chosen)
    else:
        units, places = _units(rows, chosen)
    advantages_U = unit_advantages(units, chosen.baseline, chosen.normalise)
    found = {row.key: advantages_U[place] for row, place in zip(rows, places, strict=True)}
    return Advantages(found, returns, _figures(batch))


def was_cut(trajectory: Trajectory) -> bool:
    """Whether any of its completions reached a limit of length."""
    return any(stop in _CUT for stop in trajectory.stops)


def has_spread(rewards: list[float]) -> bool:
    return len(set(rewards)) > 1


def _row(key: Key, trajectory: Trajectory, chosen: AlgorithmSection, penalties: Mapping[Key, Floats] | None) -> _Row:
    where = [np.flatnonzero(sequence.loss_mask) for sequence in trajectory.sequences]
    starts = np.cumsum([0, *(len(places) for places in where)])
    rewards_T = np.zeros(starts[-1])
    turns_T = _turns(where)
    for reward in trajectory.rewards:
        # A reward behind a turn, at the end of what a tool answered, is that turn's.
        place = max(0, int(np.searchsorted(where[reward.sequence], reward.position, side="right")) - 1)
        if len(rewards_T):
            rewards_T[min(starts[reward.sequence] + place, len(rewards_T) - 1)] += reward.value
    longest = np.array([np.bincount(turns_T).max(initial=0)])
    limits = chosen.length_limit, chosen.overlong_share, chosen.overlong_penalty
    penalty = float(overlong_penalty(longest, *limits)[0])
    total = trajectory.reward - penalty
    rewards_T[-1:] -= penalty
    if penalties is not None and len(rewards_T):
        rewards_T -= penalties[key]
        total -= float(penalties[key].sum(dtype=np.float64))
    return _Row(key, rewards_T, turns_T, total)


def _turns(where: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The turn of each trained token: a run without a gap, in one sequence."""
    turns, first = [], 0
    for places in where:
        if len(places):
            turns.append(first + np.cumsum(np.diff(places, prepend=places[0] - 1) > 1))
            first = int(turns[-1][-1]) + 1
    return np.concatenate(turns) if turns else np.zeros(0, np.int64)


def _units(rows: list[_Row], chosen: AlgorithmSection) -> tuple[Units, list[NDArray[np.int64]]]:
    """The batch's units, and of each trajectory the unit of each of its tokens."""
    returns, keys, owners, tokens, places, num = [], [], [], [], [], 0
    most_turns = max((int(row.turns_T.max(initial=0)) for row in rows), default=0) + 1
    for number, row in enumerate(rows):
        group, num_tokens = row.key[0], len(row.rewards_T)
        if chosen.reward_level == "trajectory":
            mine, unit_T, numbers = np.array([row.total]), np.zeros(num_tokens, np.int64), np.zeros(1, np.int64)
            counts = np.array([num_tokens])
        elif chosen.reward_level == "turn":
            counts = np.bincount(row.turns_T)
            mine = to_go(np.bincount(row.turns_T, row.rewards_T), np.array([len(counts)]), chosen.gamma)
            unit_T, numbers = row.turns_T, np.arange(len(counts))
        else:
            mine = to_go(row.rewards_T, np.array([num_tokens]), chosen.gamma)
            unit_T, numbers = np.arange(num_tokens), np.zeros(num_tokens, np.int64)
            counts = np.ones(num_tokens, np.int64)
        returns.append(mine)
        keys.append(group * most_turns + numbers)
        owners.append(np.full(len(mine), number))
        tokens.append(counts)
        places.append(num + unit_T)
        num += len(mine)
    joined = [np.concatenate([np.zeros(0, dtype), *parts]) for dtype, parts in (
        (np.float64, returns), (np.int64, keys), (np.int64, owners), (np.int64, tokens)
    )]  # fmt: skip
    return Units(*joined), places


def _estimated(
    rows: list[_Row], values: Mapping[Key, Floats], chosen: AlgorithmSection
) -> tuple[Units, list[NDArray[np.int64]], dict[Key, Floats]]:
    """Every trained token a unit, with its generalised advantage estimate; and what the critic learns."""
    counts_N = np.array([len(row.rewards_T) for row in rows], np.int64)
    rewards_T = np.concatenate([np.zeros(0), *(row.rewards_T for row in rows)])
    values_T = np.concatenate([np.zeros(0), *(values[row.key] for row in rows)])
    advantages_T, returns_T = gae(rewards_T, values_T, counts_N, chosen.gamma, chosen.gae_lambda)
    groups_T = np.repeat(np.array([row.key[0] for row in rows], np.int64), counts_N)
    units = Units(advantages_T, groups_T, np.repeat(np.arange(len(rows)), counts_N), np.ones(len(groups_T), np.int64))
    ends = np.cumsum(counts_N)
    places = [np.arange(end - count, end) for end, count in zip(ends, counts_N, strict=True)]
    learned = {row.key: returns_T[place].astype(np.float32) for row, place in zip(rows, places, strict=True)}
    return units, places, learned


def _figures(batch: Batch) -> dict[str, float]:
    rewards = [[trajectory.reward for trajectory in group.trajectories] for group in batch.groups]
    return {
        "zero_variance_groups": float(sum(len(own) > 1 and not has_spread(own) for own in rewards)),
        "single_groups": float(sum(len(own) == 1 for own in rewards)),
        "incomplete_groups": float(sum(not group.complete for group in batch.groups)),
        "truncated_trajectories": float(sum(was_cut(t) for group in batch.groups for t in group.trajectories)),
    }
