"""Reports what groups wait for when none finishes: trajectories for the verifier or the workflow, or the controller
for a rollout worker whose workflow blocks its event loop. Waits for engines are left to their health checks.

Invariant that lives here:
 15. Bounded waits: within seconds a person reads what is waited for, why, and which knob bounds it.
"""

from headway.config import Config
from headway.rollout.router import Waiting
from headway.tasks.scoring import specification, title

CHECK_S = 1.0
QUIET_S, LONGEST_QUIET_S = 10.0, 60.0
"""How long no group finishes until the first sentence; each later one of a run takes twice as long, up to a minute,
unless the same wait goes on."""


class WaitWatch:
    """`waiting` holds each rollout worker's last answer: when it came, and what its trajectories waited for then."""

    def __init__(self, config: Config, now: float) -> None:
        self._config = config
        self._since, self._quiet_s, self._num_running = now, QUIET_S, 0
        self.waiting: dict[str, tuple[float, tuple[Waiting, ...]]] = {}

    def begin(self, now: float) -> None:
        """A group begins."""
        self._num_running += 1
        if self._num_running == 1:
            self._since = now

    def end(self, now: float, is_whole_failure: bool) -> None:
        """A group ended; one without any trajectory is no progress."""
        self._num_running -= 1
        if not is_whole_failure:
            self._since, self._quiet_s = now, min(self._quiet_s, LONGEST_QUIET_S)

    def due(self, now: float) -> str | None:
        """The sentence that is due."""
        quiet_s = now - self._since
        if not self._num_running or quiet_s < self._quiet_s:
            return None
        cause = self._blocked(now) or self._waits(now, "verifier") or self._waits(now, "workflow")
        if cause is None:
            return None
        self._quiet_s = 2 * quiet_s
        return f"no group has finished for {quiet_s:.0f} s: {cause}"

    def _blocked(self, now: float) -> str | None:
        silent = {name: now - when for name, (when, _) in self.waiting.items()}
        name = max(silent, key=lambda name: silent[name], default="")
        if not name or silent[name] < max(QUIET_S / 2, 3 * self._config.metrics.stats_every_s):
            return None
        return (
            f"{name} has not answered for {silent[name]:.0f} s, as when the workflow {self._config.rollout.workflow} "
            "blocks its event loop: use asyncio.to_thread or an async client there; after supervise.health_s = "
            f"{self._config.supervise.health_s:g} s the worker is replaced"
        )

    def _waits(self, now: float, what: str) -> str | None:
        found = [
            (item.num, item.seconds + now - when)
            for when, items in self.waiting.values()
            for item in items
            if item.what == what
        ]
        longest_s = max((seconds for _, seconds in found), default=0.0)
        if longest_s < self._quiet_s:
            return None
        num = sum(num for num, _ in found)
        name, remedy = self._of_verifier() if what == "verifier" else self._of_workflow()
        who = "1 trajectory waits" if num == 1 else f"{num} trajectories wait"
        longest = "" if num == 1 else "the longest "
        return f"{who} for {name}, {longest}for {longest_s:.0f} s; {remedy}"

    def _of_verifier(self) -> tuple[str, str]:
        section = self._config.reward
        bound = f"a call longer than reward.deadline_s = {section.deadline_s:g} s is killed"
        return (
            f"the verifier {title(specification(self._config.named_tasks))}",
            f"{bound}; raise reward.workers (now {section.workers}) if it is slow and does not hang",
        )

    def _of_workflow(self) -> tuple[str, str]:
        section = self._config.rollout
        now = f"{section.episode_deadline_s:g} s" if section.episode_deadline_s else "no limit"
        return (
            f"the workflow {section.workflow} between its calls",
            f"an episode is given up after rollout.episode_deadline_s (now {now})",
        )
