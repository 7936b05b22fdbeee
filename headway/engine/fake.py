"""A stand-in for an engine, for tests and for measuring everything but an engine: deterministic by seed, no model.

Completions have long-tailed lengths and take time in proportion; everything else of the protocol is real enough for a
controller not to notice: versions are stamped, swaps lose nothing, fingerprints are those that were staged.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import xxhash

from headway.engine import KvPolicy
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
        self._going = asyncio.Event()
        self._going.set()
        self._num_generated = 0

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        """Tokens drawn from the request's key; half are stamped before the wait, half after it."""
        name = str(request.key)
        aborted = self._running[name] = asyncio.Event()
        draw = np.random.default_rng(xxhash.xxh3_64_intdigest(f"{request.seed}/{name}".encode()))
        wanted = int(draw.lognormal(np.log(self.mean_tokens), 0.7)) + 1
        length = min(wanted, request.sampling.max_tokens)
        tokens = draw.integers(0, self.vocab_size, length).astype(np.int32)
        logprobs = np.full(length, -np.log(self.vocab_size), np.float32)
        try:
            await self._going.wait()
            first = self.version
            if self.seconds_per_token:
                with suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), length * self.seconds_per_token)
            await self._going.wait()
            versions = np.where(np.arange(length) < length // 2, first, self.version).astype(np.int32)
            self._num_generated += length
            reason = StopReason.STOP if length == wanted else StopReason.LENGTH
            yield Completion(tokens, logprobs, versions, StopReason.ABORTED if aborted.is_set() else reason)
        finally:
            self._running.pop(name, None)

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
        return SwapReport(version, self._staged.fingerprints, 0.0, len(self._running), 0)

    async def pause(self) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    async def stats(self) -> EngineStats:
        return EngineStats(self.version, len(self._running), 0, self._num_generated, 0, 0, 0, 0.0, 0, 1)

    async def close(self) -> None:
        self._going.set()
