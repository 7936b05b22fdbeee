"""A semaphore with priorities and a limit that may change while others wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush


class PrioritySemaphore:
    """At most `limit` holders at a time (None: no limit); urgent requests first, then first in, first out."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._num_held = self._num_asked = 0
        self._queue: list[tuple[bool, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        return sum(not turn.done() for _, _, turn in self._queue)

    def set_limit(self, limit: int | None) -> None:
        """Holders above a lowered limit stay; 0 admits none until it is raised."""
        self._limit = limit
        self._admit()

    async def acquire(self, urgent: bool = False) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._num_asked += 1
        heappush(self._queue, (not urgent, self._num_asked, turn))
        self._admit()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.release()  # admitted in the moment of the cancellation
            raise

    def release(self) -> None:
        self._num_held -= 1
        self._admit()

    @asynccontextmanager
    async def slot(self, urgent: bool = False) -> AsyncIterator[None]:
        await self.acquire(urgent)
        try:
            yield
        finally:
            self.release()

    def _admit(self) -> None:
        while self._queue and (self._limit is None or self._num_held < self._limit):
            *_, turn = heappop(self._queue)
            if not turn.done():
                self._num_held += 1
                turn.set_result(None)
