"""One training step of the log, with the sums over its groups."""

from collections import Counter
from dataclasses import dataclass

from headway.record.events import Trained
from headway.types import StopReason


@dataclass(frozen=True, slots=True)
class Step:
    """A training step: its event, and counts over its groups."""

    event: Trained
    num_groups: int
    num_trajectories: int
    num_truncated: int
    num_zero_variance: int  # groups
    num_failed: int  # trajectories without a reward
    stops: Counter[StopReason | None]

    @property
    def metrics(self) -> dict[str, float]:
        """Shares of its trajectories and groups, by the names that metrics use."""
        tried = self.num_trajectories + self.num_failed
        shares = {
            "truncated_share": self.num_truncated / max(1, self.num_trajectories),
            "zero_variance_share": self.num_zero_variance / max(1, self.num_groups),
            "failed_share": self.num_failed / max(1, tried),
        }
        return shares | {
            f"stop_{stop}": num / max(1, self.num_trajectories) for stop, num in self.stops.items() if stop
        }
