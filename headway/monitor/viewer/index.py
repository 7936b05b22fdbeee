"""One run as the viewer sees it: the fold of its log, followed while the run goes on, and its trajectories as columns.

A row is one trajectory. Columns are numpy arrays, so that a million rows are filtered and sorted in milliseconds; texts
and tokens stay in the record and are read when they are opened.
"""

import threading
from array import array
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headway.monitor.reader import RunReader
from headway.monitor.view import describe
from headway.record import events
from headway.record.events import Event
from headway.record.log import EVENTS_NAME, Follower
from headway.record.run import GroupState, Run, without_collection
from headway.types import StopReason

STATES = ("waiting", "taken", "trained", "dropped", "failed", "in flight")
STOPS = ("none", *(str(reason) for reason in StopReason))
_STATE = {name: number for number, name in enumerate(STATES)}
_STOP: dict[StopReason | None, int] = {None: 0, **{reason: number for number, reason in enumerate(StopReason, 1)}}
_NAN = float("nan")
_BEGINNING = 200
"""Bytes of a log that tell runs apart: they hold the time of its first event."""

Table = dict[str, NDArray[Any]]


Span = tuple[float, float, float, str]
"""From, to (seconds of the run), the busy share, and what was done."""


class Rows:
    """One row a trajectory: what never changes is added once, when rows are asked for; the rest is looked up."""

    def __init__(self) -> None:
        self.groups: list[GroupState] = []  # as they finished, or were dropped with failures alone
        self._num_added = 0
        self._counts, self._trajectory, self._length = array("q"), array("q"), array("l")
        self._reward, self._stop, self._failed = array("d"), bytearray(), bytearray()

    def table(self, num_trained: int) -> Table:
        """All columns, of one length."""
        for group in self.groups[self._num_added :]:
            self._add(group)
        self._num_added = len(groups := self.groups)

        def column(values: Iterable[int]) -> NDArray[np.int64]:
            return np.fromiter(values, np.int64, len(groups))

        taken = column([-1 if group.taken is None else group.taken for group in groups])
        oldest = column([-1 if group.oldest is None else group.oldest for group in groups])
        dropped = column([bool(group.dropped) for group in groups])
        is_trained = (taken >= 0) & (taken < num_trained)
        left = [dropped > 0, is_trained, taken >= 0]
        of_group = {
            "group": column([group.id for group in groups]),
            "prompt": column([group.prompt for group in groups]),
            "step": np.where(is_trained, taken + 1, -1),
            "staleness": np.where(is_trained & (oldest >= 0), taken - oldest, -1),
            "state": np.select(left, [_STATE[name] for name in ("dropped", "trained", "taken")], _STATE["waiting"]),
        }
        table = {name: np.repeat(values, np.array(self._counts)) for name, values in of_group.items()}
        table["state"] = np.where(np.frombuffer(bytes(self._failed), np.bool_), _STATE["failed"], table["state"])
        table |= {"trajectory": np.array(self._trajectory), "length": np.array(self._length)}
        return table | {"reward": np.array(self._reward), "stop": np.frombuffer(bytes(self._stop), np.uint8)}

    def _add(self, group: GroupState) -> None:
        rewards, count, failed = group.rewards, len(group.rewards), [one.trajectory for one in group.failures]
        self._counts.append(count + len(failed))
        self._length.extend(group.lengths)
        known = [_NAN if reward is None else reward for reward in rewards] if None in rewards else rewards
        self._reward.extend(cast(Iterable[float], known))
        self._stop.extend(_stop_bytes(group.stops))
        self._failed.extend(bytes(count))
        if not failed:
            self._trajectory.extend(_first(count))
            return
        self._trajectory.extend([index for index in range(count + len(failed)) if index not in failed] + failed)
        self._length.extend([failure.tokens for failure in group.failures])
        self._reward.extend([_NAN] * len(failed))
        self._stop.extend(bytes(len(failed)))
        self._failed.extend(b"\1" * len(failed))


@cache
def _stop_bytes(stops: tuple[StopReason | None, ...]) -> bytes:
    return bytes(_STOP[stop] for stop in stops)


@cache
def _first(count: int) -> "array[int]":
    return array("q", range(count))


class OpenRun:
    """Folds a run's log from its start, and on `refresh` what was appended since, or another run in its directory."""

    def __init__(self, directory: Path, name: str = "") -> None:
        self.directory, self.name = directory, name
        self.lock = threading.Lock()
        self._log, self._beginning = directory / EVENTS_NAME, b""
        self._start()
        self.refresh()

    def _start(self) -> None:
        self.run = Run()
        self.reader = RunReader(self.directory, self.run)
        self.step_generated: list[int] = []  # tokens sampled by the engines until the step's end
        self.step_restarts: list[int] = []  # of workers and of the run, until then
        self.step_values: dict[int, dict[str, float]] = {}  # metrics by step, of those that were asked for
        self.markers: list[dict[str, Any]] = []  # events that are drawn across curves and timeline
        self.spans: dict[str, list[Span]] = {}
        self.scores = lru_cache(self._scores)
        self._generated = self._restarts = 0
        self._follower = Follower(self._log)
        self._rows = Rows()
        self._table: Table | None = None

    @property
    def evaluations(self) -> list[events.Evaluated]:
        return self.run.all(events.Evaluated)

    @property
    def warnings(self) -> list[str]:
        """What is wrong now: by its last steps, and what was said since the last of them."""
        since = self.run.steps[-1].event.time if self.run.steps else 0.0
        said = [event.message for event in self.run.all(events.Warned) if event.time >= since]
        return [warning.message for warning in self.run.warnings.values()] + said

    @property
    def table(self) -> Table:
        """The trajectories as columns."""
        with self.lock:
            if self._table is None:
                self._table = self._rows.table(self.run.num_trained)
            return self._table

    def refresh(self) -> None:
        with self.lock, without_collection():
            if self._is_another():
                self._start()
            for event in self._follower.read():
                self.run.on_event(event)
                if handler := _HANDLERS.get(type(event)):
                    handler(self, event)

    def _is_another(self) -> bool:
        """Whether the log begins otherwise than before: the run was trained again from nothing, with --overwrite."""
        before, self._beginning = self._beginning, b""
        with suppress(OSError), open(self._log, "rb") as file:
            self._beginning = file.read(_BEGINNING)
        return bool(before) and not self._beginning.startswith(before)

    def _scores(self, evaluation: int) -> dict[int, float]:
        """The mean reward of each problem that has one in an evaluation, by the problem's place."""
        groups = [group for group in self.reader.evaluation(evaluation) if group.trajectories]
        return {group.id: sum(one.reward for one in group.trajectories) / len(group.trajectories) for group in groups}

    def _on_finished(self, event: events.Finished) -> None:
        self._rows.groups.append(self.run.groups[event.group])
        self._table = None

    def _on_taken(self, _event: events.Taken) -> None:
        self._table = None

    def _on_dropped(self, event: events.Dropped) -> None:
        self._table = None
        for group in map(self.run.groups.__getitem__, event.groups):
            if group.ref is None and group.failures:
                self._rows.groups.append(group)

    def _on_trained(self, event: events.Trained) -> None:
        self._table = None
        self.step_generated.append(self._generated)
        self.step_restarts.append(self._restarts)
        self._span("trainer", event.started, event.started + event.seconds, f"training step {event.version}")

    def _on_phase(self, event: events.Phase) -> None:
        worker = event.name.removeprefix("starting ")
        if event.state == "finished" and worker != event.name and worker.startswith(("engine", "trainer")):
            self._span(worker, event.time - event.seconds, event.time, "start-up", 0.2)

    def _on_stats(self, event: events.Stats) -> None:
        self._generated += event.generated
        share = event.busy_s / event.seconds if event.seconds else 0.0
        self._span(event.engine, event.time - event.seconds, event.time, f"{event.generated} tokens", share)

    def _on_swapped(self, event: events.Swapped) -> None:
        start = event.time - event.stage_s - event.pause_ms / 1000
        self._span(f"{event.engine} weights", start, event.time, f"v{event.version}", 0.6)

    def _on_evaluated(self, event: events.Evaluated) -> None:
        self._span("evaluation", event.time - event.seconds, event.time, f"at version {event.version}")

    def _on_checkpointed(self, event: events.Checkpointed) -> None:
        self._span("checkpoint", event.time - event.seconds, event.time, f"version {event.version}")

    def _on_happening(self, event: Event) -> None:
        self._restarts += isinstance(event, events.WorkerRestarted | events.ResumeStarted)
        text = describe(event) or "the run was resumed"
        where = {"wall_s": self.run.clock.at(event.time), "step": self.run.num_trained}
        self.markers.append({**where, "kind": event.kind.replace("_", " "), "text": text})

    def _span(self, row: str, start: float, end: float, text: str, share: float = 1.0) -> None:
        at = self.run.clock.at
        self.spans.setdefault(row, []).append((max(0.0, at(start)), max(0.0, at(end)), share, text))


_HANDLERS: dict[type[Event], Any] = {
    events.Finished: OpenRun._on_finished,
    events.Taken: OpenRun._on_taken,
    events.Trained: OpenRun._on_trained,
    events.Dropped: OpenRun._on_dropped,
    events.Phase: OpenRun._on_phase,
    events.Stats: OpenRun._on_stats,
    events.Swapped: OpenRun._on_swapped,
    events.Evaluated: OpenRun._on_evaluated,
    events.Checkpointed: OpenRun._on_checkpointed,
}
_HANDLERS |= dict.fromkeys(
    (
        events.ResumeStarted,
        events.Skipped,
        events.EngineJoined,
        events.EngineLeft,
        events.EngineSlow,
        events.EtaChanged,
        events.WorkerLost,
        events.WorkerRestarted,
        events.CheckpointFailed,
        events.Warned,
    ),
    OpenRun._on_happening,
)
