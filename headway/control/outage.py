"""Judges recent groups: tells an outage of the verifier or the workflow from groups that fail by themselves.

While every group fails, admission pauses but for one group at a time, with growing pauses, and the prompts of the
failed groups are admitted again. The first group with a trajectory ends the outage.
"""

import time
from collections import deque
from collections.abc import Iterable

from headway.config import SuperviseSection
from headway.errors import RunFailed
from headway.types import Prompt

NUM_SUSPICIOUS = 4
"""Groups in a row that fail whole before that is an outage."""

_MAX_PAUSE_S = 30.0


class FailureWatch:
    """`prompts` are those to admit again, each with the group that failed on it."""

    def __init__(self, section: SuperviseSection, deadline_s: float, batch_groups: int, has_succeeded: bool) -> None:
        self._section, self._deadline_s = section, deadline_s
        self._num_hopeless = max(2 * NUM_SUSPICIOUS, batch_groups)
        self._has_succeeded = has_succeeded
        self._streak: list[tuple[int, Prompt]] = []
        self._num_failed = 0
        self._since = self._probe_at = 0.0
        self._pause_s = 0.0
        self.reason = ""  # of the last failed group
        self.prompts: deque[tuple[int, Prompt]] = deque()

    @property
    def is_outage(self) -> bool:
        return self._num_failed >= NUM_SUSPICIOUS and self._has_succeeded

    def restore(self, failing: Iterable[tuple[int, Prompt]]) -> None:
        """The groups that had failed in a row when the run was interrupted; one more that fails makes it an outage."""
        self._streak.extend(failing)
        self._num_failed, self._since = min(len(self._streak), NUM_SUSPICIOUS - 1), time.monotonic()

    def succeeded(self) -> None:
        """A group has a trajectory: the verifier and the workflow work."""
        self._has_succeeded = True
        self._streak.clear()
        self._num_failed, self._pause_s = 0, 0.0

    def failed(self, group: int, prompt: Prompt, reason: str) -> tuple[int, ...]:
        """A group failed whole; the groups whose prompts are to be admitted again because of it."""
        now = time.monotonic()
        self._since = self._since if self._num_failed else now
        self._num_failed += 1
        self.reason = reason
        self._check_hope(now)
        self._streak.append((group, prompt))
        if not self.is_outage:
            return ()
        again, self._streak = self._streak, []
        self.prompts.extend(again)
        self._probe_at = now + self._pause_s
        return tuple(group for group, _ in again)

    def probe(self) -> None:
        """One group is admitted to see whether the outage is over; the next one waits twice as long."""
        longest_s = min(_MAX_PAUSE_S, self._deadline_s / 8)
        self._pause_s = min(longest_s, 2 * self._pause_s or self._section.backoff_s)

    def seconds_to_probe(self) -> float:
        return max(0.0, self._probe_at - time.monotonic())

    def _check_hope(self, now: float) -> None:
        if not self._has_succeeded and self._num_failed >= self._num_hopeless:
            raise RunFailed(
                f"all trajectories failed in each of the first {self._num_failed} groups, the last with "
                f"'{self.reason}'; check the verifier and the workflow"
            )
        if self.is_outage and now - self._since > self._deadline_s:
            raise RunFailed(
                f"every group failed for more than run.deadline_s = {self._deadline_s:g} s, the last with "
                f"'{self.reason}'; check the verifier and the workflow, then --resume"
            )
