"""One run that the viewer shows: its index, its record and its tokenizer."""

from pathlib import Path

from headway.monitor.viewer.index import GroupFacts, RunIndex
from headway.monitor.viewer.texts import Texts
from headway.record.shards import RECORD_NAME, Record, ShardRef
from headway.trained_tokens import TrainedTokens
from headway.types import Group, Trajectory


class OpenRun:
    """A run with its index, its record and its tokenizer."""

    def __init__(self, directory: Path, name: str) -> None:
        self.index = RunIndex(directory)
        self.name = name
        self._record = Record(directory / RECORD_NAME)
        self._texts: Texts | None = None
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

    def group(self, group: int) -> Group | None:
        """The trajectories, from the record; None while they are being generated."""
        event = self.facts(group).finished
        if event is None:
            return None
        return self._record.load(ShardRef(event.shard, event.offset, event.num_bytes, event.checksum))

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
