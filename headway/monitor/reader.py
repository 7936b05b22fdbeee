"""A run directory as Python sees it: numbers, groups with their texts, and tokens, live or finished.

    run = headway.load_run("runs/quickstart")
    run.summary.eval_after, run.metrics()["train/reward"]
    for group in run.groups(step=3):
        print(group.prompt, [(one.reward, one.text) for one in group.trajectories])

`headway show`, `runs`, `compare` and `export` read runs through it too. Texts are a model's: pass them through
`headway.monitor.text.printable` before a terminal shows them; `repr` and a notebook's tables escape them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
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
    source: str  # its task, where the run has several
    prompt: str
    state: str  # in flight, waiting, taken, trained or dropped
    reason: str  # why it was dropped
    step: int | None  # the training step that took it
    staleness: int | None  # of its oldest token at that step
    trajectories: tuple[Scored, ...]
    failures: tuple[str, ...]  # reasons of the trajectories that have no reward


class RunReader:
    """Reads one run directory; what a live run adds later is seen by a new reader."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.run = Run.read(self.directory)
        if not self.run.began:
            raise HeadwayError(f"{self.directory / EVENTS_NAME} holds no events yet; wait until the run has begun")
        self.config: dict[str, Any] = self.run.config
        self._record = Record(self.directory / RECORD_NAME)
        self._texts: Texts | None = None

    def __repr__(self) -> str:
        return f"<run {str(self.directory)!r}: {self.status}, step {self.run.num_trained} of {self.run.num_steps}>"

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
        pandas = _pandas()
        rows: dict[int, dict[str, float]] = {}
        for measured in self.run.all(Evaluated):
            at = rows.setdefault(measured.version, {"seconds": self.run.clock.at(measured.time)})
            at |= {} if measured.accuracy is None else {"eval/accuracy": measured.accuracy}
        for step in self.run.steps:
            event = step.event
            at = rows.setdefault(event.version, {})
            at |= {"seconds": self.run.clock.at(event.time), **step_point(step).scalars}
        frame: DataFrame = pandas.DataFrame.from_dict(rows, orient="index").sort_index()
        frame.index.name = "step"
        return frame

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
        state, group = self._state(id), self._load(id)
        trajectories = tuple(self._scored(one) for one in group.trajectories) if group else ()
        step = state.taken + 1 if state.taken is not None else None
        stale = state.taken - state.oldest if state.taken is not None and state.oldest is not None else None
        return Prompted(
            id=id,
            row=state.prompt,
            source=group.source if group else "",
            prompt=self.texts.prompt(group) if group else "",
            state=_place(state, self.run.num_trained),
            reason=state.dropped,
            step=step,
            staleness=stale,
            trajectories=trajectories,
            failures=tuple(failure.reason for failure in state.failures),
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
        frame: DataFrame = _pandas().DataFrame(list(self.rows(step)))
        return frame

    def held_out(self) -> "DataFrame":
        """One row a completion of every evaluation: version, problem, prompt, completion, reward; needs pandas."""
        rows = []
        for event in self.run.all(Evaluated):
            batch = self._record.load_batch(event.groups_at) if event.groups_at is not None else None
            for group in batch.groups if batch else ():
                about = {"version": event.version, "problem": group.id, "prompt": self.texts.prompt(group)}
                scored = map(self._scored, group.trajectories)
                rows += [about | {"completion": one.text, "reward": one.reward} for one in scored]
        frame: DataFrame = _pandas().DataFrame(rows)
        return frame

    def tokens(self, group: int, trajectory: int = 0) -> "DataFrame":
        """One row a token of a trajectory; needs pandas.

        Its text, the version that sampled it, its log-prob under the behaviour, proximal and current policy, its
        importance weight, its advantage, and in `mask` why it was not trained; empty where it was.
        """
        pandas, found, state = _pandas(), self._load(group), self._state(group)
        trained = self._trained_tokens(state.taken + 1) if state.taken is not None else None
        for one in found.trajectories if found else ():
            if one.index == trajectory:
                frame: DataFrame = pandas.DataFrame(token_columns(group, one, self.texts, trained))
                return frame
        raise HeadwayError(f"group {group} of {self.directory} has no trajectory {trajectory}")

    def _trained_tokens(self, step: int) -> TrainedTokens | None:
        """What the loss of a training step saw of each token; None where it is not recorded."""
        places = (taken.event.tokens_at for taken in self.run.steps if taken.event.version == step)
        place = next(places, None)
        return self._record.load_tokens(place) if place is not None else None

    @property
    def texts(self) -> Texts:
        if self._texts is None:
            self._texts = Texts(self.directory, self.config)
        return self._texts

    def _state(self, id: int) -> GroupState:
        if not 0 <= id < len(self.run.groups):
            raise HeadwayError(f"{self.directory} has no group {id}; it admitted {len(self.run.groups)}")
        return self.run.groups[id]

    def _load(self, id: int) -> Group | None:
        return self._record.load(self.run.ref(id)) if self._state(id).ref is not None else None

    def _scored(self, trajectory: Trajectory) -> Scored:
        sampled = [int(v) for one in trajectory.sequences for v in one.versions[one.versions >= 0]]
        return Scored(
            index=trajectory.index,
            text=self.texts.completion(trajectory),
            reward=trajectory.reward,
            components=dict(trajectory.components),
            length=len(sampled),
            stops=tuple(str(stop) for stop in trajectory.stops),
            versions=(min(sampled), max(sampled)) if sampled else None,
        )


def _place(state: GroupState, num_trained: int) -> str:
    if state.dropped:
        return "dropped"
    if state.taken is not None:
        return "trained" if state.is_trained(num_trained) else "taken"
    return "waiting" if state.ref is not None else "in flight"


def _pandas() -> Any:
    with translated(ImportError, HeadwayError, "tables need pandas: pip install 'headway-rl[view]'"):
        import pandas
    return pandas
