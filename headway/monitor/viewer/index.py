"""One run as the viewer sees it: its event log folded once into columns, and followed while the run goes on.

A row is one trajectory. Columns are numpy arrays, so that a million rows are filtered and sorted in milliseconds; texts
and tokens stay in the record and are read when somebody opens them.
"""

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
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
from headway.record.run import without_collection
from headway.types import StopReason

STATES = ("waiting", "taken", "trained", "dropped", "failed", "in flight")
STOPS = ("none", *(str(reason) for reason in StopReason))
_STATE = {name: number for number, name in enumerate(STATES)}
_STOP: dict[StopReason | None, int] = {None: 0, **{reason: number for number, reason in enumerate(StopReason, 1)}}
_NAN = float("nan")

Span = tuple[float, float, float, str]
"""From, to (seconds of the run), the busy share, and what was done."""


@dataclass(frozen=True)
class GroupFacts:
    """What the log says of one group."""

    prompt: int
    eta: int
    version: int
    finished: Finished | None
    step: int | None  # the version its batch made
    state: str
    reason: str  # why it was dropped


class Groups:
    """One entry a group, by id; a fold of a million events touches nothing but a few flat arrays."""

    def __init__(self) -> None:
        self.prompt, self.eta, self.version = array("q"), array("q"), array("q")
        self.step, self.state = array("q"), bytearray()
        self.finished: list[Finished | None] = []
        self.in_order: list[int] = []  # ids, as they finished
        self.reasons: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.finished)

    def __getitem__(self, group: int) -> GroupFacts:
        step = self.step[group]
        return GroupFacts(
            self.prompt[group],
            self.eta[group],
            self.version[group],
            self.finished[group],
            step if step >= 0 else None,
            STATES[self.state[group]],
            self.reasons.get(group, ""),
        )

    def __iter__(self) -> Iterator[GroupFacts]:
        return (self[group] for group in range(len(self)))

    def admit(self, event: Admitted) -> None:
        self.prompt.append(event.prompt)
        self.eta.append(event.eta)
        self.version.append(event.version)
        self.step.append(-1)
        self.state.append(_STATE["in flight"])
        self.finished.append(None)

    def finish(self, event: Finished) -> None:
        self.finished[event.group] = event
        self.state[event.group] = _STATE["waiting"]
        self.in_order.append(event.group)

    def train(self, groups: Iterable[int], version: int) -> None:
        for group in groups:
            self.step[group], self.state[group] = version, _STATE["trained"]


class Rows:
    """One row a trajectory: what never changes is appended as groups finish; what does is looked up by group."""

    def __init__(self) -> None:
        self._num_groups = 0
        self._counts, self._oldest = array("q"), array("q")
        self._trajectory, self._length, self._reward = array("q"), array("q"), array("d")
        self._stop, self._failed = bytearray(), bytearray()

    def table(self, groups: Groups) -> dict[str, NDArray[Any]]:
        """All columns, of one length."""
        for group in groups.in_order[self._num_groups :]:
            event = groups.finished[group]
            assert event is not None
            self._add(event)
        self._num_groups = len(groups.in_order)
        ids, counts = np.array(groups.in_order, np.int64), np.array(self._counts)
        step, oldest = np.array(groups.step)[ids], np.array(self._oldest)
        of_group = {
            "group": ids,
            "prompt": np.array(groups.prompt)[ids],
            "step": step,
            "staleness": np.where((step < 0) | (oldest < 0), -1, step - 1 - oldest),
            "state": np.frombuffer(bytes(groups.state), np.uint8)[ids],
        }
        table: dict[str, NDArray[Any]] = {name: np.repeat(column, counts) for name, column in of_group.items()}
        table["state"] = np.where(np.frombuffer(bytes(self._failed), np.bool_), _STATE["failed"], table["state"])
        table |= {"trajectory": np.array(self._trajectory), "length": np.array(self._length)}
        table |= {"reward": np.array(self._reward), "stop": np.frombuffer(bytes(self._stop), np.uint8)}
        return table

    def _add(self, event: Finished) -> None:
        count = len(event.lengths)
        self._counts.append(count + len(event.failures))
        self._oldest.append(-1 if event.oldest is None else event.oldest)
        self._length.extend(event.lengths)
        if None in event.rewards:
            self._reward.extend(_NAN if reward is None else reward for reward in event.rewards)
        else:
            self._reward.extend(event.rewards)  # type: ignore[arg-type]  # none is None
        self._stop.extend([_STOP[stop] for stop in event.stops])
        self._failed.extend(bytes(count))
        if not event.failures:
            self._trajectory.extend(range(count))
            return
        failed = [failure.trajectory for failure in event.failures]
        self._trajectory.extend([index for index in range(count + len(failed)) if index not in failed])
        self._trajectory.extend(failed)
        self._length.extend([failure.tokens for failure in event.failures])
        self._reward.extend([_NAN] * len(failed))
        self._stop.extend(bytes(len(failed)))
        self._failed.extend(b"\1" * len(failed))


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
        self.groups = Groups()
        self._rows = Rows()
        self._table: dict[str, NDArray[Any]] | None = None
        self.steps: list[Trained] = []
        self.step_wall_s: list[float] = []
        self.step_generated: list[int] = []  # tokens sampled by the engines until the step's end
        self.step_restarts: list[int] = []  # of workers and of the run, until then
        self.step_values: dict[int, dict[str, float | None]] = {}  # metrics by step, of those that were asked for
        self._generated = self._restarts = 0
        self.evaluations: list[tuple[float, Evaluated]] = []
        self.warnings: list[str] = []
        self.markers = Markers()
        self.spans: dict[str, list[Span]] = {}
        self.dropped: Counter[str] = Counter()
        self.ended: Ended | None = None
        self.started = 0.0
        self._offset = 0.0  # of this incarnation's clock: the clock of a run stands still while no process of it exists
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

    @property
    def table(self) -> dict[str, NDArray[Any]]:
        """The trajectories as columns."""
        with self.lock:
            if self._table is None:
                self._table = self._rows.table(self.groups)
            return self._table

    def refresh(self) -> None:
        with self.lock, without_collection():
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

    def _on_admitted(self, event: Admitted) -> None:
        self.groups.admit(event)

    def _on_run_started(self, event: RunStarted) -> None:
        self.config = event.config

    def _on_resume(self, event: ResumeStarted) -> None:
        self.ended = None
        self._restarts += 1
        self.markers.add(event, self.at(event.time), len(self.steps), "the run was resumed")

    def _on_resumed(self, event: Resumed) -> None:
        self._span("trainer", event.time, event.time, 1.0, f"resumed at version {event.version}")

    def _on_finished(self, event: Finished) -> None:
        self.groups.finish(event)
        self._table = None

    def _on_taken(self, event: Taken) -> None:
        for group in event.groups:
            self.groups.state[group] = _STATE["taken"]
        self._table = None

    def _on_trained(self, event: Trained) -> None:
        self.groups.train(event.groups, event.version)
        self._table = None
        self.steps.append(event)
        self.step_wall_s.append(self.at(event.time))
        self.step_generated.append(self._generated)
        self.step_restarts.append(self._restarts)
        self._span("trainer", event.started, event.started + event.seconds, 1.0, f"training step {event.version}")

    def _on_dropped(self, event: Dropped) -> None:
        for group in event.groups:
            self.groups.state[group] = _STATE["dropped"]
            self.groups.reasons[group] = event.reason
        self._table = None
        self.dropped[event.reason] += len(event.groups)

    def _on_skipped(self, event: Skipped) -> None:
        self.markers.add(event, self.at(event.time), len(self.steps), event.reason)

    def _on_stats(self, event: Stats) -> None:
        self._generated += event.generated
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
        self._restarts += isinstance(event, WorkerRestarted)
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
