"""Rewards to advantages: pure functions, blind to where the data came from.

Invariants that live here:
  8. Group identity: normalisation is by group id, never by stride, so that neither the order of the rows nor a
     missing trajectory moves a reward into another group's mean.

No critic and γ = λ = 1: every sampled token of a trajectory has the advantage of the trajectory.
Array suffix: N trajectories.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.types import Batch, Floats

EPSILON = 1e-6
"""Added to the standard deviation, so that rewards that differ only by rounding do not become advantages of ±1."""


def group_relative(rewards_N: NDArray[Any], group_ids_N: NDArray[Any], epsilon: float = EPSILON) -> Floats:
    """(r − mean)/(std + ε) within each group id; a group of one member, or without spread, gets exactly 0."""
    if len(rewards_N) != len(group_ids_N):
        raise ValueError(f"{len(rewards_N)} rewards for {len(group_ids_N)} group ids")
    advantages_N = np.zeros(len(rewards_N), np.float32)
    for group_id in np.unique(group_ids_N):
        members_N = group_ids_N == group_id
        advantages_N[members_N] = _normalised(rewards_N[members_N], epsilon)
    return advantages_N


def global_batch(rewards_N: NDArray[Any], epsilon: float = EPSILON) -> Floats:
    """(r − mean)/(std + ε) over all trajectories of the batch together; without spread, exactly 0."""
    return _normalised(rewards_N, epsilon).astype(np.float32)


def batch_advantages(batch: Batch, kind: Literal["group", "batch"]) -> dict[tuple[int, int], float]:
    """The advantage of each trajectory, by (group id, trajectory index)."""
    rows = [(group.id, trajectory) for group in batch.groups for trajectory in group.trajectories]
    group_ids_N = np.array([group_id for group_id, _ in rows], np.int64)
    rewards_N = np.array([trajectory.reward for _, trajectory in rows], np.float64)
    advantages_N = group_relative(rewards_N, group_ids_N) if kind == "group" else global_batch(rewards_N)
    keys = [(group_id, trajectory.index) for group_id, trajectory in rows]
    return dict(zip(keys, advantages_N.tolist(), strict=True))


def _normalised(rewards_N: NDArray[Any], epsilon: float) -> NDArray[np.float64]:
    exact_N = np.asarray(rewards_N, np.float64)
    # Compared, not subtracted: the mean of equal numbers may miss them by a rounding error.
    if len(exact_N) == 0 or exact_N.min() == exact_N.max():
        return np.zeros(len(exact_N))
    normalised_N: NDArray[np.float64] = (exact_N - exact_N.mean()) / (exact_N.std() + epsilon)
    return normalised_N
