"""Every worker in a process of its own on this machine.

Invariant that lives here:
 15. Nothing hangs: a worker that dies fails what is pending on it, with its name and its last words; one that does
     not close in time is killed; none outlives its parent, however the parent ends.
"""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from headway import codec
from headway.errors import WorkerDied
from headway.runtime import channel
from headway.runtime.handle import Handle, Peer, find_peer, join_run, leave_run, remote_methods

T = TypeVar("T")

CLOSE_S = 10.0
_LOG = logging.getLogger(__name__)
_BACKLOG = 4096  # clients that may connect before a busy worker accepts them
_MAX_DIRECTORY = 80  # characters; a Unix-domain socket's whole path must stay below 108
_TAIL_BYTES = 8192


@dataclass
class _Worker:
    peer: Peer
    process: asyncio.subprocess.Process
    lifeline: int
    log_offset: int
    closing: bool = False

    @property
    def ended(self) -> asyncio.Task[WorkerDied]:
        assert self.peer.exit is not None
        return self.peer.exit

    def kill(self) -> None:
        """Kill the worker and whatever it started: it leads a process group of its own."""
        if not self.ended.done():  # afterwards the number may be another's
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def obituary(self, code: int) -> WorkerDied:
        if self.closing:
            return WorkerDied(f"worker {self.peer.name} was closed")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last_words = self._last_words()
        said = f"last words: {last_words!r}" if last_words else "it left no last words"
        sentence = f"worker {self.peer.name} ended ({how}) while it was still needed"
        return WorkerDied(f"{sentence}; {said}; see {self.peer.log}")

    def _last_words(self) -> str:
        lines: list[str] = []
        with suppress(OSError), open(self.peer.log, "rb") as log:
            log.seek(max(self.log_offset, os.path.getsize(self.peer.log) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class LocalRuntime:
    """Standard output and error of worker NAME go to `log_dir`/NAME.log; `deadline_s` bounds each call."""

    def __init__(self, log_dir: Path, deadline_s: float) -> None:
        self._log_dir, self._deadline_s = log_dir, deadline_s
        log_dir.mkdir(parents=True, exist_ok=True)
        short = None if len(tempfile.gettempdir()) < _MAX_DIRECTORY else "/tmp"
        self._sockets = tempfile.mkdtemp(prefix="headway-", dir=short)
        self._token = secrets.token_bytes(channel.TOKEN_BYTES)
        join_run(self._sockets, self._token)
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._deaths: list[WorkerDied] = []
        self._death = asyncio.Event()

    async def start(self, name: str, cls: type[T], *args: Any, threads: int = 1) -> T:
        spec = (_class_path(cls), [str(entry) for entry in sys.path], threads, codec.encode(list(args)))
        worker = await self._spawn(name, threads)
        try:
            await worker.peer.call("open", spec, {}, self._deadline_s)
        except BaseException:
            worker.closing = True
            worker.kill()
            await asyncio.wait({worker.ended}, timeout=CLOSE_S)
            raise
        return cast(T, Handle(worker.peer, remote_methods(cls), self._deadline_s))

    async def failure(self) -> WorkerDied:
        await self._death.wait()
        return WorkerDied(str(self._deaths[0]))

    async def stop(self, name: str) -> None:
        for worker in [worker for worker in self._workers if worker.peer.name == name]:
            await self._stop(worker)

    async def close(self) -> None:
        try:
            for worker in reversed(self._workers):
                await self._stop(worker)
        finally:
            for worker in self._workers:
                worker.closing = True
                worker.kill()
                os.close(worker.lifeline)
            self._workers.clear()
            shutil.rmtree(self._sockets, ignore_errors=True)
            leave_run(self._sockets)

    async def _spawn(self, name: str, threads: int) -> _Worker:
        path, log = f"{self._sockets}/{self._num_started}", self._log_dir / f"{name}.log"
        self._num_started += 1
        # The parent listens before the child exists, so nobody ever connects too early.
        with socket.socket(socket.AF_UNIX) as listener, log.open("ab") as output:
            listener.bind(path)
            listener.listen(_BACKLOG)
            log_offset = output.tell()  # the child moves the position they share
            process, lifeline = await self._execute(name, threads, listener, output)
        worker = _Worker(find_peer(name, path, str(log)), process, lifeline, log_offset)
        worker.peer.exit = asyncio.create_task(self._watch(worker))
        self._workers.append(worker)
        return worker

    async def _execute(
        self, name: str, threads: int, listener: socket.socket, output: BinaryIO
    ) -> tuple[asyncio.subprocess.Process, int]:
        read_end, lifeline = os.pipe()
        try:
            os.write(lifeline, self._token)
            # Not asyncio's PIPE: in Python 3.11 its wait() also waits for every process that inherited the pipe.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-u", "-m", "headway.runtime.worker", name, str(listener.fileno())),
                stdin=read_end,
                stdout=output,
                stderr=output,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                env=_environment(threads),
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(read_end)
        return process, lifeline

    async def _watch(self, worker: _Worker) -> WorkerDied:
        """Wait for the end of a worker; then fail what is pending on it and kill what it left running."""
        code = await worker.process.wait()
        worker.kill()
        error = worker.obituary(code)
        worker.peer.disconnect()
        if not worker.closing:
            self._deaths.append(error)
            self._death.set()
        return error

    async def _stop(self, worker: _Worker) -> None:
        if worker.ended.done():
            return
        worker.closing = True
        close_s = min(CLOSE_S, self._deadline_s)
        with suppress(BrokenPipeError):
            os.write(worker.lifeline, b"\n")
        await asyncio.wait({worker.ended}, timeout=close_s)
        if not worker.ended.done():
            _LOG.warning("worker %s did not close within %g s and was killed", worker.peer.name, close_s)
            worker.kill()
            await asyncio.wait({worker.ended}, timeout=close_s)
        elif worker.process.returncode:
            _LOG.warning("worker %s did not close cleanly; see %s", worker.peer.name, worker.peer.log)


def _class_path(cls: type) -> str:
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise TypeError(f"{cls.__qualname__} must be defined at the top of a module that another process can import")
    return f"{cls.__module__}:{cls.__qualname__}"


def _environment(threads: int) -> dict[str, str]:
    package_root = str(Path(codec.__file__).parent.parent)
    python_path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    # By default libgomp's threads spin at every barrier: beside another busy process, products become 10 times slower.
    patience = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
    return {**os.environ, **counts, **patience, "PYTHONPATH": os.pathsep.join(python_path)}
