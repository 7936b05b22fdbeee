"""The picture of a run: what was learnt, how stale, how fast, how long, and who was busy when; one PNG.

Drawn without a display, by matplotlib's own defaults rather than the user's; its settings are put back afterwards. Text
from the run is never read as mathematics.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.record.clock import Span
from headway.record.events import EtaChanged, Evaluated, Stats, Swapped
from headway.record.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = NDArray[np.float64]
Spent = tuple[list[Span], list[float], str, str]  # when, how many seconds of it, colour, label

_GREEN, _BLUE, _ORANGE, _RED, _PURPLE, _GREY = "#2a9d6f", "#2f6fb7", "#f0a03c", "#c8453b", "#7d5ba6", "#8a8a8a"
_ZOOM_STEPS = 12
_NUM_BINS = 200
_MOST_BARS = 120  # more than these in one lane would blur into each other; shares of time are drawn instead


def draw(run: Run, headline: str, staleness_bound: int | None, path: Path) -> None:
    """One picture: what was learnt, how stale, how fast, how long, and who was busy when."""
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(), warnings.catch_warnings():
        rcdefaults()
        rcParams.update(_STYLE)
        warnings.simplefilter("ignore")  # a run's name may hold characters that the font lacks
        figure = Figure(figsize=(12, 13), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(headline, x=0.01, ha="left", fontsize=12)
        _draw_panels(figure, run, staleness_bound)
        unfinished = path.with_name(f"{path.name}.new")
        figure.savefig(unfinished, format="png")
    os.replace(unfinished, path)


_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def _draw_panels(figure: "Figure", run: Run, staleness_bound: int | None) -> None:
    grid = figure.add_gridspec(5, 2, height_ratios=[1.15, 1, 1, 0.85, 0.85])
    _draw_learning(figure.add_subplot(grid[0, 0]), run)
    _draw_staleness(figure.add_subplot(grid[0, 1]), run, staleness_bound)
    _draw_rates(figure.add_subplot(grid[1, 0]), run)
    _draw_lengths(figure.add_subplot(grid[1, 1]), run)
    _draw_metric(figure.add_subplot(grid[2, 0]), run, "loss", _PURPLE)
    _draw_metric(figure.add_subplot(grid[2, 1]), run, "entropy", _GREEN)
    _draw_timeline(figure.add_subplot(grid[3, :]), run, (0.0, run.clock.total_s), "who was busy when: the whole run")
    num_steps = min(_ZOOM_STEPS, len(run.steps))
    title = f"the same, {num_steps} steps from the middle"
    _draw_timeline(figure.add_subplot(grid[4, :]), run, _middle_steps(run), title)


def _nothing(axes: "Axes") -> None:
    axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", va="center", color=_GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def _step_axis(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _smooth(values: Series) -> Series:
    """A centred running mean over about a fifteenth of the series, shorter at its ends."""
    reach = len(values) // 30
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - reach, 0)
    high = np.minimum(np.arange(len(values)) + reach + 1, len(values))
    smooth: Series = (sums[high] - sums[low]) / (high - low)
    return smooth


def _line(axes: "Axes", steps: Sequence[int], values: Sequence[float], colour: str, label: str) -> None:
    """A faint series with its smoothed self over it."""
    series = np.asarray(values, dtype=np.float64)
    axes.plot(steps, series, color=colour, alpha=0.3, linewidth=0.9)
    axes.plot(steps, _smooth(series), color=colour, linewidth=1.8, label=label)


def _by_step(run: Run, name: str) -> tuple[list[int], list[float]]:
    """A number of each training step, from its event or its metrics, where there is one."""
    events = [step.event for step in run.steps]
    found = [(event.version, getattr(event, name, event.metrics.get(name))) for event in events]
    known = [(step, float(value)) for step, value in found if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def _draw_learning(axes: "Axes", run: Run) -> None:
    axes.set_title("reward in training, accuracy on held-out rows")
    steps, rewards = _by_step(run, "reward")
    held_out = [(event.version, event.accuracy) for event in run.all(Evaluated) if event.accuracy is not None]
    if not steps and not held_out:
        return _nothing(axes)
    if steps:
        _line(axes, steps, rewards, _BLUE, "reward")
    shared = all(-0.05 <= reward <= 1.05 for reward in rewards)
    if held_out:
        _draw_held_out(axes if shared else axes.twinx(), held_out)
    _step_axis(axes)
    axes.margins(y=0.12)
    axes.legend(loc="lower right")
    return None


def _draw_held_out(axes: "Axes", points: list[tuple[int, float]]) -> None:
    steps, accuracies = zip(*points, strict=True)
    marker = "o-" if len(points) <= 40 else "-"
    axes.plot(steps, accuracies, marker, color=_RED, linewidth=1.4, markersize=5, label="held-out accuracy")
    for (step, accuracy), align in zip([points[-1], points[0]][: len(points)], ("right", "left"), strict=False):
        axes.annotate(f"{accuracy:.1%}", (step, accuracy), (0, 7), textcoords="offset points", ha=align, color=_RED)


def _draw_staleness(axes: "Axes", run: Run, bound: int | None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title("staleness, in versions")
    steps, largest = _by_step(run, "staleness_max")
    if not steps:
        return _nothing(axes)
    axes.fill_between(steps, largest, step="mid", color=_ORANGE, alpha=0.35, linewidth=0, label="largest in the batch")
    _line(axes, *_by_step(run, "staleness_mean"), _BLUE, "mean")
    if bound is not None:
        axes.axhline(bound, color=_RED, linestyle="--", linewidth=1.2, label=f"bound {bound}")
    if changes := run.all(EtaChanged):
        moved = [steps[0], *(event.version for event in changes), steps[-1]]
        etas = [changes[0].before, *(event.after for event in changes), changes[-1].after]
        axes.step(moved, etas, where="post", color=_GREEN, linewidth=1.5, label="η in force")
    axes.set_ylim(0, max([bound or 0, *largest, 1]) * 1.3)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _step_axis(axes)
    axes.legend(loc="upper right", ncols=3)
    return None


def _spread(spans: Sequence[Span], amounts: Sequence[float], edges: Series) -> Series:
    """How much of the amounts, each spread evenly over its span, falls between each two edges."""
    if not spans:
        return np.zeros(len(edges) - 1)
    begin_N, end_N = np.asarray(spans, dtype=np.float64).T
    length_N = np.maximum(end_N - begin_N, 1e-9)
    passed_N = np.zeros((len(edges),))
    for i, edge in enumerate(edges):
        passed_N[i] = np.clip((edge - begin_N) / length_N, 0, 1) @ np.asarray(amounts, dtype=np.float64)
    return np.diff(passed_N)


def _train_spans(run: Run) -> list[Span]:
    begins = [run.clock.at(step.event.started) for step in run.steps]
    return [(begin, begin + step.event.seconds) for begin, step in zip(begins, run.steps, strict=True)]


def _wait_spans(run: Run) -> list[Span]:
    spans = zip(_train_spans(run), run.steps, strict=True)
    return [(begin - step.event.wait_s, begin) for (begin, _), step in spans]


def _stats_spans(run: Run) -> list[Span]:
    ends = [(run.clock.at(event.time), event.seconds) for event in run.all(Stats)]
    return [(end - seconds, end) for end, seconds in ends]


def _edges(span: Span, run: Run) -> Series:
    num_bins = int(np.clip(len(run.steps) / 3, 12, 160))
    return np.linspace(span[0], max(span[1], span[0] + 1e-3), num_bins + 1)


def _draw_rates(axes: "Axes", run: Run) -> None:
    axes.set_title("tokens per second")
    if not run.all(Stats) and not run.steps:
        return _nothing(axes)
    edges = _edges((0.0, run.clock.total_s), run)
    middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    generated = _spread(_stats_spans(run), [event.generated for event in run.all(Stats)], edges) / widths
    trained = _spread(_train_spans(run), [step.event.tokens for step in run.steps], edges) / widths
    axes.plot(middles, generated, color=_GREEN, linewidth=1.6, label="generated")
    axes.plot(middles, trained, color=_BLUE, linewidth=1.6, label="trained")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.2)
    axes.set_xlabel("seconds")
    axes.legend(loc="lower right", ncols=2)
    return None


def _draw_lengths(axes: "Axes", run: Run) -> None:
    axes.set_title("tokens per trained completion")
    rows = [
        (step.event.version, *np.percentile(batch, (10, 50, 90, 100)))
        for step in run.steps
        if (batch := [length for group in step.event.groups for length in run.groups[group].lengths])
    ]
    if not rows:
        return _nothing(axes)
    steps, p10, p50, p90, longest = np.asarray(rows, dtype=np.float64).T
    axes.plot(steps, longest, color=_GREY, linewidth=0.9, alpha=0.7, label="longest")
    axes.fill_between(steps, p10, p90, color=_PURPLE, alpha=0.25, linewidth=0, label="10th to 90th percentile")
    axes.plot(steps, _smooth(p50), color=_PURPLE, linewidth=1.8, label="median")
    axes.set_ylim(0, longest.max() * 1.3)
    _step_axis(axes)
    axes.legend(loc="upper right", ncols=3)
    return None


def _draw_metric(axes: "Axes", run: Run, name: str, colour: str) -> None:
    axes.set_title(name)
    steps, values = _by_step(run, name)
    if not steps:
        return _nothing(axes)
    _line(axes, steps, values, colour, name)
    _step_axis(axes)
    return None


def _middle_steps(run: Run) -> Span:
    """The time of a dozen training steps from the middle of the run; all of it when there are fewer."""
    spans = _train_spans(run)
    first = max(0, (len(spans) - _ZOOM_STEPS) // 2)
    chosen = spans[first : first + _ZOOM_STEPS]
    return (chosen[0][0], chosen[-1][1]) if chosen else (0.0, run.clock.total_s)


def _draw_timeline(axes: "Axes", run: Run, span: Span, title: str) -> None:
    """Three lanes on one clock: all engines, trainer, evaluation; new weights are marks between the first two."""
    axes.set_title(title)
    if not run.all(Stats) and not run.steps:
        return _nothing(axes)
    num_engines = len({event.engine for event in run.all(Stats)}) or 1
    busy = [event.busy_s / num_engines for event in run.all(Stats)]
    _draw_shares(axes, 2.1, span, [(_stats_spans(run), busy, _GREEN, "engine busy")])
    trainer = [(_train_spans(run), _BLUE, "trainer trains"), (_wait_spans(run), _ORANGE, "trainer waits")]
    if len(_within(trainer[0][0], span)) > _MOST_BARS:
        stack = [(spans, [end - begin for begin, end in spans], colour, label) for spans, colour, label in trainer]
        _draw_shares(axes, 1.1, span, stack)
    else:
        for spans, colour, label in trainer:
            _draw_bars(axes, 1.1, _within(spans, span), colour, label)
    _draw_bars(axes, 0.1, _within(_evaluation_spans(run), span), _PURPLE, "evaluation")
    swaps = [at for event in run.all(Swapped) if span[0] <= (at := run.clock.at(event.time)) <= span[1]]
    if len(swaps) <= _MOST_BARS * num_engines:
        axes.plot(swaps, [2.0] * len(swaps), "|", color=_RED, markersize=9, label="new weights")
    for at in run.clock.resumes:
        axes.axvline(at, color="black", linestyle=":", linewidth=1.2)
        axes.annotate(" resumed", (at, 0.92), fontsize=8, annotation_clip=True)
    axes.set_xlim(*span)
    axes.set_ylim(0, 3.1)
    engines = "engine" if num_engines == 1 else f"{num_engines} engines"
    axes.set_yticks([0.5, 1.5, 2.5], ["evaluation", "trainer", engines])
    axes.grid(False, axis="y")
    axes.set_xlabel("seconds")
    if span[0] == 0.0:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=5, borderaxespad=0.2)
    return None


def _within(spans: Sequence[Span], outer: Span) -> list[Span]:
    return [(begin, end) for begin, end in spans if end > outer[0] and begin < outer[1]]


def _draw_bars(axes: "Axes", bottom: float, spans: Sequence[Span], colour: str, label: str) -> None:
    axes.broken_barh([(begin, end - begin) for begin, end in spans], (bottom, 0.8), color=colour, lw=0, label=label)


def _draw_shares(axes: "Axes", bottom: float, span: Span, stack: list[Spent]) -> None:
    """What share of time went where, as heights on top of each other in a lane."""
    edges = np.linspace(span[0], max(span[1], span[0] + 1e-3), _NUM_BINS + 1)
    base = np.full(_NUM_BINS, bottom)
    for spans, seconds, colour, label in stack:
        share = _spread(spans, seconds, edges) / np.diff(edges)
        top = np.minimum(base + 0.8 * share, bottom + 0.8)
        axes.stairs(top, edges, baseline=base, fill=True, color=colour, linewidth=0, label=label)
        base = top


def _evaluation_spans(run: Run) -> list[Span]:
    ends = [(run.clock.at(event.time), event.seconds) for event in run.all(Evaluated)]
    return [(end - seconds, end) for end, seconds in ends]
