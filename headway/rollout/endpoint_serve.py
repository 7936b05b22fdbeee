"""`headway serve`: the OpenAI endpoint in front of an embedded engine in this process, on a CPU or a GPU."""

import asyncio
import itertools
import random
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from weakref import WeakValueDictionary

from headway.config import EngineSection
from headway.engine.protocol import Engine
from headway.model.tokenizer import load_tokenizer
from headway.rollout.endpoint import Endpoint, with_sampling
from headway.rollout.endpoint_requests import ApiError, Call, Choice, chat_tokens, prompt_tokens
from headway.types import Chunk, Completion, Ints, Request, RequestKey, Sampling


class ServeSession:
    """Requests of one key, each sampled for itself; nothing is remembered."""

    def __init__(self, engine: Engine, model_path: str, context: int, stop_tokens: set[int], vocab_size: int):
        """`stop_tokens` end completions, besides the tokenizer's own end-of-text token."""
        self.tokenizer = load_tokenizer(model_path)
        self.context = context
        self._engine, self._vocab_size = engine, vocab_size
        stops = stop_tokens | {self.tokenizer.eos_token_id}
        self._sampling = Sampling(max_tokens=context, stop_tokens=tuple(sorted(stops)))
        self._numbers = itertools.count()
        self._seeds = random.SystemRandom()
        self._turns = WeakValueDictionary[tuple[int, int], asyncio.Lock]()  # gone with the last request of its seed

    def prompt(self, call: Call) -> list[Ints]:
        if call.messages is None:
            return [prompt_tokens(self.tokenizer, prompt, self._vocab_size) for prompt in call.prompts]
        return [chat_tokens(self.tokenizer, call)]

    async def generate(self, call: Call, tokens: Ints, index: int) -> AsyncIterator[Chunk | Completion]:
        """With a seed, the same request gives the same tokens; requests of one seed take turns, because they share
        the key that randomness and the engine know them by."""
        sampling = with_sampling(call, self._sampling)
        if call.seed is None:
            key, seed = RequestKey(next(self._numbers), index, 0, "serve"), self._seeds.getrandbits(31)
            turn = asyncio.Lock()
        else:
            key, seed = RequestKey(call.seed % 2**31, index, 0, "seeded"), call.seed % 2**31
            turn = self._turns.setdefault((seed, index), asyncio.Lock())
        async with turn:
            items: Any = self._engine.generate(Request(key, tokens, sampling, seed))
            async with aclosing(items):
                async for item in items:
                    yield item

    def finished(self, call: Call, choice: Choice) -> None: ...

    def reward(self, value: float) -> None:
        raise ApiError(400, "rewards are taken inside a run only, and this is a plain server")


async def serve(
    model_path: str,
    section: EngineSection,
    dtype: str,
    host: str,
    port: int,
    key: str = "",
    on_open: Callable[[str, str], None] = lambda url, key: None,
) -> None:
    """Serve the model until cancelled; `on_open` is given the base URL and the key."""
    from headway.engine.embedded.service import EmbeddedEngine
    from headway.model.loading import end_tokens, load_config

    config = load_config(model_path)
    context = section.max_context or config.max_position_embeddings
    engine = EmbeddedEngine(model_path, dtype, section, False)
    endpoint = Endpoint(model_path)
    key = key or f"sk-{secrets.token_urlsafe(24)}"
    await engine.open()
    try:
        session = ServeSession(engine, model_path, context, end_tokens(model_path, config), config.vocab_size)
        endpoint.sessions[key] = session
        await endpoint.open(host, port)
        on_open(endpoint.url, key)
        await asyncio.Event().wait()
    finally:
        await endpoint.close()
        await engine.close()
