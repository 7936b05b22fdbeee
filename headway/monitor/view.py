"""What a person sees of a live run: a small table on a terminal, plain lines anywhere else.

A view shows what a `Run` has folded; nothing waits for it, and nothing it does can end the run: one that cannot draw
says so once and stops. Text from models, tasks and configs is shown without control characters or markup.

Invariant that lives here:
 13. Non-blocking generation, a slow terminal or pipe included: both views write from a thread of their own.
"""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headway.monitor.rates import left_s, rates
from headway.monitor.text import clean, duration, number, sparkline
from headway.record import events
from headway.record.events import Event
from headway.record.run import Run
from headway.record.timings import slow_steps

REFRESH_S = 0.5
DROPS_EVERY_S = 5.0
PHASE_EVERY_S = 15.0
CLOSE_DEADLINE_S = 5.0
NUM_MESSAGES = 5
MAX_WIDTH = 110

Clock = Callable[[], float]


def describe(event: Event) -> str | None:
    """The line a person gets for an event that is worth one, in either view."""
    match event:
        case events.Resumed():
            lost = f"{event.num_regenerated} groups generated again, {event.lost_tokens:,} tokens lost"
            return f"resumed at step {event.version} from checkpoint {event.checkpoint_version}: {lost}"
        case events.Warned():
            return event.message
        case events.Evaluated():
            return _evaluation(event)
        case events.Checkpointed():
            return f"checkpoint of step {event.version} written ({event.seconds:.1f} s)"
        case events.CheckpointFailed():
            return f"checkpoint of step {event.version} failed and is retried at the next occasion: {event.cause}"
        case events.WorkerLost():
            again = f"; {len(event.groups)} groups are generated again" if event.groups else ""
            return f"lost {event.worker}: {event.cause}{again}"
        case events.WorkerRestarted():
            return f"{event.worker} restarted after {event.seconds:.1f} s"
        case events.Retried():
            retried = f"{event.requests} requests of {event.engine} retried on other engines"
            return f"{retried} with {event.tokens:,} tokens, within {event.seconds:.1f} s"
        case events.EngineJoined():
            return f"{event.engine} joined at version {event.version}"
        case events.EngineLeft():
            return f"{event.engine} left: {event.cause}"
        case events.EngineSlow():
            pace = f"{event.tokens_per_s:.2g} tokens/s a sequence, the others {event.others_per_s:.2g}"
            return f"{event.engine} is slow: {pace}"
        case events.EtaChanged():
            moved = "rises" if event.after > event.before else "falls"
            why = f"effective sample size {event.effective_sample_size:.3f}, mismatch KL {event.behaviour_kl:.3g}"
            return f"η {moved} from {event.before} to {event.after} at step {event.version}: {why}"
        case events.Skipped():
            return f"step on version {event.version} skipped: {event.reason}"
        case events.Ended():
            return f"run {event.status}" + (f": {event.cause}" if event.cause else "")
    return None


def _evaluation(event: events.Evaluated) -> str:
    span = f" to {event.version_last}" if event.version_last > event.version else ""
    where = f"{event.label} training" if event.label in ("before", "after") else f"at step {event.version}{span}"
    failed = f", {event.num_failed} more without a verdict" if event.num_failed else ""
    of_tasks = "".join(f", {name} {number(share, '.1%')}" for name, share in event.tasks.items())
    interval = f", 95% interval {event.interval[0]:.1%} to {event.interval[1]:.1%}" if event.interval else ""
    return (
        f"held-out accuracy {number(event.accuracy, '.1%')} {where} "
        f"({event.num} problems{failed}{interval}{of_tasks}, {event.seconds:.1f} s)"
    )


class View(ABC):
    """What both views share: the lines of events, and the promise that drawing never raises into the run."""

    def __init__(self, stream: TextIO, clock: Clock = time.time) -> None:
        self.run = Run()
        self._stream, self._clock = stream, clock
        self._lock = threading.RLock()
        self._broken = False
        self._started = clock()
        self._phase_shown = 0.0
        self._drops_shown = 0.0
        self._drops: Counter[str] = Counter()
        self._warned: set[str] = set()

    def follow(self, run: Run) -> None:
        """Show this run from now on; it must have folded each event before `on_event` gets it."""
        self.run = run
        self._warned = set(run.warnings)

    def on_event(self, event: Event) -> None:
        """Show an event. Nothing is written under the lock: a stopped terminal must not stop the run."""
        self._guarded(lambda: self._locked(event))

    def message(self, text: str) -> None:
        """Show one line that is no event."""
        self._guarded(lambda: self._say(clean(text)))

    def close(self) -> None:
        self._guarded(self._say_drops)

    def _locked(self, event: Event) -> None:
        with self._lock:
            self._take(event)

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # a closed pipe or a bug in drawing must not end a run
            self._broken = True
            self._give_up()
            cause = f"{type(error).__name__}: {clean(error)}"
            logging.getLogger(__name__).warning("the view stopped (%s); the run goes on", cause)

    def _take(self, event: Event) -> None:
        line = describe(event)
        if isinstance(event, events.Dropped):
            self._drops[event.reason] += len(event.groups)
        if isinstance(event, events.Ended) or self._clock() - self._drops_shown >= DROPS_EVERY_S:
            self._say_drops()
        if line is not None:
            self._say(clean(line, 400))
        if isinstance(event, events.Phase):
            self.run.show_phase(event)
            self._say_phase(event)
        if isinstance(event, events.Trained):
            self._say_warnings()
            for slow in slow_steps(self.run, since=event.version - 1):
                self._say(str(slow))

    def _say_warnings(self) -> None:
        for kind in self.run.warnings.keys() - self._warned:
            self._say(clean(f"warning: {self.run.warnings[kind].message}", 400))
        self._warned = set(self.run.warnings)

    def _say_drops(self) -> None:
        """Drops can come by the thousand when a verifier is broken, so they are shown together."""
        for reason, num_groups in self._drops.items():
            plural = "s" * (num_groups != 1)
            cause = "".join(f", {clean(cause, 40)} {num:,}" for cause, num in self.run.failures.most_common(3))
            self._say(f"dropped {num_groups} group{plural}: {clean(reason)} ({len(self.run.dropped):,} in all{cause})")
            self._drops_shown = self._clock()
        self._drops.clear()

    def _say_phase(self, event: events.Phase) -> None:
        if event.state in ("finished", "failed"):
            how = "done" if event.state == "finished" else "failed"
            self._say(f"{clean(event.name)}: {how} in {event.seconds:.1f} s")

    @abstractmethod
    def _say(self, line: str) -> None:
        """Show a line; text in it that is not ours is clean already."""

    @abstractmethod
    def _give_up(self) -> None: ...


class PlainView(View):
    """One line for each training step and each thing worth a line, behind the time since the start."""

    def __init__(self, stream: TextIO, clock: Clock = time.time) -> None:
        super().__init__(stream, clock)
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
        if isinstance(event, events.RunStarted):
            self._say(f"run {clean(self.run.directory)}: {self.run.num_steps} steps, {_bound(self.run)}")
        if isinstance(event, events.Trained):
            self._say(self._step_line(event))
        super()._take(event)

    def _step_line(self, event: events.Trained) -> str:
        run, recent, now = self.run, rates(self.run), self._clock()
        left, shares = left_s(run, now), run.steps[-1].metrics
        cells = [
            f"step {run.num_trained:>{len(str(run.num_steps))}}/{run.num_steps}",
            f"reward {number(event.reward, '6.3f')}",
            f"stale {event.staleness_mean:4.1f} max {event.staleness_max:2}",
            f"truncated {shares['truncated_share']:4.0%}",
            f"zero var {shares['zero_variance_share']:4.0%}",
            f"tok/s gen {recent.generated_per_s:>7,.0f} train {recent.trained_per_s:>7,.0f}",
            f"waited {event.wait_s:5.1f} s",
            f"left {duration(left) if left is not None else '?':>7}",
        ]
        return "  ".join(cells)

    def _say_phase(self, event: events.Phase) -> None:
        super()._say_phase(event)
        if event.state == "started":
            self._phase_shown = self._clock()
            self._say(f"{clean(event.name)} ...")
        elif event.state == "progress" and self._clock() - self._phase_shown >= PHASE_EVERY_S:
            self._phase_shown = self._clock()
            self._say(f"{_phase(event)} ... {duration(event.seconds)} so far")


def _phase(event: events.Phase) -> str:
    return clean(event.name) + (f" {event.done}/{event.total}" if event.total else "")


def _bound(run: Run) -> str:
    section = run.config.get("staleness", {})
    eta, lowest = section.get("max_staleness", "?"), section.get("min_staleness", -1)
    if lowest not in (-1, eta):
        eta = f"{lowest} to {eta}"
    if run.worst_staleness is None:
        return f"η {eta}, staleness without bound"
    return f"η {eta}, staleness at most {run.worst_staleness}"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich 15 ends the whole process here, with exit status 1; for a view it is one more thing it cannot draw."""
        raise BrokenPipeError("the terminal is gone")


class LiveView(View):
    """A table of at most 20 lines, redrawn twice a second by a thread."""

    def __init__(self, stream: TextIO, clock: Clock = time.time) -> None:
        super().__init__(stream, clock)
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
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_DEADLINE_S)
        if not self._thread.is_alive():  # else the terminal takes no more characters, and stopping would wait for it
            self._guarded(self._live.stop)

    def _give_up(self) -> None:
        """Give the terminal and the standard streams back."""
        with suppress(Exception):
            self._live.stop()

    def _say(self, line: str) -> None:
        self._messages.append(f"{duration(self._clock() - self._started):>7}  {line}")

    def picture(self) -> RenderableType:
        """What is drawn now, no wider than the terminal."""
        with self._lock:
            body = Table.grid(padding=(0, 1))
            for _ in range(2):
                body.add_column(no_wrap=True, width=10, style="dim")
                body.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
            body.expand, body.width = True, min(MAX_WIDTH, self._console.width)
            for left, right in zip(self._learning(), self._flow(), strict=True):
                body.add_row(*(Text(cell) for cell in (*left, *right)))
            lines = [*self._messages, *[""] * (NUM_MESSAGES - len(self._messages))]
            messages = (Text(line, no_wrap=True, overflow="ellipsis") for line in lines)
            return Group(self._header(), self._state(), Text(""), body, Text(""), *messages)

    def _header(self) -> RenderableType:
        run, now = self.run, self._clock()
        left = left_s(run, now)
        bar = Table.grid(padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.expand, bar.width = True, min(MAX_WIDTH, self._console.width)
        share = run.num_trained / run.num_steps if run.num_steps else 0.0
        times = f"{share:4.0%}  {duration(now - self._started)} elapsed"
        times += f"  {duration(left)} left" if left is not None else ""
        title = f"headway · {clean(run.directory, 30)} · " if run.directory else "headway · "
        step = f"step {run.num_trained} of {run.num_steps or '?'}"
        progress = ProgressBar(total=run.num_steps or 1, completed=run.num_trained)
        bar.add_row(Text(title + step, style="bold"), progress, Text(times))
        return bar

    def _state(self) -> Text:
        run, now = self.run, self._clock()
        if run.status:
            state, style = f"run {clean(run.status)}", "green" if run.status == "finished" else "bold red"
            state += f": {clean(run.cause)}" if run.cause else ""
        elif (phase := run.phase) is not None:
            spinner = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(now / REFRESH_S) % 10]
            seconds = now - (phase.time - phase.seconds)
            state, style = f"{spinner} {_phase(phase)}, {duration(seconds)}", "yellow"
        elif run.warnings:
            state, style = "; ".join(f"warning: {found.message}" for found in list(run.warnings.values())), "yellow"
        else:
            state, style = "training" if run.steps else "waiting for the first batch", "dim"
        return Text(state, style=style, no_wrap=True, overflow="ellipsis")

    def _learning(self) -> list[tuple[str, str]]:
        run = self.run
        last = run.steps[-1] if run.steps else None
        metrics = {**last.event.metrics, **last.metrics} if last else {}
        rewards = [step.event.reward for step in run.steps if step.event.reward is not None]
        evaluated = run.all(events.Evaluated)
        before = next((event for event in evaluated if event.label == "before"), None)
        event = last.event if last else None
        return [
            ("reward", f"{number(event.reward, '.3f')}  {sparkline(rewards, 18)}" if event else "-"),
            ("held-out", _accuracy(evaluated[-1]) if evaluated else "-"),
            ("  before", _accuracy(before) if before else "-"),
            ("staleness", f"mean {event.staleness_mean:.1f}, max {event.staleness_max}" if event else "-"),
            ("  bound", _bound(run).replace("staleness ", "")),
            ("truncated", number(metrics.get("truncated_share"), ".0%")),
            ("zero var", f"{number(metrics.get('zero_variance_share'), '.0%')} of groups"),
            ("failed", ", ".join(f"{num:,} {clean(cause, 40)}" for cause, num in run.failures.most_common(3)) or "0"),
            ("entropy", f"{number(metrics.get('entropy'), '.3f')}, loss {number(metrics.get('loss'), '.4f')}"),
        ]

    def _flow(self) -> list[tuple[str, str]]:
        run, recent = self.run, rates(self.run)
        serving = list(run.engines.values())
        last = max(serving, key=lambda stats: stats.seq, default=None)
        used, total = sum(stats.kv_used for stats in serving), sum(stats.kv_total for stats in serving)
        sequences = sum(stats.running for stats in serving), sum(stats.waiting for stats in serving)
        pauses = [event.pause_ms for event in run.all(events.Swapped)]
        dropped = Counter(run.dropped.values()).most_common()
        return [
            ("generated", f"{recent.generated_per_s:,.0f} tokens/s"),
            ("trained", f"{recent.trained_per_s:,.0f} tokens/s"),
            ("groups", f"{last.inflight} in flight, {last.ready} ready" if last else "-"),
            (f"{len(serving)} engines" if len(serving) > 1 else "engine", "{} running, {} waiting".format(*sequences)),
            ("kv used", f"{used / total:.0%} of {total:,} tokens" if total else "-"),
            ("pause", f"last {pauses[-1]:.1f} ms, mean {sum(pauses) / len(pauses):.1f} ms" if pauses else "-"),
            ("busy", f"engines {recent.engine_busy:.0%}, trainer {recent.trainer_busy:.0%}"),
            ("waiting", f"trainer {recent.trainer_wait:.0%}, admission {recent.admission_wait:.0%}"),
            ("dropped", ", ".join(f"{num:,} {clean(reason, 40)}" for reason, num in dropped) or "nothing"),
        ]


def _accuracy(event: events.Evaluated) -> str:
    where = "" if event.label == "before" else f" at step {event.version}"
    failed = f", {event.num_failed} without verdict" if event.num_failed else ""
    return f"{number(event.accuracy, '.1%')}{where} of {event.num}{failed}"


def open_view(stream: TextIO, clock: Clock = time.time) -> View:
    """The live view on a terminal that can draw it, plain lines on anything else."""
    console = Console(file=stream)
    drawable = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LiveView(stream, clock) if drawable else PlainView(stream, clock)
