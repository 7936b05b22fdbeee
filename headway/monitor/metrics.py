"""Metrics for other tools: TensorBoard files and, when configured, W&B, made from the run's events.

`metric_names` explains every name. Sample completions go the same way, as tables of text, and to the terminal.

Invariant that lives here:
 13. Non-blocking generation, logging included: `on_event` only puts numbers on a queue; files and the network are
     touched by a thread.
"""

import importlib
import logging
import math
import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headway.errors import CAUSE, ConfigError, translated
from headway.monitor.samples import COLUMNS, NUM_GROUPS, SampleRow, Samples, markdown
from headway.record.events import EtaChanged, Evaluated, Event, Place, Stats, Swapped, Trained
from headway.record.run import Run
from headway.record.steps import Step

if TYPE_CHECKING:
    from headway.config import MetricsSection

TENSORBOARD_DIR = "tensorboard"
WANDB_ID_FILE = "wandb_id.txt"
CLOSE_DEADLINE_S = 60.0

_LOG = logging.getLogger(__name__)
_NOT_MEASURED = ("version", "started", "seq", "time")  # the step and the time of a point say these already


@dataclass(frozen=True, slots=True)
class Point:
    """The finite numbers of one event at one step, by tag, such as train/loss or engine/engine-0/running."""

    time: float
    step: int
    scalars: dict[str, float]
    groups: tuple[Place, ...] = ()  # to show samples of


def point_of(event: Event, run: Run) -> Point | None:
    """The point of a training step, an evaluation, a swap or an engine's stats; `run` has folded the event."""
    match event:
        case Trained():
            return step_point(run.steps[-1])
        case Stats():
            numbers = _numbers(event)
            if event.seconds > 0:
                numbers["generated_per_s"] = event.generated / event.seconds
                numbers["busy_share"] = min(1.0, max(0.0, event.busy_s / event.seconds))
            return _point(event, event.version, f"engine/{event.engine}", numbers)
        case Swapped():
            return _point(event, event.version, f"weights/{event.engine}", _numbers(event))
        case EtaChanged():
            return _point(event, event.version, "staleness", _numbers(event) | {"eta": float(event.after)})
        case Evaluated():
            numbers = _numbers(event) | {f"pass@{k}": share for k, share in event.pass_at.items()}
            numbers |= {f"accuracy_of/{name}": share for name, share in event.tasks.items() if share is not None}
            return _point(event, event.version, "eval", numbers)
    return None


def step_point(step: Step) -> Point:
    event = step.event
    numbers = _numbers(event) | _numbers(event.metrics) | step.metrics
    numbers["tokens_per_s"] = event.tokens / event.seconds if event.seconds > 0 else math.nan
    numbers["completion_length_mean"] = event.tokens / max(1, step.num_trajectories)
    return _point(event, event.version, "train", numbers)


def _point(event: Event, step: int, prefix: str, numbers: dict[str, float]) -> Point:
    return Point(event.time, step, {f"{prefix}/{name}": n for name, n in numbers.items() if math.isfinite(n)})


def _numbers(values: Any) -> dict[str, float]:
    fields = values if isinstance(values, dict) else msgspec.structs.asdict(values)
    return {name: n for name, n in fields.items() if type(n) in (int, float) and name not in _NOT_MEASURED}


class Sink(Protocol):
    def write(self, points: list[Point]) -> None: ...

    def show(self, point: Point, rows: list[SampleRow]) -> None: ...

    def close(self) -> None: ...


class Terminal:
    """Prints the first samples of a step, one line each."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say

    def write(self, points: list[Point]) -> None: ...

    def show(self, point: Point, rows: list[SampleRow]) -> None:
        for row in rows[:2]:
            self._say(row.line(point.step))

    def close(self) -> None: ...


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
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in point.scalars.items()]
            record = self._record(wall_time=point.time, step=point.step, summary=self._summary(value=values))
            self._writer.add_event(record)
        self._writer.flush()

    def show(self, point: Point, rows: list[SampleRow]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        record = self._record(wall_time=point.time, step=point.step, summary=text_pb("samples", markdown(rows)))
        self._writer.add_event(record)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def check_tools(section: "MetricsSection") -> None:
    """Refuse a tool that is not installed."""
    if section.wandb_project:
        try:
            importlib.import_module("wandb")
        except ImportError:
            raise ConfigError(
                f"metrics.wandb_project = {section.wandb_project!r} needs the wandb package: pip install wandb, or "
                "clear the setting"
            ) from None


class WeightsAndBiases:
    """The same scalars in a W&B project; a resumed run continues its own W&B run."""

    def __init__(self, run_dir: Path, project: str) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._wandb = wandb
        with translated(
            Exception,
            ConfigError,
            f"W&B did not start for metrics.wandb_project = {project!r} ({CAUSE}): "
            "run wandb login, set WANDB_MODE=offline, or clear the setting",
        ):  # whatever wandb raises, the user's way out is the same
            self._run = wandb.init(
                project=project, name=run_dir.name, dir=str(run_dir), id=_wandb_id(run_dir), resume="allow"
            )
            self._run.define_metric("*", step_metric="step")

    def write(self, points: list[Point]) -> None:
        for point in points:
            self._run.log({**point.scalars, "step": point.step})

    def show(self, point: Point, rows: list[SampleRow]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[row.cells() for row in rows])
        self._run.log({"samples": table, "step": point.step})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / WANDB_ID_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


class Metrics:
    """Sends the points of a run to every configured tool, from a thread.

    Subscribe it after the run: it reads what `run` has folded. A resumed run continues where its log stopped; what a
    killed process had not sent is in the event log only. A tool that fails while the run goes on is
    named once through `complain` and left out from then on.
    """

    def __init__(
        self, run_dir: Path, section: "MetricsSection", run: Run, complain: Callable[[str], object] = _LOG.warning
    ) -> None:
        self._complain, self._run, self._samples_every = complain, run, section.samples_every
        self._run_dir = run_dir
        self._samples: Samples | None = None
        self._queue: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self._sinks: list[Sink] = []
        if section.wandb_project:
            self._sinks.append(WeightsAndBiases(run_dir, section.wandb_project))
        if section.tensorboard:
            self._sinks.append(TensorBoard(run_dir))
        if section.samples_every:
            self._sinks.append(Terminal(complain))
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        if self._sinks and (point := point_of(event, self._run)) is not None:
            if self._samples_every and isinstance(event, Trained) and event.version % self._samples_every == 0:
                point = replace(point, groups=tuple(map(self._run.ref, event.groups[:NUM_GROUPS])))
            self._queue.put(point)

    def close(self) -> None:
        """Write what is queued and close every sink."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            self._complain(f"metrics were not all written within {CLOSE_DEADLINE_S:.0f} s; the event log has them")

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
        for point in points:
            if point.groups and self._samples_every:
                self._show(point)

    def _show(self, point: Point) -> None:
        def show() -> None:
            self._samples = self._samples or Samples(self._run_dir, self._run.config)
            rows = self._samples.read(point.groups)
            self._attempt(lambda sink: sink.show(point, rows))

        if not self._guarded(show, "reading samples"):
            self._samples_every = 0

    def _attempt(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            if not self._guarded(partial(action, sink), type(sink).__name__):
                self._sinks.remove(sink)

    def _guarded(self, action: Callable[[], None], what: str) -> bool:
        try:
            action()
        except Exception as error:  # a full disk or a lost network must not end a run whose log is intact
            self._complain(f"{what} failed and is left out for the rest of this run: {error}")
            return False
        return True
