"""The main of a worker process: `python -m headway.runtime.worker NAME SOCKET_FD ADDRESS`, started by `launch.py`.

Standard input is the lifeline: the parent writes the run's token, later one byte that asks the worker to close, and its
end means that the parent has died. Which class to construct arrives as the first call, `open`.
"""

import asyncio
import faulthandler
import hmac
import importlib
import os
import secrets
import select
import shutil
import signal
import socket
import stat
import sys
import threading
import warnings
from contextlib import aclosing
from typing import Any

from headway import codec
from headway.runtime import channel
from headway.runtime.channel import Channel, error_to_plain
from headway.runtime.compute import awaitable, offload, start_compute_thread
from headway.runtime.handle import join_run, remote_methods
from headway.runtime.process_tree import on_parent_death

_PROOF_S = 60.0  # a client that has not proved the token by then is disconnected
_LONGEST_OUTPUT = 64 << 20  # bytes of a worker's log
_MAX_UNVERIFIED = 1024  # clients not verified yet; one more disconnects the oldest


class Service:
    """The one object of this process, and the calls that run on it."""

    def __init__(self, name: str, address: str, token: bytes) -> None:
        self.name, self.address, self.token = name, address, token
        self.tasks: set[asyncio.Task[None]] = set()
        self.unverified: dict[Connection, None] = {}  # oldest first
        self.closing = False
        self.methods: dict[str, bool] = {"open": False, "is_alive": False}
        self._object: Any = self

    def method(self, name: str) -> Any:
        return awaitable(getattr(self._object, name))

    async def open(self, class_path: str, python_path: list[str], threads: int, args: bytes) -> None:
        """Import and construct; from here on the calls are the object's."""
        sys.path[:] = python_path
        module, _, qualified_name = class_path.partition(":")
        cls: Any = await offload(importlib.import_module, module)  # for seconds, while health checks must be answered
        for part in qualified_name.split("."):
            cls = getattr(cls, part)
        worker = await offload(_construct, cls, threads, args)
        if hasattr(worker, "open"):
            await worker.open()
        self._object, self.methods = worker, remote_methods(cls)

    async def is_alive(self) -> None:
        """Health check while the worker opens; afterwards only the object's own methods are called."""

    async def close(self) -> None:
        self.closing = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._object is not self and hasattr(self._object, "close"):
            await self._object.close()


def _construct(cls: Any, threads: int, args: bytes) -> Any:
    # After the class's module is imported: only then are the message classes of its arguments registered.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    return cls(*codec.decode(args))


class Connection(Channel):
    """The calls of one client process; they are cancelled when it disconnects."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service
        self._nonces = b""  # the client's and then ours, once it has sent its own
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._patience = self._loop.call_later(_PROOF_S, self.transport.abort)
        waiting = self._service.unverified
        waiting[self] = None
        if len(waiting) > _MAX_UNVERIFIED:
            oldest = next(iter(waiting))
            del waiting[oldest]
            oldest.transport.abort()

    def prove(self, kind: int, payload: bytes) -> bool:
        service = self._service
        if kind == channel.HELLO and len(payload) == channel.NONCE_BYTES and not self._nonces:
            nonce = secrets.token_bytes(channel.NONCE_BYTES)
            self._nonces = payload + nonce
            ours = channel.proof(service.token, "worker", service.address, self._nonces)
            self.send(channel.CHALLENGE, 0, nonce + ours)
            return True
        expected = channel.proof(service.token, "client", service.address, self._nonces)
        if kind != channel.PROOF or not self._nonces or not hmac.compare_digest(payload, expected):
            return False
        self._stop_waiting()
        self.verified()
        return True

    def _stop_waiting(self) -> None:
        self._service.unverified.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()

    def frame_received(self, kind: int, call: int, payload: memoryview) -> None:
        if kind == channel.CALL:
            self._start_call(call, payload)
        elif kind == channel.CANCEL and call in self._tasks:
            self._tasks[call].cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        for task in self._tasks.values():
            task.cancel()

    def _start_call(self, call: int, payload: memoryview) -> None:
        try:
            method, args, kwargs = codec.decode(payload)
        except Exception as error:
            self._send_error(call, f"worker {self._service.name}: reading a call", error)
            return
        task = self._loop.create_task(self._answer(call, method, args, kwargs))
        self._tasks[call] = task
        self._service.tasks.add(task)
        task.add_done_callback(self._service.tasks.discard)

    async def _answer(self, call: int, method: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        try:
            if method not in self._service.methods:
                raise AttributeError(f"worker {self._service.name} has no method {method!r}")
            if self._service.methods[method]:
                await self._send_items(call, self._service.method(method)(*args, **kwargs))
            else:
                result = await self._service.method(method)(*args, **kwargs)
                self.send(channel.RESULT, call, codec.encode(result))
        except asyncio.CancelledError as error:
            # The client has stopped waiting, unless the method cancelled itself. A closing worker answers nothing.
            if not self._service.closing:
                self._send_error(call, f"{self._service.name}.{method}", error)
        except Exception as error:
            self._send_error(call, f"{self._service.name}.{method}", error)
        finally:
            del self._tasks[call]

    async def _send_items(self, call: int, items: Any) -> None:
        async with aclosing(items):
            async for item in items:
                self.send(channel.ITEM, call, codec.encode(item))
                await self.drain()
        self.send(channel.END, call)

    def _send_error(self, call: int, where: str, error: BaseException) -> None:
        self.send(channel.ERROR, call, codec.encode(error_to_plain(where, error)))


class Lifeline:
    """The pipe from the parent; when it breaks, this process and all it started are killed."""

    def __init__(self, sockets: str | None) -> None:
        self._sockets = sockets  # the run's directory of sockets on this machine, if it has one
        # User code that reads standard input must not consume what the parent writes.
        self._fd = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        # A stopped process does not see the end of the pipe, and a pipe another process inherited does not end.
        on_parent_death(os.getppid(), self._vanish)

    def leave_reaper(self) -> None:
        """Fork a process that kills this group when the pipe breaks: this process may be stopped, or killed alone.

        So does Ray 2.60: it kills the child of an actor that has to end, and nothing below that child.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: the child takes no thread's lock
            if os.fork():
                return
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, self._fd)
        os.closerange(self._fd + 1, os.sysconf("SC_OPEN_MAX"))
        hang_up = select.poll()
        hang_up.register(self._fd, 0)  # poll reports a hang-up without being asked
        hang_up.poll()
        os.killpg(0, signal.SIGKILL)

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += os.read(self._fd, num_bytes - len(data)) or self._vanish()
        return data

    def watch(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """On a thread of its own, so that a blocked event loop does not outlive the parent."""
        self.read(1)
        loop.call_soon_threadsafe(stop.set)
        self.read(1)

    def _vanish(self) -> bytes:
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)
        return b""


async def _bound_output() -> None:
    """Truncate a log that user code's output made too long, before it fills the disk."""
    while stat.S_ISREG(os.fstat(1).st_mode):
        if os.fstat(1).st_size > _LONGEST_OUTPUT:
            os.ftruncate(1, 0)
            os.write(1, f"more than {_LONGEST_OUTPUT >> 20} MiB of output were removed here\n".encode())
        await asyncio.sleep(1.0)


async def _serve(service: Service, lifeline: Lifeline, listener: socket.socket) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    bounding = loop.create_task(_bound_output())
    threading.Thread(target=lifeline.watch, args=(loop, stop), daemon=True).start()
    listen = loop.create_unix_server if channel.is_unix(service.address) else loop.create_server
    server = await listen(lambda: Connection(service), sock=listener, backlog=channel.BACKLOG)
    await stop.wait()
    bounding.cancel()
    server.close()
    await service.close()


def main() -> None:
    name, listener, address = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which decides
    os.umask(0o077)  # under Ray it is the node's
    faulthandler.enable()
    lifeline = Lifeline(os.path.dirname(address) if channel.is_unix(address) else None)
    if not channel.is_unix(address):
        lifeline.leave_reaper()
    token = lifeline.read(channel.TOKEN_BYTES)
    join_run(channel.run_of(address), token)
    start_compute_thread()
    asyncio.run(_serve(Service(name, address, token), lifeline, listener))
    # Not sys.exit, which would wait for the compute thread, whose work may never end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
