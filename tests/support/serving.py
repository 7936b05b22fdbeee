"""An embedded engine as a service, opened for a test, and a deadline for whatever is done with it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from headway.config import EngineSection
from headway.engine.embedded.service import EmbeddedEngine

T = TypeVar("T")
DEADLINE_S = 60.0


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """On a loop of its own, with a deadline, so that a hang is a failure with a name."""
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


@asynccontextmanager
async def opened(path: str, deterministic: bool = True, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    section = EngineSection(**{"max_num_seqs": 8, "prefill_chunk": 64, "chunk_tokens": 4, **settings})
    engine = EmbeddedEngine(path, "float32", section, deterministic)
    await engine.open()
    yield engine
    await engine.close()
