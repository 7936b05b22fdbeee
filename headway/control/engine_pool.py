"""Who is there: the engines with the version each has proved, the rollout workers, the reward pool; told to each other.

An engine serves from the moment it has proved the published weights. Then rollout workers are told of it, and its
version counts; when it is lost or leaves, neither. Every engine follows the published versions by itself, so that one
that joins late, or was away, catches up like any other.

Invariants that live here:
  1. Single admission authority: `confirmed` is the lowest version proved by every engine that may serve.
 11. Verified weight sync at every load, before the engine's first request under it.
 13. Non-blocking generation: a new version travels to all engines at the same time, beside their work.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headway.config import Config
from headway.control.health import Pace, far_slower, next_limit
from headway.control.supervisor import LOST, Kept, Supervisor, within
from headway.control.workers import Fleet, Generation
from headway.engine.protocol import Engine
from headway.errors import HeadwayError, RunFailed, WeightsUnreachable, WorkerDied
from headway.record.events import EngineJoined, EngineLeft, EngineSlow, Retried
from headway.record.log import EventLog
from headway.rollout.reward_pool import RewardPool
from headway.rollout.router import Continued, RolloutStats, Shunned
from headway.rollout.worker import RolloutWorker
from headway.runtime.channel import RemoteError
from headway.types import Admission, EngineStats, Group, Scores, WeightUpdate

_DRAIN_LOOK_S = 0.05
_MOST_LOOKS_PER_S = 100
"""At all engines together: with very many, each is looked at less often than the config says."""


@dataclass(frozen=True)
class Published:
    """The newest weights, and what the trainer makes of the probe under them."""

    update: WeightUpdate
    reference: Scores


class Member(Kept[Engine]):
    """One engine: what it has proved, what was last seen of it, how many sequences it should hold."""

    def __init__(self, name: str, engine: Engine | None, start: Callable[[], Awaitable[Engine]]) -> None:
        super().__init__(name, engine, start)
        self.confirmed = -1  # until it has proved what it runs
        self.asked_for = self.leaving = self.slow = False
        self.stats: EngineStats | None = None
        self.limit, self.pace = 0, Pace()

    @property
    def load(self) -> int:
        return _num_sequences(self.stats) if self.stats else 0

    def end(self) -> None:
        super().end()
        self.stats, self.limit, self.pace, self.slow = None, 0, Pace(), False


class Roster:
    """`send` brings an engine to a version and proves it; `on_stats` hears of each look, `on_serving` of each
    engine that begins to serve; `changed` is set when
    `confirmed` may have changed."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        generation: Generation,
        supervisor: Supervisor,
        log: EventLog,
        send: Callable[[str, WeightUpdate, Scores], Awaitable[None]],
        on_stats: Callable[[str, EngineStats], None],
        on_serving: Callable[[str], None],
        changed: asyncio.Event,
    ) -> None:
        self._config, self._fleet, self._supervisor, self._log = config, fleet, supervisor, log
        self._send, self._on_stats, self._on_serving, self._changed = send, on_stats, on_serving, changed
        self.engines = {name: self._member(name, engine) for name, engine in generation.engines.items()}
        self._rollout = {name: self._worker(name, worker) for name, worker in generation.rollout.items()}
        self._rewards = Kept("reward", generation.rewards, fleet.start_rewards)
        self._pool = generation.rewards, 0  # the last one, and which life of it; it may be dead
        self._groups: dict[str, list[int]] = {name: [] for name in self._rollout}
        self._lives: dict[str, asyncio.Task[object]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._published: Published | None = None
        self.newest: int | None = None  # the version that is published, or about to be
        self._announcing: asyncio.Task[None] | None = None
        self._versions: Counter[int] = Counter()  # proved versions, by how many engines
        # Each is set once and replaced: what is published; what engines have proved; who serves among rollout workers.
        self._news, self._moved, self._staffed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._reconnect = asyncio.Event()  # rollout workers have to be told who is there

    def _member(self, name: str, engine: Engine | None) -> Member:
        return Member(name, engine, lambda: self._fleet.start_engine(name))

    def _worker(self, name: str, worker: RolloutWorker) -> Kept[RolloutWorker]:
        return Kept(name, worker, lambda: self._fleet.start_rollout(name))

    def keep_all(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to look after everybody, in tasks of the run."""
        self._tasks = tasks
        keep = self._supervisor.keep
        self._lives["reward"] = tasks.create_task(keep(self._rewards, self._serve_rewards))
        for name, kept in self._rollout.items():
            self._lives[name] = tasks.create_task(self._keep_rollout(name, kept))
        for member in self.engines.values():
            self._lives[member.name] = tasks.create_task(self._keep_engine(member))
        self._lives["loads"] = tasks.create_task(self._tell_loads())
        self._lives["connections"] = tasks.create_task(self._tell_connections())

    def let_go(self) -> None:
        """The run is over: nobody is looked after any more."""
        for task in self._lives.values():
            task.cancel()

    # Versions

    @property
    def serving(self) -> list[Member]:
        return [member for member in self.engines.values() if member.serving.is_set() and not member.leaving]

    @property
    def confirmed(self) -> int | None:
        """The lowest version proved by every engine that may serve; None while there is none.

        One that was lost or leaves counts until the log says so.
        """
        return min(self._versions, default=None)

    def _confirm(self, member: Member, version: int) -> None:
        """The engine has proved a version, or with -1 is gone. Constant time, because every admission asks."""
        self._versions[member.confirmed] -= 1
        self._versions[version] += 1
        member.confirmed = version
        self._versions = +self._versions
        self._versions.pop(-1, None)
        self._moved.set()
        self._moved = asyncio.Event()
        self._changed.set()

    def publish(self, published: Published) -> None:
        """Let every engine have these weights, beside whatever comes next."""
        assert self._tasks is not None
        self.newest = published.update.version
        self._announcing = self._tasks.create_task(self._announce(published, self._announcing))

    async def _announce(self, published: Published, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        await self._to_rollout(self._inform)  # before any token can be sampled under it
        self._published = published
        self._news.set()
        self._news = asyncio.Event()

    async def current(self) -> None:
        """Wait until every engine that is up has proved what is published: then nobody reads older weights."""
        if self._announcing is not None:
            await self._announcing
        for member in list(self.engines.values()):
            while not self._is_current(member):
                await self._moved.wait()
        if self._reconnect.is_set():  # rollout workers shall know all of them, and not first one and then the others
            await self._to_rollout(self._connect)

    def _is_current(self, member: Member) -> bool:
        assert self._published is not None
        gone = member.worker is None or member.lost.done() or member.name not in self.engines
        return gone or member.confirmed == self._published.update.version

    # Engines

    def engine(self, name: str) -> Engine:
        """One that is up."""
        engine = self.engines[name].worker
        assert engine is not None
        return engine

    async def _keep_engine(self, member: Member) -> None:
        """One engine, for as long as it can be kept alive; the others go on without it when it cannot."""

        async def serve(engine: Engine) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(member, engine))
                tasks.create_task(self._look_after(member))

        def on_lost() -> list[int]:
            self._confirm(member, -1)
            self._reconnect.set()
            return []

        cause = await self._supervisor.keep(member, _unwrapped(serve), on_lost, lambda: bool(self.serving))
        await self._remove(member, str(cause))

    async def _follow(self, member: Member, engine: Engine) -> None:
        """Consumes published versions, each as soon as the last is proved; produces an engine that may serve."""
        while True:
            while self._published is None or member.confirmed == self._published.update.version:
                await self._news.wait()
            published = self._published
            try:
                await self._send(member.name, published.update, published.reference)
            except RemoteError as error:
                raise WorkerDied(f"{member.name} broke: {error}") from error
            except (WorkerDied, WeightsUnreachable) as error:
                if isinstance(error, WorkerDied) and error.worker == member.name:
                    raise  # it died, or its connection broke, and nobody knows how far it has come with the update
                await self._look(engine, member.name)
                await self._await_other_weights(published)
                continue
            self._confirm(member, published.update.version)
            if not member.serving.is_set():
                if member.asked_for and not member.life:
                    self._log.append(EngineJoined(engine=member.name, version=member.confirmed))
                self._on_serving(member.name)
                self._supervisor.serves(member)
                self._reconnect.set()

    async def _await_other_weights(self, published: Published) -> None:
        """The engine lives, so the trainer must have died with its weights: it will publish them again."""

        async def wait() -> None:
            while self._published is published:
                await self._news.wait()

        await within(self._config.run.deadline_s, f"publishing version {published.update.version} again", wait())

    async def _look(self, engine: Engine, name: str) -> EngineStats:
        return await within(self._config.supervise.health_s, f"a look at {name}", engine.stats())

    async def _look_after(self, member: Member) -> None:
        every_s = max(self._config.metrics.stats_every_s, len(self.engines) / _MOST_LOOKS_PER_S)
        told = time.monotonic()

        async def look(engine: Engine) -> None:
            nonlocal told
            stats = await engine.stats()
            if member.stats is not None:
                member.limit = next_limit(member.limit, self._config.engine.max_num_seqs, member.stats, stats)
            member.stats = stats
            member.pace.look(time.monotonic(), stats)
            if time.monotonic() - told >= every_s:
                told = time.monotonic()
                self._on_stats(member.name, stats)

        await self._supervisor.look_after(member, look, every_s)

    async def look_at_engines(self) -> None:
        """One last look, whose counters are final; an engine that is lost in this moment has had its last one."""

        async def last_look(member: Member) -> None:
            try:
                self._on_stats(member.name, await self._look(await member.get(), member.name))
            except LOST as error:
                member.lose(member.worker, error)

        await asyncio.gather(*(last_look(member) for member in self.serving))
        await self._to_rollout(self._look_at_rollout)

    # Joining and leaving

    async def resize(self, count: int) -> None:
        """Have so many engines: start more, or let the youngest leave; returns when that has begun."""
        staying = [member for member in self.engines.values() if not member.leaving]
        assert self._tasks is not None
        for member in staying[count:]:
            self._tasks.create_task(self._let_leave(member))
        for _ in range(count - len(staying)):
            member = self._member(self._next_name(), None)
            member.asked_for = True
            self.engines[member.name] = member
            self._lives[member.name] = self._tasks.create_task(self._join(member))

    def _next_name(self) -> str:
        number = len(self.engines)
        while f"engine-{number}" in self.engines:
            number += 1
        return f"engine-{number}"

    async def _join(self, member: Member) -> None:
        # One that was asked for and cannot start is not worth the run.
        try:
            member.begin(await member.start())
        except HeadwayError as error:
            await self._remove(member, f"it did not start: {error}")
            return
        member.life = 0
        await self._keep_engine(member)

    async def _let_leave(self, member: Member) -> None:
        """What it has sampled is given back first, and goes on elsewhere; then it is ended."""
        member.leaving = True
        await self._to_rollout(self._connect)
        try:
            async with asyncio.timeout(self._config.supervise.health_s):
                while member.worker is not None and _num_sequences(await member.worker.stats()):
                    await asyncio.sleep(_DRAIN_LOOK_S)
            if member.worker is not None:
                self._on_stats(member.name, await member.worker.stats())
        except (TimeoutError, *LOST):
            pass  # then its requests go on from what was received
        if (life := self._lives.pop(member.name, None)) is not None:
            life.cancel()
        await self._remove(member, "it was asked to leave")

    async def _remove(self, member: Member, cause: str) -> None:
        if self.engines.pop(member.name, None) is None:
            return  # it could not be kept just as it was to leave
        self._log.append(EngineLeft(engine=member.name, cause=cause))
        self._confirm(member, -1)
        await self._to_rollout(self._connect)
        await self._fleet.stop(member.name)
        if not self.engines:
            raise RunFailed(f"no engine is left; the last was {member.name}: {cause}")

    # Rollout workers and the reward pool

    async def run(self, admission: Admission) -> Group:
        """The group, from the first rollout worker that brings it home; one that is lost costs what it had sampled."""
        is_training = admission.stream == "train"
        while True:
            kept = await self._rollout_for(admission.group)
            worker = await kept.get()
            groups = self._groups[kept.name]
            if is_training:
                groups.append(admission.group)
            try:
                group = await worker.run(admission)
            except WorkerDied as error:
                kept.lose(worker, error)  # its keeper takes the groups it had
                continue
            if is_training:
                groups.remove(admission.group)
            return group

    async def _rollout_for(self, group: int) -> Kept[RolloutWorker]:
        """By turns among those that serve."""
        while not (serving := [kept for kept in self._rollout.values() if kept.serving.is_set()]):
            await self._staffed.wait()
        return serving[group % len(serving)]

    async def _keep_rollout(self, name: str, kept: Kept[RolloutWorker]) -> None:
        async def serve(worker: RolloutWorker) -> None:
            await self._connect(worker)
            await self._inform(worker)
            self._supervisor.serves(kept)
            self._staffed.set()
            self._staffed = asyncio.Event()
            await self._supervisor.look_after(kept, self._look_at_rollout, self._config.metrics.stats_every_s)

        def take_groups() -> list[int]:
            groups, self._groups[name] = self._groups[name], []
            return sorted(groups)

        await self._supervisor.keep(kept, serve, take_groups)

    async def _look_at_rollout(self, worker: RolloutWorker) -> None:
        found: RolloutStats = await worker.stats()
        for shunned in found.shunned:
            self._believe(shunned)
        by_engine: dict[str, list[Continued]] = {}
        for continued in found.continued:
            by_engine.setdefault(continued.engine, []).append(continued)
        for engine, items in by_engine.items():
            tokens, seconds = sum(item.tokens for item in items), max(item.seconds for item in items)
            self._log.append(Retried(engine=engine, requests=len(items), tokens=tokens, seconds=seconds))

    def _believe(self, shunned: Shunned) -> None:
        """A rollout worker found an engine wanting: it is replaced, if it is still that one."""
        member = self.engines.get(shunned.engine)
        if member is not None and member.life == shunned.life:
            member.lose(member.worker, HeadwayError(shunned.reason))

    async def _serve_rewards(self, pool: RewardPool) -> None:
        self._pool = pool, self._rewards.life
        await self._to_rollout(self._connect)
        self._supervisor.serves(self._rewards)

        async def look(pool: RewardPool) -> None:
            await pool.stats()

        await self._supervisor.look_after(self._rewards, look, self._config.metrics.stats_every_s)

    # What rollout workers are told

    async def _to_rollout(self, tell: Callable[[RolloutWorker], Awaitable[None]]) -> None:
        """Tell all rollout workers that are up; whoever comes later is told then."""

        async def one(kept: Kept[RolloutWorker]) -> None:
            worker = kept.worker
            if worker is None:
                return
            try:
                await within(self._config.supervise.health_s, f"telling {kept.name}", tell(worker))
            except LOST as error:
                kept.lose(worker, error)

        await asyncio.gather(*(one(kept) for kept in self._rollout.values()))

    async def _connect(self, worker: RolloutWorker) -> None:
        members = [member for member in self.engines.values() if member.serving.is_set()]
        engines = {member.name: member.worker for member in members if member.worker is not None}
        pool, pool_life = self._pool
        lives = {"reward": pool_life} | {member.name: member.life for member in members}
        leaving = tuple(member.name for member in members if member.leaving)
        await worker.connect(engines, lives, leaving, pool)

    async def _inform(self, worker: RolloutWorker) -> None:
        num_workers = len(self._rollout)
        loads = {member.name: member.load for member in self.serving}
        limits = {member.name: -(-member.limit // num_workers) for member in self.serving if member.limit}
        await worker.inform(self.newest or 0, loads, limits)

    async def _tell_connections(self) -> None:
        """Many changes that come together are told once."""
        while True:
            await self._reconnect.wait()
            self._reconnect.clear()
            await self._to_rollout(self._connect)

    async def _tell_loads(self) -> None:
        """A worker knows its own requests; those of the others, and limits, it has to be told."""
        limits: dict[str, int] = {}
        while True:
            await asyncio.sleep(self._config.metrics.stats_every_s)
            found = {member.name: member.limit for member in self.serving}
            if found != limits or (len(self._rollout) > 1 and len(found) > 1):
                limits = found
                await self._to_rollout(self._inform)
            self._tell_slow()

    def _tell_slow(self) -> None:
        """An engine that stays far behind the others is told of, once, and replaced where that is wanted."""
        paces = {member.name: pace for member in self.serving if (pace := member.pace.tokens_per_s) is not None}
        slow = far_slower(paces)
        for member in self.serving:
            if member.name in slow and not member.slow:
                own, others = paces[member.name], slow[member.name]
                self._log.append(EngineSlow(engine=member.name, tokens_per_s=own, others_per_s=others))
                if self._config.supervise.replace_slow:
                    member.lose(member.worker, HeadwayError(f"{member.name} is slow: {own:.3g} tokens/s a sequence"))
            member.slow = member.name in slow


def _num_sequences(stats: EngineStats) -> int:
    return stats.running + stats.waiting


def _unwrapped(serve: Callable[[Engine], Awaitable[None]]) -> Callable[[Engine], Awaitable[None]]:
    """The first error of a task group, as itself."""

    async def call(engine: Engine) -> None:
        try:
            await serve(engine)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    return call
