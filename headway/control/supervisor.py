"""Restarts failed workers with exponential backoff, up to a limit.

A worker has failed when the runtime reports its death, when it misses a health check, when another worker found its
answers invalid, or when it dies or stops answering while it starts. What it needs before it serves (weights, a
connection) is given by the `serve` coroutine of its pool, which runs as long as the incarnation lives.

Invariant that lives here:
 15. Bounded waits: a worker that misses a health check is killed, and one that fails too often ends the run with the
     cause, unless the others can continue without it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from headway.config import SuperviseSection
from headway.control.workers import Fleet
from headway.errors import ConfigError, DeadlineExceeded, HeadwayError, RunFailed, WorkerDied
from headway.record.events import Event, Phase, WorkerLost, WorkerRestarted

T = TypeVar("T")
R = TypeVar("R")

FAILED = (WorkerDied, DeadlineExceeded)
"""What a call to a worker raises when the worker, and not the call, is at fault."""

_MAX_BACKOFF_S = 60.0
_SLICES = 8  # of a deadline; a standstill of this process costs one


class Restarts:
    """How often a worker may fail, and how long to wait before it is restarted."""

    def __init__(self, section: SuperviseSection) -> None:
        self._section = section
        self._times: deque[float] = deque()

    def failed(self, now: float) -> float | None:
        """Seconds to wait after a failure at `now`, doubled each time; None when there were too many."""
        self._times.append(now)
        while self._times[0] < now - self._section.window_s:
            self._times.popleft()
        if len(self._times) > self._section.max_failures:
            return None
        return min(_MAX_BACKOFF_S, self._section.backoff_s * 2.0 ** (len(self._times) - 1))


class Supervised(Generic[T]):
    """A worker that is restarted when it fails; `incarnation` counts the restarts, from -1 before the first start."""

    def __init__(self, name: str, start: Callable[[], Awaitable[T]]) -> None:
        self.name, self.start, self.incarnation = name, start, -1
        self.worker: T | None = None  # None while it is down
        self.down_since = time.monotonic()
        self.serving = asyncio.Event()
        self.failure: asyncio.Future[HeadwayError] = asyncio.get_running_loop().create_future()

    async def get(self) -> T:
        """The worker, once it serves; its start has a deadline, or ends the run."""
        await self.serving.wait()
        assert self.worker is not None
        return self.worker

    def fail(self, worker: T | None, cause: HeadwayError) -> None:
        """Mark this incarnation failed; later reports about it, or about an earlier one, are ignored."""
        if worker is not None and worker is self.worker and not self.failure.done():
            self.serving.clear()
            self.failure.set_result(cause)

    @contextmanager
    def watched(self, worker: T | None = None) -> Iterator[None]:
        """Mark the incarnation failed when a call inside fails; the error goes no further."""
        try:
            yield
        except FAILED as error:
            self.fail(worker or self.worker, error)

    def started(self, worker: T) -> None:
        self.worker, self.incarnation = worker, self.incarnation + 1
        self.failure = asyncio.get_running_loop().create_future()

    def stopped(self) -> None:
        self.worker, self.down_since = None, time.monotonic()
        self.serving.clear()


class Supervisor:
    """Starts, watches and restarts the workers of a run."""

    def __init__(self, fleet: Fleet, section: SuperviseSection, emit: Callable[[Event], object]) -> None:
        self._fleet, self._section, self._emit = fleet, section, emit
        self._supervised: dict[str, Supervised[Any]] = {}
        self._restarts: dict[str, Restarts] = {}

    async def watch(self) -> None:
        """Consumes deaths reported by the runtime; produces failures, which `supervise` answers with a restart."""
        while True:
            death = await self._fleet.failure()
            if (supervised := self._supervised.get(death.worker)) is not None:
                supervised.fail(supervised.worker, death)

    async def supervise(
        self,
        supervised: Supervised[T],
        serve: Callable[[T], Awaitable[None]],
        on_failed: Callable[[], list[int]] = list,
        is_spare: Callable[[], bool] = lambda: False,
    ) -> HeadwayError:
        """Restart a worker until it failed too often; then end the run, or return the cause if it is spare.

        `serve` prepares the incarnation, calls `mark_serving` and runs as long as it lives; `on_failed` is called with
        the event of the failure and returns the groups that are generated again.
        """
        while True:
            cause = await self._serve(supervised, serve)
            supervised.stopped()
            self._emit(WorkerLost(worker=supervised.name, cause=str(cause), groups=tuple(on_failed())))
            if not await self._back_off(supervised, cause):
                if is_spare():
                    return cause
                raise self._too_often(supervised.name, cause) from cause
            await self.start(supervised)

    async def start(self, supervised: Supervised[T]) -> T:
        """Start the next incarnation; a worker that dies or hangs while it starts is one more failure."""
        self._supervised[supervised.name] = supervised
        while True:
            begun = time.monotonic()
            try:
                supervised.started(await supervised.start())
            except HeadwayError as error:
                # The configuration cannot improve by waiting; what held a device or a port may let go of it.
                if isinstance(error, ConfigError) and supervised.incarnation < 0:
                    raise
                self._emit(WorkerLost(worker=supervised.name, cause=str(error), groups=()))
                if not await self._back_off(supervised, error):
                    raise self._too_often(supervised.name, error) from error
                continue
            seconds = time.monotonic() - begun
            name = f"starting {supervised.name}"
            self._emit(Phase(time=time.time(), name=name, state="finished", seconds=seconds))
            assert supervised.worker is not None
            return supervised.worker

    async def _back_off(self, supervised: Supervised[Any], cause: HeadwayError) -> bool:
        """End what is left of the failed incarnation and wait; False when it failed too often."""
        await self._fleet.stop(supervised.name)
        restarts = self._restarts.setdefault(supervised.name, Restarts(self._section))
        wait_s = restarts.failed(time.monotonic())
        if wait_s is None:
            return False
        await asyncio.sleep(wait_s)
        return True

    async def _serve(self, supervised: Supervised[T], serve: Callable[[T], Awaitable[None]]) -> HeadwayError:
        """Returns when the incarnation failed, with the cause."""
        assert supervised.worker is not None
        serving: asyncio.Future[Any] = asyncio.ensure_future(serve(supervised.worker))
        ends: set[asyncio.Future[Any]] = {serving, supervised.failure}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if supervised.failure.done():
                return supervised.failure.result()
            await serving
        except FAILED as error:
            return error
        except BaseExceptionGroup as errors:
            if isinstance(errors.exceptions[0], FAILED):
                return errors.exceptions[0]
            raise errors.exceptions[0] from errors
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        raise AssertionError(f"{supervised.name} is no longer served")

    def mark_serving(self, supervised: Supervised[T]) -> None:
        """The worker has all it needs: from here on it may be called; unless it failed meanwhile."""
        if supervised.failure.done():
            return
        if supervised.incarnation:
            seconds = time.monotonic() - supervised.down_since
            incarnation = supervised.incarnation
            self._emit(WorkerRestarted(worker=supervised.name, incarnation=incarnation, seconds=seconds))
        supervised.serving.set()

    def _too_often(self, name: str, cause: HeadwayError) -> RunFailed:
        limit, window_s = self._section.max_failures, self._section.window_s
        return RunFailed(f"{name} failed more than {limit} times within {window_s:g} s; the last time: {cause}")

    async def check_health(
        self, supervised: Supervised[T], check: Callable[[T], Awaitable[None]], every_s: float, hint: str = ""
    ) -> None:
        """Check a worker periodically; one that does not answer within `supervise.health_s` has failed, as is said with
        the `hint` at a cause."""
        assert supervised.worker is not None
        period_s = min(every_s, self._section.health_s / 2)
        while True:
            await asyncio.sleep(period_s)
            deadline_s = self._section.health_s - period_s
            await within(deadline_s, f"a health check of {supervised.name}{hint}", check(supervised.worker))


async def within(seconds: float, what: str, call: Awaitable[R]) -> R:
    """The result of a call that must come in time; a standstill of this process hardly counts."""
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
