"""Every worker in a process of its own on some node of a Ray cluster.

Ray places and starts workers and forwards their output (`driver.py`, in a process of its own); calls go over channels
from process to process, as on one machine. So a run here equals one of the local runtime bit for bit.

Invariant that lives here:
 15. Bounded waits: a worker that dies, or whose node does, fails what is pending on it, with its name and its last
     output; one that does not close in time is killed; none outlives the controller.
"""

import asyncio
import importlib.util
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from headway.errors import ConfigError, DeadlineExceeded, HeadwayError, WorkerDied
from headway.runtime import channel
from headway.runtime.driver import Cluster
from headway.runtime.handle import Handle, Peer, find_peer, join_run, leave_run, remote_methods, with_deadline
from headway.runtime.launch import closed, describe_exit, exit_error, open_arguments
from headway.runtime.local import CLOSE_S, LocalRuntime

T = TypeVar("T")

Resources = Mapping[str, float]
"""How much of what a worker needs at its node: CPU, GPU, memory in bytes, or a resource of the cluster's own."""

_LOG = logging.getLogger(__name__)
_DRIVER = "ray"
_CONNECT_S = 60.0
_PLACE_S = 300.0
_SILENCE_S = 120.0  # longer than the driver waits for a launcher, so that the error names the launcher


def check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("run.runtime = ray needs Ray, which is not installed; pip install 'headway-rl[ray]'")


@dataclass
class _RayWorker:
    number: int
    cluster: Cluster
    peer: Peer
    log: BinaryIO
    log_offset: int
    how: str = "exit status unknown"
    opened: bool = False
    closing: bool = False

    @property
    def ended(self) -> asyncio.Task[WorkerDied]:
        assert self.peer.exit is not None
        return self.peer.exit


class RayRuntime:
    """The output of worker NAME goes to `log_dir`/NAME.log; `deadline_s` bounds each call.

    `resources` is by kind of worker: "engine" is for workers named engine, engine-0, engine-1 and so on.
    """

    def __init__(
        self,
        log_dir: Path,
        deadline_s: float,
        address: str = "",
        resources: Mapping[str, Resources] | None = None,
        silence_s: float = 0.0,
    ) -> None:
        check_ray()
        self._silence_s = silence_s or deadline_s
        self._log_dir, self._deadline_s, self._address = log_dir, deadline_s, address
        self._resources = resources or {}
        self._local = LocalRuntime(log_dir, min(_CONNECT_S, deadline_s))
        self._run, self._token = f"headway-{secrets.token_hex(8)}", secrets.token_bytes(channel.TOKEN_BYTES)
        join_run(self._run, self._token)
        self._num_machines = 0  # unknown
        self._connecting: asyncio.Task[Cluster] | None = None
        self._workers: dict[str, _RayWorker] = {}
        self._num_started = 0
        self._deaths: asyncio.Queue[WorkerDied] = asyncio.Queue()

    async def start(self, name: str, cls: type[T], *args: Any, threads: int = 1) -> T:
        spec = open_arguments(cls, args, threads)
        worker = await self._place(name, threads)
        try:
            await worker.peer.open(spec, self._deadline_s, self._silence_s)
            if worker.ended.done():
                raise worker.ended.result()
            worker.opened = True
        except BaseException:
            await self._end(worker, kill=True)
            raise
        return cast(T, Handle(worker.peer, remote_methods(cls), self._deadline_s))

    async def num_machines(self) -> int:
        """Counted once, so that all workers get the same number; connects to the cluster, or starts one."""
        cluster = await self._connect()
        self._num_machines = self._num_machines or await cluster.num_machines()
        return self._num_machines

    async def failure(self) -> WorkerDied:
        return await self._deaths.get()

    async def stop(self, name: str) -> None:
        if (worker := self._workers.pop(name, None)) is not None:
            await self._end(worker)

    async def close(self) -> None:
        try:
            for name in reversed([*self._workers]):
                await self.stop(name)
        finally:
            if self._connecting is not None:
                self._connecting.cancel()
                await asyncio.wait({self._connecting})
            await self._local.close()  # ends the driver, with it Ray, and with Ray every worker left
            leave_run(self._run)

    async def _connect(self) -> Cluster:
        """The driver, started when there is none."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._start_driver())
        return await asyncio.shield(self._connecting)

    async def _start_driver(self) -> Cluster:
        place_s = min(_PLACE_S, self._deadline_s)
        try:
            cluster = await self._local.start(_DRIVER, Cluster, self._address, self._local.directory, place_s)
        except BaseException as error:
            self._connecting = None
            if not isinstance(error, DeadlineExceeded):
                raise
            where = f"ray.address = {self._address}" if self._address else "a Ray cluster on this machine"
            raise ConfigError(f"{where} does not answer; is it there? ({error})") from error
        return with_deadline(cluster, 2 * place_s)

    async def _place(self, name: str, threads: int) -> _RayWorker:
        await self.stop(name)
        cluster = await self._connect()
        number, path = self._num_started, self._log_dir / f"{name}.log"
        self._num_started += 1
        needs = dict(self._resources.get(re.sub(r"-\d+$", "", name), {}))
        try:
            where = os.getcwd(), await self.num_machines() > 1
            address = await cluster.place(number, name, needs, threads, *where, self._run, self._token)
        except WorkerDied as error:
            if error.worker == _DRIVER:
                self._connecting = None  # the next start makes a new one
            raise
        log = path.open("ab", buffering=0)
        worker = _RayWorker(number, cluster, find_peer(name, address, str(path)), log, log.tell())
        worker.peer.exit = asyncio.create_task(self._follow(worker))
        self._workers[name] = worker
        return worker

    async def _follow(self, worker: _RayWorker) -> WorkerDied:
        """Log a worker's output until it ends; then fail the calls pending on it."""
        try:
            async for output in with_deadline(worker.cluster, _SILENCE_S).follow(worker.number):
                if isinstance(output, int):
                    worker.how = describe_exit(output)
                else:
                    with suppress(OSError):  # a full disk is reported by the writers of the record
                        worker.log.write(output)
        except HeadwayError as error:
            worker.how = str(error)
            if isinstance(error, DeadlineExceeded):  # the driver hangs; ending it ends its workers
                self._connecting = None
                await self._local.stop(_DRIVER)
        finally:
            worker.log.close()
        died = closed(worker.peer) if worker.closing else exit_error(worker.peer, worker.how, worker.log_offset)
        worker.peer.disconnect()
        if worker.opened and not worker.closing:
            self._deaths.put_nowait(died)
        return died

    async def _end(self, worker: _RayWorker, kill: bool = False) -> None:
        """Ask a worker to close, and kill it if it does not."""
        if worker.ended.done():
            return
        worker.closing = True
        close_s = min(CLOSE_S, self._deadline_s)
        cluster = with_deadline(worker.cluster, close_s)
        if not kill:
            await self._wait_for(worker, close_s, cluster.close_worker(worker.number))
            if not worker.ended.done():
                _LOG.warning("worker %s did not close within %g s and was killed", worker.peer.name, close_s)
            elif worker.how != describe_exit(0):
                _LOG.warning("worker %s did not close cleanly; see %s", worker.peer.name, worker.peer.log)
        if not worker.ended.done():
            await self._wait_for(worker, close_s, cluster.kill_worker(worker.number))
        if not worker.ended.done():
            worker.ended.cancel()  # the driver then kills the launcher
            await asyncio.wait({worker.ended})
            worker.peer.disconnect()

    async def _wait_for(self, worker: _RayWorker, seconds: float, asking: Awaitable[None]) -> None:
        with suppress(HeadwayError):  # the worker may have ended meanwhile, or the driver with all of them
            await asking
        await asyncio.wait({worker.ended}, timeout=seconds)
