"""A run's events on one clock: its process lives, and what each engine did between two looks at it.

The clock stands still while no process of the run lives, so a run that was killed and resumed reads as one.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from headway.record.events import Event

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine did between two of its stats events."""

    engine: str
    start: float
    end: float
    generated: int
    busy_s: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.seconds

    @property
    def busy_share(self) -> float:
        return min(1.0, max(0.0, self.busy_s / self.seconds))


def look_of(event: Event) -> Look | None:
    if event.kind != "stats" or event["seconds"] <= 0:
        return None
    return Look(event["engine"], event.time - event["seconds"], event.time, event["generated"], event["busy_s"])


class History:
    """The events of a run, sorted by kind, on a clock that stands still while no process of the run lives."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.by_kind: dict[str, list[Event]] = {}
        self.lives: list[list[Event]] = []
        self.looks: list[Look] = []
        for event in events:
            self.by_kind.setdefault(event.kind, []).append(event)
            if event.kind == "resume_started" or not self.lives:
                self.lives.append([])
            self.lives[-1].append(event)
            if (look := look_of(event)) is not None:
                self.looks.append(look)
        self._starts = [life[0].time for life in self.lives]
        lengths = [life[-1].time - life[0].time for life in self.lives]
        self._offsets = list(accumulate(lengths, initial=0.0))

    def __getitem__(self, kind: str) -> list[Event]:
        return self.by_kind.get(kind, [])

    @property
    def total_s(self) -> float:
        return self._offsets[-1]

    @property
    def resumes(self) -> list[float]:
        """When, on this clock, a later life began."""
        return self._offsets[1:-1]

    def at(self, time: float) -> float:
        """Seconds the run had lived at a unix time."""
        life = max(0, bisect.bisect_right(self._starts, time) - 1)
        return self._offsets[life] + time - self._starts[life]

    def training(self) -> list[Span]:
        """For each life that trained: from its first admission, or its resumption, to its last training step."""
        spans: list[Span] = []
        for life in self.lives:
            begins = [event.time for event in life if event.kind in ("admitted", "resumed", "taken")][:1]
            ends = [event.time for event in life if event.kind == "trained"][-1:]
            spans += zip(begins, ends, strict=False)
        return spans

    def last_stats(self) -> list[dict[str, Event]]:
        """Each life's last look at each engine."""
        return [{str(event["engine"]): event for event in life if event.kind == "stats"} for life in self.lives]
