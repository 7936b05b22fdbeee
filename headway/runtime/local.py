"""Every worker in a process of its own on this machine.

Invariant that lives here:
 15. Bounded waits: a worker that dies fails what is pending on it, with its name and its last output; one that does
     not close in time is killed; none outlives its parent, however the parent ends.
"""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from headway.errors import CAUSE, HeadwayError, WorkerDied, translated
from headway.runtime import channel
from headway.runtime.handle import Handle, Peer, find_peer, join_run, leave_run, remote_methods
from headway.runtime.launch import closed, describe_exit, execute, exit_error, open_arguments

T = TypeVar("T")

CLOSE_S = 10.0
_LOG = logging.getLogger(__name__)
_PREFIX, _SOCKETS_NAME = "headway-", "sockets"
_MAX_DIRECTORY = 24  # characters; the whole path of a Unix-domain socket, Ray's own among them, must stay below 108


@dataclass(eq=False)
class _Worker:
    peer: Peer
    process: asyncio.subprocess.Process
    lifeline: int
    log_offset: int
    opened: bool = False
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

    def exit_error(self, code: int) -> WorkerDied:
        return closed(self.peer) if self.closing else exit_error(self.peer, describe_exit(code), self.log_offset)


class LocalRuntime:
    """Standard output and error of worker NAME go to `log_dir`/NAME.log; `deadline_s` bounds each call, and `silence_s`
    how long a worker that starts may leave a health check unanswered."""

    def __init__(self, log_dir: Path, deadline_s: float, silence_s: float = 0.0) -> None:
        self._log_dir, self._deadline_s, self._silence_s = log_dir, deadline_s, silence_s or deadline_s
        short = None if len(tempfile.gettempdir()) < _MAX_DIRECTORY else "/tmp"
        self._owner_file = log_dir / _SOCKETS_NAME
        self._remove_left_behind()
        self.directory = tempfile.mkdtemp(prefix=_PREFIX, dir=short)
        with suppress(OSError):  # on a full disk the next run cannot remove the directory
            log_dir.mkdir(parents=True, exist_ok=True)
            self._owner_file.write_text(f"{os.getpid()} {self.directory}")
        self._token = secrets.token_bytes(channel.TOKEN_BYTES)
        join_run(self._run, self._token)
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._deaths: asyncio.Queue[WorkerDied] = asyncio.Queue()

    def _remove_left_behind(self) -> None:
        """Remove the directory of sockets of an earlier run that was killed before a worker could remove it."""
        if not self._owner_file.exists():
            return
        import psutil  # 12 ms, and few runs follow one that was killed

        owner, _, earlier = self._owner_file.read_text().partition(" ")
        if Path(earlier).name.startswith(_PREFIX) and not psutil.pid_exists(int(owner)):
            shutil.rmtree(earlier, ignore_errors=True)

    @property
    def _run(self) -> str:
        return os.path.basename(self.directory)

    async def start(self, name: str, cls: type[T], *args: Any, threads: int = 1) -> T:
        spec = open_arguments(cls, args, threads)
        worker = await self._spawn(name, threads)
        try:
            await worker.peer.open(spec, self._deadline_s, self._silence_s)
            if worker.ended.done():
                raise worker.ended.result()
            worker.opened = True
        except BaseException:
            worker.closing = True
            worker.kill()
            await asyncio.wait({worker.ended}, timeout=CLOSE_S)
            self._forget(worker)
            raise
        return cast(T, Handle(worker.peer, remote_methods(cls), self._deadline_s))

    async def num_machines(self) -> int:
        return 1

    async def failure(self) -> WorkerDied:
        return await self._deaths.get()

    async def stop(self, name: str) -> None:
        for worker in [worker for worker in self._workers if worker.peer.name == name]:
            try:
                await self._stop(worker)
            finally:
                self._forget(worker)

    async def close(self) -> None:
        try:
            for worker in reversed(list(self._workers)):
                await self._stop(worker)
        finally:
            for worker in list(self._workers):
                self._forget(worker)
            shutil.rmtree(self.directory, ignore_errors=True)
            with suppress(OSError):  # it, or all logs, may be gone
                self._owner_file.unlink()
            leave_run(self._run)

    def _forget(self, worker: _Worker) -> None:
        """Release everything of a worker, however it ended."""
        worker.closing = True
        worker.kill()
        if worker in self._workers:
            self._workers.remove(worker)
            os.close(worker.lifeline)
            worker.lifeline = -1

    async def _spawn(self, name: str, threads: int) -> _Worker:
        log = self._log_dir / f"{name}.log"
        # The parent listens before the child exists, so no client connects too early.
        listener, address = self._listen()
        with listener, self._open_log(log) as output:
            log_offset = output.tell()  # the child moves the position they share
            process, lifeline = await execute(name, address, listener, output.fileno(), self._token, threads)
        worker = _Worker(find_peer(name, address, str(log)), process, lifeline, log_offset)
        worker.peer.exit = asyncio.create_task(self._watch(worker))
        self._workers.append(worker)
        return worker

    def _open_log(self, log: Path) -> BinaryIO:
        """To append to; somebody may have removed the directory of logs while the run goes on."""
        with translated(OSError, HeadwayError, f"cannot write {log}: {CAUSE}; make room or repair the disk"):
            self._log_dir.mkdir(parents=True, exist_ok=True)
            return log.open("ab")

    def _listen(self) -> tuple[socket.socket, str]:
        self._num_started += 1
        os.makedirs(self.directory, mode=0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        return channel.listen_on_path(self.directory, self._num_started)

    async def _watch(self, worker: _Worker) -> WorkerDied:
        """Wait for the end of a worker; then fail what is pending on it and kill what it left running."""
        code = await worker.process.wait()
        worker.kill()
        error = worker.exit_error(code)
        worker.peer.disconnect()
        if worker.opened and not worker.closing:
            self._deaths.put_nowait(error)
        self._forget(worker)
        return error

    async def _stop(self, worker: _Worker) -> None:
        if worker.ended.done():
            return
        worker.closing = True
        close_s = min(CLOSE_S, self._deadline_s)
        with suppress(OSError):
            os.write(worker.lifeline, b"\n")
        await asyncio.wait({worker.ended}, timeout=close_s)
        if not worker.ended.done():
            _LOG.warning("worker %s did not close within %g s and was killed", worker.peer.name, close_s)
            worker.kill()
            await asyncio.wait({worker.ended}, timeout=close_s)
        elif worker.process.returncode:
            _LOG.warning("worker %s did not close cleanly; see %s", worker.peer.name, worker.peer.log)
