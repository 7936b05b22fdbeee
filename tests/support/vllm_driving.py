"""An engine on a small server that speaks vLLM's wire format (`vllm_wire.py`), step by step and version by version."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from driving import plain_model, teacher_forced
from vllm_servers import Watched
from vllm_wire import WireServer, until

from headway.config import EngineSection
from headway.engine.vllm.engine import VllmEngine
from headway.engine.vllm.messages import PROCESSED
from headway.model.loading import named_weights
from headway.types import Completion
from headway.weights.publish import Publisher

BOUND = 1e-5


@asynccontextmanager
async def engine_on(
    server: WireServer, path: str, deadline_s: float = 20.0, mode: str = PROCESSED, **settings: Any
) -> AsyncIterator[VllmEngine]:
    section = EngineSection(**{"kind": "vllm", "urls": server.url, "chunk_tokens": 4, **settings})
    engine = VllmEngine(path, "float32", section, server.url, mode, deadline_s)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def pair(path: str, spans: bool = True, **settings: Any) -> AsyncIterator[tuple[WireServer, VllmEngine]]:
    async with WireServer(path, scale_out=spans).listening() as server, engine_on(server, path, **settings) as engine:
        yield server, engine


async def steps(server: WireServer, number: int) -> None:
    """Let the server take `num` steps, and no more."""
    server.budget = number
    await until(lambda: server.budget == 0)


class Updates:
    """Other weights under each next version."""

    def __init__(self, path: str) -> None:
        self.path, self.models, self.publisher = path, [plain_model(path)], Publisher()

    async def stage(self, engine: VllmEngine) -> int:
        version = len(self.models)
        self.models.append(plain_model(self.path, noise_seed=version))
        await engine.stage_weights(self.publisher.publish(version, named_weights(self.models[-1])))
        return version

    async def swap(self, engine: VllmEngine, kv: Any) -> Any:
        return await engine.swap(await self.stage(engine), kv)

    def check(self, one: Watched, completion: Completion, num_given: int = 0) -> None:
        """Each token's log-prob is that of the weights it is stamped with; chunks tell the same as the completion."""
        tokens = np.concatenate([one.request.tokens, completion.tokens])
        rows = np.stack([teacher_forced(model, tokens) for model in self.models])
        exact = rows[completion.versions, np.arange(len(one.request.tokens), len(tokens))]
        assert np.abs(exact - completion.logprobs)[num_given:].max() < BOUND
        for name in ("tokens", "logprobs", "versions"):
            told = np.concatenate([getattr(chunk, name) for chunk in one.chunks])
            assert np.array_equal(told, getattr(completion, name)[num_given:])
