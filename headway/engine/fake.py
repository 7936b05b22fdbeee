"""A fake engine without a model, deterministic by seed: for tests, and for benchmarks of everything but an engine.

Completions have long-tailed lengths and take time in proportion. The rest of the protocol is implemented: versions are
stamped, swaps lose no request, tokens sampled elsewhere are continued, fingerprints are those of the staged update.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import xxhash

from headway.engine.protocol import KvPolicy
from headway.types import (
    Chunk,
    Completion,
    EngineStats,
    Ints,
    Request,
    RequestKey,
    Scores,
    StopReason,
    SwapReport,
    WeightUpdate,
)


class FakeEngine:
    def __init__(self, mean_tokens: float = 32.0, seconds_per_token: float = 0.0, vocab_size: int = 16):
        self.mean_tokens, self.seconds_per_token, self.vocab_size = mean_tokens, seconds_per_token, vocab_size
        self.version = 0
        self._staged: WeightUpdate | None = None
        self._running: dict[str, asyncio.Event] = {}
        self._num_generated = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        """Sample and send half of the missing tokens before the wait, half after it."""
        name = str(request.key)
        aborted = self._running[name] = asyncio.Event()
        tokens, reason = self._draw(request)
        sampled = request.sampled or Chunk.join([])
        num_known = min(len(sampled.tokens), len(tokens))
        half = (len(tokens) - num_known) // 2
        try:
            first = self._sample(request, tokens[num_known : num_known + half])
            yield first
            if self.seconds_per_token:
                with suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), (len(tokens) - num_known) * self.seconds_per_token)
            rest = tokens[:0] if aborted.is_set() else tokens[num_known + half :]
            last = self._sample(request, rest)
            whole = Chunk.join([sampled, first, last])
            stop = StopReason.ABORTED if aborted.is_set() else reason
            yield Completion(whole.tokens, whole.logprobs, whole.versions, stop)
        finally:
            if self._running.get(name) is aborted:  # else the key is another's by now
                del self._running[name]

    def _draw(self, request: Request) -> tuple[Ints, StopReason]:
        """All tokens of a completion, which depend on the request's key and seed alone, and why it ends."""
        draw = np.random.default_rng(xxhash.xxh3_64_intdigest(f"{request.seed}/{request.key}".encode()))
        wanted = int(draw.lognormal(np.log(self.mean_tokens), 0.7)) + 1
        length, stops = min(wanted, request.sampling.max_tokens), request.sampling.stop_tokens
        going_on = np.setdiff1d(np.arange(self.vocab_size, dtype=np.int32), np.array(stops, np.int32))
        tokens = going_on[draw.integers(0, len(going_on), length)]
        if length < wanted:
            return tokens, StopReason.LENGTH
        if stops:
            tokens[-1] = stops[0]
        return tokens, StopReason.STOP

    def _sample(self, request: Request, tokens: Ints) -> Chunk:
        length = len(tokens)
        self._num_generated += length if request.key.stream == "train" else 0
        logprob, version = -np.log(self.vocab_size), self.version
        return Chunk(tokens, np.full(length, logprob, np.float32), np.full(length, version, np.int32))

    async def abort(self, key: RequestKey) -> None:
        if str(key) in self._running:
            self._running[str(key)].set()

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return Scores(self.version, tuple(np.zeros(len(tokens), np.float32) for tokens in sequences))

    async def stage_weights(self, update: WeightUpdate) -> None:
        self._staged = update

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        assert self._staged is not None and self._staged.version == version
        self.version = version
        return SwapReport(version, self._staged.fingerprints, 0.0, self.num_running, 0)

    async def stats(self) -> EngineStats:
        return EngineStats(self.version, self.num_running, 0, self._num_generated, 0, 0, 0, 0.0, 0, 1)

    async def close(self) -> None: ...
