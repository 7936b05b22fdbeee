"""Which groups are replaced instead of trained: without spread, of an unwanted success rate, or of a prompt at rest.

A curriculum by success rate: the prompt of a replaced group is passed over the next times that it comes up, then tried
again. Its groups are admitted and dropped at once, so that the stream of prompts stays as it is.
"""

from collections.abc import Iterable

from headway.algorithm import AlgorithmSection, drop_reason
from headway.errors import RunFailed
from headway.types import DropReason, Group


class GroupFilter:
    """Decides group by group. A replaced group is a drop, so Eq. 3 admits another in its place."""

    def __init__(self, chosen: AlgorithmSection, batch_groups: int):
        self._chosen = chosen
        self._limit = max(64, 8 * batch_groups)
        self._num_in_a_row = 0
        self._resting: dict[int, int] = {}  # prompts, with how often they are to be passed over

    def restore(self, groups: Iterable[tuple[int, str]]) -> None:
        """The prompts of the record's groups, in order, with the reasons of those that were dropped."""
        for prompt, reason in groups:
            self._note(prompt, reason)

    def _note(self, prompt: int, reason: str | None) -> None:
        if reason in (DropReason.ZERO_VARIANCE, DropReason.SUCCESS_RATE) and self._chosen.rest_epochs:
            self._resting[prompt] = self._chosen.rest_epochs
        elif reason == DropReason.RESTING:
            self._resting[prompt] = self._resting.get(prompt, 1) - 1

    def rests(self, prompt: int) -> bool:
        """Whether a prompt that comes up is passed over this time."""
        is_resting = self._resting.get(prompt, 0) > 0
        if is_resting:
            self._note(prompt, DropReason.RESTING)
        return is_resting

    def reason(self, group: Group) -> DropReason | None:
        """Why this group is dropped; None if it is trained. Fails where it seems that every group would be dropped."""
        reason = drop_reason(self._chosen, [trajectory.reward for trajectory in group.trajectories])
        self._num_in_a_row = self._num_in_a_row + 1 if reason else 0
        self._note(group.prompt_index, reason)
        if reason and self._num_in_a_row >= self._limit:
            knob = "drop_zero_variance" if reason == DropReason.ZERO_VARIANCE else "success_low or success_high"
            raise RunFailed(
                f"{self._limit} groups in a row were replaced ({reason.value}), so no batch fills up; relax "
                f"algorithm.{knob}, or choose tasks that the model sometimes solves"
            )
        return reason
