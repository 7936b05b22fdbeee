"""What every runtime does: start a class somewhere, report its death, stop it."""

from typing import Any, Protocol, TypeVar

from headway.errors import WorkerDied

T = TypeVar("T")


class Runtime(Protocol):
    async def num_machines(self) -> int:
        """On how many machines a worker may be started."""
        ...

    async def start(self, name: str, cls: type[T], *args: Any, threads: int = 1) -> T:
        """Construct `cls(*args)` and open it; returns the object itself or a handle that behaves like it.

        Every public method is then awaited: `async` ones run on the worker's event loop, synchronous ones on its
        compute thread, one at a time. A caller of synchronous methods types the result by a protocol of their
        awaitable form.

        A name may be started again after its death or its stop. The death of one that is not open yet is
        this call's error, not a `failure`.
        """
        ...

    async def failure(self) -> WorkerDied:
        """Return once for each worker that died unexpectedly, in turn; the error's `worker` is its name."""
        ...

    async def stop(self, name: str) -> None:
        """Close one worker, which is no `failure`: it is killed if that takes too long, and may be dead already."""
        ...

    async def close(self) -> None:
        """Close the workers in reverse order of their start; each is given a bounded time."""
        ...
