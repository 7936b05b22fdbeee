"""Keeps workers alive: who is lost is named, ended, and after a growing wait started again, a bounded number of times.

A worker is lost when the runtime says that it died, when it does not answer a look in time, or when somebody who asked
it found its answers impossible. What it must be told or given before it serves again is the business of whoever keeps
it: the `serve` coroutine, which runs as long as the worker lives.

Invariant that lives here:
 15. Bounded waits: a worker that does not answer a look is ended, and one that is lost too often ends the run with
     the cause, unless the others can go on without it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from headway.config import SuperviseSection
from headway.control.workers import Fleet
from headway.errors import DeadlineExceeded, HeadwayError, RunFailed, WorkerDied
from headway.record.events import WorkerLost, WorkerRestarted
from headway.record.log import EventLog

T = TypeVar("T")
R = TypeVar("R")

LOST = (WorkerDied, DeadlineExceeded)
"""What a call to a worker raises when the worker, and not the call, is the trouble."""

_LONGEST_WAIT_S = 60.0
_SLICES = 8  # of a deadline; a standstill costs one


class Restarts:
    """How often a worker may be lost, and how long to wait before it is started again."""

    def __init__(self, section: SuperviseSection) -> None:
        self._section = section
        self._times: deque[float] = deque()

    def lost(self, now: float) -> float | None:
        """Seconds to wait after a loss at `now`, twice as long each time; None when there were too many."""
        self._times.append(now)
        while self._times[0] < now - self._section.window_s:
            self._times.popleft()
        if len(self._times) > self._section.max_failures:
            return None
        return min(_LONGEST_WAIT_S, self._section.backoff_s * 2.0 ** (len(self._times) - 1))


class Kept(Generic[T]):
    """A worker that is started again whenever it is lost; `life` counts how often it was."""

    def __init__(self, name: str, worker: T | None, start: Callable[[], Awaitable[T]]) -> None:
        self.name, self.start, self.life = name, start, 0
        self.worker = worker  # None while it is down
        self.down_since = time.monotonic()
        self.serving = asyncio.Event()
        self.lost: asyncio.Future[HeadwayError] = asyncio.get_running_loop().create_future()

    async def get(self) -> T:
        """The worker, once it serves; whoever starts it has a deadline, or ends the run."""
        await self.serving.wait()
        assert self.worker is not None
        return self.worker

    def lose(self, worker: T | None, cause: HeadwayError) -> None:
        """It can no longer be relied upon; heard once for each of its lives, and never for an earlier one."""
        if worker is not None and worker is self.worker and not self.lost.done():
            self.serving.clear()
            self.lost.set_result(cause)

    def begin(self, worker: T) -> None:
        self.worker, self.life = worker, self.life + 1
        self.lost = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        self.worker, self.down_since = None, time.monotonic()
        self.serving.clear()


class Supervisor:
    """Watches over the workers of a run."""

    def __init__(self, fleet: Fleet, section: SuperviseSection, log: EventLog) -> None:
        self._fleet, self._section, self._log = fleet, section, log
        self._kept: dict[str, Kept[Any]] = {}

    async def watch(self) -> None:
        """Consumes the runtime's word of deaths; produces losses, each of which its keeper answers."""
        while True:
            death = await self._fleet.failure()
            if (kept := self._kept.get(death.worker)) is not None:
                kept.lose(kept.worker, death)

    async def keep(
        self,
        kept: Kept[T],
        serve: Callable[[T], Awaitable[None]],
        on_lost: Callable[[], list[int]] = list,
        is_spare: Callable[[], bool] = lambda: False,
    ) -> HeadwayError:
        """Keep a worker alive until it was lost too often; then end the run, or return the cause if it is spare.

        `serve` gives the worker what it needs, calls `serves`, and goes on for as long as it lives; `on_lost` happens
        with the event that tells of the loss, and says which groups have to begin again.
        """
        self._kept[kept.name], restarts = kept, Restarts(self._section)
        while True:
            cause = await self._serve(kept, serve)
            kept.end()
            groups = on_lost()
            while kept.worker is None:
                self._log.append(WorkerLost(worker=kept.name, cause=str(cause), groups=tuple(groups)))
                await self._fleet.stop(kept.name)
                wait_s = restarts.lost(time.monotonic())
                if wait_s is None:
                    if is_spare():
                        return cause
                    raise self._too_often(kept.name, cause) from cause
                await asyncio.sleep(wait_s)
                # A start that fails is one more loss: what ended it may hold a device or a port for a while yet.
                try:
                    kept.begin(await kept.start())
                except HeadwayError as error:
                    cause, groups = error, []

    async def _serve(self, kept: Kept[T], serve: Callable[[T], Awaitable[None]]) -> HeadwayError:
        """Returns when the worker is lost, with the cause."""
        assert kept.worker is not None
        serving: asyncio.Future[Any] = asyncio.ensure_future(serve(kept.worker))
        ends: set[asyncio.Future[Any]] = {serving, kept.lost}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if kept.lost.done():
                return kept.lost.result()
            await serving
        except LOST as error:
            return error
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        raise AssertionError(f"nobody serves {kept.name} any more")

    def serves(self, kept: Kept[T]) -> None:
        """The worker has all it needs: from here on it may be asked; unless it was lost in this very moment."""
        if kept.lost.done():
            return
        if kept.life:
            seconds = time.monotonic() - kept.down_since
            self._log.append(WorkerRestarted(worker=kept.name, incarnation=kept.life, seconds=seconds))
        kept.serving.set()

    def _too_often(self, name: str, cause: HeadwayError) -> RunFailed:
        limit, window_s = self._section.max_failures, self._section.window_s
        return RunFailed(f"{name} was lost more than {limit} times within {window_s:g} s; the last time: {cause}")

    async def look_after(self, kept: Kept[T], look: Callable[[T], Awaitable[None]], every_s: float) -> None:
        """Look at a worker for as long as it lives; one that does not answer within `supervise.health_s` is lost."""
        assert kept.worker is not None
        period_s = min(every_s, self._section.health_s / 2)
        while True:
            await asyncio.sleep(period_s)
            await within(self._section.health_s - period_s, f"a look at {kept.name}", look(kept.worker))


async def within(seconds: float, what: str, call: Awaitable[R]) -> R:
    """The result of a call that must come in time; time for which this process itself stood still hardly counts."""
    answer = asyncio.ensure_future(call)
    try:
        # After a standstill every deadline has passed, and answers that came meanwhile have not been read.
        for _ in range(_SLICES):
            await asyncio.wait({answer}, timeout=seconds / _SLICES)
            if answer.done():
                return answer.result()
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s")
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
