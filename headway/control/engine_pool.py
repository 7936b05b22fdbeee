"""The engines: stages published weights to each, swaps, verifies, and owns the confirmed version.

Each engine follows the published versions by itself, so that one that joins late or was down catches up like any
other. It serves from the moment it has verified the newest one. A new weight transport needs nothing here: it lives in
`weights/`, and `workers.resolve_transport` chooses it.

Invariants that live here:
  1. Single admission authority: `confirmed` is the lowest version verified by every engine that may serve; an engine
     begins to serve at the newest published version only, so no group meets weights older than its admission.
  6. Parity: after each swap, engine and trainer score the same probe, and the largest difference is an event.
 11. Verified weight sync at every load, by fingerprint or by score, before the engine's first request under it.
 13. Non-blocking generation: a new version is sent to all engines concurrently, while they generate.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headway.config import Config
from headway.control.health import DecodeRate, far_slower, next_limit
from headway.control.rollout_pool import EngineSet, RolloutPool
from headway.control.supervisor import FAILED, Supervised, Supervisor, within
from headway.control.workers import Fleet
from headway.engine.protocol import Engine
from headway.errors import (
    HeadwayError,
    RunFailed,
    WeightMismatch,
    WeightsUnreachable,
    WorkerDied,
)
from headway.record.events import EngineJoined, EngineLeft, EngineSlow, Event, Swapped
from headway.record.stats import StatsMeter
from headway.runtime.channel import RemoteError
from headway.runtime.gather import together
from headway.types import EngineStats, Ints, Scores, WeightUpdate
from headway.weights.probe import ScoreProof, check_parity

_DRAIN_POLL_S = 0.05
_MAX_CHECKS_PER_S = 100
"""Health checks of all engines together: with very many, each is checked less often than the config says."""


@dataclass(frozen=True)
class Published:
    """The newest weights, and the trainer's scores of the probe under them; without an update, those on disk."""

    update: WeightUpdate | None
    reference: Scores

    @property
    def version(self) -> int:
        return self.update.version if self.update else 0


RunLoad = tuple[tuple[int, int], tuple[float, float]]
"""Groups in flight and ready; how long admission and the trainer have waited in all."""


class EngineWorker(Supervised[Engine]):
    """One engine: the version it verified, its latest statistics, how many sequences it should hold."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        super().__init__(name, partial(fleet.start_engine, name))
        self.verified = -1  # the version it runs
        self.confirmed = -1  # the same while it serves: what admission counts
        self.added = self.leaving = self.slow = False
        self.stats: EngineStats | None = None
        self.limit, self.rate = 0, DecodeRate()
        self.task: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return _num_sequences(self.stats) if self.stats else 0

    def stopped(self) -> None:
        super().stopped()
        self.verified = -1
        self.stats, self.limit, self.rate, self.slow = None, 0, DecodeRate(), False


class EnginePool:
    """`changed` is set when `confirmed` may have changed; `load` gives what the run adds to each `Stats` event."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        supervisor: Supervisor,
        rollout: RolloutPool,
        emit: Callable[[Event], object],
        probe: tuple[Ints, ...],
        load: Callable[[], RunLoad] = lambda: ((0, 0), (0.0, 0.0)),
    ) -> None:
        self._config, self._fleet, self._supervisor, self._rollout, self._emit = (
            config,
            fleet,
            supervisor,
            rollout,
            emit,
        )
        self._probe, self._load, self._meter = probe, load, StatsMeter()
        self.engines = {name: EngineWorker(name, fleet) for name in config.engine.placement}
        self.changed = asyncio.Event()
        self.newest: int | None = None  # the version that is published, or about to be
        self._tasks: asyncio.TaskGroup | None = None
        self._published: Published | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._versions: Counter[int] = Counter()  # confirmed versions, by how many engines
        self._counted: set[EngineWorker] = set()  # those engines
        # Each is set once and replaced: when weights are published, and when an engine has verified some.
        self._news, self._moved = asyncio.Event(), asyncio.Event()
        self._reconnect = asyncio.Event()  # rollout workers do not know the present set of engines
        self._proofs = defaultdict[tuple[str, int], ScoreProof](lambda: ScoreProof(config.model.dtype))

    async def start(self) -> None:
        await together(*(self._supervisor.start(engine) for engine in self.engines.values()))

    def supervise(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[Any]]:
        """Begin to serve; the tasks run until they are cancelled."""
        self._tasks = tasks
        for engine in self.engines.values():
            engine.task = tasks.create_task(self._supervise_engine(engine))
        loops = (self._connect_rollout(), self._inform_rollout(), self._replace_faulty())
        return [*(tasks.create_task(loop) for loop in loops)]

    def stop(self) -> None:
        """The run is over: engines are no longer supervised."""
        for engine in self.engines.values():
            if engine.task is not None:
                engine.task.cancel()

    # Versions

    @property
    def serving(self) -> list[EngineWorker]:
        return [engine for engine in self.engines.values() if engine.serving.is_set() and not engine.leaving]

    @property
    def confirmed(self) -> int | None:
        """The lowest version verified by every engine that may serve; None while there is none.

        An engine that failed or leaves counts until no rollout worker uses it any more.
        """
        return min(self._versions, default=None) if any(e.serving.is_set() for e in self.engines.values()) else None

    def _confirm(self, engine: EngineWorker, version: int) -> None:
        """The engine serves at a version, or with -1 no longer. Constant time, because every admission asks."""
        self._versions[engine.confirmed] -= 1
        self._versions[version] += 1
        engine.confirmed = version
        (self._counted.discard if version < 0 else self._counted.add)(engine)
        self._versions = +self._versions
        self._versions.pop(-1, None)
        self.changed.set()

    def publish(self, published: Published) -> None:
        """Send these weights to every engine; the caller does not wait."""
        assert self._tasks is not None
        self.newest = published.version
        self._announcing = self._tasks.create_task(self._announce(published, self._announcing))

    async def _announce(self, published: Published, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        self._rollout.engines.newest = published.version
        await self._rollout.inform()  # before any token can be sampled under it
        self._published = published
        self._news.set()
        self._news = asyncio.Event()

    async def current(self) -> None:
        """Wait until every engine that is up has verified what is published: older weights are no longer read."""
        if self._announcing is not None:
            await self._announcing
        for engine in list(self.engines.values()):
            while not self._is_current(engine):
                await self._moved.wait()
        if self._reconnect.is_set():  # so that groups are placed on all of them from the first one on
            await self._connect()

    def _is_current(self, engine: EngineWorker) -> bool:
        assert self._published is not None
        gone = engine.worker is None or engine.failure.done() or engine.name not in self.engines
        return gone or engine.verified == self._published.version

    # One engine

    async def _supervise_engine(self, engine: EngineWorker) -> None:
        """One engine, for as long as it can be restarted; the others continue without it when it cannot."""

        async def serve(worker: Engine) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(engine, worker))
                tasks.create_task(self._check_health(engine))

        def on_failed() -> list[int]:
            self._verified(engine, -1)
            self._reconnect.set()
            return []

        cause = await self._supervisor.supervise(engine, serve, on_failed, lambda: bool(self.serving))
        await self._remove(engine, str(cause))

    async def _follow(self, engine: EngineWorker, worker: Engine) -> None:
        """Consumes published versions, each as soon as the last is verified; produces an engine that may serve."""
        while True:
            while self._published is None or engine.verified == self._published.version:
                await self._news.wait()
            published = self._published
            try:
                await self._update(engine, worker, published)
            except RemoteError as error:
                raise WorkerDied(f"{engine.name} broke: {error}") from error
            except (WorkerDied, WeightsUnreachable) as error:
                if isinstance(error, WorkerDied) and error.worker == engine.name:
                    raise  # it died, or its connection broke while it applied the update
                await self._read_stats(worker, engine.name)
                await self._await_other_weights(published)
                continue
            self._verified(engine, published.version)
            if engine.serving.is_set():
                self._confirm(engine, published.version)
            elif published.version == self.newest:  # else groups may have been admitted at a newer version
                self._begin_serving(engine)

    def _begin_serving(self, engine: EngineWorker) -> None:
        if engine.added and not engine.incarnation:
            self._emit(EngineJoined(engine=engine.name, version=engine.verified))
        self._supervisor.mark_serving(engine)
        if engine.serving.is_set():
            self._meter.begin(engine.name)
            self._confirm(engine, engine.verified)
            self._reconnect.set()

    def _verified(self, engine: EngineWorker, version: int) -> None:
        engine.verified = version
        self._moved.set()
        self._moved = asyncio.Event()

    async def _update(self, engine: EngineWorker, worker: Engine, published: Published) -> None:
        """Stage the update during generation, swap, and verify what the engine then runs."""
        update = published.update
        if update is None:
            return
        started = time.monotonic()
        await worker.stage_weights(update)
        stage_s = time.monotonic() - started
        report = await worker.swap(update.version, self._config.engine.kv_on_swap)
        wrong = [key for key, value in update.fingerprints.items() if report.fingerprints.get(key) != value]
        if wrong and report.fingerprints:
            raise WeightMismatch(f"{engine.name} runs other weights than version {update.version}: {wrong[0]} differs")
        scores = await worker.score(self._probe, 1.0)
        if self._config.engine.kind == "embedded":
            check_parity(engine.name, scores, published.reference, self._config.model.dtype)
        if not report.fingerprints:
            self._proofs[engine.name, engine.incarnation].check(engine.name, scores, published.reference)
        self._emit(
            Swapped(
                version=update.version,
                engine=engine.name,
                stage_s=stage_s,
                pause_ms=report.pause_ms,
                interrupted=report.num_interrupted,
                recomputed=report.num_recomputed,
                parity_max_abs=parity(scores, published.reference),
            )
        )

    async def _await_other_weights(self, published: Published) -> None:
        """The engine answers, so the trainer must have died with its weights: it will publish them again."""

        async def wait() -> None:
            while self._published is published:
                await self._news.wait()

        await within(self._config.run.deadline_s, f"publishing version {published.version} again", wait())

    async def _read_stats(self, worker: Engine, name: str) -> EngineStats:
        return await within(self._config.supervise.health_s, f"a health check of {name}", worker.stats())

    async def _check_health(self, engine: EngineWorker) -> None:
        every_s = max(self._config.metrics.stats_every_s, len(self.engines) / _MAX_CHECKS_PER_S)
        reported = time.monotonic()

        async def check(worker: Engine) -> None:
            nonlocal reported
            stats = await worker.stats()
            if engine.stats is not None:
                engine.limit = next_limit(engine.limit, self._config.engine.max_num_seqs, engine.stats, stats)
            engine.stats = stats
            engine.rate.sample(time.monotonic(), stats)
            if time.monotonic() - reported >= every_s:
                reported = time.monotonic()
                self._report(engine, stats)

        await self._supervisor.check_health(engine, check, every_s)

    def _report(self, engine: EngineWorker, stats: EngineStats) -> None:
        self._emit(self._meter.measure(engine.name, stats, *self._load()))

    async def read_final_stats(self) -> None:
        """Statistics whose counters are final; engines that fail here are skipped."""

        async def read(engine: EngineWorker) -> None:
            with engine.watched():
                self._report(engine, await self._read_stats(await engine.get(), engine.name))

        await asyncio.gather(*(read(engine) for engine in self.serving))
        await self._rollout.read_all_stats()

    # Joining and leaving

    async def resize(self, count: int) -> None:
        """Start engines, or let the youngest leave, until there are `count`; returns when that has begun."""
        assert self._tasks is not None
        staying = [engine for engine in self.engines.values() if not engine.leaving]
        for engine in staying[count:]:
            self._tasks.create_task(self._leave(engine))
        for _ in range(count - len(staying)):
            number = next(n for n in range(len(self.engines), 1 << 20) if f"engine-{n}" not in self.engines)
            engine = EngineWorker(f"engine-{number}", self._fleet)
            engine.added = True
            self.engines[engine.name] = engine
            engine.task = self._tasks.create_task(self._join(engine))

    async def _join(self, engine: EngineWorker) -> None:
        # An additional engine that cannot start is not worth the run.
        try:
            await self._supervisor.start(engine)
        except HeadwayError as error:
            await self._remove(engine, f"it did not start: {error}")
            return
        await self._supervise_engine(engine)

    async def _leave(self, engine: EngineWorker) -> None:
        """Its requests continue elsewhere with what it has sampled; then it is ended."""
        engine.leaving = True
        await self._connect()
        with suppress(TimeoutError, *FAILED):  # then its requests continue from what was received
            async with asyncio.timeout(self._config.supervise.health_s):
                while engine.worker is not None and _num_sequences(await engine.worker.stats()):
                    await asyncio.sleep(_DRAIN_POLL_S)
            if engine.worker is not None:
                self._report(engine, await engine.worker.stats())
        if engine.task is not None:
            engine.task.cancel()
        await self._remove(engine, "it was asked to leave")

    async def _remove(self, engine: EngineWorker, cause: str) -> None:
        if self.engines.pop(engine.name, None) is None:
            return  # it failed for the last time just as it was to leave
        self._emit(EngineLeft(engine=engine.name, cause=cause))
        self._verified(engine, -1)
        await self._connect()
        await self._fleet.stop(engine.name)
        if not self.engines:
            raise RunFailed(f"no engine is left; the last was {engine.name}: {cause}")

    # What rollout workers know of engines

    async def _connect(self) -> None:
        """Tell rollout workers the present set; only then do engines outside it stop to count in `confirmed`."""
        self._reconnect.clear()
        serving = [engine for engine in self.engines.values() if engine.serving.is_set()]
        gone = [engine for engine in self._counted if not engine.serving.is_set() or engine.name not in self.engines]
        state: EngineSet = self._rollout.engines
        state.engines = {engine.name: engine.worker for engine in serving if engine.worker is not None}
        state.incarnations = {engine.name: engine.incarnation for engine in serving}
        state.leaving = tuple(engine.name for engine in serving if engine.leaving)
        await self._rollout.connect()
        for engine in gone:
            if not engine.serving.is_set() or engine.name not in self.engines:
                self._confirm(engine, -1)

    async def _connect_rollout(self) -> None:
        """Consumes changes of the set of engines; those that come together are sent once."""
        while True:
            await self._reconnect.wait()
            await self._connect()

    async def _inform_rollout(self) -> None:
        """Produces loads and limits for rollout workers: each knows its own requests, not those of the others."""
        state = self._rollout.engines
        while True:
            await asyncio.sleep(self._config.metrics.stats_every_s)
            limits = {engine.name: engine.limit for engine in self.serving if engine.limit}
            is_changed, state.limits = limits != state.limits, limits
            state.loads = {engine.name: engine.load for engine in self.serving}
            if is_changed or (self._config.rollout.workers > 1 and len(state.loads) > 1):
                await self._rollout.inform()
            self._report_slow()

    async def _replace_faulty(self) -> None:
        """Consumes faults that rollout workers found; replaces those engines, unless they were restarted since."""
        while True:
            fault = await self._rollout.faults.get()
            engine = self.engines.get(fault.engine)
            if engine is not None and engine.incarnation == fault.incarnation:
                engine.fail(engine.worker, HeadwayError(fault.reason))

    def _report_slow(self) -> None:
        """An engine that stays far behind the others is reported once, and replaced where that is configured."""
        rates = {engine.name: rate for engine in self.serving if (rate := engine.rate.tokens_per_s) is not None}
        slow = far_slower(rates)
        for engine in self.serving:
            if engine.name in slow and not engine.slow:
                own, others = rates[engine.name], slow[engine.name]
                self._emit(EngineSlow(engine=engine.name, tokens_per_s=own, others_per_s=others))
                if self._config.supervise.replace_slow:
                    engine.fail(engine.worker, HeadwayError(f"{engine.name} is slow: {own:.3g} tokens/s a sequence"))
            engine.slow = engine.name in slow


def _num_sequences(stats: EngineStats) -> int:
    return stats.running + stats.waiting


def parity(one: Scores, other: Scores) -> float:
    """The largest difference of two scores of the same tokens under the same version."""
    if one.version != other.version:
        raise WeightMismatch(
            f"a probe was scored at version {one.version} by one side and {other.version} by the other"
        )
    return max(float(np.abs(a - b).max()) for a, b in zip(one.logprobs, other.logprobs, strict=True))
