"""Blocking work, kept off the event loop of a worker."""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_compute: ThreadPoolExecutor | None = None


def start_compute_thread() -> None:
    """From now on, `offload` runs everything on one dedicated thread, in order; a worker process calls this once."""
    global _compute
    _compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")


async def offload(fn: Callable[[*Ts], R], *args: *Ts) -> R:
    """Run `fn(*args)`: on the compute thread of a worker process, otherwise on this thread, where a breakpoint works.

    A cancelled caller stops waiting; work that already runs on the compute thread runs to its end.
    """
    if _compute is not None:
        return await asyncio.get_running_loop().run_in_executor(_compute, fn, *args)
    result = fn(*args)
    await asyncio.sleep(0)
    return result


def awaitable(method: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method as its callers see it: `async` ones as they are, synchronous ones run by `offload`."""
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        return method

    async def call(*args: Any, **kwargs: Any) -> Any:
        return await offload(partial(method, *args, **kwargs))

    return call
