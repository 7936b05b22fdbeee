"""Runs on disk that were never trained: an event log with its record of trajectories, as large as a test wants."""

import random
from pathlib import Path

import msgspec
import numpy as np

from headway.record.events import (
    Admitted,
    Dropped,
    Ended,
    Evaluated,
    Event,
    FailedTrajectory,
    Finished,
    Place,
    RunStarted,
    Taken,
    TokenCounts,
    Trained,
)
from headway.record.log import EVENTS_NAME, encode
from headway.record.shards import RECORD_NAME, Record
from headway.trained_tokens import TOKEN_FATES, TrainedTokens
from headway.types import (
    Batch,
    Completion,
    Failure,
    Group,
    Reward,
    Sequence,
    StopReason,
    Trajectory,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=()<>&;:.,!?'\" \n#\x1b[\u202e"


def encoded(text: str) -> np.ndarray:
    return np.array([ALPHABET.index(character) + 3 for character in text], np.int32)  # <pad>, <eos>, <unk> come first


def trajectory(index: int, prompt: str, text: str, reward: float, versions: tuple[int, int]) -> Trajectory:
    """A completion whose second half was sampled by a later version."""
    tokens = encoded(text)
    stamped = np.repeat(np.array(versions, np.int32), [len(tokens) // 2, len(tokens) - len(tokens) // 2])
    logprobs = -np.linspace(0.1, 2.0, len(tokens), dtype=np.float32)
    return completed(index, encoded(prompt), Completion(tokens, logprobs, stamped, StopReason.STOP), reward)


def completed(index: int, prompt: np.ndarray, completion: Completion, reward: float) -> Trajectory:
    sequence = Sequence.single_turn(prompt, completion)
    place = len(sequence.tokens) - 1
    return Trajectory(index, (sequence,), (Reward(0, place, reward),), 1.0, (completion.stop,))


def write_tokenizer(directory: Path) -> None:
    from headway.model.tokenizer import build_character_tokenizer

    build_character_tokenizer(ALPHABET).save_pretrained(directory)


def trained_tokens(groups: list[Group]) -> TrainedTokens:
    """A step whose proximal log-probs are 0.9 times the behaviour ones; each sequence's third token was capped."""
    sources, behaviour, advantages, fates = [], [], [], []
    for group in groups:
        mean = float(np.mean([trajectory.reward for trajectory in group.trajectories] or [0]))
        for one in group.trajectories:
            for number, sequence in enumerate(one.sequences):
                own = sequence.logprobs[sequence.loss_mask > 0]
                sources += [group.id, one.index, number]
                behaviour.append(own)
                advantages.append(np.full(len(own), one.reward - mean, np.float32))
                fates.append(np.where(np.arange(len(own)) == 2, TOKEN_FATES.index("capped"), 0).astype(np.int32))
    proximal = [np.float32(0.9) * own for own in behaviour]
    weights = [np.exp(after - own) for after, own in zip(proximal, behaviour, strict=True)]
    rows = [np.concatenate([np.zeros(0, np.float32), *row]) for row in (proximal, weights, advantages)]
    counts = np.array([len(own) for own in behaviour], np.int32)
    fate = np.concatenate([np.zeros(0, np.int32), *fates])
    current = rows[0] - np.float32(0.25)
    return TrainedTokens(np.array(sources, np.int32), counts, rows[0], current, rows[1], rows[2], fate)


class RecordedRun:
    """Writes steps of one batch each; prompts repeat, and completions get better with the steps."""

    def __init__(
        self, directory: Path, batch: int = 4, size: int = 4, prompts: int = 10, started: float = 1_700_000_000.0
    ) -> None:
        self.directory, self.batch, self.size, self.prompts = directory, batch, size, prompts
        (directory / RECORD_NAME).mkdir(parents=True)
        self._record = Record(directory / RECORD_NAME)
        self._random = random.Random(0)
        self._log = (directory / EVENTS_NAME).open("ab")
        self._seq, self._time = 0, started
        self.version = self.num_groups = 0
        self._untrained: dict[int, Group] = {}
        config = {"run": {"steps": 100, "dir": str(directory)}, "model": {"path": str(directory / "model")}}
        self.add(RunStarted(config=config, config_hash="x", hardware={}, num_prompts=prompts, worst_staleness=1))

    def add(self, event: Event, seconds: float = 0.0) -> None:
        self._time += seconds
        self._log.write(encode(msgspec.structs.replace(event, seq=self._seq, time=self._time)))
        self._seq += 1

    def finish_group(self, texts: list[str] | None = None, failure: str = "", asked: str = "") -> int:
        prompt, good = self.num_groups % self.prompts, self.version > 0
        texts = texts or [f"the answer is {prompt if good or index else 0}" for index in range(self.size)]
        versions = max(0, self.version - 1), self.version
        made = tuple(
            trajectory(index, asked or f"what is {prompt}?", text, float(good), versions)
            for index, text in enumerate(texts)
        )
        return self.record_group(made, (Failure(len(made), failure, 3),) if failure else ())

    def record_group(self, made: tuple[Trajectory, ...], failures: tuple[Failure, ...] = ()) -> int:
        number, prompt = self.num_groups, self.num_groups % self.prompts
        self.num_groups += 1
        self.add(Admitted(group=number, prompt=prompt, eta=1, version=max(0, self.version - 1)))
        group = Group(number, prompt, 1, len(made) + len(failures), made, failures)
        self._untrained[number] = group
        ref = self._record.append(group)
        self.add(
            Finished(
                group=number, shard=ref.shard, offset=ref.offset, num_bytes=ref.num_bytes, checksum=ref.checksum,
                lengths=tuple(one.num_sampled for one in made), rewards=tuple(one.reward for one in made),
                stops=tuple(one.stops[-1] for one in made), failures=FailedTrajectory.of(group),
                oldest=max(0, self.version - 1), newest=self.version, seconds=1.0,
            )
        )  # fmt: skip
        return number

    def drop_group(self, cause: str) -> int:
        """A group all of whose trajectories failed, so that it never finished."""
        number = self.num_groups
        self.num_groups += 1
        self.add(Admitted(group=number, prompt=number % self.prompts, eta=1, version=max(0, self.version - 1)))
        failures = tuple(FailedTrajectory(trajectory=index, reason=cause, tokens=0) for index in range(self.size))
        self.add(Dropped(groups=(number,), reason="failed", tokens=0, failures=failures))
        return number

    def train(
        self, groups: list[int], metrics: dict[str, float] | None = None, weights_sample: tuple[float, ...] = ()
    ) -> None:
        ref = self._record.append(trained_tokens([self._untrained.pop(number) for number in groups]))
        self.add(Taken(version=self.version, groups=tuple(groups)))
        self.version += 1
        self.add(
            Trained(
                version=self.version, groups=tuple(groups), tokens=100, started=self._time, seconds=1.0, wait_s=0.1,
                staleness_mean=1.0, staleness_max=1, reward=0.5, metrics=metrics or {"loss": 0.1, "entropy": 1.0},
                digest="d", weights_sample=weights_sample,
                tokens_at=Place(ref.shard, ref.offset, ref.num_bytes, ref.checksum),
            ),
            seconds=1.0,
        )  # fmt: skip

    def step(self) -> None:
        self.train([self.finish_group() for _ in range(self.batch)])

    def flush(self) -> None:
        self._record.fsync()
        self._log.flush()

    def evaluate(self, right: list[bool], seconds: float = 2.0) -> None:
        """One held-out problem for each of `right`, answered with a swap in the middle."""
        groups = []
        for number, is_right in enumerate(right):
            text = f"it is {number if is_right else 0}"
            made = trajectory(0, f"held out {number}?", text, float(is_right), (max(0, self.version - 1), self.version))
            groups.append(Group(number, number, 0, 1, (made,), reference={"answer": str(number)}))
        ref = self._record.append(Batch(self.version, tuple(groups)))
        place = Place(ref.shard, ref.offset, ref.num_bytes, ref.checksum)
        accuracy = sum(right) / len(right)
        self.add(
            Evaluated(
                label="step", version=self.version, version_last=self.version, accuracy=accuracy, num=len(right),
                mean_tokens=7.0, seconds=seconds, groups_at=place,
            ),
            seconds,
        )  # fmt: skip

    def end(self) -> None:
        self.add(Ended(status="finished", cause="", tokens=TokenCounts()))
        self.flush()
