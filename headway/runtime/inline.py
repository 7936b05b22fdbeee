"""Every worker in this process and on its one event loop, so that a breakpoint works anywhere."""

import asyncio
import logging
from typing import Any, TypeVar

from headway.errors import WorkerDied

T = TypeVar("T")
CLOSE_S = 10.0


class InlineRuntime:
    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}

    async def start(self, name: str, cls: type[T], *args: Any, threads: int = 1) -> T:
        worker = cls(*args)
        self._workers[name] = worker
        if hasattr(worker, "open"):
            await worker.open()
        return worker

    async def num_machines(self) -> int:
        return 1

    async def failure(self) -> WorkerDied:
        """Never returns: a worker that shares this process dies with it."""
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if hasattr(worker, "close"):
            await _close(name, worker)

    async def close(self) -> None:
        for name in reversed(list(self._workers)):
            await self.stop(name)


async def _close(name: str, worker: Any) -> None:
    # One that cannot close must not keep the others from closing.
    try:
        await asyncio.wait_for(worker.close(), CLOSE_S)
    except TimeoutError:
        logging.getLogger(__name__).warning("worker %s did not close within %g s", name, CLOSE_S)
    except Exception:
        logging.getLogger(__name__).exception("worker %s did not close cleanly", name)
