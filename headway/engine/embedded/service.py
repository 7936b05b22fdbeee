"""`EmbeddedEngine`, the default engine: the asynchronous service around the scheduler.

It accepts requests at any time, runs the scheduler's steps on the compute thread, and streams chunks to callers while
the next step runs. Between two steps it submits new requests, swaps weights and scores probes. Weights are received
concurrently with generation, on another thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.config import EngineSection
from headway.engine.protocol import KvPolicy
from headway.errors import HeadwayError, RequestRefused, WorkerDied
from headway.runtime.compute import offload
from headway.runtime.handle import Inbox
from headway.types import (
    Chunk,
    Completion,
    EngineStats,
    Ints,
    Request,
    RequestKey,
    Scores,
    SwapReport,
    WeightUpdate,
)

if TYPE_CHECKING:
    from headway.engine.embedded.scheduler import Output

KEY_WAIT_S = 2.0
_POLL_S = 0.002
_NOT_OPEN = "the engine is not open, or was closed while requests were being generated"


class EmbeddedEngine:
    def __init__(self, model_path: str, dtype: str, section: EngineSection, deterministic: bool, kv_share: float = 0.8):
        """`kv_share` is the part of a GPU's free memory that keys and values take when `kv_tokens` is 0."""
        from headway.engine.embedded.scheduler import EngineCore
        from headway.model.device import DTYPES, find_device
        from headway.model.loading import load_config, load_model
        from headway.model.tokenizer import decode, load_tokenizer

        context = section.max_context or load_config(model_path).max_position_embeddings
        self._tokenizer: Any = None

        def decode_text(tokens: list[int]) -> str:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(model_path)
            return decode(self._tokenizer, tokens, special=True)

        device = find_device("engine.device", section.device, DTYPES[dtype])
        model = load_model(model_path, DTYPES[dtype]).to(device)  # type: ignore[arg-type]  # transformers' own wrapper
        self._core = EngineCore(model, section, context, deterministic, decode_text, kv_share)
        self._streams: dict[str, Inbox] = {}
        self._arrived: dict[str, Request] = {}  # not yet submitted to the core
        self._wake = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._loop: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._loop = asyncio.create_task(self._generate_forever())
        self._loop.add_done_callback(self._fail_streams)

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def _generate_forever(self) -> None:
        """Consumes requests; waits for work; is unblocked by a request or a swap; produces chunks."""
        while True:
            if not (self._core.has_work or self._arrived):
                self._wake.clear()
                await self._wake.wait()
                continue
            async with self._between_steps:
                self._take_in()
                self._deliver(await offload(self._core.step))

    def _take_in(self) -> None:
        """Give the core the requests that arrived; a refused one fails its own stream. Between steps only."""
        for name, request in self._arrived.items():
            # An error at submission concerns that request alone.
            try:
                self._core.submit(request)
            except Exception as error:
                self._streams[name].set_exception(error)
        self._arrived.clear()
        self._deliver(self._core.take_outputs())

    def _deliver(self, outputs: "list[Output]") -> None:
        for name, item in outputs:
            if (stream := self._streams.get(name)) is None:
                continue
            if isinstance(item, HeadwayError):
                stream.set_exception(item)
            else:
                stream.put(item)

    def _fail_streams(self, loop: asyncio.Task[None]) -> None:
        """Generation ended: fail every request with the cause."""
        error = None if loop.cancelled() else loop.exception()
        for stream in self._streams.values():
            stream.set_exception(error or WorkerDied(_NOT_OPEN))

    def _check_alive(self) -> None:
        """Raise if the generation loop has ended."""
        if self._loop is None or self._loop.cancelled():
            raise WorkerDied(_NOT_OPEN)
        if self._loop.done():
            self._loop.result()

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        name = str(request.key)
        await self._await_key(name)
        stream = self._streams[name] = Inbox()
        finished = False
        try:
            self._check_alive()
            # Taken in between steps, not one by one after the running step: a thousand would delay the next.
            self._arrived[name] = request
            if not self._between_steps.locked():
                self._take_in()
            self._wake.set()
            while not finished:
                item = await stream.next()
                finished = isinstance(item, Completion)
                yield item
        finally:
            if not finished and self._arrived.pop(name, None) is None:
                async with self._between_steps:
                    self._core.drop(request.key)
            # Last, because a request that reuses the key must not receive the items of this one.
            del self._streams[name]

    async def _await_key(self, name: str) -> None:
        """Wait for a cancelled request of the same key to be dropped; a running one refuses this request."""
        deadline = time.monotonic() + KEY_WAIT_S
        while name in self._streams:
            if time.monotonic() > deadline:
                raise RequestRefused(f"request {name} is already being generated; give each call a key of its own")
            await asyncio.sleep(_POLL_S)

    async def abort(self, key: RequestKey) -> None:
        async with self._between_steps:
            self._take_in()
            self._core.abort(key)
            self._deliver(self._core.take_outputs())

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        async with self._between_steps:
            return await offload(self._core.score, sequences, temperature)

    async def stage_weights(self, update: WeightUpdate) -> None:
        # Not on the compute thread: generation goes on while the bytes arrive.
        await asyncio.to_thread(self._core.stage, update)

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        if kv == "drain":
            await self._drain()
        async with self._between_steps:
            report = await offload(self._core.swap, version, kv)
        self._wake.set()
        return report

    async def _drain(self) -> None:
        """Return once every sequence in flight has ended; new ones wait for the swap."""
        async with self._between_steps:
            self._core.drain()
        self._wake.set()
        while not self._core.is_idle:
            self._check_alive()
            await asyncio.sleep(_POLL_S)

    async def stats(self) -> EngineStats:
        known = self._core.stats()
        return replace(known, waiting=known.waiting + len(self._arrived))
