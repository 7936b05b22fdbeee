"""The reward worker: a pool of killable processes that run the verifier, one call each, under a deadline.

Invariants that live here:
 10. Errors are never rewards. What the text causes (it is wrong, its program crashes or exits, its verifier computes
     beyond the deadline, each time it is asked) is a wrong answer; what befalls the verifier (a crash, a hang, an
     unreachable service) is a counted error and a dropped or retried trajectory, unless `reward.on_error` says
     otherwise. Deadlines run from the start of execution, and what hangs is killed. A verdict with an error has a
     score of 0.0 that nobody may use.
 15. Bounded waits: a child that does not start, does not answer or does not end is given up after its deadline.

No task runs in the background: a call takes a place in the pool (a waiting child, or a vacancy that it fills with a
new one), talks to that child, and gives the place back whatever happens, leaving a vacancy where the child was lost.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from headway import codec
from headway.config import RewardSection
from headway.errors import CAUSE, ConfigError, WorkerDied, translated
from headway.rollout.reward_process import BROKEN, HEADER, NOT_A_SCORE, RAISED, SCORED
from headway.runtime.process_tree import processor_s
from headway.tasks.sandbox.pool import queued_s
from headway.tasks.scoring import title
from headway.types import EXCEEDED, UNSCORED, Verdict

START_DEADLINE_S = 60.0
"""For a new child to import the verifier."""
_LEAST_MEMORY = 4 << 30
END_DEADLINE_S = 5.0
"""For a guardian to kill its worker and all that this one started."""

_LONGEST_FRAME = 1 << 16
_COMPUTED_SHARE = 0.5
"""Of its deadline in which a verifier computed: its text is what makes it slow. One that waits for a service is not."""
_QUICK_S, _LEAST_EXTENSION_S = 0.05, 0.05
_EXCEEDED, _DEADLINE, _DIED, _START, _REQUEST = "exceeded", "deadline", "died", "start", "request"
_KINDS = (RAISED, NOT_A_SCORE, _EXCEEDED, _DEADLINE, _DIED, _START, _REQUEST)
_BOOT = "import sys; sys.path[:] = sys.argv[5:]; from headway.rollout.reward_process import main; main()"


class _Broken(Exception):
    """How the verifier failed: one of `_KINDS`, and a sentence."""

    def __init__(self, kind: str, sentence: str, seconds: float = 0.0, killed: bool = False) -> None:
        super().__init__(sentence)
        self.kind, self.seconds, self.killed = kind, seconds, killed


class RewardPool:
    """Runs the verifiers of a specification (`tasks.scoring`), or the one that a bare reference names, on texts in
    `section.workers` processes; one that does not take up a text within `health_s` is replaced. Open it first, close it
    last."""

    def __init__(self, verifiers: str, section: RewardSection, health_s: float = 30.0) -> None:
        self._health_s = health_s
        self._specification, self._reference = verifiers, title(verifiers)
        self._section = section
        self._places: asyncio.Queue[_Child | None] = asyncio.Queue()
        self._children: set[_Child] = set()
        self._endings: set[asyncio.Task[str]] = set()
        self._counts: Counter[str] = Counter()
        self._opened = self._closed = False

    async def open(self) -> None:
        """Start every child; a verifier that cannot be imported or started is a `ConfigError`."""
        self._opened = True
        starts = [self._start() for _ in range(self._section.workers)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        for result in results:
            if not isinstance(result, BaseException):
                self._places.put_nowait(result)
                continue
            await self.close()
            raise ConfigError(f"verifier {self._reference}: {result}") if isinstance(result, _Broken) else result

    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Verdict:
        """The verifier's score for `text`, or, after `retries` more attempts, its error, or 0 for a text that takes too
        long."""
        if not self._opened:
            raise RuntimeError("the reward pool was not opened")
        self._check_not_closed()
        try:
            request = codec.encode([source, task, text.encode("utf-8", "surrogatepass")])
        except (TypeError, ValueError) as error:
            return self._fail(self._count(_Broken(_REQUEST, f"the row cannot be sent to its verifier: {error}")))
        for _ in range(self._section.retries + 1):
            try:
                verdict = await self._attempt(request)
            except _Broken as broken:
                last = self._count(broken)
            else:
                self._counts["num_verified"] += 1
                return verdict
        return self._fail(last)

    async def stats(self) -> dict[str, int]:
        """Verdicts with a score and with an error, children killed at a deadline, broken attempts by kind."""
        names = ("num_verified", "num_failed", "num_killed", "num_errors", *(f"num_errors_{kind}" for kind in _KINDS))
        return {name: self._counts[name] for name in names}

    async def close(self) -> None:
        """End every child with all it started; calls still waiting fail."""
        self._closed = True
        for child in list(self._children):
            self._end(child)
        self._places.put_nowait(None)  # wakes a waiting call, which gives the place to the next
        while self._endings:
            await asyncio.wait(self._endings)

    def _count(self, broken: _Broken) -> _Broken:
        self._counts.update(("num_errors", f"num_errors_{broken.kind}"))
        self._counts["num_killed"] += broken.killed
        return broken

    def _fail(self, broken: _Broken) -> Verdict:
        self._counts["num_failed"] += 1
        if broken.kind == _EXCEEDED or self._section.on_error == "zero":
            return Verdict(0.0, "", broken.seconds, {EXCEEDED if broken.kind == _EXCEEDED else UNSCORED: 1.0})
        return Verdict(0.0, f"verifier {self._reference}: {broken}", broken.seconds)

    async def _attempt(self, request: bytes) -> Verdict:
        child = await self._places.get()
        try:
            self._check_not_closed()
            if child is not None and child.gone:
                self._end(child)
                child = None
            child = child or await self._start()
            return await child.ask(request, self._section.deadline_s)
        except _Broken:
            self._check_not_closed()
            raise
        finally:
            if child is not None and not child.waiting:
                self._end(child)
                child = None
            self._places.put_nowait(child)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise WorkerDied(f"the reward pool of {self._reference} is closed, and a text still needed its verdict")

    async def _start(self) -> "_Child":
        with translated(OSError, partial(_Broken, _START), f"its process could not be created: {CAUSE}"):
            child = _Child(self._specification, self._section, self._health_s)
        self._children.add(child)
        try:
            await child.get_ready()
        finally:
            if not child.waiting:
                self._end(child)
        return child

    def _end(self, child: "_Child") -> None:
        """Begin to end a child; `close` waits until it is done. Never waits, so that a cancelled call can do it."""
        self._children.discard(child)
        ending = asyncio.ensure_future(child.end())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)


def _memory(section: RewardSection) -> int:
    """Bytes that one verifier may use: without the knob all of them share half of the machine's, but 4 GB is little."""
    if section.memory_gb:
        return int(section.memory_gb * (1 << 30))
    return max(_LEAST_MEMORY, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // section.workers)


class _Child:
    """The pool's end of one child: `waiting` says that it is ready for a call and owes no answer."""

    def __init__(self, reference: str, section: RewardSection, health_s: float) -> None:
        self.waiting, self._health_s = False, health_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = [*map(str, (theirs.fileno(), os.getpid(), _memory(section))), reference, *sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def gone(self) -> bool:
        return self._reader is None or self._reader.at_eof()

    async def get_ready(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        said = await self._hear(START_DEADLINE_S, _START)
        if said is None:
            raise _Broken(_START, f"did not start within {START_DEADLINE_S:g} s and was killed", killed=True)
        if said[0] == BROKEN:
            raise _Broken(_START, said[1])
        self.waiting = True

    async def ask(self, request: bytes, deadline_s: float) -> Verdict:
        assert self._writer is not None
        self.waiting = False
        self._writer.write(HEADER.pack(len(request)) + request)
        if await self._hear(self._health_s, _DIED) is None:
            raise _Broken(_START, f"did not take up a text within {self._health_s:g} s and was killed", killed=True)
        # Reading the clocks of a process tree costs more than most verdicts: only slow ones have theirs read.
        pid, quick_s = self._process.pid, min(_QUICK_S, deadline_s / 10)
        is_quick, computed_s, queued, extra_s = True, 0.0, 0.0, 0.0

        def extend() -> float:
            """After the quick part comes the rest of the deadline, and then time without a processor, which is not the
            verifier's, up to four times the deadline."""
            nonlocal is_quick, computed_s, queued, extra_s
            if is_quick:
                is_quick, computed_s, queued = False, processor_s(pid), queued_s(pid)
                return max(deadline_s - quick_s, 2 * _LEAST_EXTENSION_S)
            before, extra_s = extra_s, min(queued_s(pid) - queued, 3 * deadline_s)
            return extra_s - before

        answer = await self._hear(quick_s, _DIED, extend)
        computed_s = 0.0 if is_quick else processor_s(pid) - computed_s
        late = _EXCEEDED if computed_s >= _COMPUTED_SHARE * deadline_s else _DEADLINE
        if answer is None:
            sentence = f"ran longer than reward.deadline_s = {deadline_s:g} and was killed"
            raise _Broken(late, sentence, deadline_s, killed=True)
        self.waiting = True
        kind, score, sentence, seconds, components = answer
        if kind != SCORED:
            raise _Broken(kind, sentence, seconds)
        if seconds > deadline_s + extra_s:
            raise _Broken(late, f"ran for {seconds:.3g} s, longer than reward.deadline_s = {deadline_s:g}", seconds)
        return Verdict(score, "", seconds, components)

    async def _hear(
        self, timeout_s: float, kind_if_it_ends: str, extend: Callable[[], float] = lambda: 0.0
    ) -> list[Any] | None:
        """What the child says next, or None when it says nothing in time, as often as that is extended."""
        started = time.monotonic()
        reading = asyncio.ensure_future(self._read_frame())
        try:
            # Not wait_for, whose timer wins on Python 3.12: where this event loop was kept busy past the deadline,
            # the answer lies here unread, and that is not the child's hang.
            done, _ = await asyncio.wait({reading}, timeout=timeout_s)
            while not done and (extra_s := extend()) > _LEAST_EXTENSION_S:
                done, _ = await asyncio.wait({reading}, timeout=extra_s)
            return reading.result() if done else None
        except (EOFError, OSError, ValueError):
            raise _Broken(kind_if_it_ends, await self.end(), time.monotonic() - started) from None
        finally:
            reading.cancel()

    async def _read_frame(self) -> list[Any]:
        assert self._reader is not None
        (num_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if num_bytes > _LONGEST_FRAME:
            raise ValueError("this is no frame: the verifier wrote to a descriptor that is not its own")
        frame: list[Any] = codec.decode(await self._reader.readexactly(num_bytes))
        return frame

    async def end(self) -> str:
        """Hang up, which makes the guardian kill its worker, and say how the child ended."""
        assert self._process.stdin is not None
        (self._writer or self._socket).close()
        self._process.stdin.close()
        try:
            code = await asyncio.to_thread(self._process.wait, END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return f"its process did not end within {END_DEADLINE_S:g} s"
        number = -code if code < 0 else code - 128
        names = {known.value: known.name for known in signal.Signals}
        how = f"was ended by {names[number]}" if number in names else f"ended with exit code {code}"
        return f"its process {how}" + (", as when memory runs out" if number == signal.SIGKILL else "")
