"""The rollout workers and the reward pool: runs groups on them and tells them which engines serve.

Rollout workers get the set of engines whenever it changes, the newest version before any engine can sample under it,
and the engines' loads and limits periodically; one that is restarted gets all of that before its first group.

Invariants that live here:
  2. Conservation: the groups of a rollout worker that fails are generated again under their ids, by another one, or
     dropped with that reason.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headway.config import Config
from headway.control import waits
from headway.control.supervisor import Supervised, Supervisor, within
from headway.control.workers import Fleet
from headway.engine.protocol import Engine
from headway.errors import WorkerDied
from headway.record.events import Event, Retried, Warned
from headway.rollout.reward_pool import RewardPool
from headway.rollout.router import EngineFault, Retry, RolloutStats
from headway.rollout.worker import RolloutWorker
from headway.runtime.gather import together
from headway.types import Admission, Failure, Group

_NUM_SUSPECTS = 8
"""Groups that run at one time of those that were on two workers as these were lost."""


@dataclass
class EngineSet:
    """The engines that serve, as rollout workers are given them."""

    engines: dict[str, Engine] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    leaving: tuple[str, ...] = ()
    newest: int = 0
    loads: dict[str, int] = field(default_factory=dict)  # sequences by engine
    limits: dict[str, int] = field(default_factory=dict)  # the most it should hold of all workers; missing: no limit


class RolloutPool:
    """`faults` are the engines that workers found faulty."""

    def __init__(self, config: Config, fleet: Fleet, supervisor: Supervisor, emit: Callable[[Event], object]) -> None:
        self._config, self._supervisor, self._emit = config, supervisor, emit
        names = [f"rollout-{number}" for number in range(config.rollout.workers)]
        self._workers = {name: Supervised(name, partial(fleet.start_rollout, name)) for name in names}
        self._rewards = Supervised("reward", fleet.start_rewards)
        self._pool: tuple[RewardPool, int]  # the latest reward pool, which may be dead, and its incarnation
        self._groups: dict[str, list[int]] = {name: [] for name in names}
        self._serving = asyncio.Event()  # set once and replaced, when a worker begins to serve
        self.engines = EngineSet()
        self.faults: asyncio.Queue[EngineFault] = asyncio.Queue()
        self._waits = waits.WaitWatch(config, time.monotonic())
        no_limit = nullcontext()
        self._rooms = no_limit, no_limit, asyncio.Semaphore(_NUM_SUSPECTS), asyncio.Semaphore(1)

    async def start(self) -> None:
        workers: list[Supervised[Any]] = [self._rewards, *self._workers.values()]
        await together(*(self._supervisor.start(worker) for worker in workers))
        assert self._rewards.worker is not None
        self._pool = self._rewards.worker, self._rewards.incarnation

    def supervise(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[Any]]:
        """Begin to serve; the tasks run until they are cancelled."""
        begun: list[asyncio.Task[Any]] = [
            tasks.create_task(self._supervisor.supervise(self._rewards, self._serve_rewards))
        ]
        for name, worker in self._workers.items():
            begun.append(tasks.create_task(self._supervise_worker(name, worker)))
        begun.append(tasks.create_task(self._watch_waits()))
        return begun

    async def _watch_waits(self) -> None:
        """Consumes what rollout workers say their trajectories wait for; produces a sentence when none finishes."""
        while True:
            await asyncio.sleep(waits.CHECK_S)
            if sentence := self._waits.due(time.monotonic()):
                self._emit(Warned(message=sentence))

    async def run(self, admission: Admission) -> Group:
        """The group, from the first rollout worker that finishes it."""
        self._waits.begin(time.monotonic())
        group = await self._run(admission)
        self._waits.end(time.monotonic(), not group.trajectories)
        return group

    async def _run(self, admission: Admission) -> Group:
        """Again on the next worker when one is lost. What a workflow does may be why: a group that was there each time
        runs with few others, then alone, and is given up when that worker is lost too."""
        for room in self._rooms:
            async with room:
                if (group := await self._try(admission)) is not None:
                    return group
        reason = f"workflow: {len(self._rooms)} rollout workers were lost while they ran this group"
        return Group(
            id=admission.group,
            prompt_index=admission.prompt.index,
            eta=admission.eta,
            size=admission.size,
            trajectories=(),
            failures=tuple(Failure(index, reason, 0) for index in range(admission.size)),
            source=admission.prompt.source,
        )

    async def _try(self, admission: Admission) -> Group | None:
        """None if the worker is lost."""
        chosen = await self._choose(admission.group)
        worker, groups = await chosen.get(), self._groups[chosen.name]
        groups += [admission.group] * (admission.stream == "train")
        try:
            group = await worker.run(admission)
        except WorkerDied as error:
            chosen.fail(worker, error)  # the event of its failure lists the groups it had
            return None
        if admission.stream == "train":
            groups.remove(admission.group)
        return group

    async def _choose(self, group: int) -> Supervised[RolloutWorker]:
        """Round-robin among those that serve."""
        while not (serving := [worker for worker in self._workers.values() if worker.serving.is_set()]):
            await self._serving.wait()
        return serving[group % len(serving)]

    # Workers

    async def _supervise_worker(self, name: str, supervised: Supervised[RolloutWorker]) -> None:
        async def serve(worker: RolloutWorker) -> None:
            await self._connect(worker)
            await self._inform(worker)
            self._supervisor.mark_serving(supervised)
            self._serving.set()
            self._serving = asyncio.Event()

            async def check(worker: RolloutWorker) -> None:
                await self._read_stats(name, worker)

            hint = " (its workflow may block the event loop)"
            await self._supervisor.check_health(supervised, check, self._config.metrics.stats_every_s, hint)

        def take_groups() -> list[int]:
            self._waits.waiting.pop(name, None)
            groups, self._groups[name] = self._groups[name], []
            return sorted(groups)

        await self._supervisor.supervise(supervised, serve, take_groups)

    async def _read_stats(self, name: str, worker: RolloutWorker) -> None:
        found: RolloutStats = await worker.stats()
        if name:
            self._waits.waiting[name] = time.monotonic(), found.waiting
        for fault in found.faults:
            self.faults.put_nowait(fault)
        by_engine: dict[str, list[Retry]] = {}
        for retry in found.retries:
            by_engine.setdefault(retry.engine, []).append(retry)
        for engine, retries in by_engine.items():
            tokens, seconds = sum(retry.tokens for retry in retries), max(retry.seconds for retry in retries)
            self._emit(Retried(engine=engine, requests=len(retries), tokens=tokens, seconds=seconds))

    async def read_all_stats(self) -> None:
        await self._call_all(lambda worker: self._read_stats("", worker))

    async def _serve_rewards(self, pool: RewardPool) -> None:
        self._pool = pool, self._rewards.incarnation
        await self._call_all(self._connect)
        self._supervisor.mark_serving(self._rewards)

        async def check(pool: RewardPool) -> None:
            await pool.stats()

        await self._supervisor.check_health(self._rewards, check, self._config.metrics.stats_every_s)

    # What rollout workers know of engines

    async def connect(self) -> None:
        """Tell all workers which engines serve now."""
        await self._call_all(self._connect)

    async def inform(self) -> None:
        """Tell all workers the newest version, the engines' loads and their limits."""
        await self._call_all(self._inform)

    async def _call_all(self, call: Callable[[RolloutWorker], Awaitable[None]]) -> None:
        """On all workers that are up; the others are called when they start."""

        async def one(supervised: Supervised[RolloutWorker]) -> None:
            worker = supervised.worker
            if worker is None:
                return
            with supervised.watched(worker):
                await within(self._config.supervise.health_s, f"a call to {supervised.name}", call(worker))

        await asyncio.gather(*(one(supervised) for supervised in self._workers.values()))

    async def _connect(self, worker: RolloutWorker) -> None:
        pool, incarnation = self._pool
        incarnations = self.engines.incarnations | {"reward": incarnation}
        await worker.connect(self.engines.engines, incarnations, self.engines.leaving, pool)

    async def _inform(self, worker: RolloutWorker) -> None:
        state = self.engines
        limits = {name: -(-limit // len(self._workers)) for name, limit in state.limits.items()}
        await worker.inform(state.newest, state.loads, limits)
