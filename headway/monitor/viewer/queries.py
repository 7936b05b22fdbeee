"""What the viewer's page asks, answered from run indices and the record: plain values, ready for JSON.

Parameters arrive as strings from a browser. A number that is none is a `ValueError`, which the server answers as a bad
request; a run or group that does not exist likewise.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.monitor.viewer.index import STATES, STOPS, RunIndex, Span
from headway.monitor.viewer.metrics import METRICS, series_of
from headway.monitor.viewer.opened import OpenRun
from headway.monitor.viewer.questions import QUESTIONS
from headway.monitor.viewer.tokens import token_columns
from headway.types import Group, Trajectory

Parameters = Mapping[str, str]

SEARCH_LIMIT = 2_000
"""Groups whose texts one search reads at most; the page says when there were more."""
PREVIEW_CHARACTERS, QUESTION_CHARACTERS = 160, 60


class Queries:
    """All queries over the opened runs; `handlers` is what the server routes to."""

    def __init__(self, directories: list[Path]) -> None:
        names = Counter(directory.name for directory in directories)
        self.runs = [
            OpenRun(directory, directory.name if names[directory.name] == 1 else str(directory))
            for directory in directories
        ]

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
        run.index.refresh()
        return run

    def list_runs(self, _parameters: Parameters) -> dict[str, Any]:
        for run in self.runs:
            run.index.refresh()
        return {
            "runs": [
                {
                    "name": run.name,
                    "directory": str(run.index.directory),
                    "status": run.index.status,
                    "live": run.index.is_live,
                    "facts": _facts(run.index),
                }
                for run in self.runs
            ]
        }

    def series(self, parameters: Parameters) -> dict[str, Any]:
        index = self._run(parameters).index
        return {
            "metrics": METRICS,
            "columns": series_of(index),
            "evaluations": [
                {
                    "wall_s": wall_s,
                    "version": event.version,
                    "version_last": event.version_last,
                    "accuracy": event.accuracy,
                    "num": event.num,
                }
                for wall_s, event in index.evaluations
            ],
            "markers": index.markers.all,
            "warnings": index.warnings,
        }

    def timeline(self, parameters: Parameters) -> dict[str, Any]:
        index = self._run(parameters).index
        start, end = _float(parameters, "from", 0.0), _float(parameters, "to", index.total_s)
        pixel = max(1e-9, (end - start) / max(1, min(4000, int(parameters.get("pixels", "1200")))))
        rows = [
            {"name": name, "spans": merged(visible(spans, start, end), pixel)} for name, spans in index.spans.items()
        ]
        inside = [marker for marker in index.markers.all if start <= marker["wall_s"] <= end]
        return {"rows": rows, "markers": inside, "total_s": index.total_s}

    def trajectories(self, parameters: Parameters) -> dict[str, Any]:
        """One page of rows: filtered and sorted over columns; a text search reads the record of what is left."""
        run = self._run(parameters)
        table = run.index.table
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
        facts, group = run.facts(number), run.group(number)
        same = np.flatnonzero(np.array(run.index.groups.prompt) == facts.prompt).tolist()
        others = [{"group": other, "step": run.index.groups[other].step} for other in same if other != number]
        return {
            "prompt": facts.prompt,
            "state": f"{facts.state} ({facts.reason})" if facts.reason else facts.state,
            "step": facts.step,
            "eta": facts.eta,
            "admitted_version": facts.version,
            "same_prompt": others[:12],
            **_contents(run, group),
        }

    def tokens(self, parameters: Parameters) -> dict[str, Any]:
        run, number = self._run(parameters), int(parameters.get("group", ""))
        evaluation, wanted = parameters.get("evaluation"), int(parameters.get("trajectory", ""))
        group = run.problem(int(evaluation), number) if evaluation else run.group(number)
        for trajectory in group.trajectories if group else ():
            if trajectory.index == wanted:
                tokens = None if evaluation else run.trained_tokens(run.facts(number).step)
                return token_columns(number, trajectory, run.texts, tokens)
        raise ValueError(f"group {number} has no trajectory {wanted}")

    def questions(self, parameters: Parameters) -> dict[str, Any]:
        run = self._run(parameters)
        asked = parameters.get("ask")
        if asked is None:
            return {"questions": [{"name": name, "title": title} for name, (title, _) in QUESTIONS.items()]}
        if asked not in QUESTIONS:
            raise ValueError(f"there is no question {asked!r}")
        return QUESTIONS[asked][1](run)

    def configs(self, _parameters: Parameters) -> dict[str, Any]:
        flat = [flattened(run.index.config) for run in self.runs]
        knobs = list(dict.fromkeys(knob for config in flat for knob in config))
        rows = []
        for knob in knobs:
            values = [config.get(knob) for config in flat]
            differs = any(value != values[0] for value in values)
            texts = ["–" if value is None else str(value) for value in values]
            rows.append({"knob": knob, "values": texts, "differs": differs})
        return {"rows": rows}


def _contents(run: OpenRun, group: Group | None) -> dict[str, Any]:
    """The prompt of a group, what its row says beside it, and its completions."""
    if group is None:
        return {"text": "the group is being generated", "reference": {}, "trajectories": [], "failures": []}
    return {
        "text": run.prompt(group),
        "reference": group.reference,
        "trajectories": [_summary(run, trajectory) for trajectory in group.trajectories],
        "failures": [{"trajectory": failure.trajectory, "reason": failure.reason} for failure in group.failures],
    }


def _problem(run: OpenRun, number: int, problem: int) -> dict[str, Any]:
    """A held-out problem in one evaluation, and where it is in the others."""
    others = [
        {"evaluation": other, "group": problem, "step": event.version, "reward": run.scores(other).get(problem)}
        for other, (_, event) in enumerate(run.index.evaluations)
        if other != number and event.groups_at is not None
    ]
    event = run.index.evaluations[number][1] if 0 <= number < len(run.index.evaluations) else None
    group = run.problem(number, problem)
    assert event is not None
    return {
        "prompt": group.prompt_index,
        "state": f"held out, evaluated at version {event.version}",
        "step": None,
        "same_prompt": others,
        **_contents(run, group),
    }


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key → value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


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


def matches(table: Mapping[str, NDArray[Any]], parameters: Parameters) -> NDArray[np.bool_]:
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


def _search(
    run: OpenRun, table: Mapping[str, NDArray[Any]], rows: NDArray[np.int64], text: str
) -> tuple[NDArray[np.int64], int]:
    """The rows whose completion or failure contains the text, and how many rows were looked through."""
    needle, read = text.casefold(), 0
    texts: dict[int, dict[int, str]] = {}
    found: list[int] = []
    for searched, row in enumerate(rows.tolist()):
        number = int(table["group"][row])
        if number not in texts:
            if read == SEARCH_LIMIT:
                return np.array(found, np.int64), searched
            read += 1
            texts[number] = _texts_of(run, number)
        if needle in texts[number].get(int(table["trajectory"][row]), "").casefold():
            found.append(row)
    return np.array(found, np.int64), len(rows)


def _texts_of(run: OpenRun, number: int) -> dict[int, str]:
    group = run.group(number)
    if group is None:
        return {}
    texts = {trajectory.index: run.completion(trajectory) for trajectory in group.trajectories}
    return texts | {failure.trajectory: failure.reason for failure in group.failures}


def _row(run: OpenRun, table: Mapping[str, NDArray[Any]], row: int) -> dict[str, Any]:
    number, index = int(table["group"][row]), int(table["trajectory"][row])
    reward = float(table["reward"][row])
    text = _texts_of(run, number).get(index, "")
    return {
        "group": number,
        "trajectory": index,
        "prompt": int(table["prompt"][row]),
        "step": _known(table["step"][row]),
        "reward": None if math.isnan(reward) else reward,
        "length": int(table["length"][row]),
        "staleness": _known(table["staleness"][row]),
        "stop": STOPS[table["stop"][row]] if table["stop"][row] else None,
        "state": STATES[table["state"][row]],
        "question": run.prompt_of(number)[-QUESTION_CHARACTERS:],
        "preview": text[-PREVIEW_CHARACTERS:],
    }


def _known(value: Any) -> int | None:
    return int(value) if value >= 0 else None


def _summary(run: OpenRun, trajectory: Trajectory) -> dict[str, Any]:
    sampled = np.concatenate([s.versions[s.versions >= 0] for s in trajectory.sequences] or [np.zeros(0, np.int32)])
    versions = [int(sampled.min()), int(sampled.max())] if len(sampled) else []
    return {
        "index": trajectory.index,
        "reward": trajectory.reward,
        "components": trajectory.components,
        "length": trajectory.num_sampled,
        "stops": [str(stop) for stop in trajectory.stops],
        "versions": versions[:1] if len(set(versions)) == 1 else versions,
        "text": run.completion(trajectory),
    }


def _facts(index: RunIndex) -> dict[str, Any]:
    """The cards at the head of the run page."""
    last = index.steps[-1] if index.steps else None
    accuracies = [event for _, event in index.evaluations if event.accuracy is not None]
    planned = index.config.get("run", {}).get("steps")
    facts: dict[str, Any] = {"status": index.status, "steps": f"{len(index.steps)} of {planned}"}
    if last is not None:
        facts["reward, last step"] = last.reward
        facts["staleness, last step"] = f"{last.staleness_mean:.2f}, max {last.staleness_max}"
    if accuracies:
        facts[f"accuracy, v{accuracies[0].version} → v{accuracies[-1].version}"] = (
            f"{accuracies[0].accuracy:.1%} → {accuracies[-1].accuracy:.1%}"
        )
    facts["groups dropped"] = sum(index.dropped.values())
    facts["wall time, s"] = round(index.total_s)
    return facts
