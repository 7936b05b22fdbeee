"""Sandboxes started in advance and used once each: a program goes in, a report comes out, everything in it is killed.

Limits are of two kinds. What a program may use of its sandbox (processor time, memory, files, output) the kernel
enforces inside; how long a verdict may take is measured here, from the moment the sandbox got its job, and ends in the
death of the process that holds the sandbox, which takes the whole process namespace with it.

Invariant that lives here:
 10. Errors are never rewards. A program that crashes, exits, exceeds a limit or breaks its own channel is a wrong
     answer. A sandbox that cannot be started or refuses to close is a `SandboxError`, and no verdict on any program.
"""

import contextlib
import marshal
import math
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.runtime import process_tree
from headway.tasks.sandbox import guest, isolation, seccomp, wire

START_DEADLINE_S = 30.0
"""For a new sandbox to say that it is ready."""

_WORTH_WAITING_S = 0.05
_UNCOUNTED = {"threads": -1, "scratch_files": 0}
"""No such limits, for a program that shares its user and /tmp with others."""

_BOOT = """
import os, sys, marshal, types
def take(size):
    data = b""
    while len(data) < size:
        data += os.read(int(sys.argv[1]), size - len(data)) or os._exit(3)
    return data
for name, code in marshal.loads(take(int.from_bytes(take(4), "big"))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, module.__dict__)
module.main(int(sys.argv[1]))
"""


class SandboxError(ConfigError):
    """A sandbox that could not be started, or did not close; never the fault of a program."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. `wall_s` is for the whole verdict, however many tests or inputs it has."""

    wall_s: float = 8.0
    cpu_s: int = 5
    memory_mb: int = 512
    scratch_mb: int = 16
    scratch_files: int = 2000
    threads: int = 64
    output_kb: int = 256


@dataclass(frozen=True)
class Tests:
    """What a program is tried with: single asserts, and a suite (functions, test cases or `check(candidate)`).

    `names` are those that tests take from the program, `modules` those of the standard library they take for granted.
    """

    asserts: Sequence[str] = ()
    suite: str = ""
    setup: str = ""
    entry_point: str = ""
    names: Sequence[str] = ()
    modules: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """How many tests a program passed, and what went wrong first."""

    passed: int
    total: int
    failure: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class ProgramRun:
    """What a program printed for one input, and how it ended: its exit status, negative for a signal."""

    output: bytes
    errors: str
    status: int
    too_long: bool = False


@dataclass
class _Sandbox:
    """One started sandbox: its process, and our end of its control socket."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    ready: bool = field(default=False)

    def wait_ready(self) -> None:
        if self.ready:
            return
        try:
            said = wire.decode(self.hear(time.monotonic() + START_DEADLINE_S))
        except (wire.WireError, TimeoutError) as error:
            self.process.kill()
            assert self.process.stderr is not None
            why = " ".join(self.process.stderr.read(2000).decode(errors="replace").split()) or str(error)
            raise SandboxError(f"a sandbox did not start: {why}") from None
        self.ready = said == "ready"

    def hear(self, deadline: float) -> bytes:
        """The next frame. A judge writes a frame at once, so what can be read is whole within moments.

        Time that the sandbox was ready to run and got no processor is not its own: the deadline moves by it.
        """
        if not wait_readable(self.control.fileno(), self.process.pid, deadline):
            raise TimeoutError("nothing was said in time")
        return wire.receive(self.control.fileno())

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.control.close()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        process_tree.SPARED.discard(self.process.pid)


class Sandboxes:
    """Gives each program a sandbox of its own; usable from any number of threads. `spares` wait ready to be used.

    `isolated=False` runs programs behind the filter of system calls and the limits alone, without namespaces: they
    see the machine's files and can read the memory of their judge. It is for code one would run anyway.
    """

    def __init__(self, limits: Limits | None = None, spares: int = 2, isolated: bool = True) -> None:
        self.limits = limits or Limits()
        self._isolated = isolated
        self._spares: queue.SimpleQueue[_Sandbox] = queue.SimpleQueue()
        self._num_spares, self._lock, self._wanted = spares, threading.Lock(), threading.Semaphore(0)
        self._closed = False
        self._filter = seccomp.program()
        if isolated and not self._filter:
            raise SandboxError("there is no filter of system calls for this kind of processor; see docs/tasks.md")
        self._start().end()  # whether this machine can isolate at all shows here, and not at the first verdict
        self._starter: threading.Thread | None = None

    def test(self, program: str, tests: Tests) -> Outcome:
        """Run the tests on the program."""
        started = time.monotonic()
        job = {"kind": "tests", "program": program}

        def talk(sandbox: _Sandbox, deadline: float) -> Any:
            said = wire.decode(sandbox.hear(deadline))
            if said == "loaded":
                wire.send(sandbox.control.fileno(), wire.encode(_plain(tests)))
                said = wire.decode(sandbox.hear(deadline))
            return said

        total = max(1, len(tests.asserts))
        try:
            report = self._do(job, talk)
        except TimeoutError:
            return Outcome(0, total, f"ran longer than {self.limits.wall_s:g} s", time.monotonic() - started)
        except wire.WireError:
            return Outcome(0, total, "ended its sandbox", time.monotonic() - started)
        return Outcome(report["passed"], report["total"], report["failure"], time.monotonic() - started)

    def run(self, program: str, inputs: Sequence[str], stop_at_error: bool = False) -> list[ProgramRun]:
        """Run the program once for each input; fewer runs than inputs when time ran out or one failed."""
        given = [text.encode("utf-8", "surrogatepass") for text in inputs]
        job = {"kind": "runs", "program": program, "inputs": given, "stop_at_error": stop_at_error}
        runs: list[Any] = []
        with suppress(TimeoutError, wire.WireError):
            runs = self._do(job, lambda sandbox, deadline: wire.decode(sandbox.hear(deadline)))["runs"]
        return [ProgramRun(r["output"], r["errors"].decode(errors="replace"), r["status"], r["too_long"]) for r in runs]

    def close(self) -> None:
        self._closed = True
        while not self._spares.empty():
            with contextlib.suppress(queue.Empty):
                self._spares.get_nowait().end()

    def _do(self, job: dict[str, Any], talk: Callable[[_Sandbox, float], Any]) -> Any:
        """Take a sandbox, give it the job, have the conversation, end it."""
        limits = asdict(self.limits)
        if not self._isolated:
            limits |= _UNCOUNTED
        elif _kernel() < (5, 14):  # it would count the threads of all sandboxes, and all else of this user
            limits["threads"] = _UNCOUNTED["threads"]
        payload = wire.encode({**job, "limits": limits, "filter": self._filter})
        sandbox = self._take()
        try:
            sandbox.wait_ready()
            wire.send(sandbox.control.fileno(), payload)
            report = talk(sandbox, time.monotonic() + self.limits.wall_s)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise wire.WireError(str(error)) from None
        finally:
            sandbox.end()
        if "refused" in report:
            raise SandboxError(f"a sandbox did not close: {report['refused']}")
        return report

    def _take(self) -> _Sandbox:
        """A spare that still runs, or a new sandbox; either way one more is started for later."""
        while self._num_spares:
            self._want_spare()
            try:
                sandbox = self._spares.get_nowait()
            except queue.Empty:
                break
            if sandbox.process.poll() is None:
                return sandbox
            sandbox.end()
        return self._launch()

    def _want_spare(self) -> None:
        with self._lock:
            if self._starter is None or not self._starter.is_alive():
                # A thread that stays: the death signal of a sandbox comes with the end of the thread that started it.
                self._starter = threading.Thread(target=self._start_spares, name="sandboxes", daemon=True)
                self._starter.start()
        self._wanted.release()

    def _start_spares(self) -> None:
        while not self._closed:
            self._wanted.acquire()
            if self._spares.qsize() < self._num_spares and not self._closed:
                with contextlib.suppress(OSError):  # the next verdict starts its own, and says what failed
                    self._spares.put(self._launch())

    def _start(self) -> _Sandbox:
        sandbox = self._launch()
        try:
            sandbox.wait_ready()
        except SandboxError as error:
            sandbox.end()
            raise SandboxError(
                f"untrusted code is not run: this machine offers no isolation ({error}); allow user namespaces, or "
                "name the verifier headway.tasks.verifiers.code:verify_without_isolation if you trust the code"
            ) from None
        return sandbox

    def _launch(self) -> _Sandbox:
        ours, theirs = socket.socketpair()
        words = isolation.command(self.limits.scratch_mb) if self._isolated else []
        with theirs:
            process = subprocess.Popen(
                [*words, isolation.interpreter(), "-I", "-S", "-B", "-c", _BOOT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        process_tree.SPARED.add(process.pid)
        with contextlib.suppress(OSError):  # one that ended already is found when its readiness is awaited
            wire.send(ours.fileno(), _guest_code())
        return _Sandbox(process, ours)


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit())


def queued_s(pid: int) -> float:
    """Seconds that a process and its descendants waited for a processor; 0 where the kernel does not say."""
    total = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        total = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        total += sum(queued_s(int(child)) for child in children)
    return total


def wait_readable(
    descriptor: int, pid: int, deadline: float, queued_before_s: float = 0.0, longest_s: float = math.inf
) -> bool:
    """Whether there is something to read by then. Time since `queued_before_s` in which the process was ready to run
    and got no processor moves the deadline, by `longest_s` at most."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    latest = deadline
    while not poll.poll(max(0.0, latest - time.monotonic()) * 1000):
        latest, before = deadline + min(queued_s(pid) - queued_before_s, longest_s), latest
        if latest - before < _WORTH_WAITING_S:
            return False
    return True


def _guest_code() -> bytes:
    """The guest's modules as code objects: the sandbox sees none of our files, and compiles nothing."""
    if not _CODE:
        modules = [(module.__name__, Path(str(module.__file__))) for module in (wire, seccomp, guest)]
        _CODE.append(marshal.dumps([(name, compile(path.read_text(), name, "exec")) for name, path in modules]))
    return _CODE[0]


_CODE: list[bytes] = []


def _plain(tests: Tests) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(tests).items()}
