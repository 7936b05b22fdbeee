"""Types that the scheduler and the executors share: running sequences, and the KV memory and executor protocols."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.engine.completion import DecodeText, PartialCompletion
from headway.engine.embedded.live_weights import LiveWeights
from headway.engine.embedded.sampler import request_counter
from headway.types import Floats, Ints, Request

Row = Any
"""The place of one sequence's keys and values, of a type that its memory defines; None without one."""


@dataclass(eq=False)
class CachedPrompt:
    """A prompt's keys and values under one version: complete in `rows`, or being computed in one."""

    key: tuple[bytes, int]
    num_tokens: int
    rows: list[Row] = field(default_factory=list)
    computing: Row = None
    num_members: int = 0  # sequences that have it, compute it or wait for it
    is_retained: bool = False  # its only row belongs to no sequence

    @property
    def front(self) -> Row:
        """The row whose pages other sequences may share, even while the prompt is computed."""
        return self.rows[0] if self.rows else self.computing


class RunningSequence(PartialCompletion):
    """A request in the embedded engine: its completion so far, and its keys and values."""

    def __init__(self, request: Request, context: int, decode_text: DecodeText | None = None):
        super().__init__(request, context, decode_text)
        self.counter = request_counter(request)
        self.prefix = request.tokens[:-1].tobytes()
        self.row: Row = None  # while it has a place in memory
        self.num_cached = 0
        self.prompt: CachedPrompt | None = None  # while it has a row
        self.awaits_prompt = False  # another sequence computes it
        self.replays = False  # after a preemption in deterministic mode: decodes again what it had sampled

    @property
    def up_to_date(self) -> bool:
        return self.num_cached == self.num_tokens - 1

    @property
    def decodable(self) -> bool:
        return self.up_to_date or (self.replays and self.num_cached >= self.num_prompt - 1)


class Memory(Protocol):
    """Key/value memory. Running out is an answer (None, False), not a failure."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_used(self) -> int: ...

    def allocate(self, num_tokens: int, source: Row = None, num_shared: int = 0) -> Row:
        """Room for `num_tokens`, of which the first `num_shared` are going to be those of `source`."""
        ...

    def copy(self, source: Row, target: Row, num_tokens: int) -> None:
        """Fork: the first `num_tokens` of `source` become those of `target`, which was allocated for that."""
        ...

    def grow(self, row: Row, num_tokens: int) -> bool: ...

    def shrink(self, row: Row, num_tokens: int) -> None:
        """Release the memory beyond the first `num_tokens`."""
        ...

    def renew(self, row: Row, source: Row = None, num_shared: int = 0) -> bool:
        """Prepare to compute the row again: like `free` and `allocate` at the same size."""
        ...

    def clear(self, row: Row) -> None:
        """Erase a row that holds NaN, so that the next sequence in its place cannot read it."""
        ...

    def free(self, row: Row) -> None: ...


class Executor(Protocol):
    """Runs the model for the scheduler: chunks of known tokens, steps of sampled ones.

    `decode` may return any number of tokens per sequence, so speculative decoding concerns the executor alone; so does
    the format in which weights, keys and values are stored.
    """

    @property
    def memory(self) -> Memory: ...

    def num_steps(self, num_rows: int) -> int:
        """The most tokens to sample between two host synchronisations, for `num_rows` sequences together."""
        ...

    def prefill(self, chunks: Sequence[tuple[RunningSequence, int]]) -> None:
        """Compute keys and values of each sequence's next tokens, as many as its chunk names."""
        ...

    def decode(self, ready: Sequence[RunningSequence], num_steps: int) -> list[tuple[Ints, Floats]]:
        """Up to `num_steps` tokens and log-probs for each, as far as its stop tokens and its limit allow."""
        ...

    @property
    def device_s(self) -> float:
        """Seconds the last decode's steps took on a device that runs concurrently with the host; 0 without one."""
        ...

    def score(self, tokens: Ints, row: Row, temperature: float) -> Floats:
        """Log-probs of given tokens by teacher forcing, through the memory that generation uses."""
        ...

    @property
    def weights(self) -> LiveWeights: ...
