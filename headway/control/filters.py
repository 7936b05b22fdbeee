"""Which finished groups are replaced instead of trained: those without spread, or of an unwanted success rate."""

from headway.algorithm import AlgorithmSection, drop_reason
from headway.errors import RunFailed
from headway.types import DropReason, Group


class GroupFilter:
    """Decides group by group. A replaced group is a drop, so Eq. 3 admits another in its place."""

    def __init__(self, chosen: AlgorithmSection, batch_groups: int):
        self._chosen = chosen
        self._limit = max(64, 8 * batch_groups)
        self._num_in_a_row = 0

    def reason(self, group: Group) -> DropReason | None:
        """Why this group is dropped; None if it is trained. Fails where it seems that every group would be dropped."""
        reason = drop_reason(self._chosen, [trajectory.reward for trajectory in group.trajectories])
        self._num_in_a_row = self._num_in_a_row + 1 if reason else 0
        if reason and self._num_in_a_row >= self._limit:
            knob = "drop_zero_variance" if reason == DropReason.ZERO_VARIANCE else "success_low or success_high"
            raise RunFailed(
                f"{self._limit} groups in a row were replaced ({reason.value}), so no batch fills up; relax "
                f"algorithm.{knob}, or choose tasks that the model sometimes solves"
            )
        return reason
