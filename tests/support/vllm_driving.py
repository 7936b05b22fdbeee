"""An engine on a small server that speaks vLLM's wire format (`vllm_wire.py`), step by step and version by version."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from driving import plain_model, teacher_forced
from torch import Tensor
from transformers import PreTrainedModel
from vllm_servers import Watched
from vllm_wire import WireServer, until

from headway.config import EngineSection
from headway.engine.vllm.engine import VllmEngine
from headway.engine.vllm.messages import PROCESSED
from headway.model.loading import named_weights
from headway.types import Completion, SwapReport, WeightUpdate
from headway.weights import lora
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.publish import Publisher

BOUND = 1e-5
RANK = 4  # of adapters


@asynccontextmanager
async def engine_on(
    server: WireServer,
    path: str,
    deadline_s: float = 20.0,
    mode: str = PROCESSED,
    lora_rank: int = 0,
    **settings: Any,
) -> AsyncIterator[VllmEngine]:
    section = EngineSection(**{"kind": "vllm", "urls": server.url, "chunk_tokens": 4, **settings})
    engine = VllmEngine(path, "float32", section, server.url, mode, deadline_s, lora_rank=lora_rank)
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


def factors_of(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """Random factors for every matrix of the layers, as a trainer publishes them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in model.named_parameters():
        if "_proj" in name:
            stem = name.removesuffix(".weight")
            found[stem + lora.A] = 0.3 * torch.randn(RANK, weight.shape[1], generator=generator)
            found[stem + lora.B] = 0.3 * torch.randn(len(weight), RANK, generator=generator)
    return found


class Adapters:
    """Publishes another adapter under the next version, and knows every version's merged model; version 0 is none."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.models = [plain_model(path)]
        self._base = digest(fingerprints(named_weights(self.models[0])))
        self._publisher = Publisher()

    def publish(self, version: int | None = None, base: str = "") -> WeightUpdate:
        version, merged = version or len(self.models), plain_model(self.path)
        factors = factors_of(merged, version)
        with torch.no_grad():
            for name in lora.targets(list(factors)):
                weight, stem = merged.get_parameter(name), name.removesuffix(".weight")
                weight.copy_(lora.merged(weight, factors[stem + lora.A], factors[stem + lora.B]))
        self.models[version:] = [merged]
        return self._publisher.publish(version, factors, base or self._base)

    async def update(self, engine: VllmEngine, kv: Any = "recompute") -> SwapReport:
        update = self.publish()
        await engine.stage_weights(update)
        return await engine.swap(update.version, kv)

    def error(self, one: Watched) -> float:
        """The largest difference of a completion's log-probs to those of the versions its tokens are stamped with."""
        completion = one.task.result()
        tokens = np.concatenate([one.request.tokens, completion.tokens])
        rows = np.stack([teacher_forced(model, tokens) for model in self.models])
        exact = rows[completion.versions, np.arange(len(one.request.tokens), len(tokens))]
        return float(np.abs(exact - completion.logprobs).max())
