"""`headway show`, `runs` and `compare`: runs in the terminal, with every text that is not ours escaped."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from headway.errors import HeadwayError
from headway.monitor.reader import Prompted, RunReader, knob_values
from headway.monitor.report import SUMMARY_FILE
from headway.monitor.text import ago, clean, duration, figure, printable, share
from headway.record.log import EVENTS_NAME, is_being_written

TEXT_CHARACTERS = 2_000
"""More of a prompt or completion than this is cut, unless all is asked for."""


# headway show


def show(run: RunReader, step: int | None, group: int | None, count: int, whole: bool) -> Iterator[str]:
    """The lines of one group, or of the first `count` groups of a training step; without either, of the last step."""
    if group is not None:
        yield from _group_lines(run.group(group), whole)
        return
    step = run.num_steps if step is None else step
    ids = run.group_ids(step) if step else run.group_ids()
    if not ids:
        raise HeadwayError(f"{run.directory} has no finished group yet; wait until its first completions are rewarded")
    for found in map(run.group, islice(ids, count)):
        yield from _group_lines(found, whole)
    if len(ids) > count:
        where = f"step {step}" if step else "the run"
        yield f"{where} has {len(ids) - count} more: --count, --group or --step show others"


def _group_lines(group: Prompted, whole: bool) -> Iterator[str]:
    state = f"{group.state} ({clean(group.reason)})" if group.reason else group.state
    about = [f"group {group.id}", f"prompt row {group.row}", state]
    about += [f"step {group.step}"] if group.step is not None else []
    about += [f"staleness {group.staleness}"] if group.staleness is not None else []
    yield " · ".join(about)
    yield from _indented(group.prompt, whole)
    for name, value in group.reference.items():
        yield f"  {clean(name, 40)}: {clean(value)}"
    for one in sorted(group.trajectories, key=lambda one: -one.reward):
        parts = "".join(f", {clean(name, 40)} {value:g}" for name, value in one.components.items())
        versions = f" · version {' to '.join(map(str, dict.fromkeys(one.versions)))}" if one.versions else ""
        stop = one.stops[-1] if one.stops else "none"
        yield f"  #{one.index} reward {one.reward:g}{parts} · {one.length} tokens, ended by {stop}{versions}"
        yield from _indented(one.text, whole)
    for index, reason in group.failures.items():
        yield f"  #{index} no reward: {clean(reason)}"
    yield ""


def _indented(text: str, whole: bool) -> Iterator[str]:
    shown = text if whole else text[:TEXT_CHARACTERS]
    for line in printable(shown).split("\n"):
        yield f"    {line}"
    if len(shown) < len(text):
        yield f"    … {len(text) - len(shown):,} more characters: --whole shows them"


# headway runs


@dataclass(frozen=True)
class Listed:
    """One line of `headway runs`."""

    directory: Path
    status: str
    steps: int
    accuracy: float | None
    changed: float  # unix time of the last event


def runs(folder: Path) -> list[Listed]:
    """Every run in a folder, the latest first."""
    logs = [path for path in folder.glob(f"**/{EVENTS_NAME}") if path.stat().st_size]
    if not logs:
        raise HeadwayError(f"there is no run in {folder}; name the folder that holds run directories")
    return sorted(map(_listed, logs), key=lambda one: -one.changed)


def _listed(log: Path) -> Listed:
    """From the summary where it is as new as the log, else from the log."""
    changed, summary = log.stat().st_mtime, log.parent / SUMMARY_FILE
    if summary.is_file() and summary.stat().st_mtime >= changed and not is_being_written(log):
        found = json.loads(summary.read_bytes())
        return Listed(log.parent, found["status"], found["steps"], found["eval_latest"], changed)
    run = RunReader(log.parent)
    return Listed(log.parent, run.status, run.num_steps, run.summary.eval_latest, changed)


def runs_table(listed: Sequence[Listed], now: float | None = None) -> Table:
    now = time.time() if now is None else now
    table = Table(Column("run", overflow="fold"), "status", "step", "held-out", "last event", box=None)
    for one in listed:
        cells = (
            str(one.directory),
            one.status,
            f"{one.steps:,}",
            share(one.accuracy),
            ago(now - one.changed),
        )
        table.add_row(*(Text(clean(cell)) for cell in cells))
    return table


# headway compare


def compare(runs: Sequence[RunReader]) -> list[Table]:
    """The knobs that differ, and what came of it."""
    titles = [str(run.directory) for run in runs]
    rows = [(one.knob, one.values) for one in knob_values([run.config for run in runs]) if one.differs]
    summaries = [run.summary for run in runs]
    results: dict[str, list[str]] = {
        "status": [run.status for run in runs],
        "training steps": [f"{one.steps:,}" for one in summaries],
        "training time": [duration(one.wall_s) for one in summaries],
        "held-out accuracy": [f"{share(one.eval_before)} → {share(one.eval_latest)}" for one in summaries],
        "reward, first and last tenth": [
            f"{figure(one.reward_first)} → {figure(one.reward_last)}" for one in summaries
        ],
        "trained tokens per second": [
            figure(one.tokens_trained / one.wall_s if one.wall_s else None) for one in summaries
        ],
        "goodput": [share(one.goodput) for one in summaries],
        "staleness, mean and max": [f"{figure(one.staleness_mean)}, {figure(one.staleness_max)}" for one in summaries],
        "completion length, mean": [figure(one.lengths.sampled_mean) for one in summaries],
        "truncated": [share(one.truncated_share) for one in summaries],
        "groups dropped": [f"{one.num_dropped:,}" for one in summaries],
        "workers lost": [f"{sum(one.losses.values()):,}" for one in summaries],
    }
    return [_columns("knob", titles, rows), _columns("result", titles, list(results.items()))]


def _columns(first: str, titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Table:
    table = Table(box=None)
    for title in (first, *titles):
        table.add_column(Text(clean(title)))
    for name, values in rows:
        table.add_row(*(Text(clean(cell)) for cell in (name, *values)))
    if not rows:
        table.add_row("none differs")
    return table
