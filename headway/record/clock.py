"""Maps unix times to seconds of run time: the processes of a run in sequence, without the pauses between them."""

import bisect
from dataclasses import dataclass

from headway.record.events import Admitted, Event, Resumed, ResumeStarted, Taken, Trained

Span = tuple[float, float]


@dataclass
class Incarnation:
    """One process of the run: unix times of its first and last event, and of its training."""

    start: float
    end: float
    offset: float  # run time at its start
    training_start: float | None = None  # its first admission, resumption or batch
    training_end: float | None = None  # its last training step


class Clock:
    def __init__(self) -> None:
        self.incarnations: list[Incarnation] = []

    def on_event(self, event: Event) -> None:
        kind = type(event)
        if kind is ResumeStarted or not self.incarnations:
            self.incarnations.append(Incarnation(event.time, event.time, self.total_s))
        current = self.incarnations[-1]
        current.end = event.time
        if kind is Trained:
            current.training_end = event.time
        elif current.training_start is None and kind in (Admitted, Resumed, Taken):
            current.training_start = event.time

    @property
    def total_s(self) -> float:
        """Seconds for which a process of the run existed."""
        return self.at(self.incarnations[-1].end) if self.incarnations else 0.0

    @property
    def resumes(self) -> list[float]:
        """Run time at which each later incarnation began."""
        return [incarnation.offset for incarnation in self.incarnations[1:]]

    def at(self, time: float) -> float:
        """Run time at a unix time."""
        incarnation = self.incarnations[-1]
        if time < incarnation.start:
            index = bisect.bisect_right(self.incarnations, time, key=lambda incarnation: incarnation.start) - 1
            incarnation = self.incarnations[max(0, index)]
        return incarnation.offset + time - incarnation.start

    def training(self) -> list[Span]:
        """For each incarnation that trained, unix times from its first admission to its last training step."""
        spans = [(one.training_start, one.training_end) for one in self.incarnations]
        return [(start, end) for start, end in spans if start is not None and end is not None]
