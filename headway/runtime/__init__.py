"""Start a class somewhere and call it: in this process (`inline`), in processes of their own on this machine (`local`)
or on the nodes of a Ray cluster (`ray`).

Knows nothing of RL. A worker is an ordinary class whose public methods are `async def` or async generators; it may
define `open` (called inside the running event loop, after construction) and `close` (called at the end).

Invariant that lives here:
 15. Nothing hangs: every wait has a deadline; what exceeds it fails with the name of what was awaited.
"""

from typing import Any, Protocol, TypeVar

from headway.errors import WorkerDied
from headway.runtime.channel import RemoteError
from headway.runtime.handle import Inbox, with_deadline
from headway.runtime.inline import InlineRuntime
from headway.runtime.local import LocalRuntime
from headway.runtime.offload import offload
from headway.runtime.ray import RayRuntime, check_ray
from headway.runtime.together import together

__all__ = [
    "Inbox",
    "InlineRuntime",
    "LocalRuntime",
    "RayRuntime",
    "RemoteError",
    "Runtime",
    "check_ray",
    "offload",
    "together",
    "with_deadline",
]

T = TypeVar("T")


class Runtime(Protocol):
    async def num_machines(self) -> int:
        """On how many machines a worker may be started."""
        ...

    async def start(self, name: str, cls: type[T], *args: Any, threads: int = 1) -> T:
        """Construct `cls(*args)` and open it; returns the object itself or a handle that behaves like it.

        A name may be started again after its death or its stop. One that dies before it is open is no failure: it is
        this call's error.
        """
        ...

    async def failure(self) -> WorkerDied:
        """Return once for each worker that died unexpectedly, in turn; the error's `worker` is its name."""
        ...

    async def stop(self, name: str) -> None:
        """End one worker now, which is no failure; killed if it does not close in a bounded time; dead is fine too."""
        ...

    async def close(self) -> None:
        """Close the workers in reverse order of their start; each is given a bounded time."""
        ...
