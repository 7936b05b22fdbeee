"""What the viewer's page asks, answered from the fold of a run's log and its record: values ready for JSON.

Parameters arrive as strings from a browser. A number that is none is a `ValueError`, a run or group that does not exist
a `HeadwayError`; the server answers both as a bad request.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.monitor.reader import Prompted, knob_values
from headway.monitor.text import duration, share
from headway.monitor.viewer.index import STATES, STOPS, OpenRun, Span, Table
from headway.monitor.viewer.metrics import METRICS, series_of
from headway.monitor.viewer.questions import QUESTIONS
from headway.record.log import EVENTS_NAME, is_being_written

Parameters = Mapping[str, str]

SEARCH_LIMIT = 2_000
"""Groups whose texts one search reads at most; the page says when there were more."""
PREVIEW_CHARACTERS, QUESTION_CHARACTERS = 160, 60
MOST_TOKENS = 50_000
"""Of a trajectory that the page shows: of more elements it would be slow."""


class Queries:
    """All queries over the opened runs; `handlers` is what the server routes to."""

    def __init__(self, directories: list[Path]) -> None:
        self.runs = [OpenRun(directory, name) for directory, name in zip(directories, names(directories), strict=True)]

    @property
    def handlers(self) -> dict[str, Callable[[Parameters], Any]]:
        return {
            "runs": self.list_runs,
            "series": self.series,
            "timeline": self.timeline,
            "trajectories": self.trajectories,
            "group": self.group,
            "tokens": self.tokens,
            "questions": self.questions,
            "configs": self.configs,
        }

    def _run(self, parameters: Parameters) -> OpenRun:
        number = int(parameters.get("run", "0"))
        if not 0 <= number < len(self.runs):
            raise ValueError(f"there is no run {number}; the viewer shows {len(self.runs)}")
        run = self.runs[number]
        run.refresh()
        return run

    def list_runs(self, _parameters: Parameters) -> dict[str, Any]:
        for run in self.runs:
            run.refresh()
        return {
            "runs": [
                {
                    "name": run.name,
                    "directory": str(run.directory),
                    "status": run.reader.status,
                    "live": is_being_written(run.directory / EVENTS_NAME),
                    "facts": _facts(run),
                }
                for run in self.runs
            ]
        }

    def series(self, parameters: Parameters) -> dict[str, Any]:
        run = self._run(parameters)
        return {
            "metrics": METRICS,
            "columns": series_of(run),
            "evaluations": [
                {"wall_s": run.run.clock.at(event.time), "version": event.version, "accuracy": event.accuracy}
                for event in run.evaluations
            ],
            "markers": run.markers,
            "warnings": run.warnings,
        }

    def timeline(self, parameters: Parameters) -> dict[str, Any]:
        run = self._run(parameters)
        total_s = run.run.clock.total_s
        start, end = _float(parameters, "from", 0.0), _float(parameters, "to", total_s)
        pixel = max(1e-9, (end - start) / max(1, min(4000, int(parameters.get("pixels", "1200")))))
        rows = [
            {"name": name, "lane": lane(name), "spans": merged(visible(run.spans[name], start, end), pixel)}
            for name in sorted(run.spans, key=lambda name: (lane(name), name))
        ]
        inside = [marker for marker in run.markers if start <= marker["wall_s"] <= end]
        return {"rows": rows, "markers": inside, "total_s": total_s}

    def trajectories(self, parameters: Parameters) -> dict[str, Any]:
        """One page of rows: filtered and sorted over columns; a text search reads the record of what is left."""
        run = self._run(parameters)
        table = run.table
        rows = np.flatnonzero(matches(table, parameters))
        column = table.get(parameters.get("sort", "group"))
        if column is None:
            raise ValueError(f"cannot sort by {parameters['sort']!r}; columns are {', '.join(table)}")
        rows = rows[np.argsort(column[rows], kind="stable")]
        if parameters.get("down", "1") != "0":
            rows = rows[::-1]
        matching = searched = len(rows)
        if text := parameters.get("search", ""):
            rows, searched = _search(run, table, rows, text)
        offset, limit = int(parameters.get("offset", "0")), min(500, int(parameters.get("limit", "50")))
        shown = rows[offset : offset + limit]
        return {
            "total": len(rows),
            "matching": matching,
            "searched": searched,
            "rows": [_row(run, table, int(row)) for row in shown],
        }

    def group(self, parameters: Parameters) -> dict[str, Any]:
        run, number = self._run(parameters), int(parameters.get("group", ""))
        if parameters.get("evaluation"):
            return _problem(run, int(parameters["evaluation"]), number)
        found, state = run.reader.group(number), run.run.groups[number]
        others = [one for one in run.run.groups if one.prompt == state.prompt and one is not state]
        return {
            **_shown(found),
            "state": f"{found.state} ({found.reason})" if found.reason else found.state,
            "text": found.prompt or ("the group is being generated" if found.state == "in flight" else ""),
            "eta": state.eta,
            "admitted_version": state.version,
            "same_prompt": [{"group": one.id, "step": _step(one.taken)} for one in others[:12]],
        }

    def tokens(self, parameters: Parameters) -> dict[str, Any]:
        run, evaluation = self._run(parameters), parameters.get("evaluation")
        number, trajectory = int(parameters.get("group", "")), int(parameters.get("trajectory", ""))
        columns = run.reader.token_columns(number, trajectory, int(evaluation) if evaluation else None)
        total = len(columns["text"])
        if total > MOST_TOKENS:
            columns = {name: of[:MOST_TOKENS] if isinstance(of, list) else of for name, of in columns.items()}
        return {**columns, "total": total}

    def questions(self, parameters: Parameters) -> dict[str, Any]:
        run = self._run(parameters)
        asked = parameters.get("ask")
        if asked is None:
            return {"questions": [{"name": name, "title": title} for name, (title, _) in QUESTIONS.items()]}
        if asked not in QUESTIONS:
            raise ValueError(f"there is no question {asked!r}")
        return QUESTIONS[asked][1](run)

    def configs(self, _parameters: Parameters) -> dict[str, Any]:
        found = knob_values([run.run.config for run in self.runs])
        return {"rows": [{"knob": one.knob, "values": one.values, "differs": one.differs} for one in found]}


def names(directories: list[Path]) -> list[str]:
    """What each run is called: its directory's name, or where several have that, its path below what all share."""
    last = [directory.resolve().name for directory in directories]
    if len(set(last)) == len(last):
        return last
    shared = os.path.commonpath([directory.resolve().parent for directory in directories])
    return [os.path.relpath(directory.resolve(), shared) for directory in directories]


def _step(taken: int | None) -> int | None:
    return None if taken is None else taken + 1


def _shown(found: Prompted) -> dict[str, Any]:
    """What the page shows of a group wherever it comes from."""
    return {
        "row": found.row,
        "step": found.step,
        "text": found.prompt,
        "reference": found.reference,
        "trajectories": found.trajectories,
        "failures": [{"trajectory": index, "reason": reason} for index, reason in found.failures.items()],
    }


def _problem(run: OpenRun, number: int, problem: int) -> dict[str, Any]:
    """A held-out problem in one evaluation, and where it is in the others."""
    found = run.reader.prompted(run.reader.problem(number, problem))
    others = [
        {"evaluation": other, "group": problem, "step": event.version, "reward": run.scores(other).get(problem)}
        for other, event in enumerate(run.evaluations)
        if other != number and event.groups_at is not None
    ]
    state = f"held out, evaluated at version {run.evaluations[number].version}"
    return {**_shown(found), "state": state, "same_prompt": others}


def lane(name: str) -> int:
    """Rows of one kind stand together and have one colour: engines, trainer, transfers of weights, the rest."""
    if name.endswith(" weights"):
        return 2
    return next((at for at, kind in ((0, "engine"), (1, "trainer"), (3, "evaluation")) if name.startswith(kind)), 4)


def visible(spans: list[Span], start: float, end: float) -> list[Span]:
    return [span for span in spans if span[1] >= start and span[0] <= end]


def merged(spans: list[Span], pixel: float) -> list[Span]:
    """Neighbours that lie within one pixel become one span, with the busy share that all of them have together."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span[0] - found[-1][1] < pixel and span[1] - found[-1][0] < 2 * pixel:
            last = found[-1]
            length, added = max(last[1] - last[0], 1e-9), max(span[1] - span[0], 0.0)
            share = (last[2] * length + span[2] * added) / (length + added)
            found[-1] = (last[0], max(last[1], span[1]), share, "several; zoom in")
        else:
            found.append(span)
    return found


_RANGES = ("step", "reward", "length", "staleness", "prompt", "group")


def matches(table: Table, parameters: Parameters) -> NDArray[np.bool_]:
    """Which rows pass the filters; `NAME` asks for a value, `NAME_min` and `NAME_max` for a range."""
    wanted = np.ones(len(table["group"]), np.bool_)
    for name in _RANGES:
        if parameters.get(name):
            wanted &= table[name] == _float(parameters, name, 0.0)
        if parameters.get(f"{name}_min"):
            wanted &= table[name] >= _float(parameters, f"{name}_min", 0.0)
        if parameters.get(f"{name}_max"):
            wanted &= table[name] <= _float(parameters, f"{name}_max", 0.0)
    for name, values in (("stop", STOPS), ("state", STATES)):
        if value := parameters.get(name):
            if value not in values:
                raise ValueError(f"{name} is one of {', '.join(values)}, not {value!r}")
            wanted &= table[name] == values.index(value)
    return wanted


def _float(parameters: Parameters, name: str, default: float) -> float:
    text = parameters.get(name)
    value = default if text is None else float(text)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {text}")
    return value


def _search(run: OpenRun, table: Table, rows: NDArray[np.int64], text: str) -> tuple[NDArray[np.int64], int]:
    """The rows whose prompt, completion or failure contains the text, and how many rows were looked through."""
    needle = text.casefold()
    hits: dict[int, set[int] | None] = {}  # of each group, its trajectories with the text; None: its prompt has it
    found: list[int] = []
    for searched, row in enumerate(rows.tolist()):
        number = int(table["group"][row])
        if number not in hits:
            if len(hits) == SEARCH_LIMIT:
                return np.array(found, np.int64), searched
            group = run.reader.group(number)
            inside = {index for index, written in group.texts.items() if needle in written.casefold()}
            hits[number] = None if needle in group.prompt.casefold() else inside
        if (of_group := hits[number]) is None or int(table["trajectory"][row]) in of_group:
            found.append(row)
    return np.array(found, np.int64), len(rows)


def _row(run: OpenRun, table: Table, row: int) -> dict[str, Any]:
    index, reward = int(table["trajectory"][row]), float(table["reward"][row])
    group = run.reader.group(int(table["group"][row]))
    return {
        "group": group.id,
        "trajectory": index,
        "prompt": group.row,
        "step": _known(table["step"][row]),
        "reward": None if math.isnan(reward) else reward,
        "length": int(table["length"][row]),
        "staleness": _known(table["staleness"][row]),
        "stop": STOPS[table["stop"][row]] if table["stop"][row] else None,
        "state": STATES[table["state"][row]],
        "question": group.prompt[-QUESTION_CHARACTERS:],
        "preview": group.texts.get(index, "")[-PREVIEW_CHARACTERS:],
    }


def _known(value: Any) -> int | None:
    return int(value) if value >= 0 else None


def _facts(run: OpenRun) -> dict[str, Any]:
    """The cards at the head of the run page."""
    state, last = run.run, run.run.steps[-1].event if run.run.steps else None
    accuracies = [event for event in run.evaluations if event.accuracy is not None]
    facts: dict[str, Any] = {"status": run.reader.status, "steps": f"{len(state.steps)} of {state.num_steps}"}
    if last is not None:
        facts["reward, last step"] = last.reward
        facts["staleness, last step"] = f"{last.staleness_mean:.2f}, max {last.staleness_max}"
    if accuracies:
        ends = accuracies[:1] if len(accuracies) == 1 else [accuracies[0], accuracies[-1]]
        at = " → ".join(f"v{event.version}" for event in ends)
        facts[f"accuracy, {at}"] = " → ".join(share(event.accuracy) for event in ends)
    facts["groups dropped"] = len(state.dropped)
    facts["wall time"] = duration(state.clock.total_s)
    return facts
