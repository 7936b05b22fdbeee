"""Data types that processes send each other: frozen, typed, array lengths checked on construction. No torch.

Invariants that live here:
  8. Group identity: a trajectory names its group by containment, never by its place in an array, and a
     group that lost trajectories says so.
  9. Explicit stop reasons travel with the completion; truncation is never inferred from length.

Array suffixes: T tokens of one sequence, P tokens of a prompt.
"""

import math
from collections.abc import Iterable
from dataclasses import field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.codec import message
from headway.trained_tokens import Floats as Floats
from headway.trained_tokens import Ints as Ints
from headway.trained_tokens import TrainedTokens

NOT_SAMPLED = -1
"""The version of a token that no policy sampled (a prompt's, a tool's)."""


class StopReason(StrEnum):
    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_tokens reached
    CONTEXT = "context"  # the model's context is full
    ABORTED = "aborted"  # the client asked for it


class DropReason(StrEnum):
    FAILED = "failed"  # no trajectory of the group survived its workflow or its verifier
    SKIPPED = "skipped"  # the training step that took it was skipped: not finite, or everything masked
    TOO_OLD = "too_old"  # a token is older than the version it was admitted at
    ZERO_VARIANCE = "zero_variance"  # its rewards are all equal, and the algorithm replaces such groups
    SUCCESS_RATE = "success_rate"  # too few or too many of its trajectories succeeded
    RESTING = "resting"  # the last group of its prompt was replaced, and the curriculum passes the prompt over


def _check_lengths(owner: str, **arrays: NDArray[Any]) -> None:
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{owner}: lengths differ: {lengths}")


def _check_dtypes(owner: str, dtype: type, **arrays: NDArray[Any]) -> None:
    for name, array in arrays.items():
        if array.dtype != dtype:
            raise ValueError(f"{owner}.{name} is {array.dtype}, not {np.dtype(dtype)}")


@message
class Chat:
    """The messages of a chat prompt, and the arguments of the chat template that wrote them."""

    messages: list[dict[str, Any]]
    template: dict[str, Any]


@message
class Prompt:
    """A task instance: its tokens, its text, and what its verifier needs; `source` names its task among several."""

    index: int
    tokens: Ints
    text: str
    task: dict[str, Any]
    source: str = ""
    chat: Chat | None = None  # None: the prompt is plain text

    def __post_init__(self) -> None:
        _check_dtypes("Prompt", np.int32, tokens=self.tokens)
        if len(self.tokens) == 0:
            raise ValueError(f"prompt {self.index} has no tokens")


@message
class Sampling:
    temperature: float = 1.0  # 0 is greedy; log-probs are then given at temperature 1
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    max_tokens: int = 256
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if "" in self.stop_strings:
            raise ValueError("an empty stop string would stop every completion at its first token")
        if not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_tokens < 1:
            raise ValueError(f"top_p in (0, 1], top_k of 0 or more and max_tokens of 1 or more, not {self}")


class Truncatable(Protocol):
    """Sampling parameters that can exclude tokens: `Sampling`, or the config's section."""

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...


def truncates(sampling: Truncatable) -> bool:
    """Whether some tokens are never sampled; log-probs are those before that."""
    return sampling.top_k > 0 or sampling.top_p < 1


@message
class RequestKey:
    """Identifies a request. Randomness depends on it, the seed and the position, never on the rest of the batch."""

    group: int
    trajectory: int
    call: int = 0
    stream: str = "train"

    def __str__(self) -> str:
        return f"{self.stream}/{self.group}/{self.trajectory}/{self.call}"


@message
class Chunk:
    """Tokens sampled since the last chunk of the same request."""

    tokens: Ints
    logprobs: Floats
    versions: Ints

    def __post_init__(self) -> None:
        _check_lengths("Chunk", tokens=self.tokens, logprobs=self.logprobs, versions=self.versions)

    @classmethod
    def join(cls, parts: "Iterable[Chunk | Completion]") -> "Chunk":
        """Concatenate chunks and completions in order; without any, an empty chunk."""
        parts = list(parts)
        return cls(
            np.concatenate([np.empty(0, np.int32), *(part.tokens for part in parts)]),
            np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
            np.concatenate([np.empty(0, np.int32), *(part.versions for part in parts)]),
        )


@message
class Request:
    key: RequestKey
    tokens: Ints
    sampling: Sampling
    seed: int
    urgent: bool = False  # skips the queue: for evaluations and probes, which must not wait behind a whole batch
    sampled: Chunk | None = None  # what another engine sampled of this completion before it was lost

    def __post_init__(self) -> None:
        _check_dtypes("Request", np.int32, tokens=self.tokens)
        if len(self.tokens) == 0:
            raise ValueError(f"request {self.key} has no prompt tokens")


@message
class Completion:
    """All tokens that one request produced, across any number of interruptions, and the stop reason."""

    tokens: Ints
    logprobs: Floats
    versions: Ints
    stop: StopReason

    def __post_init__(self) -> None:
        _check_lengths("Completion", tokens=self.tokens, logprobs=self.logprobs, versions=self.versions)
        _check_dtypes("Completion", np.int32, tokens=self.tokens, versions=self.versions)
        _check_dtypes("Completion", np.float32, logprobs=self.logprobs)


@message
class Scores:
    """Log-probs of given tokens under the weights of `version`; position 0 of each sequence is 0."""

    version: int
    logprobs: tuple[Floats, ...]


@message
class Sequence:
    """Four arrays of one length; `logprobs[t]` is that of `tokens[t]` given what precedes it, where it was sampled."""

    tokens: Ints
    loss_mask: Floats
    logprobs: Floats
    versions: Ints
    roles: dict[int, str] = field(default_factory=dict)  # by first token, after the prompt: user, tool

    def __post_init__(self) -> None:
        arrays = {"tokens": self.tokens, "versions": self.versions}
        floats = {"loss_mask": self.loss_mask, "logprobs": self.logprobs}
        _check_lengths("Sequence", **arrays, **floats)
        _check_dtypes("Sequence", np.int32, **arrays)
        _check_dtypes("Sequence", np.float32, **floats)
        self._check_mask()

    def _check_mask(self) -> None:
        trained_T = self.loss_mask != 0
        if not (self.loss_mask[trained_T] == 1).all():
            raise ValueError("Sequence.loss_mask holds 0 and 1 only")
        if trained_T[:1].any():
            raise ValueError("Sequence.loss_mask: the first token follows nothing, so it cannot be trained")
        if (self.versions[trained_T] == NOT_SAMPLED).any():
            raise ValueError("Sequence.loss_mask: a token that no policy sampled cannot be trained")

    @classmethod
    def single_turn(cls, prompt_P: Ints, completion: Completion) -> "Sequence":
        """A prompt with its completion: only what was sampled is trained."""
        num_prompt, num_sampled = len(prompt_P), len(completion.tokens)
        return cls(
            tokens=np.concatenate([prompt_P, completion.tokens]),
            loss_mask=np.repeat(np.array([0, 1], np.float32), [num_prompt, num_sampled]),
            logprobs=np.concatenate([np.zeros(num_prompt, np.float32), completion.logprobs]),
            versions=np.concatenate([np.full(num_prompt, NOT_SAMPLED, np.int32), completion.versions]),
        )

    @property
    def num_sampled(self) -> int:
        return int((self.versions != NOT_SAMPLED).sum())


@message
class Reward:
    """`value` placed at token `position` of sequence number `sequence` of its trajectory."""

    sequence: int
    position: int
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a reward must be a finite number, not {self.value}")


@message
class Trajectory:
    """One episode: its sequences, its rewards, and why each of its completions ended."""

    index: int
    sequences: tuple[Sequence, ...]
    rewards: tuple[Reward, ...]
    temperature: float
    stops: tuple[StopReason, ...]
    components: dict[str, float] = field(default_factory=dict)  # named parts of the reward, before weighting

    def __post_init__(self) -> None:
        for reward in self.rewards:
            if not 0 <= reward.sequence < len(self.sequences):
                raise ValueError(f"reward for sequence {reward.sequence} of {len(self.sequences)}")
            if not 0 <= reward.position < len(self.sequences[reward.sequence].tokens):
                raise ValueError(f"reward at position {reward.position}, outside its sequence")

    @property
    def reward(self) -> float:
        return sum(reward.value for reward in self.rewards)

    @property
    def num_sampled(self) -> int:
        return sum(sequence.num_sampled for sequence in self.sequences)

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest sampled token, or None when nothing was sampled."""
        sampled = [s.versions[s.versions != NOT_SAMPLED] for s in self.sequences]
        return min((int(versions.min()) for versions in sampled if len(versions)), default=None)


@message
class Failure:
    """A failed trajectory: the reason, and how many sampled tokens were wasted."""

    trajectory: int
    reason: str
    num_sampled: int


@message
class Admission:
    """The controller's order to a rollout worker: generate a group of `size` trajectories for this prompt."""

    group: int
    prompt: Prompt
    size: int
    eta: int
    version: int
    sampling: Sampling
    stream: str = "train"


@message
class Group:
    """The trajectories of one prompt. `size` were asked for; those missing are listed in `failures`."""

    id: int
    prompt_index: int
    eta: int
    size: int
    trajectories: tuple[Trajectory, ...]
    failures: tuple[Failure, ...] = ()
    source: str = ""  # the prompt's task, where the run has several
    reference: dict[str, str] = field(default_factory=dict)  # the prompt's row but for the prompt, shortened

    def __post_init__(self) -> None:
        if len(self.trajectories) + len(self.failures) != self.size:
            found = f"{len(self.trajectories)} trajectories and {len(self.failures)} failures"
            raise ValueError(f"group {self.id}: {found}, not {self.size}")

    @property
    def complete(self) -> bool:
        return not self.failures

    @property
    def num_sampled(self) -> int:
        return sum(trajectory.num_sampled for trajectory in self.trajectories)

    @property
    def oldest_version(self) -> int | None:
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)


@message
class Batch:
    """The groups of one training step, in group-id order; `version` is that of the weights it will change."""

    version: int
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        ids = [group.id for group in self.groups]
        if ids != sorted(set(ids)):
            raise ValueError(f"a batch holds distinct groups in id order, not {ids}")

    @property
    def num_sampled(self) -> int:
        return sum(group.num_sampled for group in self.groups)

    @property
    def staleness(self) -> tuple[int, ...]:
        """Per trajectory with at least one sampled token: how many versions its oldest token lies behind."""
        oldest = [t.oldest_version for group in self.groups for t in group.trajectories]
        return tuple(self.version - version for version in oldest if version is not None)


@message
class Sample:
    """One sequence with at least one trained token; `where` are the positions of those tokens."""

    tokens: Ints
    where: NDArray[np.int64]
    behaviour: Floats
    versions: Ints
    advantages: Floats
    temperature: float
    source: tuple[int, int, int] = (-1, -1, -1)  # group, trajectory, sequence; -1: not of a batch


def piece_key(name: str, rows: range, num_rows: int) -> str:
    """The name under which a fingerprint of some rows is listed: the tensor's own name if these are all its rows."""
    return name if len(rows) == num_rows else f"{name}[{rows.start}:{rows.stop}]"


@message
class TensorInfo:
    """Type, shape, place and checksum of one published tensor, or of some rows of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    fingerprint: str
    first_row: int = 0
    num_rows: int | None = None  # of the whole tensor; None where this is all of it

    @property
    def rows(self) -> range:
        """The rows (dimension 0) of the whole tensor that are here."""
        return range(self.first_row, self.first_row + self.shape[0])

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.num_rows is None else (self.num_rows, *self.shape[1:])

    @property
    def key(self) -> str:
        return self.name if self.num_rows is None else piece_key(self.name, self.rows, self.num_rows)


@message
class WeightPlace:
    """One place from which an update can be fetched: the transport, the location, and the machine it works on."""

    transport: str
    location: str
    host: str = ""  # empty: every machine may try


@message
class WeightUpdate:
    """Named tensors under a version: `kind` is full or adapter, `location` says where the bytes lie.

    One published by several ranks has no tensors of its own but a part for each rank, which is an update by itself.
    """

    version: int
    kind: str
    transport: str
    location: str
    tensors: tuple[TensorInfo, ...]
    parts: tuple["WeightUpdate", ...] = ()
    host: str = ""  # the machine that can read `location`; empty: every machine may try
    elsewhere: tuple[WeightPlace, ...] = ()  # where else the same bytes lie, best first
    base: str = ""  # of an adapter: the digest of the weights it is for
    token: bytes = field(default=b"", repr=False)  # shared secret: a receiver proves it before a stream sends anything
    digest: str = ""  # one checksum of all values, the same whatever the transport; the trainer takes it

    def __post_init__(self) -> None:
        if self.kind not in ("full", "adapter") or (self.kind == "adapter") != bool(self.base):
            raise ValueError(f"an update is full, or an adapter with its base, not {self.kind} with base {self.base!r}")

    @property
    def places(self) -> tuple[WeightPlace, ...]:
        """All places from which the bytes can be fetched, best first."""
        return (WeightPlace(self.transport, self.location, self.host), *self.elsewhere)

    @property
    def pieces(self) -> tuple[TensorInfo, ...]:
        """Its tensors and those of its parts."""
        return (*self.tensors, *(tensor for part in self.parts for tensor in part.pieces))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.pieces)

    @property
    def fingerprints(self) -> dict[str, str]:
        return {tensor.key: tensor.fingerprint for tensor in self.pieces}


@message
class SwapReport:
    """Result of a swap: fingerprints of the live tensors, and how long decoding was paused."""

    version: int
    fingerprints: dict[str, str]
    pause_ms: float
    num_interrupted: int
    num_recomputed: int


@message
class EngineStats:
    version: int
    running: int
    waiting: int
    num_generated: int
    num_prefilled: int
    num_recomputed: int
    num_preempted: int
    busy_s: float
    kv_used: int
    kv_total: int


@message
class StepReport:
    """Result of one training step. `skipped` holds the reason when no version was added."""

    version: int
    skipped: str
    num_tokens: int
    started: float
    seconds: float
    metrics: dict[str, float]
    weights_sample: tuple[float, ...] = ()  # master weights at fixed places, to estimate how far two runs lie apart
    tokens: TrainedTokens | None = None  # None: skipped, or not asked for


@message
class Verdict:
    """The reward pool's answer for one text: a score, or an error, which is never a reward."""

    score: float
    error: str
    seconds: float
    components: dict[str, float] = field(default_factory=dict)  # named parts of the score, before weighting


EXCEEDED, UNSCORED = "verifier_exceeded", "verifier_failed"
"""Components of verdicts of 0 that no verifier gave: of a text over which it computed beyond its deadline, and, with
`reward.on_error` = "zero", of one over which it failed. Metrics hold their shares."""
