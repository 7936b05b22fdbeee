"""Runtimes for tests, each kind by its name, with a worker to try things on."""

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import ray_cluster
from probes import Probe

from headway.runtime import channel
from headway.runtime.inline import InlineRuntime
from headway.runtime.local import LocalRuntime
from headway.runtime.protocol import Runtime
from headway.runtime.ray import RayRuntime

PROCESSES = ["local", "tcp", pytest.param("ray", marks=pytest.mark.slow)]
"""Over Unix-domain sockets, as on one machine; over TCP, as between nodes; on the nodes of a Ray cluster."""
everywhere = pytest.mark.parametrize("kind", ["inline", *PROCESSES])
in_processes = pytest.mark.parametrize("kind", PROCESSES)


class TcpRuntime(LocalRuntime):
    """Local processes that listen as workers on several machines do."""

    def _listen(self) -> tuple[socket.socket, str]:
        self._num_started += 1
        return channel.listen_on_host("127.0.0.1", self._run, self._num_started)


def make_runtime(kind: str, log_dir: Path, deadline_s: float) -> Runtime:
    if kind == "inline":
        return InlineRuntime()
    if kind == "ray":
        return RayRuntime(log_dir, deadline_s, ray_cluster.cluster().address, ray_cluster.PLACES)
    return {"local": LocalRuntime, "tcp": TcpRuntime}[kind](log_dir, deadline_s)


@asynccontextmanager
async def running(tmp_path: Path, kind: str = "local", deadline_s: float = 15.0) -> AsyncIterator[Runtime]:
    runtime = make_runtime(kind, tmp_path / "logs", deadline_s)
    try:
        await runtime.num_machines()  # starts Ray, where it is Ray
        yield runtime
    finally:
        await runtime.close()


def with_probe(
    tmp_path: Path, test: Callable[[Runtime, Probe], Awaitable[None]], kind: str = "local", deadline_s: float = 15.0
) -> None:
    async def body() -> None:
        async with running(tmp_path, kind, deadline_s) as runtime:
            await test(runtime, await runtime.start("probe", Probe))

    asyncio.run(body())


def wait_gone(pidfds: list[int], timeout_s: float = 10.0) -> None:
    """Return when every process has ended: a pidfd becomes readable at that moment."""
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], timeout_s)[0], "a process was left behind"
        os.close(pidfd)
