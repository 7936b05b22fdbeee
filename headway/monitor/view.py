"""What a person sees while a run goes on: a live picture on a terminal, plain lines anywhere else.

A view is told events and phases and draws them; nothing waits for it, and nothing it does can end the run: a view that
cannot draw says so once and falls silent. Text that comes from models, tasks or configs is cleaned of control
characters and never read as markup.

Invariant that lives here:
 13. Non-blocking generation, with a slow terminal or pipe too: both views write from a thread of their own.
"""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headway.monitor.metrics import Board
from headway.record.events import Event, Phase

REFRESH_S = 0.5
DROPS_TOLD_EVERY_S = 5.0
PHASE_TOLD_EVERY_S = 15.0
CLOSE_DEADLINE_S = 5.0
NUM_MESSAGES = 4
MAX_WIDTH = 110
_SPARKS = "▁▂▃▄▅▆▇█"

Clock = Callable[[], float]


def clean(text: object, limit: int = 300) -> str:
    """One printable line: no control or escape characters, no newlines, not endless."""
    whole = " ".join(str(text)[: 4 * limit].split())
    line = "".join(char if char.isprintable() else "?" for char in whole)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None, spec: str) -> str:
    """A number of the log, where one that was not finite is null."""
    return "-".rjust(int(spec.split(".")[0] or 1)) if value is None else format(value, spec)


def sparkline(values: list[float], width: int) -> str:
    """The whole series in `width` characters: the mean of each stretch, scaled between the least and the largest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def describe(event: Event) -> str | None:
    """The line a person gets for an event that is worth one, in either view."""
    match event.kind:
        case "resumed":
            lost = f"{event['num_regenerated']} groups generated again, {event['lost_tokens']:,} tokens lost"
            return f"resumed at step {event['version']} from checkpoint {event['checkpoint_version']}: {lost}"
        case "evaluated":
            label, step = event["label"], f"at step {event['version']}"
            where = f"{label} training" if label in ("before", "after") else step
            accuracy = number(event["accuracy"], ".1%")
            return f"held-out accuracy {accuracy} {where} ({event['num']} rows, {event['seconds']:.1f} s)"
        case "checkpointed":
            return f"checkpoint of step {event['version']} written ({event['seconds']:.1f} s)"
        case "checkpoint_failed":
            cause = clean(event["cause"])
            return f"checkpoint of step {event['version']} failed, and is tried again at the next occasion: {cause}"
        case "worker_lost":
            again = f"; {len(event['groups'])} groups begin again" if event["groups"] else ""
            return f"lost {clean(event['worker'])}: {clean(event['cause'])}{again}"
        case "worker_restarted":
            return f"{clean(event['worker'])} restarted after {event['seconds']:.1f} s"
        case "warned":
            return clean(event["message"])
        case "retried":
            brought = f"{event['requests']} requests of {clean(event['engine'])} continue on other engines"
            return f"{brought} with {event['tokens']:,} tokens, within {event['seconds']:.1f} s"
        case "engine_joined":
            return f"{clean(event['engine'])} joined at version {event['version']}"
        case "engine_left":
            return f"{clean(event['engine'])} left: {clean(event['cause'])}"
        case "engine_slow":
            rates = f"{event['tokens_per_s']:.2g} tokens/s a sequence, the others {event['others_per_s']:.2g}"
            return f"{clean(event['engine'])} is slow: {rates}"
        case "skipped":
            return f"step on version {event['version']} skipped: {clean(event['reason'])}"
        case "ended":
            return f"run {clean(event['status'])}" + (f": {clean(event['cause'])}" if event["cause"] else "")
    return None


@dataclass(slots=True)
class _Running:
    """A phase that is under way."""

    name: str
    started: float
    told: float
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return self.name + (f" {self.done}/{self.total}" if self.total else "")


class View(ABC):
    """What both views share: the board, phases, and the promise that drawing never raises into the run."""

    def __init__(self, stream: TextIO, history: Iterable[Event] = (), clock: Clock = time.time) -> None:
        self._stream, self._clock = stream, clock
        self._lock = threading.RLock()
        self._broken = False
        self._started = clock()
        self._phase: _Running | None = None
        self._drops_told = 0.0
        self._drops_untold: Counter[str] = Counter()
        self.board = Board()
        self._change(lambda: self._remember(history))

    def on_event(self, event: Event) -> None:
        self._change(lambda: self._take(event))

    def message(self, text: str) -> None:
        """Show one line that is no event, such as a warning."""
        self._change(lambda: self._say(clean(text)))

    def close(self) -> None:
        self._change(self._tell_drops)

    def _change(self, action: Callable[[], None]) -> None:
        """Change what is to be seen. Nothing is written under the lock: a stopped terminal must not stop the run."""

        def locked() -> None:
            with self._lock:
                action()

        self._guarded(locked)

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # a closed pipe or a bug in drawing must not end a run
            self._broken = True
            self._give_up()
            logging.getLogger(__name__).warning(
                "the view stopped (%s: %s); the run goes on", type(error).__name__, error
            )

    def _remember(self, history: Iterable[Event]) -> None:
        for event in history:
            self.board.on_event(event)

    def _take(self, event: Event) -> None:
        self.board.on_event(event)
        line = describe(event)
        if isinstance(event, Phase):
            self._on_phase(event, clean(event.name))
        if event.kind == "dropped":
            self._drops_untold[str(event["reason"])] += len(event["groups"])
        if event.kind == "ended" or self._clock() - self._drops_told >= DROPS_TOLD_EVERY_S:
            self._tell_drops()
        if line is not None:
            self._say(line)

    def _tell_drops(self) -> None:
        """Drops can come by the thousand when a verifier is broken, so they are told together."""
        for reason, num_groups in self._drops_untold.items():
            total = self.board.dropped.total()
            self._say(f"dropped {num_groups} group{'s' * (num_groups != 1)}: {clean(reason)} ({total:,} in all)")
            self._drops_told = self._clock()
        self._drops_untold.clear()

    def _on_phase(self, event: Phase, name: str) -> None:
        match event.state:
            case "started":
                self._phase_start(name)
            case "progress":
                self._phase_progress(name, event.done, event.total)
            case "finished":
                self._phase_end(name, "done")
            case _:
                self._phase_end(name, "failed")

    def _phase_start(self, name: str) -> None:
        now = self._clock()
        self._phase = _Running(name, now, now)

    def _phase_progress(self, name: str, done: int, total: int) -> None:
        if self._phase is not None and self._phase.name == name:
            self._phase.done, self._phase.total = done, total

    def _phase_end(self, name: str, how: str) -> None:
        if self._phase is not None and self._phase.name == name:
            self._say(f"{name}: {how} in {self._clock() - self._phase.started:.1f} s")
            self._phase = None

    @abstractmethod
    def _say(self, line: str) -> None: ...

    @abstractmethod
    def _give_up(self) -> None: ...


class PlainView(View):
    """One line for each training step and each thing worth a line, behind the time since the start."""

    def __init__(self, stream: TextIO, history: Iterable[Event] = (), clock: Clock = time.time) -> None:
        super().__init__(stream, history, clock)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_lines, name="view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        super().close()
        self._lines.put(None)
        self._thread.join(CLOSE_DEADLINE_S)

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            self._guarded(partial(self._write, line))

    def _write(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def _give_up(self) -> None:
        pass

    def _say(self, line: str) -> None:
        self._lines.put(f"{duration(self._clock() - self._started):>8}  {line}")

    def _take(self, event: Event) -> None:
        super()._take(event)
        if event.kind == "run_started":
            self._say(f"run {clean(self.board.run_dir)}: {self.board.num_steps} steps, {_bound(self.board)}")
        if event.kind == "trained":
            self._say(self._step_line(event))
        self._tell_phase()

    def _step_line(self, event: Event) -> str:
        board = self.board
        width = len(str(board.num_steps))
        left = board.left_s(self._clock())
        cells = [
            f"step {board.step:>{width}}/{board.num_steps}",
            f"reward {number(event['reward'], '6.3f')}",
            f"stale {number(event['staleness_mean'], '4.1f')} max {number(event['staleness_max'], '2.0f')}",
            f"gen {board.generated_per_s:>7,.0f} tok/s",
            f"train {board.trained_per_s:>7,.0f} tok/s",
            f"waited {event['wait_s']:5.1f} s",
            f"left {duration(left) if left is not None else '?':>7}",
        ]
        return "  ".join(cells)

    def _phase_start(self, name: str) -> None:
        super()._phase_start(name)
        self._say(f"{name} ...")

    def _phase_progress(self, name: str, done: int, total: int) -> None:
        super()._phase_progress(name, done, total)
        self._tell_phase()

    def _tell_phase(self) -> None:
        phase, now = self._phase, self._clock()
        if phase is not None and now - phase.told >= PHASE_TOLD_EVERY_S:
            phase.told = now
            self._say(f"{phase} ... {duration(now - phase.started)} so far")


def _bound(board: Board) -> str:
    if board.eta is None:
        return "staleness unknown"
    if board.worst_staleness is None:
        return f"η {board.eta}, staleness without bound"
    return f"η {board.eta}, staleness at most {board.worst_staleness}"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich 15 ends the whole process here, with exit status 1; for a view it is one more thing it cannot draw."""
        raise BrokenPipeError("the terminal is gone")


class LiveView(View):
    """A picture of at most 23 lines by 80 columns, redrawn twice a second by a thread of its own."""

    def __init__(self, stream: TextIO, history: Iterable[Event] = (), clock: Clock = time.time) -> None:
        super().__init__(stream, history, clock)
        self._messages: deque[str] = deque(maxlen=NUM_MESSAGES)
        self._console = _Console(file=stream, markup=False, highlight=False, emoji=False)
        self._live = Live(get_renderable=self.picture, console=self._console, auto_refresh=False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="view", daemon=True)
        self._guarded(lambda: self._live.start(refresh=True))
        self._thread.start()

    def _refresh(self) -> None:
        while not self._closing.wait(REFRESH_S) and not self._broken:
            self._guarded(self._live.refresh)

    def close(self) -> None:
        super().close()
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(CLOSE_DEADLINE_S)
            if (
                not self._thread.is_alive()
            ):  # else the terminal takes no more characters, and stopping would wait for it
                self._guarded(self._live.stop)

    def _give_up(self) -> None:
        """Hand the terminal and the standard streams back."""
        with suppress(Exception):
            self._live.stop()

    def _say(self, line: str) -> None:
        self._messages.append(f"{duration(self._clock() - self._started):>7}  {line}")

    def picture(self) -> RenderableType:
        """What is drawn now: 23 lines, no wider than the terminal."""
        with self._lock:
            parts = Group(self._header(), self._middle(), self._shares(), self._recent_messages())
        return Constrain(parts, MAX_WIDTH)

    def _header(self) -> RenderableType:
        board, now = self.board, self._clock()
        left = board.left_s(now)
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        share = board.step / board.num_steps if board.num_steps else 0.0
        times = f"{share:4.0%}  {duration(now - self._started)} elapsed"
        times += f"  {duration(left)} left" if left is not None else ""
        bar.add_row(
            Text(f"step {board.step} of {board.num_steps or '?'}", style="bold"),
            ProgressBar(total=board.num_steps or 1, completed=board.step),
            Text(times),
        )
        rows = Table.grid(expand=True)
        rows.add_row(bar)
        rows.add_row(self._state(now))
        title = "headway" + (f" · {clean(board.run_dir, 50)}" if board.run_dir else "")
        return _panel(rows, title)

    def _state(self, now: float) -> Text:
        ended = self.board.ended
        if ended is not None:
            state, style = describe(ended) or "", "green" if ended["status"] == "finished" else "bold red"
        elif self._phase is not None:
            spinner = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(now / REFRESH_S) % 10]
            state, style = f"{spinner} {self._phase}, {duration(now - self._phase.started)}", "yellow"
        else:
            state, style = "training" if self.board.trained else "waiting for the first batch", "dim"
        return Text(state, style=style, no_wrap=True, overflow="ellipsis")

    def _middle(self) -> RenderableType:
        sides = Table.grid(expand=True)
        sides.add_column(ratio=1)
        sides.add_column(ratio=1)
        sides.add_row(_panel(_rows(self._learning()), "learning"), _panel(_rows(self._flow()), "flow"))
        return sides

    def _learning(self) -> list[tuple[str, str]]:
        board = self.board
        last = board.trained[-1] if board.trained else None
        metrics: dict[str, float] = last["metrics"] if last else {}
        reward = f"{number(last['reward'], '.3f')}  {sparkline(board.rewards, 18)}" if last else "-"
        latest, before = board.evaluated, board.before
        held_out = f"{number(latest['accuracy'], '.1%')} at step {latest['version']}" if latest else "-"
        stale = (
            f"mean {number(last['staleness_mean'], '.1f')}, max {number(last['staleness_max'], '.0f')}" if last else "-"
        )
        return [
            ("reward", reward),
            ("held-out", held_out),
            ("  before", f"{number(before['accuracy'], '.1%')} of {before['num']}" if before else "-"),
            ("staleness", stale),
            ("  bound", _bound(board).replace("staleness ", "")),
            ("loss", number(metrics.get("loss"), ".4f")),
            ("entropy", number(metrics.get("entropy"), ".3f")),
        ]

    def _flow(self) -> list[tuple[str, str]]:
        board = self.board
        stats = board.waits[-1] if board.waits else None
        total, used = board.over_engines("kv_total"), board.over_engines("kv_used")
        reasons = ", ".join(f"{num_groups:,} {clean(reason, 40)}" for reason, num_groups in board.dropped.most_common())
        pauses = board.pauses
        pause = f"last {pauses[-1]:.1f} ms, mean {sum(pauses) / len(pauses):.1f} ms" if pauses else "-"
        engines = f"{len(board.engines)} engines" if len(board.engines) > 1 else "engine"
        return [
            ("generated", f"{board.generated_per_s:,.0f} tokens/s"),
            ("trained", f"{board.trained_per_s:,.0f} tokens/s"),
            ("groups", f"{stats['inflight']} in flight, {stats['ready']} ready" if stats else "-"),
            (engines, f"{board.over_engines('running')} running, {board.over_engines('waiting')} waiting"),
            ("kv used", f"{used / total:.0%} of {total:,} tokens" if total else "-"),
            ("pause", pause),
            ("dropped", reasons or "nothing"),
        ]

    def _shares(self) -> RenderableType:
        board = self.board
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in range(2):
            table.add_column(no_wrap=True)
            table.add_column(ratio=1)
            table.add_column(no_wrap=True, justify="right", width=5)
        shares = [
            ("engine busy", board.engine_busy_share),
            ("generation waits to be admitted", board.wait_share("admission_wait_s")),
            ("trainer busy", board.trainer_busy_share),
            ("trainer waits for groups", board.wait_share("trainer_wait_s")),
        ]
        cells: list[Any] = []
        for name, share in shares:
            bar = ProgressBar(total=1.0, completed=share, complete_style="cyan", finished_style="cyan")
            cells += [Text(name), bar, Text(f"{min(share, 1.0):.0%}")]
        table.add_row(*cells[:6])
        table.add_row(*cells[6:])
        return _panel(table, "who waits for whom")

    def _recent_messages(self) -> RenderableType:
        lines = [*self._messages, *[""] * (NUM_MESSAGES - len(self._messages))]
        return _panel(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), "messages")


def _rows(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, width=10)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value, overflow="ellipsis", no_wrap=True))
    return table


def _panel(body: RenderableType, title: str) -> RenderableType:
    return Panel(body, title=Text(title), title_align="left", border_style="dim", padding=(0, 1))


def open_view(stream: TextIO, history: Iterable[Event] = (), clock: Clock = time.time) -> View:
    """The live view on a terminal that can draw it, plain lines on anything else.

    `history` holds the events of earlier lives of a resumed run: they are counted, not told again.
    """

    console = Console(file=stream)
    drawable = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LiveView(stream, history, clock) if drawable else PlainView(stream, history, clock)
