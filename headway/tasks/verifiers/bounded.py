"""One function in a process of its own: a call that takes too long, or too much memory, costs that process alone.

For verifiers whose work depends on hostile text (symbolic mathematics, a user's regular expressions): the caller is a
verifier's process with its libraries loaded; the function runs in a fork of it, one call after another. A call that
exceeds its limits raises `Exceeded`, the fork is killed, and the next call forks again, in milliseconds. Behind the
filter of `headway.tasks.sandbox.seccomp`, the fork starts no process, opens no connection and changes no file.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from headway.runtime import process_tree
from headway.tasks.sandbox import seccomp
from headway.tasks.sandbox.pool import queued_s, wait_readable
from headway.tasks.sandbox.wire import WireError, decode, encode, receive, send


class Exceeded(Exception):
    """The call ran out of time or memory, or its process crashed: the text's doing, not the verifier's."""


class Bounded:
    """Calls `function`, plain values in and out: `deadline_s` for each call, `memory_mb` beyond what is loaded.

    Time that the process was ready to run and got no processor extends the deadline, up to four times it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        deadline_s: float = 3.0,
        memory_mb: int = 1024,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._function, self._deadline_s, self._memory_mb, self._prepare = function, deadline_s, memory_mb, prepare
        self._lock = threading.Lock()
        self._child = self._owner = 0
        self._line = (-1, -1)

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns; what it raises is a RuntimeError here."""
        with self._lock:
            if self._owner != os.getpid():  # a copy of this process has no child of its own yet
                self._start()
            try:
                send(self._line[1], encode(list(arguments)))
                kind, value = self._hear()
            except (WireError, OSError) as error:
                self._end()
                raise Exceeded(f"the comparison ended: {error}") from None
        if kind == "exceeded":
            raise Exceeded(value)
        if kind == "raised":
            raise RuntimeError(value)
        return value

    def within_limits(self, *arguments: Any, otherwise: Any) -> Any:
        """What the function returns, or `otherwise` where the call exceeds its limits."""
        with contextlib.suppress(Exceeded):
            return self(*arguments)
        return otherwise

    def close(self) -> None:
        with self._lock:
            if self._owner == os.getpid():
                self._end()

    def _hear(self) -> Any:
        deadline, queued = time.monotonic() + self._deadline_s, queued_s(self._child)
        if not wait_readable(self._line[0], self._child, deadline, queued, longest_s=3 * self._deadline_s):
            raise WireError(f"it took longer than {self._deadline_s:g} s")
        return decode(receive(self._line[0]))

    def _start(self) -> None:
        if self._prepare is not None:
            self._prepare()  # here, so that no call waits for it, and once, whatever number of forks there will be
        there, here = os.pipe(), os.pipe()
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            _serve(self._function, there[0], here[1], parent, self._memory_mb)
        os.close(there[0])
        os.close(here[1])
        self._line, self._owner = (here[0], there[1]), parent
        process_tree.SPARED.add(self._child)

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._child, 0)
        process_tree.SPARED.discard(self._child)
        for descriptor in self._line:
            os.close(descriptor)
        self._owner = 0


def _serve(function: Callable[..., Any], reading: int, writing: int, parent: int, memory_mb: int) -> NoReturn:
    try:
        process_tree.set_death_signal(signal.SIGKILL, parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        low, high = sorted((reading, writing))
        os.closerange(3, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, 4096)
        # What a function prints goes nowhere; the files behind these may be among those just closed.
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        _limit_memory(memory_mb)
        if refusal := seccomp.install(seccomp.program(read_only=True)):
            send(writing, encode(["raised", f"the kernel takes no filter of system calls: {refusal}"]))
            os._exit(1)
        while True:
            arguments = decode(receive(reading))
            send(writing, encode(_answer(function, arguments)))
    finally:
        os._exit(0)


def _answer(function: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    try:
        return ["returned", function(*arguments)]
    except (MemoryError, RecursionError, OverflowError) as error:
        return ["exceeded", type(error).__name__]
    except Exception as error:
        return ["raised", f"{type(error).__name__}: {error}"[:500]]


def _limit_memory(extra_mb: int) -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    most = now + (extra_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
