"""Every worker in this process and on its one event loop, so that a breakpoint works anywhere."""

import asyncio
import logging
from typing import Any, TypeVar, cast

from headway.errors import WorkerDied
from headway.runtime.compute import awaitable
from headway.runtime.handle import remote_methods

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
        calls = {name: awaitable(getattr(worker, name)) for name in remote_methods(cls)}
        plain = all(call == getattr(worker, name) for name, call in calls.items())
        return worker if plain else cast(T, _Awaitable(worker, calls))

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


class _Awaitable:
    """A worker whose synchronous methods are awaited, as behind a handle; all else is the worker's own."""

    def __init__(self, worker: Any, calls: dict[str, Any]) -> None:
        self._worker = worker
        self.__dict__.update(calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


async def _close(name: str, worker: Any) -> None:
    # One that cannot close must not prevent the others from closing.
    try:
        await asyncio.wait_for(worker.close(), CLOSE_S)
    except TimeoutError:
        logging.getLogger(__name__).warning("worker %s did not close within %g s", name, CLOSE_S)
    except Exception:
        logging.getLogger(__name__).exception("worker %s did not close cleanly", name)
