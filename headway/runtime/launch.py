"""Starts the process of a worker, on whichever machine, and describes how it exited."""

import asyncio
import os
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from headway import codec
from headway.errors import WorkerDied
from headway.runtime.handle import Peer

_TAIL_BYTES = 8192


async def execute(
    name: str,
    address: str,
    listener: socket.socket,
    output: int,
    token: bytes,
    threads: int,
    directory: str | None = None,
) -> tuple[asyncio.subprocess.Process, int]:
    """Start the process of a worker; returns it with the write end of its lifeline, on whose close it exits."""
    read_end, lifeline = os.pipe()
    with os.fdopen(read_end, "rb", buffering=0), ExitStack() as on_error:
        on_error.callback(os.close, lifeline)
        os.write(lifeline, token)
        # Not asyncio's PIPE: in Python 3.11 its wait() also waits for every process that inherited the pipe.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-u", "-m", "headway.runtime.worker", name, str(listener.fileno()), address),
            stdin=read_end,
            stdout=output,
            stderr=output,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
            env=_environment(threads),
            cwd=directory,
        )
        on_error.pop_all()
    return process, lifeline


def _environment(threads: int) -> dict[str, str]:
    package_root = str(Path(codec.__file__).parent.parent)
    python_path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    # By default libgomp's threads spin at every barrier: with another busy process, products become 10 times slower.
    spinning = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
    return {**os.environ, **counts, **spinning, "PYTHONPATH": os.pathsep.join(python_path)}


def open_arguments(cls: type, args: tuple[Any, ...], threads: int) -> tuple[str, list[str], int, bytes]:
    """The first call to a new worker: which class to construct with what, and where to import it from."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise TypeError(f"{cls.__qualname__} must be defined at the top of a module that another process can import")
    path = f"{cls.__module__}:{cls.__qualname__}"
    return path, [str(entry) for entry in sys.path], threads, codec.encode(list(args))


def describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def closed(peer: Peer) -> WorkerDied:
    return WorkerDied(f"worker {peer.name} was closed", peer.name)


def exit_error(peer: Peer, how: str, log_offset: int) -> WorkerDied:
    """How a worker ended, with its last output; its log before `log_offset` is an earlier incarnation's."""
    lines: list[str] = []
    with suppress(OSError), open(peer.log, "rb") as log:
        log.seek(max(log_offset, os.path.getsize(peer.log) - _TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    said = f"last output: {last!r}" if last else "no log output"
    sentence = f"worker {peer.name} ended ({how}) while it was still needed"
    return WorkerDied(f"{sentence}; {said}; see {peer.log}", peer.name)
