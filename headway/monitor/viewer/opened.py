"""One run that the viewer shows: its index, its record and its tokenizer."""

from pathlib import Path

from headway.monitor.viewer.index import GroupFacts, RunIndex
from headway.monitor.viewer.texts import Texts
from headway.record.shards import RECORD_NAME, Record, ShardRef
from headway.trained_tokens import TrainedTokens
from headway.types import Batch, Group, Trajectory

CACHED_GROUPS, CACHED_EVALUATIONS = 64, 4


def mean_reward(group: Group) -> float:
    return sum(trajectory.reward for trajectory in group.trajectories) / len(group.trajectories)


class OpenRun:
    """A run with its index, its record and its tokenizer."""

    def __init__(self, directory: Path, name: str) -> None:
        self.index = RunIndex(directory)
        self.name = name
        self._record = Record(directory / RECORD_NAME)
        self._texts: Texts | None = None
        self._evaluations: dict[int, Batch] = {}  # that were read last
        self._groups: dict[int, Group] = {}  # that were read last
        self._scores: dict[int, dict[int, float]] = {}
        self._tokens: tuple[int | None, TrainedTokens | None] = None, None  # of the step that was asked for last

    @property
    def texts(self) -> Texts:
        if self._texts is None or not self._texts.found:
            self._texts = Texts(self.index.directory, self.index.config)
        return self._texts

    def facts(self, group: int) -> GroupFacts:
        if not 0 <= group < len(self.index.groups):
            raise ValueError(f"the run has no group {group}; it admitted {len(self.index.groups)}")
        return self.index.groups[group]

    def evaluation(self, number: int) -> Batch | None:
        """The problems of one evaluation with their completions; None where they are not recorded."""
        if not 0 <= number < len(self.index.evaluations):
            raise ValueError(f"the run has no evaluation {number}; it made {len(self.index.evaluations)}")
        place = self.index.evaluations[number][1].groups_at
        if place is None:
            return None
        batch = self._evaluations.pop(number, None) or self._record.load_batch(place)
        if len(self._evaluations) == CACHED_EVALUATIONS:
            del self._evaluations[next(iter(self._evaluations))]
        self._evaluations[number] = batch
        return batch

    def scores(self, number: int) -> dict[int, float]:
        """The mean reward of each problem that has one in an evaluation, by the problem's place."""
        if number not in self._scores:
            groups = batch.groups if (batch := self.evaluation(number)) else ()
            self._scores[number] = {group.id: mean_reward(group) for group in groups if group.trajectories}
        return self._scores[number]

    def problem(self, number: int, problem: int) -> Group:
        """One held-out problem with its completions in an evaluation."""
        batch = self.evaluation(number)
        if batch is None or not 0 <= problem < len(batch.groups):
            raise ValueError(f"evaluation {number} has no problem {problem}")
        return batch.groups[problem]

    def group(self, group: int) -> Group | None:
        """The trajectories, from the record; None while they are being generated."""
        event = self.facts(group).finished
        if event is None:
            return None
        if group not in self._groups:
            if len(self._groups) >= CACHED_GROUPS:
                self._groups.clear()
            self._groups[group] = self._record.load(
                ShardRef(event.shard, event.offset, event.num_bytes, event.checksum)
            )
        return self._groups[group]

    def prompt_of(self, group: int) -> str:
        found = self.group(group)
        return self.prompt(found) if found else ""

    def trained_tokens(self, step: int | None) -> TrainedTokens | None:
        """What the loss of a training step saw of each token; None where it is not recorded."""
        place = self.index.steps[step - 1].tokens_at if step is not None else None
        if place is None:
            return None
        if self._tokens[0] != step:
            self._tokens = step, self._record.load_tokens(place)
        return self._tokens[1]

    def completion(self, trajectory: Trajectory) -> str:
        return self.texts.completion(trajectory)

    def prompt(self, group: Group) -> str:
        return self.texts.prompt(group)
