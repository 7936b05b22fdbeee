"""Rewards to advantages: pure functions on arrays that do not know where the data came from. No torch.

An advantage is a return less a baseline, normalised. What has one return is a unit: a trajectory, a turn or a token,
by `reward_level`.

Invariants that live here:
  8. Group identity: normalisation is by group id, never by stride, so that neither the order of the rows nor a missing
     trajectory moves a reward into another group's mean.

Shape suffixes: U units, N trajectories, T trained tokens.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.types import Floats

EPSILON = 1e-6
"""Added to the standard deviation, so that rewards that differ only by rounding do not become advantages of ±1."""

Doubles = NDArray[np.float64]
Baseline = Literal["group", "leave_one_out", "none", "critic"]
Normalisation = Literal["group", "batch", "token", "none"]


@dataclass(frozen=True, eq=False)
class Units:
    """Returns, each with what it is compared with, whose it is, and how many tokens it speaks for."""

    returns_U: Doubles
    keys_U: NDArray[np.int64]  # units of one key are compared: a group's, or those of one turn of it
    owners_U: NDArray[np.int64]  # the trajectory
    tokens_U: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len({len(self.returns_U), len(self.keys_U), len(self.owners_U), len(self.tokens_U)}) > 1:
            raise ValueError(f"{len(self.returns_U)} returns for {len(self.keys_U)} group ids")


def unit_advantages(units: Units, baseline: Baseline, normalise: Normalisation) -> Floats:
    """The advantage of each unit. With a critic, `returns_U` are its estimates, and only the batch normalises."""
    advantages_U = np.array(units.returns_U, np.float64)
    for members in _by_key(units.keys_U):
        own = units.returns_U[members]
        # Compared, not subtracted: the mean of equal numbers may miss them by a rounding error.
        if baseline in ("group", "leave_one_out") and own.min() == own.max():
            advantages_U[members] = 0.0
            continue
        if baseline == "group":
            advantages_U[members] = own - own.mean()
        elif baseline == "leave_one_out":
            advantages_U[members] = own - _mean_of_others(own, units.owners_U[members])
        if normalise == "group":
            advantages_U[members] /= own.std() + EPSILON
    if normalise == "batch":
        # Each trajectory counts once, however many units it has.
        _, inverse, counts = np.unique(units.owners_U, return_inverse=True, return_counts=True)
        several = len(counts) < len(advantages_U)
        advantages_U = _normalised(advantages_U, 1.0 / counts[inverse] if several else None)
    elif normalise == "token":
        advantages_U = _normalised(advantages_U, units.tokens_U.astype(np.float64))
    return advantages_U.astype(np.float32)


def to_go(values_T: NDArray[Any], counts_N: NDArray[Any], factor: float) -> Doubles:
    """Σ over later tokens j of the same trajectory of factor^(j − t)·value_j, the token itself included.

    By doubling: after k rounds each token has the sum over the 2^k tokens from it on. The first `counts_N[0]` tokens
    are the first trajectory's, and so on.
    """
    total_T = np.array(values_T, np.float64)
    counts = np.asarray(counts_N, np.int64)
    later_T = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(total_T))  # tokens that follow in the trajectory
    reach = 1
    while reach < counts.max(initial=0):
        reached_T = np.where(later_T[:-reach] >= reach, total_T[reach:], 0.0)
        total_T[:-reach] += factor**reach * reached_T
        reach *= 2
    return total_T


def gae(
    rewards_T: NDArray[Any], values_T: NDArray[Any], counts_N: NDArray[Any], gamma: float, lam: float
) -> tuple[Doubles, Doubles]:
    """Generalised advantage estimates, and the returns a critic learns: estimate + value. After the end, value 0."""
    values_T = np.asarray(values_T, np.float64)
    following_T = np.append(values_T[1:], 0.0)
    ends = np.cumsum(counts_N)[np.asarray(counts_N) > 0] - 1
    following_T[ends] = 0.0
    errors_T = np.asarray(rewards_T, np.float64) + gamma * following_T - values_T
    advantages_T = to_go(errors_T, counts_N, gamma * lam)
    return advantages_T, advantages_T + values_T


def overlong_penalty(num_tokens_N: NDArray[Any], limit: int, share: float, penalty: float) -> Doubles:
    """What a completion loses for its length: nothing up to (1 − share)·limit, then linearly up to `penalty`."""
    if share <= 0:
        return np.zeros(len(num_tokens_N))
    beyond_N = np.asarray(num_tokens_N, np.float64) - (1 - share) * limit
    return penalty * np.clip(beyond_N / (share * limit), 0, 1)


def _by_key(keys_U: NDArray[Any]) -> list[NDArray[np.int64]]:
    """The places of each key's units, in their order."""
    order = np.argsort(keys_U, kind="stable")
    starts = np.flatnonzero(np.diff(keys_U[order])) + 1
    return [members for members in np.split(order, starts) if len(members)]


def _mean_of_others(own_U: Doubles, owners_U: NDArray[np.int64]) -> Doubles:
    """For each unit the mean over the units of the other trajectories; of a lone trajectory, its own."""
    _, inverse = np.unique(owners_U, return_inverse=True)
    sums, counts = np.bincount(inverse, own_U), np.bincount(inverse)
    num_others = len(own_U) - counts[inverse]
    others_U: Doubles = (own_U.sum() - sums[inverse]) / np.maximum(num_others, 1)
    return np.where(num_others > 0, others_U, own_U)


def _normalised(values_U: Doubles, weights_U: Doubles | None = None) -> Doubles:
    if len(values_U) == 0 or values_U.min() == values_U.max():
        return np.zeros(len(values_U))
    if weights_U is None or weights_U.sum() == 0:
        normalised_U: Doubles = (values_U - values_U.mean()) / (values_U.std() + EPSILON)
        return normalised_U
    mean = np.average(values_U, weights=weights_U)
    deviation = np.sqrt(np.average((values_U - mean) ** 2, weights=weights_U))
    centred_U: Doubles = (values_U - mean) / (deviation + EPSILON)
    return centred_U
