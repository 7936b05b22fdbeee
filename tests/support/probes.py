"""Workers for test_runtime.py, in a module of their own so that their processes import nothing else."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from headway.errors import ConfigError, RequestRefused


class StopsItself:
    """Does not get through its constructor."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Probe:
    """A worker with one method for each thing that can happen to a call."""

    def __init__(self, name: str = "probe", diary: str = "") -> None:
        self.name, self.diary = name, diary
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.gate = threading.Event()
        self.num_arrived = 0
        self.opened = False

    async def open(self) -> None:
        self.opened = True

    async def close(self) -> None:
        if self.diary:
            with open(self.diary, "a") as diary:
                diary.write(f"{self.name}\n")

    async def is_open(self) -> bool:
        return self.opened

    async def echo(self, value: Any, *, twice: bool = False) -> Any:
        return (value, value) if twice else value

    async def write_to_output(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, 1 << 20):
            os.write(1, b"x" * min(1 << 20, num_bytes - start))

    async def count(self, num: int) -> AsyncIterator[int]:
        for number in range(num):
            yield number

    async def endless(self) -> AsyncIterator[int]:
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def hang(self) -> None:
        self.arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def wait_arrived(self) -> None:
        await self.arrived.wait()

    async def wait_cancelled(self) -> None:
        await self.cancelled.wait()

    async def meet(self, num: int) -> int:
        """Return once `num` calls are inside this method together."""
        self.num_arrived += 1
        if self.num_arrived == num:
            self.arrived.set()
        await self.arrived.wait()
        return self.num_arrived

    async def refuse(self) -> None:
        raise RequestRefused("the request is too long; shorten it")

    async def break_down(self) -> None:
        raise ValueError("no such thing")

    async def give_unknown(self) -> object:
        return object()

    async def pid(self) -> int:
        return os.getpid()

    async def breed(self) -> int:
        """Fork a process that would outlive this one, holding all its files and sockets."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid

    async def setting(self, name: str) -> str:
        return os.environ[name]

    async def say(self, words: str) -> None:
        sys.stdout.write(f"{words}\n")

    async def leave(self, code: int) -> None:
        os._exit(code)

    def pass_gate(self) -> str:
        assert self.gate.wait(10)
        return threading.current_thread().name

    def repeat(self, value: Any, *, twice: bool = False) -> Any:
        return (value, value) if twice else value

    def refuse_synchronously(self) -> None:
        raise RequestRefused("the request is too long; shorten it")

    async def open_gate(self) -> str:
        self.gate.set()
        return threading.current_thread().name


class Caller:
    """A worker that is given the handle of another."""

    def __init__(self, probe: Probe, options: tuple[Probe, ...] = ()) -> None:
        self.probe, self.options = probe, options

    async def pid(self) -> int:
        return os.getpid()

    async def relay(self, method: str, *args: Any) -> Any:
        return await getattr(self.probe, method)(*args)

    async def relay_count(self, num: int) -> AsyncIterator[int]:
        async for number in self.options[0].count(num):
            yield number

    async def relay_to(self, probe: Probe, value: Any) -> Any:
        return await probe.echo(value)


class Broken:
    def __init__(self, how: str) -> None:
        if how == "config":
            raise ConfigError("model.path = 'x' is not a directory; name one")
        if how == "bug":
            raise KeyError("weights")
        os._exit(3)


class BrokenOpen:
    async def open(self) -> None:
        raise ConfigError("port 80 is in use; choose another")


class Stubborn:
    async def close(self) -> None:
        await asyncio.Event().wait()

    async def pid(self) -> int:
        return os.getpid()


class SlowToOpen(Probe):
    """Its constructor computes for some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
