"""Chooses the engine of each group, as one rollout worker sees the engines, and limits its requests to each.

A group stays on one engine, where the keys and values of its prompt are computed once, until that engine fails; then
the whole group moves to another. The choice is the engine with the fewest sequences: this worker's own, counted
exactly, and those of other workers, from the latest engine statistics.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.codec import message
from headway.engine.protocol import Engine
from headway.errors import DeadlineExceeded
from headway.runtime.semaphore import PrioritySemaphore
from headway.types import RequestKey

_MAX_NONFINITE_GROUPS = 3
"""Groups in a row with a non-finite log-prob, without a valid completion between them, that make it the engine's fault
and no longer the requests'."""


@message
class EngineFault:
    """An engine that a rollout worker no longer uses, and why: EngineFault("engine-1", 0, "engine-1 exited ...")."""

    engine: str
    incarnation: int
    reason: str


@message
class Retry:
    """A request that continued on another engine: tokens carried over, seconds without an engine."""

    engine: str
    tokens: int
    seconds: float


@message
class Waiting:
    """Trajectories of this worker that wait for the same thing ("verifier", "workflow", "engine-0"), oldest first."""

    what: str
    num: int
    seconds: float  # of the one that has waited longest


@message
class RolloutStats:
    """What a rollout worker observed; `retries` since the previous statistics."""

    faults: tuple[EngineFault, ...]
    retries: tuple[Retry, ...]
    waiting: tuple[Waiting, ...] = ()


@dataclass(eq=False)
class EngineSlot:
    """One incarnation of one engine, as this worker sees it."""

    name: str
    incarnation: int
    engine: Engine
    num_own: int = 0  # unfinished trajectories of this worker
    num_others: int = 0  # sequences of other workers
    semaphore: PrioritySemaphore = field(default_factory=PrioritySemaphore)
    fault: str = ""  # why no request is sent there any more
    distrusted: bool = False  # it sent invalid answers: its tokens of unfinished requests are discarded
    leaving: bool = False  # asked to leave: returns what it has sampled
    attempts: dict[str, "tuple[RequestKey, asyncio.Task[object]]"] = field(default_factory=dict)
    nonfinite_groups: set[int] = field(default_factory=set)  # since its last valid completion

    @property
    def serves(self) -> bool:
        return not self.fault and not self.leaving

    def withdraw(self, reason: str, distrusted: bool = False) -> None:
        """Send it no more requests; those in flight are cancelled here and retried elsewhere."""
        self.fault, self.distrusted = self.fault or reason, self.distrusted or distrusted
        self.semaphore.set_limit(None)
        for _, attempt in self.attempts.values():
            attempt.cancel()

    def nonfinite(self, group: int, reason: str) -> None:
        """A log-prob is not a number. The engine's weights were verified, so the request is suspected first."""
        self.nonfinite_groups.add(group)
        if len(self.nonfinite_groups) >= _MAX_NONFINITE_GROUPS:
            self.withdraw(reason, distrusted=True)


class Router:
    """The engines that serve, for one rollout worker."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._slots: dict[str, EngineSlot] = {}
        self._changed = asyncio.Event()

    def set_engines(
        self, engines: Mapping[str, Engine], incarnations: Mapping[str, int], leaving: tuple[str, ...]
    ) -> None:
        """Replace the set of engines; an engine of the same incarnation keeps its slot."""
        for name, slot in list(self._slots.items()):
            if name not in engines or incarnations[name] != slot.incarnation:
                self._slots.pop(name).withdraw(f"{name} was removed")
        for name, engine in engines.items():
            slot = self._slots.setdefault(name, EngineSlot(name, incarnations[name], engine))
            if name in leaving and not slot.leaving:
                slot.leaving = True
                slot.semaphore.set_limit(None)
        self._changed.set()

    def set_loads(self, loads: Mapping[str, int], limits: Mapping[str, int]) -> None:
        """All workers' sequences by engine, and how many this worker may have at each (0: no limit)."""
        for name, slot in self._slots.items():
            slot.num_others = max(0, loads.get(name, 0) - slot.num_own)
            slot.semaphore.set_limit((limits.get(name, 0) or None) if slot.serves else None)

    @property
    def leaving(self) -> list[EngineSlot]:
        return [slot for slot in self._slots.values() if slot.leaving]

    @property
    def faults(self) -> tuple[EngineFault, ...]:
        slots = self._slots.values()
        return tuple(EngineFault(slot.name, slot.incarnation, slot.fault) for slot in slots if slot.fault)

    def least_loaded(self, group: int) -> EngineSlot | None:
        """The engine with the fewest sequences; among equals round-robin by group number."""
        slots = list(self._slots.values())
        first = group % max(1, len(slots))
        serving = [slot for slot in slots[first:] + slots[:first] if slot.serves]
        return min(serving, key=lambda slot: slot.num_own + slot.num_others, default=None)

    async def find(self, group: int) -> EngineSlot:
        """As `least_loaded`; while no engine serves, waits for one."""
        try:
            async with asyncio.timeout(self._deadline_s):
                while (slot := self.least_loaded(group)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            reasons = "; ".join(f"{slot.name}: {slot.fault or 'is leaving'}" for slot in self._slots.values())
            raise DeadlineExceeded(
                f"no engine served group {group} within {self._deadline_s:g} s ({reasons or 'there was none'})"
            ) from None
        return slot


class Placement:
    """The engine of one group: all its trajectories together, until that engine serves no more."""

    def __init__(self, router: Router, group: int, size: int) -> None:
        self._router, self.group, self._num_left = router, group, size
        self._slot: EngineSlot | None = None
        self.faulted = dict[EngineSlot, None]()  # those that failed at a request of this group, in order
        # Counted now, not when the first request is sent: the next group may be placed before that.
        self._move(router.least_loaded(group))

    async def slot(self) -> EngineSlot:
        if self._slot is None or not self._slot.serves:
            found = await self._router.find(self.group)
            if self._slot is None or not self._slot.serves:  # else another trajectory of the group was faster
                self._move(found)
        assert self._slot is not None
        return self._slot

    def _move(self, slot: EngineSlot | None) -> None:
        if self._slot is not None:
            self._slot.num_own -= self._num_left
        self._slot = slot
        if slot is not None:
            slot.num_own += self._num_left

    def done(self) -> None:
        """One trajectory has ended."""
        self._num_left -= 1
        if self._slot is not None:
            self._slot.num_own -= 1
