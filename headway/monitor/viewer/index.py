"""One run as the viewer sees it: its event log folded once into columns, and followed while the run goes on.

A row is one trajectory. Columns are numpy arrays, so that a million rows are filtered and sorted in milliseconds; texts
and tokens stay in the record and are read when somebody opens them.
"""

import threading
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.record.events import (
    Admitted,
    Checkpointed,
    Dropped,
    Ended,
    EngineJoined,
    EngineLeft,
    EngineSlow,
    Evaluated,
    Event,
    Finished,
    Resumed,
    ResumeStarted,
    RunStarted,
    Skipped,
    Stats,
    Swapped,
    Taken,
    Trained,
    Warned,
    WorkerLost,
    WorkerRestarted,
)
from headway.record.log import EVENTS_NAME, Follower, is_being_written
from headway.types import StopReason

STATES = ("waiting", "taken", "trained", "dropped", "failed")
STOPS = ("none", *(str(reason) for reason in StopReason))
_STATE = {name: number for number, name in enumerate(STATES)}
_STOP = {name: number for number, name in enumerate(STOPS)}

Span = tuple[float, float, float, str]
"""From, to (seconds of the run), the busy share, and what was done."""


@dataclass
class GroupFacts:
    """What the log says of one group."""

    prompt: int
    eta: int
    version: int
    finished: Finished | None = None
    first_row: int = -1  # of its trajectories, once finished
    step: int | None = None  # the version its batch made
    state: str = "in flight"
    reason: str = ""  # why it was dropped


COLUMNS = {"group": "q", "trajectory": "q", "prompt": "q", "step": "q", "reward": "d", "length": "q", "staleness": "q"}
"""Of each row: its numbers, and their types as `array` names them."""


class Rows:
    """The growing columns; `table` is what they hold now, as numpy arrays of one length."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in COLUMNS.items()}
        self._stop, self._state = bytearray(), bytearray()
        self._table: dict[str, NDArray[Any]] | None = None

    def __len__(self) -> int:
        return len(self._state)

    def add(self, facts: GroupFacts, event: Finished) -> None:
        failed = {failure.trajectory for failure in event.failures}
        places = [index for index in range(len(event.lengths) + len(failed)) if index not in failed]
        columns = self._columns
        for index, length, reward, stop in zip(places, event.lengths, event.rewards, event.stops, strict=False):
            columns["group"].append(event.group)
            columns["trajectory"].append(index)
            columns["prompt"].append(facts.prompt)
            columns["step"].append(-1)
            columns["reward"].append(float("nan") if reward is None else reward)
            columns["length"].append(length)
            columns["staleness"].append(-1)
            self._stop.append(_STOP[str(stop)] if stop is not None else 0)
            self._state.append(_STATE["waiting"])
        for failure in event.failures:
            for name, value in (("group", event.group), ("trajectory", failure.trajectory), ("prompt", facts.prompt)):
                columns[name].append(value)
            columns["step"].append(-1)
            columns["reward"].append(float("nan"))
            columns["length"].append(failure.tokens)
            columns["staleness"].append(-1)
            self._stop.append(0)
            self._state.append(_STATE["failed"])
        self._table = None

    def set_state(self, first: int, count: int, state: str, step: int = -1, staleness: int = -1) -> None:
        number, failed = _STATE[state], _STATE["failed"]
        for row in range(first, first + count):
            if self._state[row] != failed:
                self._state[row] = number
            if step >= 0:
                self._columns["step"][row] = step
                self._columns["staleness"][row] = staleness
        self._table = None

    @property
    def table(self) -> dict[str, NDArray[Any]]:
        if self._table is None:
            # Copies, because an array that is looked into cannot grow.
            self._table = {name: np.array(column) for name, column in self._columns.items()}
            self._table |= {"stop": np.array(self._stop), "state": np.array(self._state)}
        return self._table


@dataclass
class Markers:
    """Events that are drawn across curves and timeline."""

    all: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: Event, wall_s: float, step: int, text: str) -> None:
        self.all.append({"wall_s": wall_s, "step": step, "kind": event.kind.replace("_", " "), "text": text})


class RunIndex:
    """Reads a run's log from its start, and on `refresh` what was appended since."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = threading.Lock()
        self._follower = Follower(directory / EVENTS_NAME)
        self.config: dict[str, Any] = {}
        self.groups: list[GroupFacts] = []
        self.rows = Rows()
        self.steps: list[Trained] = []
        self.step_wall_s: list[float] = []
        self.evaluations: list[tuple[float, Evaluated]] = []
        self.warnings: list[str] = []
        self.markers = Markers()
        self.spans: dict[str, list[Span]] = {}
        self.dropped: Counter[str] = Counter()
        self.ended: Ended | None = None
        self.started = 0.0
        self._offset = 0.0  # of this incarnation's clock: the clock of a run stands still while no process of it lives
        self._last = 0.0
        self.refresh()

    @property
    def is_live(self) -> bool:
        return is_being_written(self.directory / EVENTS_NAME)

    @property
    def status(self) -> str:
        if self.ended is not None:
            return self.ended.status
        return "running" if self.is_live else "interrupted"

    @property
    def total_s(self) -> float:
        return self.at(self._last)

    def at(self, time: float) -> float:
        """Seconds that the run had lived at a unix time of its newest incarnation."""
        return max(0.0, time - self.started + self._offset)

    def refresh(self) -> None:
        with self.lock:
            for event in self._follower.read():
                self._fold(event)

    def _fold(self, event: Event) -> None:
        if not self.started:
            self.started = event.time
        if isinstance(event, ResumeStarted) and self._last:
            self._offset = self._last - self.started + self._offset
            self.started = event.time
        self._last = max(self._last, event.time) if not isinstance(event, ResumeStarted) else event.time
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def _on_run_started(self, event: RunStarted) -> None:
        self.config = event.config

    def _on_resume(self, event: ResumeStarted) -> None:
        self.ended = None
        self.markers.add(event, self.at(event.time), len(self.steps), "the run was resumed")

    def _on_resumed(self, event: Resumed) -> None:
        self._span("trainer", event.time, event.time, 1.0, f"resumed at version {event.version}")

    def _on_admitted(self, event: Admitted) -> None:
        assert event.group == len(self.groups)
        self.groups.append(GroupFacts(event.prompt, event.eta, event.version))

    def _on_finished(self, event: Finished) -> None:
        facts = self.groups[event.group]
        facts.finished, facts.first_row, facts.state = event, len(self.rows), "waiting"
        self.rows.add(facts, event)

    def _set(self, group: int, state: str, step: int = -1) -> None:
        facts = self.groups[group]
        facts.state = state
        if step >= 0:
            facts.step = step
        if facts.finished is None:
            return
        oldest = facts.finished.oldest
        staleness = -1 if step < 0 or oldest is None else step - 1 - oldest
        count = len(facts.finished.lengths) + len(facts.finished.failures)
        self.rows.set_state(facts.first_row, count, state, step, staleness)

    def _on_taken(self, event: Taken) -> None:
        for group in event.groups:
            self._set(group, "taken")

    def _on_trained(self, event: Trained) -> None:
        for group in event.groups:
            self._set(group, "trained", event.version)
        self.steps.append(event)
        self.step_wall_s.append(self.at(event.time))
        self._span("trainer", event.started, event.started + event.seconds, 1.0, f"training step {event.version}")

    def _on_dropped(self, event: Dropped) -> None:
        for group in event.groups:
            self._set(group, "dropped")
            self.groups[group].reason = event.reason
        self.dropped[event.reason] += len(event.groups)

    def _on_skipped(self, event: Skipped) -> None:
        self.markers.add(event, self.at(event.time), len(self.steps), event.reason)

    def _on_stats(self, event: Stats) -> None:
        share = event.busy_s / event.seconds if event.seconds else 0.0
        self._span(event.engine, event.time - event.seconds, event.time, share, f"{event.generated} tokens")

    def _on_swapped(self, event: Swapped) -> None:
        end = event.time
        self._span(
            f"{event.engine} weights", end - event.stage_s - event.pause_ms / 1000, end, 0.6, f"v{event.version}"
        )

    def _on_evaluated(self, event: Evaluated) -> None:
        self.evaluations.append((self.at(event.time), event))
        self._span("evaluation", event.time - event.seconds, event.time, 1.0, f"at version {event.version}")

    def _on_checkpointed(self, event: Checkpointed) -> None:
        self._span("checkpoint", event.time - event.seconds, event.time, 1.0, f"version {event.version}")

    def _on_warned(self, event: Warned) -> None:
        self.warnings.append(event.message)

    def _on_happening(self, event: Event) -> None:
        subject = str(getattr(event, "worker", getattr(event, "engine", "")))
        cause = str(getattr(event, "cause", ""))
        self.markers.add(event, self.at(event.time), len(self.steps), f"{subject}: {cause}" if cause else subject)

    def _on_ended(self, event: Ended) -> None:
        self.ended = event

    def _span(self, row: str, start: float, end: float, share: float, text: str) -> None:
        self.spans.setdefault(row, []).append((self.at(start), self.at(end), share, text))


_HANDLERS: dict[type[Event], Any] = {
    RunStarted: RunIndex._on_run_started,
    ResumeStarted: RunIndex._on_resume,
    Resumed: RunIndex._on_resumed,
    Admitted: RunIndex._on_admitted,
    Finished: RunIndex._on_finished,
    Taken: RunIndex._on_taken,
    Trained: RunIndex._on_trained,
    Dropped: RunIndex._on_dropped,
    Skipped: RunIndex._on_skipped,
    Stats: RunIndex._on_stats,
    Swapped: RunIndex._on_swapped,
    Evaluated: RunIndex._on_evaluated,
    Checkpointed: RunIndex._on_checkpointed,
    Warned: RunIndex._on_warned,
    WorkerLost: RunIndex._on_happening,
    WorkerRestarted: RunIndex._on_happening,
    EngineJoined: RunIndex._on_happening,
    EngineLeft: RunIndex._on_happening,
    EngineSlow: RunIndex._on_happening,
    Ended: RunIndex._on_ended,
}
