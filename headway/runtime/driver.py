"""The one process of a run that talks to Ray, and the launchers that Ray starts for it, one on the node of each worker.

Ray places launchers by resources, starts them, and reports when one or its node dies. A launcher starts the process of
its worker, the same that the local runtime starts, and forwards its output. Nothing else goes through Ray: calls
between workers have channels of their own. The run's token reaches a launcher as the argument of a call, and its worker
through a pipe, so that no command line, environment or log shows it.

Invariant that lives here:
 15. Bounded waits: a worker dies with its launcher, a launcher with this process, this process with the controller;
     and a launcher that answers nothing for a while is killed.
"""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from headway.errors import ConfigError, DeadlineExceeded, WorkerDied
from headway.runtime import channel
from headway.runtime.launch import execute

_LOG = logging.getLogger(__name__)
_BEAT_S = 5.0  # a launcher answers at least this often
_LOST_S = 60.0  # and is killed after this long without an answer
_DRAIN_S = 1.0  # for a worker's last output, in case a process it left running still holds the pipe
_CHUNK_BYTES = 64 * 1024
_MAX_CHUNKS = 64  # of unread output; then the worker waits
_STORE_BYTES = 100 * 2**20  # of Ray's object store, which stays empty
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


class Cluster:
    """Ray's driver. Without an address it starts a cluster on this machine alone, below `directory`."""

    def __init__(self, address: str, directory: str, place_s: float) -> None:
        self._address, self._directory, self._place_s = address, directory, place_s
        self._launchers: dict[int, Any] = {}

    async def open(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if not self._address:
            self._restrict_to_loopback()
        import ray  # only now: it reads its environment when it is imported

        self._ray: Any = ray
        self._actor = ray.remote(Launcher)
        try:
            if self._address:
                ray.init(address=self._address, log_to_driver=False)
            else:
                options = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
                ray.init(address="local", log_to_driver=False, _temp_dir=f"{self._directory}/ray", **options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = f"ray.address = {self._address}" if self._address else "a Ray cluster on this machine"
            raise ConfigError(f"{where} does not work: {_reason(error)}") from error

    def _restrict_to_loopback(self) -> None:
        # Ray 2.60 listens on every interface, even when given 127.0.0.1, unless it takes the machine for a desktop.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    async def num_machines(self) -> int:
        return len({node["NodeManagerAddress"] for node in self._nodes()})

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    async def place(
        self,
        number: int,
        name: str,
        needs: dict[str, float],
        threads: int,
        directory: str,
        several: bool,
        run: str,
        token: bytes,
    ) -> str:
        """Start a worker on a node with the resources it needs; returns its address."""
        if not any(all(node["Resources"].get(key, 0) >= needs[key] for key in needs) for node in self._nodes()):
            raise ConfigError(f"worker {name} needs {_listed(needs)}, and no node of the Ray cluster has that")
        launcher = self._actor.options(**_options(needs)).remote()
        try:
            async with asyncio.timeout(self._place_s):
                address = await launcher.start.remote(number, name, threads, directory, several, run, token)
            self._launchers[number] = launcher
            return str(address)
        except TimeoutError as error:
            available = self._ray.available_resources()
            free = _listed({key: available.get(key, 0.0) for key in needs})
            sentence = f"Ray found no place for worker {name} within {self._place_s:g} s"
            raise DeadlineExceeded(f"{sentence}: it needs {_listed(needs)}, and free are {free}") from error
        except self._ray.exceptions.RayError as error:
            _LOG.warning("%s could not be started: %s", name, error)
            raise WorkerDied(f"Ray could not start worker {name}: {_reason(error)}", name) from error
        finally:
            if number not in self._launchers:
                self._ray.kill(launcher)

    async def follow(self, number: int) -> AsyncIterator[bytes | int]:
        """Yield a worker's output, empty at least every few seconds, and at last its exit code."""
        launcher = self._launchers[number]
        try:
            while True:
                async with asyncio.timeout(_LOST_S):
                    output = await launcher.read.remote()
                yield output
                if isinstance(output, int):
                    return
        except TimeoutError as error:
            raise WorkerDied(f"its launcher on a Ray node was silent for {_LOST_S:g} s") from error
        except self._ray.exceptions.RayError as error:
            _LOG.warning("launcher %d is lost: %s", number, error)
            raise WorkerDied("Ray lost its launcher or its node; ray.log says why") from error
        finally:
            self._release(number)

    async def close_worker(self, number: int) -> None:
        """Ask a worker to close."""
        if (launcher := self._launchers.get(number)) is not None:
            await launcher.close.remote()

    async def kill_worker(self, number: int) -> None:
        if (launcher := self._launchers.get(number)) is not None:
            await launcher.kill.remote()

    def _release(self, number: int) -> None:
        if (launcher := self._launchers.pop(number, None)) is not None:
            self._ray.kill(launcher)

    async def close(self) -> None:
        self._ray.shutdown()


class Launcher:
    """A Ray actor: it starts the process of one worker on its own node, and holds its lifeline."""

    async def start(
        self, number: int, name: str, threads: int, directory: str, several: bool, run: str, token: bytes
    ) -> str:
        """Workers of `several` machines listen on their node's own address, those of one on loopback."""
        import ray

        host = ray.util.get_node_ip_address() if several else "127.0.0.1"
        if not os.path.isdir(directory):
            raise ConfigError(
                f"its node {host} has no directory {directory}; start the run from one that all nodes have"
            )
        os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray has read it, and the worker's code must not
        listener, address = channel.listen_on_host(host, run, number)
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb", buffering=0)
        with listener, os.fdopen(write_end, "wb", buffering=0):
            self._process, self._lifeline = await execute(name, address, listener, write_end, token, threads, directory)
        self._output: asyncio.Queue[bytes | int] = asyncio.Queue(_MAX_CHUNKS)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._watching = asyncio.create_task(self._watch(asyncio.create_task(self._take(reader))))
        return address

    async def _take(self, reader: asyncio.StreamReader) -> None:
        while output := await reader.read(_CHUNK_BYTES):
            await self._output.put(output)

    async def _watch(self, taking: asyncio.Task[None]) -> None:
        """Wait for the end of the worker; then kill what it left running."""
        code = await self._process.wait()
        await self.kill()
        await asyncio.wait({taking}, timeout=_DRAIN_S)
        await self._output.put(code)

    async def read(self) -> bytes | int:
        """The worker's next output, empty if there is none, or its exit code when it has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                return await self._output.get()
        return b""

    async def close(self) -> None:
        with suppress(BrokenPipeError):
            os.write(self._lifeline, b"\n")

    async def kill(self) -> None:
        """Kill the worker and whatever it started: it leads a process group of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _options(needs: dict[str, float]) -> dict[str, Any]:
    """Resources as Ray's options; those not named are not reserved."""
    named = {option: needs.get(key, 0) for key, option in _OPTIONS.items()}
    return {**named, "resources": {key: amount for key, amount in needs.items() if key not in _OPTIONS}}


def _listed(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {key}" for key, amount in resources.items()) or "nothing"


def _reason(error: BaseException) -> str:
    """The line of Ray's error that gives the cause."""
    # A launcher's own error comes with its whole trace, and the error itself as the cause.
    lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "because" in line), lines[0])
