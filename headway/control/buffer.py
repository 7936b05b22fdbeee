"""Finished groups, handed out in the order staleness allows, or dropped with a reason.

Invariants that live here:
  2. Conservation: a group that was put is handed out once or dropped once; a batch that was only partly collected
     when its taker was cancelled is completed by the next taker.
  8. Group identity: groups are kept and handed out by id, a batch in id order.

Every decision is `StalenessControl`'s; the buffer holds what finished and wakes the taker. Drops of untaken groups pass
through here, because a drop lets the window slide and may complete a batch.
"""

import asyncio
import heapq
from collections.abc import Callable

from headway.control.staleness import StalenessControl
from headway.errors import InvariantBroken
from headway.types import Group


class Buffer:
    def __init__(self, staleness: StalenessControl) -> None:
        self.staleness = staleness
        self.on_take: Callable[[], object] = lambda: None  # each take may let admission continue
        self._finished: dict[int, Group] = {}
        self._order: list[int] = []  # a heap of the ids in _finished, and of dropped ones not yet removed
        self._collected: dict[int, Group] = {}  # taken for the next batch
        self._changed = asyncio.Event()

    @property
    def num_ready(self) -> int:
        """Finished groups not yet handed out."""
        return len(self._finished) + len(self._collected)

    def put(self, group: Group) -> None:
        if group.id in self._finished or not self.staleness.is_untaken(group.id):
            raise InvariantBroken(f"group {group.id} finished twice, or after it left")
        self._finished[group.id] = group
        heapq.heappush(self._order, group.id)
        self._changed.set()

    def drop(self, group_id: int) -> Group | None:
        """Drop a group that is in flight; returns it if it was waiting here."""
        self.staleness.drop(group_id)
        self._changed.set()
        return self._finished.pop(group_id, None) or self._collected.pop(group_id, None)

    async def take_batch(self) -> tuple[Group, ...]:
        """Wait until B groups have been taken, one by one as the window allows, and return them in id order.

        Waits for `put` and `drop`; the deadline is the caller's, and cancelling loses nothing.
        """
        while not self._collect():
            self._changed.clear()
            await self._changed.wait()
        batch = tuple(self._collected[group_id] for group_id in sorted(self._collected))
        self._collected = {}
        return batch

    def _collect(self) -> bool:
        """Take finished groups, oldest first, until the batch is full or the window has no finished group left."""
        while len(self._collected) < self.staleness.batch_groups and self._order:
            oldest = self._order[0]
            if oldest in self._finished:
                if not self.staleness.may_take(oldest):
                    return False
                self.staleness.take(oldest)
                self.on_take()
                self._collected[oldest] = self._finished.pop(oldest)
            heapq.heappop(self._order)
        return len(self._collected) == self.staleness.batch_groups
