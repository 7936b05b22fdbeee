"""One place of the reward pool: a guardian and its worker, started by `reward_pool.py`, one call at a time.

The worker imports the verifier once and runs it; the guardian never runs a user's code, so it always answers. When the
worker ends, or the pool closes the guardian's standard input, or the pool dies, the guardian kills the worker's process
group and then every descendant that left the group, and ends with the worker's status (128 + N for signal N).

Invariant that lives here:
 10. Errors are never rewards: what a verifier returns becomes a score only when it is one finite number.

The wire is one socket that belongs to the worker alone; standard input is empty for the verifier, and what it prints
goes to standard error. Frames are a length and then one encoded value. The worker says [READY] or [BROKEN, sentence]
once, and to each request [source, task, text] first [STARTED] and then [kind, score, sentence, seconds, components].
Only light modules are imported here: the worker forks before numpy exists, and torch never does.
"""

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from headway.errors import ConfigError, describe
from headway.runtime import process_tree
from headway.tasks.scoring import NotAScore, Scorer

HEADER = struct.Struct(">Q")
READY, BROKEN, STARTED = "ready", "broken", "started"
SCORED, RAISED, NOT_A_SCORE = "scored", "raised", "not_a_score"

_LONGEST_SENTENCE = 500


def main() -> NoReturn:
    """Become the guardian and its worker; arguments: the worker's descriptor, the pool's process id, the worker's
    memory in bytes, the verifier."""
    descriptor, pool, memory, reference = *map(int, sys.argv[1:4]), sys.argv[4]
    process_tree.adopt_orphans()
    guardian = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        process_tree.set_death_signal(signal.SIGKILL, guardian)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        _serve_and_end(descriptor, reference)
    os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        os.setpgid(worker, worker)  # both sides set it, so that neither can run ahead of the other
    os._exit(process_tree.guard(worker, pool))


def _serve_and_end(descriptor: int, reference: str) -> NoReturn:
    try:
        _serve(descriptor, reference)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)  # at once: a thread the verifier left behind would keep an ordinary exit waiting


def _serve(descriptor: int, reference: str) -> None:
    worker = os.getpid()
    process_tree.adopt_orphans()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the pool's workers are the parallelism
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    try:
        scorer, greeting = Scorer(reference), [READY]
    except ConfigError as error:
        scorer, greeting = None, [BROKEN, _printable(str(error).removeprefix(f"{reference}: "))]
    _end_if_forked(worker)
    spare = process_tree.children()
    _send(connection, greeting)
    if scorer is None:
        return
    with contextlib.suppress(ConnectionError):  # the pool has gone, and nobody waits for an answer
        while request := _receive(connection):
            _send(connection, [STARTED])
            answer = _judge(scorer, *request)
            _end_if_forked(worker)
            process_tree.kill_children(spare)
            _send(connection, answer)


def _end_if_forked(worker: int) -> None:
    """A user's code that forks may return twice; only the worker itself answers."""
    if os.getpid() != worker:
        os._exit(0)


def _judge(scorer: Scorer, source: str, task: dict[str, Any], text: bytes) -> list[Any]:
    started = time.monotonic()
    try:
        score, components = scorer.score(source, task, text.decode("utf-8", "surrogatepass"))
    except NotAScore as error:
        sentence = _printable(f"returned {error}, and a score is one finite number, or a dict of named ones")
        return [NOT_A_SCORE, 0.0, sentence, time.monotonic() - started, {}]
    except BaseException as error:  # a user's code: sys.exit is no more an answer than any other exception
        return [RAISED, 0.0, _printable(f"raised {describe(error)}"), time.monotonic() - started, {}]
    return [SCORED, score, "", time.monotonic() - started, components]


def _printable(sentence: str) -> str:
    """On one line, not too long, and without what no file or terminal can hold."""
    line = " ".join(sentence[: 4 * _LONGEST_SENTENCE].split())
    return line[:_LONGEST_SENTENCE].encode("utf-8", "backslashreplace").decode()


def _send(connection: socket.socket, value: Any) -> None:
    from headway import codec

    payload = codec.encode(value)
    connection.sendall(HEADER.pack(len(payload)) + payload)


def _receive(connection: socket.socket) -> Any:
    """The next request, or None when the pool has closed the line."""
    from headway import codec

    header = _receive_exactly(connection, HEADER.size)
    payload = _receive_exactly(connection, *HEADER.unpack(header)) if header else b""
    return codec.decode(payload) if payload else None


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        received = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not received:
            return b""
        data += received
    return bytes(data)
