"""The trainer under supervision: calls that survive its failures, and the way back to the run's version.

Invariants that live here:
 14. Crash safety: a trainer that comes back, restarted or resumed, first loads the newest checkpoint and retrains the
     recorded batches since, so that versions never decrease.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from headway.config import Config
from headway.control.engine_pool import EnginePool, Published
from headway.control.retrain import load_newest_checkpoint, retrain
from headway.control.supervisor import Supervised, Supervisor
from headway.control.workers import Fleet
from headway.errors import DeadlineExceeded, InvariantBroken
from headway.record.events import Warned
from headway.record.phases import phase
from headway.record.run import Run
from headway.record.shards import RunLog
from headway.training.ranks import RankedTrainer
from headway.types import Ints
from headway.weights.probe import check_finite

R = TypeVar("R")


class TrainerWorker(Supervised[RankedTrainer]):
    """`version` is that of the weights its incarnation last restored; the controller counts on from there."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        supervisor: Supervisor,
        engines: EnginePool,
        log: RunLog,
        directory: Path,
        probe: tuple[Ints, ...],
    ) -> None:
        super().__init__("trainer", fleet.start_trainer)
        self._config, self._supervisor, self._engines = config, supervisor, engines
        self._log, self._directory, self._probe = log, directory, probe
        self.checkpoint_version = 0  # the checkpoint that the last restoration began with

    async def call(self, call: Callable[[RankedTrainer], Awaitable[R]]) -> R:
        """The trainer's answer; when it fails meanwhile, that of its next incarnation."""
        while True:
            trainer = await self.get()
            with self.watched(trainer):
                return await call(trainer)

    async def publish(self, trainer: RankedTrainer) -> Published:
        published = Published(await trainer.publish(), await trainer.score(self._probe, 1.0))
        check_finite(published.reference, self._config.model.dtype)
        return published

    def supervise(self, tasks: asyncio.TaskGroup, resumes: bool) -> list[asyncio.Task[Any]]:
        """Begin to serve; a resumed run and a restarted trainer restore the recorded version first."""

        async def serve(trainer: RankedTrainer) -> None:
            async with asyncio.TaskGroup() as own:
                own.create_task(self._check_health())
                if resumes or self.incarnation:
                    await self._restore(trainer)
                self._supervisor.mark_serving(self)

        return [tasks.create_task(self._supervisor.supervise(self, serve))]

    async def _check_health(self) -> None:
        health_s = self._config.supervise.health_s
        period_s = min(self._config.metrics.stats_every_s, health_s / 2)

        async def check(trainer: RankedTrainer) -> None:
            await trainer.ping(health_s)

        try:
            await self._supervisor.check_health(self, check, period_s)
        except DeadlineExceeded as late:  # of the trainer as a whole: say which rank it was, if others answer
            assert self.worker is not None
            silent = self.worker.silent
            if not 0 < len(silent) < len(self.worker.ranks):
                raise
            raise DeadlineExceeded(f"{late}; no answer to a ping from {', '.join(sorted(silent))}") from None

    async def _restore(self, trainer: RankedTrainer) -> None:
        """To the version of the record; weights that did not reach every engine are published again."""
        await self._log.flush()
        run = await asyncio.to_thread(Run.read, self._directory)

        def warn(message: str) -> None:
            self._log.append(Warned(message=message))

        self.checkpoint_version = await load_newest_checkpoint(run, trainer, self._directory, warn)
        num_steps = run.num_trained - self.checkpoint_version
        with phase(self._log.append, f"retraining {num_steps} recorded steps") as progress:
            load_group, emit = self._log.record.load, self._log.append
            await retrain(load_group, run, trainer, self.checkpoint_version, progress, emit)
        newest = self._engines.newest
        if newest is not None:
            if newest > run.num_trained:
                raise InvariantBroken(f"engines were sent version {newest}, and the record is at {run.num_trained}")
            self._engines.publish(await self.publish(trainer))
