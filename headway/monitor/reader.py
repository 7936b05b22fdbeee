"""A run directory as Python sees it: numbers, groups with their texts, and tokens, live or finished.

    run = headway.load_run("runs/quickstart")
    run.summary.eval_after, run.metrics()["train/reward"]
    for group in run.groups(step=3):
        print(group.prompt, [(one.reward, one.text) for one in group.trajectories])

`headway show`, `runs`, `compare` and `export` read runs through it too. Texts are a model's: pass them through
`headway.monitor.text.printable` before a terminal shows them; `repr` and a notebook's tables escape them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import HeadwayError, translated
from headway.monitor.metrics import step_point
from headway.monitor.report import Summary, summarise
from headway.monitor.viewer.texts import Texts
from headway.monitor.viewer.tokens import token_columns
from headway.record.events import Evaluated
from headway.record.log import EVENTS_NAME, is_being_written
from headway.record.run import GroupState, Run
from headway.record.shards import RECORD_NAME, Record
from headway.trained_tokens import TrainedTokens
from headway.types import Group, Trajectory

if TYPE_CHECKING:
    from pandas import DataFrame

MODEL_NAME = "model"
CACHED_GROUPS, CACHED_EVALUATIONS = 64, 4


@dataclass(frozen=True)
class Scored:
    """One trajectory: what the policy wrote, and what it was worth."""

    index: int
    text: str
    reward: float
    components: dict[str, float]  # named parts of the reward, before weighting
    length: int  # sampled tokens
    stops: tuple[str, ...]  # why each of its completions ended
    versions: tuple[int, int] | None  # of its oldest and its newest sampled token; None: none was sampled


@dataclass(frozen=True)
class Prompted:
    """A group: one prompt and its trajectories."""

    id: int
    row: int  # of the prompt in the training rows
    prompt: str = ""
    source: str = ""  # its task, where the run has several
    reference: dict[str, str] = field(default_factory=dict)  # the rest of its row, shortened
    state: str = ""  # in flight, waiting, taken, trained or dropped; empty of a held-out problem
    reason: str = ""  # why it was dropped
    step: int | None = None  # the training step that took it
    staleness: int | None = None  # of its oldest token at that step
    trajectories: tuple[Scored, ...] = ()
    failures: dict[int, str] = field(default_factory=dict)  # of the trajectories without a reward, by index

    @property
    def texts(self) -> dict[int, str]:
        """By a trajectory's index, what the policy wrote, or why there is no reward."""
        return {one.index: one.text for one in self.trajectories} | self.failures


class RunReader:
    """Reads one run directory. What a live run adds later is seen by a new reader, or where `run` follows its log."""

    def __init__(self, directory: str | Path, run: Run | None = None) -> None:
        self.directory = Path(directory)
        self.run = Run.read(self.directory) if run is None else run
        if run is None and not self.run.began:
            raise HeadwayError(f"{self.directory / EVENTS_NAME} holds no events yet; wait until the run has begun")
        record = Record(self.directory / RECORD_NAME)
        self._read = lru_cache(CACHED_GROUPS)(record.load)
        self._read_batch = lru_cache(CACHED_EVALUATIONS)(record.load_batch)
        self._read_tokens = lru_cache(1)(record.load_tokens)
        self._texts: Texts | None = None

    def __repr__(self) -> str:
        return f"<run {str(self.directory)!r}: {self.status}, step {self.run.num_trained} of {self.run.num_steps}>"

    @property
    def config(self) -> dict[str, Any]:
        """Every knob by section, as the run was started or resumed with."""
        return self.run.config

    @property
    def status(self) -> str:
        """finished, failed, stopped, running, or interrupted: it ended without saying so."""
        if self.run.status:
            return self.run.status
        return "running" if is_being_written(self.directory / EVENTS_NAME) else "interrupted"

    @property
    def num_steps(self) -> int:
        """Training steps so far."""
        return self.run.num_trained

    @property
    def summary(self) -> Summary:
        """What `summary.json` holds, computed from the log as it is now."""
        return summarise(self.run)

    @property
    def model_path(self) -> Path:
        """The trained model, a transformers directory; an error where none was saved yet."""
        path = self.directory / MODEL_NAME
        if not (path / "config.json").is_file():
            raise HeadwayError(f"{self.directory} holds no saved model; one is written when the run ends")
        return path

    def metrics(self) -> "DataFrame":
        """One row a training step, one column a metric, named as in TensorBoard and W&B; needs pandas.

        `seconds` counts the time the run ran. Accuracies stand at the step they were measured at, 0 before training.
        """
        rows: dict[int, dict[str, float]] = {}
        for measured in self.run.all(Evaluated):
            at = rows.setdefault(measured.version, {"seconds": self.run.clock.at(measured.time)})
            at |= {} if measured.accuracy is None else {"eval/accuracy": measured.accuracy}
        for step in self.run.steps:
            event = step.event
            at = rows.setdefault(event.version, {})
            at |= {"seconds": self.run.clock.at(event.time), **step_point(step).scalars}
        return _frame(rows, index="step")

    def group_ids(self, step: int | None = None) -> list[int]:
        """Groups that training step `step` took (1 is the first); without a step, all that have finished."""
        if step is None:
            return [group.id for group in self.run.groups if group.ref is not None]
        for taken in self.run.steps:
            if taken.event.version == step:
                return list(taken.event.groups)
        raise HeadwayError(f"{self.directory} has no training step {step}; it has {self.run.num_trained}")

    def groups(self, step: int | None = None) -> Iterator[Prompted]:
        """The groups that training step `step` took; without a step, every group that has finished, by id."""
        return (self.group(id) for id in self.group_ids(step))

    def group(self, id: int) -> Prompted:
        """One group with its texts, which a group in flight does not have yet."""
        state, group = self.state(id), self.load(id)
        found = self.prompted(group) if group else Prompted(id, state.prompt)
        taken, oldest = state.taken, state.oldest
        return replace(
            found,
            state=place_of(state, self.run.num_trained),
            reason=state.dropped,
            step=None if taken is None else taken + 1,
            staleness=None if taken is None or oldest is None else taken - oldest,
            failures={failure.trajectory: failure.reason for failure in state.failures},
        )

    def rows(self, step: int | None = None) -> Iterator[dict[str, Any]]:
        """One plain dict a trajectory of `groups(step)`: what `completions` and the Parquet export hold."""
        for group in self.groups(step):
            about = {"group": group.id, "prompt_row": group.row, "task": group.source, "step": group.step}
            about |= {"state": group.state, "staleness": group.staleness, "prompt": group.prompt}
            for one in group.trajectories:
                oldest, newest = one.versions or (None, None)
                yield about | {
                    "trajectory": one.index,
                    "completion": one.text,
                    "reward": one.reward,
                    "components": json.dumps(one.components),
                    "length": one.length,
                    "stop": one.stops[-1] if one.stops else None,
                    "oldest_version": oldest,
                    "newest_version": newest,
                }

    def completions(self, step: int | None = None) -> "DataFrame":
        """One row a trajectory of `groups(step)`: prompt, completion, reward, length, stop, versions; needs pandas."""
        return _frame(list(self.rows(step)))

    def held_out(self) -> "DataFrame":
        """One row a completion of every evaluation: version, problem, prompt, completion, reward; needs pandas."""
        rows = []
        for number, event in enumerate(self.run.all(Evaluated)):
            for problem in map(self.prompted, self.evaluation(number)):
                about = {"version": event.version, "problem": problem.id, "prompt": problem.prompt}
                rows += [about | {"completion": one.text, "reward": one.reward} for one in problem.trajectories]
        return _frame(rows)

    def tokens(self, group: int, trajectory: int = 0) -> "DataFrame":
        """One row a token of a trajectory; needs pandas.

        Its text, the version that sampled it, its log-prob under the behaviour, proximal and current policy, its
        importance weight, its advantage, and in `mask` why it was not trained; empty where it was.
        """
        return _frame(self.token_columns(group, trajectory))

    # What only the viewer reads

    @property
    def texts(self) -> Texts:
        if self._texts is None or not self._texts.found:
            self._texts = Texts(self.directory, self.config)
        return self._texts

    def state(self, id: int) -> GroupState:
        if not 0 <= id < len(self.run.groups):
            raise HeadwayError(f"{self.directory} has no group {id}; it admitted {len(self.run.groups)}")
        return self.run.groups[id]

    def load(self, id: int) -> Group | None:
        """A group as it was recorded; None while it is in flight."""
        return self._read(self.run.ref(id)) if self.state(id).ref is not None else None

    def evaluation(self, number: int) -> tuple[Group, ...]:
        """The problems of an evaluation, the first is 0, with their completions; empty where they are not recorded."""
        made = self.run.all(Evaluated)
        if not 0 <= number < len(made):
            raise HeadwayError(f"{self.directory} has no evaluation {number}; it made {len(made)}")
        place = made[number].groups_at
        return self._read_batch(place).groups if place is not None else ()

    def problem(self, evaluation: int, number: int) -> Group:
        """One held-out problem with its completions in an evaluation."""
        groups = self.evaluation(evaluation)
        if not 0 <= number < len(groups):
            raise HeadwayError(f"evaluation {evaluation} of {self.directory} has no problem {number}")
        return groups[number]

    def trained_tokens(self, step: int) -> TrainedTokens | None:
        """What the loss of a training step saw of each token; None where it is not recorded."""
        place = self.run.steps[step - 1].event.tokens_at if 0 < step <= len(self.run.steps) else None
        return self._read_tokens(place) if place is not None else None

    def token_columns(self, number: int, trajectory: int, evaluation: int | None = None) -> dict[str, Any]:
        """The columns of `tokens`, of a group or of a held-out problem."""
        group, taken = (
            (self.load(number), self.state(number).taken)
            if evaluation is None
            else (self.problem(evaluation, number), None)
        )
        for one in group.trajectories if group else ():
            if one.index == trajectory:
                trained = self.trained_tokens(taken + 1) if taken is not None else None
                return token_columns(number, one, self.texts, trained)
        raise HeadwayError(f"group {number} of {self.directory} has no trajectory {trajectory}")

    def prompted(self, group: Group) -> Prompted:
        """A recorded group with its texts."""
        return Prompted(
            group.id,
            group.prompt_index,
            self.texts.prompt(group),
            group.source,
            group.reference,
            trajectories=tuple(map(self._scored, group.trajectories)),
            failures={failure.trajectory: failure.reason for failure in group.failures},
        )

    def _scored(self, trajectory: Trajectory) -> Scored:
        sampled = [int(version) for one in trajectory.sequences for version in one.versions[one.versions >= 0]]
        return Scored(
            index=trajectory.index,
            text=self.texts.completion(trajectory),
            reward=trajectory.reward,
            components=dict(trajectory.components),
            length=trajectory.num_sampled,
            stops=tuple(str(stop) for stop in trajectory.stops),
            versions=(min(sampled), max(sampled)) if sampled else None,
        )


def place_of(state: GroupState, num_trained: int) -> str:
    if state.dropped:
        return "dropped"
    if state.taken is not None:
        return "trained" if state.is_trained(num_trained) else "taken"
    return "waiting" if state.ref is not None else "in flight"


@dataclass(frozen=True)
class KnobValues:
    """One knob in several runs."""

    knob: str  # section.key
    values: tuple[str, ...]  # of each run, as text

    @property
    def differs(self) -> bool:
        """Run directories always do, which says nothing."""
        return len(set(self.values)) > 1 and self.knob != "run.dir"


def knob_values(configs: Sequence[Mapping[str, Any]]) -> list[KnobValues]:
    """Every knob that one of the configs has."""
    flat = [_flattened(config) for config in configs]
    knobs = dict.fromkeys(knob for one in flat for knob in one)
    return [KnobValues(knob, tuple(one.get(knob, "–") for one in flat)) for knob in knobs]


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _flattened(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


def _frame(rows: Any, index: str | None = None) -> "DataFrame":
    """A table of rows, or of columns; with `index`, of rows by that column's values."""
    with translated(ImportError, HeadwayError, "tables need pandas: pip install 'headway-rl[view]'"):
        from headway.monitor.tables import Frame
    if index is None:
        return Frame(rows)
    frame = Frame(list(rows.values()), index=list(rows)).sort_index()
    frame.index.name = index
    return frame
