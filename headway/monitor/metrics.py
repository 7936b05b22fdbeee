"""Metrics: the run's numbers as they arise: a board of the latest ones for the view, points for other tools.

Points go to metrics.jsonl, TensorBoard files and, when configured, W&B. Everything here is made from events and from
nothing else, so `rebuild` can make metrics.jsonl again at any time.

Invariant that lives here:
 13. Non-blocking generation: it does not wait for logging. `on_event` only flattens numbers and puts them on a
     queue; files and the network are touched by a thread of their own.
"""

import importlib
import json
import logging
import math
import os
import queue
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.config import MetricsSection
from headway.errors import ConfigError
from headway.record.events import Event
from headway.record.history import Look, look_of

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
WANDB_ID_FILE = "wandb_id.txt"
CLOSE_DEADLINE_S = 60.0
RECENT_S = 15.0
RECENT_STEPS = 10

_LOG = logging.getLogger(__name__)
_KINDS = ("trained", "evaluated", "swapped", "stats")
_LABELS = ("engine", "label")
_NOT_MEASURED = ("version", "started")  # `step` and `time` say these already


class Board:
    """What the events so far add up to; recent means the last seconds for engines, the last steps for the trainer."""

    def __init__(self) -> None:
        self.run_dir = ""
        self.num_steps, self.step = 0, 0
        self.eta: int | None = None
        self.worst_staleness: int | None = None
        self.rewards: list[float] = []
        self.trained: deque[Event] = deque(maxlen=RECENT_STEPS + 1)
        self.before: Event | None = None
        self.evaluated: Event | None = None
        self.ended: Event | None = None
        self.engines: dict[str, Event] = {}
        self.waits: deque[Event] = deque()
        self.looks: dict[str, deque[Look]] = {}  # by engine
        self.pauses: list[float] = []
        self.dropped: Counter[str] = Counter()

    def on_event(self, event: Event) -> None:
        look = look_of(event)
        if look is not None:
            self._add_look(look)
        match event.kind:
            case "run_started":
                self._on_run_started(event)
            case "resumed":
                self._on_resumed(event)
            case "trained":
                self.step = event["version"]
                self.rewards += [event["reward"]] if event["reward"] is not None else []
                self.trained.append(event)
            case "evaluated":
                self.evaluated = event
                if event["label"] == "before" and self.before is None:
                    self.before = event
            case "stats":
                self.engines[str(event["engine"])] = event
                self.waits.append(event)
            case "swapped":
                self.pauses += [event["pause_ms"]] if event["pause_ms"] is not None else []
            case "dropped":
                self.dropped[str(event["reason"])] += len(event["groups"])
            case "worker_lost" | "engine_left":
                self._on_gone(str(event.fields.get("worker", event.fields.get("engine"))))
            case "ended":
                self.ended = event
        while len(self.waits) > 2 and self.waits[1].time < event.time - RECENT_S:
            self.waits.popleft()

    def _on_run_started(self, event: Event) -> None:
        config: dict[str, Any] = event["config"]
        self.run_dir = str(config.get("run", {}).get("dir", ""))
        self.num_steps = config.get("run", {}).get("steps", 0)
        self.eta = config.get("staleness", {}).get("max_staleness")
        self.worst_staleness = event["worst_staleness"]

    def _on_resumed(self, event: Event) -> None:
        """A new process: its counters start from zero, and time in which nothing ran is nobody's rate."""
        self.step, self.ended = event["version"], None
        for recent in (self.trained, self.engines, self.waits, self.looks):
            recent.clear()

    def _on_gone(self, worker: str) -> None:
        """What an engine did last is no longer what it does."""
        self.engines.pop(worker, None)
        self.looks.pop(worker, None)

    def _add_look(self, look: Look) -> None:
        """What is not recent goes, but never an engine's latest: looks may be far apart."""
        looks = self.looks.setdefault(look.engine, deque())
        looks.append(look)
        while len(looks) > 1 and looks[0].end < look.end - RECENT_S:
            looks.popleft()

    @property
    def generated_per_s(self) -> float:
        """Of all engines together."""
        engines = self.looks.values()
        return sum(sum(look.generated for look in looks) / sum(look.seconds for look in looks) for looks in engines)

    @property
    def engine_busy_share(self) -> float:
        """Of the time of all engines, the part in which they worked."""
        looks = [look for recent in self.looks.values() for look in recent]
        seconds = sum(look.seconds for look in looks)
        return sum(look.busy_s for look in looks) / seconds if seconds else 0.0

    def _over_steps(self, field: str) -> float:
        """Of a field of recent training steps: its sum, per second of the time they span."""
        steps = list(self.trained)
        if len(steps) == 1:
            return float(steps[0][field] / max(steps[0]["seconds"] + steps[0]["wait_s"], 1e-9))
        if len(steps) < 2:
            return 0.0
        return float(sum(step[field] for step in steps[1:]) / max(steps[-1].time - steps[0].time, 1e-9))

    @property
    def trained_per_s(self) -> float:
        return self._over_steps("tokens")

    @property
    def trainer_busy_share(self) -> float:
        return self._over_steps("seconds")

    def wait_share(self, field: str) -> float:
        """Share of recent time by which a cumulative wait of the stats events grew."""
        if len(self.waits) < 2 or self.waits[-1].time <= self.waits[0].time:
            return 0.0
        first, last = self.waits[0], self.waits[-1]
        spent = sum(stats[field] for stats in self.waits if stats is not first)
        return min(1.0, max(0.0, float(spent) / (last.time - first.time)))

    def left_s(self, now: float) -> float | None:
        """Seconds to the last step at the recent pace; None before the first step of this process."""
        if not self.trained or not self.num_steps:
            return None
        first, last = self.trained[0], self.trained[-1]
        pace = (last.time - first.time) / max(len(self.trained) - 1, 1) or float(last["seconds"] + last["wait_s"])
        return max(0.0, (self.num_steps - self.step) * pace - max(0.0, now - last.time))

    def over_engines(self, field: str) -> int:
        return sum(event[field] for event in self.engines.values())


@dataclass(frozen=True, slots=True)
class Point:
    """The numbers of one event at one step."""

    seq: int
    time: float
    step: int
    kind: str
    labels: dict[str, str]
    numbers: dict[str, float]

    def to_line(self) -> str:
        finite = {name: value if math.isfinite(value) else None for name, value in self.numbers.items()}
        head = {"step": self.step, "time": self.time, "seq": self.seq, "kind": self.kind}
        return json.dumps({**finite, **self.labels, **head}, allow_nan=False) + "\n"

    def scalars(self) -> dict[str, float]:
        """Finite numbers by tag, such as trained/loss or stats/engine-0/running."""
        prefix = "/".join([self.kind, *([self.labels["engine"]] if "engine" in self.labels else [])])
        return {f"{prefix}/{name}": value for name, value in self.numbers.items() if math.isfinite(value)}


class Points:
    """Events in, points out, with the rates that single events do not state."""

    def on_event(self, event: Event) -> Point | None:
        look = look_of(event)
        if event.kind not in _KINDS:
            return None
        numbers = _flat_numbers(event)
        if look is not None:
            numbers |= {"generated_per_s": look.tokens_per_s, "busy_share": look.busy_share}
        if event.kind == "trained" and event["seconds"] > 0:
            numbers["trained_per_s"] = event["tokens"] / event["seconds"]
        labels = {name: str(event[name]) for name in _LABELS if name in event.fields}
        return Point(event.seq, event.time, int(event["version"]), event.kind, labels, numbers)

    def over(self, events: Iterable[Event]) -> Iterator[Point]:
        return (point for event in events if (point := self.on_event(event)) is not None)


def _flat_numbers(event: Event) -> dict[str, float]:
    fields = {**event.fields.get("metrics", {}), **event.fields}
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_MEASURED
    }


def rebuild(events: Iterable[Event], run_dir: Path) -> None:
    """Write metrics.jsonl again from the log; a reader sees the old file or the new one, never half of one."""
    unfinished = run_dir / f"{METRICS_FILE}.new"
    with unfinished.open("w") as file:
        file.writelines(point.to_line() for point in Points().over(events))
    os.replace(unfinished, run_dir / METRICS_FILE)


class Sink(Protocol):
    def write(self, points: list[Point]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends to metrics.jsonl; opened for each write, because `rebuild` may have replaced the file."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE

    def write(self, points: list[Point]) -> None:
        with self._path.open("a") as file:
            file.writelines(point.to_line() for point in points)

    def close(self) -> None:
        pass


class TensorBoard:
    """Scalars in TensorBoard's own file format, written by its package; needs neither torch nor TensorFlow."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._record, self._summary = Record, Summary
        self._writer = EventFileWriter(str(run_dir / TENSORBOARD_DIR))

    def write(self, points: list[Point]) -> None:
        for point in points:
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in point.scalars().items()]
            record = self._record(wall_time=point.time, step=point.step, summary=self._summary(value=values))
            self._writer.add_event(record)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The same scalars in a W&B project; a resumed run continues its own W&B run."""

    def __init__(self, run_dir: Path, project: str) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise ConfigError(
                f"metrics.wandb_project = {project!r} needs the wandb package: pip install wandb, or clear the setting"
            ) from None
        try:
            self._run = wandb.init(
                project=project, name=run_dir.name, dir=str(run_dir), id=_wandb_id(run_dir), resume="allow"
            )
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # whatever wandb raises, the user's way out is the same
            raise ConfigError(
                f"W&B did not start for metrics.wandb_project = {project!r} ({error}): "
                "run wandb login, set WANDB_MODE=offline, or clear the setting"
            ) from error

    def write(self, points: list[Point]) -> None:
        for point in points:
            self._run.log({**point.scalars(), "step": point.step})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / WANDB_ID_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


class Metrics:
    """Writes a point for each training step, evaluation, swap and look at an engine, from a thread of its own.

    `history` holds the events of earlier lives of a resumed run: what their sinks had not yet received is sent now.
    A sink that breaks while the run goes on is named once through `complain` and left out from then on; the numbers
    stay in the event log.
    """

    def __init__(
        self,
        run_dir: Path,
        section: MetricsSection,
        history: Iterable[Event] = (),
        complain: Callable[[str], None] = _LOG.warning,
    ) -> None:
        self._complain = complain
        self._points = Points()
        self._queue: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self._sinks: list[Sink] = []
        if section.wandb_project:
            self._sinks.append(WeightsAndBiases(run_dir, section.wandb_project))
        if section.tensorboard:
            self._sinks.append(TensorBoard(run_dir))
        self._catch_up(run_dir, list(history))
        self._sinks.append(JsonLines(run_dir))
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def _catch_up(self, run_dir: Path, history: list[Event]) -> None:
        last = _last_seq(run_dir / METRICS_FILE)
        rebuild(history, run_dir)
        missed = [point for point in self._points.over(history) if point.seq > last]
        if missed:
            self._write(missed)

    def on_event(self, event: Event) -> None:
        point = self._points.on_event(event)
        if point is not None:
            self._queue.put(point)

    def close(self) -> None:
        """Write what is queued and close every sink."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            self._complain(f"metrics were not all written within {CLOSE_DEADLINE_S:.0f} s; headway report has them")

    def _work(self) -> None:
        closing = False
        while not closing:
            waiting = [self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            closing = None in waiting
            self._write([point for point in waiting if point is not None])
        self._attempt(lambda sink: sink.close())

    def _write(self, points: list[Point]) -> None:
        if points:
            self._attempt(lambda sink: sink.write(points))

    def _attempt(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # a full disk or a lost network must not end a run whose log is intact
                self._sinks.remove(sink)
                self._complain(f"{type(sink).__name__} failed and gets no more metrics from this run: {error}")


def _last_seq(path: Path) -> int:
    """The sequence number of the last whole line; -1 when there is none."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["seq"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1
