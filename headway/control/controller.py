"""The controller: owns the version and the loops that move groups between workers. It sees workers only as handles.

    prompts ──► rollout ──► reward ──► buffer ──► trainer
                  ▲                                  │
                  └───────────── weights ◄───────────┘

Three loops, joined by what they wait for: admission waits for room under Eq. 3, training waits for a batch, and each
training step's weights travel to the engines beside the next step. Everything that happens is an event first. Workers
that are lost are started again beside all this (roster.py, supervise.py); the trainer comes back at the version it had.

Invariants that live here:
  1. Single admission authority: every admission asks `StalenessControl` with the lowest version confirmed by all
     engines that may serve.
  2. Conservation: the ledger is checked after every training step.
  4. η = 0 is synchronous training: no line here asks whether it is; Eq. 3 alone makes the two sides take turns.
  6. Parity: after each swap, engine and trainer score the same probe, and the largest difference is an event.
 11. Verified weight sync at every load, by fingerprint or by score, before a version counts as confirmed.
 13. Non-blocking generation: no loop that feeds the engines waits for training, saving, evaluation or logging;
     training waits for a checkpoint only while its state is set aside.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from headway.config import Config
from headway.control.buffer import Buffer
from headway.control.engine_pool import Published, Roster
from headway.control.resize import take
from headway.control.retrain import load_newest_checkpoint, retrain
from headway.control.staleness import StalenessControl
from headway.control.supervisor import LOST, Kept, Supervisor
from headway.control.workers import Fleet, Workers
from headway.errors import DeadlineExceeded, InvariantBroken, RunFailed, SaveFailed, WeightMismatch
from headway.record import events
from headway.record.ledger import fold
from headway.record.log import EVENTS_NAME, read
from headway.record.phases import phase
from headway.record.shards import RunLog
from headway.record.stats import StatsMeter
from headway.rollout.evaluate import evaluate
from headway.tasks.prompts import MixedStream, PromptStream
from headway.training.checkpoint import slot_for
from headway.training.ranks import RankedTrainer
from headway.types import (
    Admission,
    Batch,
    DropReason,
    EngineStats,
    Group,
    Ints,
    Prompt,
    Sampling,
    Scores,
    StepReport,
    WeightUpdate,
)
from headway.weights.fingerprints import digest
from headway.weights.probe import ScoreProof

R = TypeVar("R")
Failures = tuple[events.FailedTrajectory, ...]
_WISHES_EVERY_S = 0.5
_ROOM_S = 60.0
"""However many checkpoints fail, for so long a person has time to make room on the disk."""


@dataclass
class Tasks:
    """What the run is about: prompts in the order of their groups, held-out prompts, a probe for parity."""

    stream: PromptStream | MixedStream
    held_out: list[Prompt]
    probe: tuple[Ints, ...]
    sampling: Sampling
    eval_sampling: Sampling


@dataclass
class Progress:
    """Where a run stands when the controller takes over: nothing done, or what the record says."""

    version: int
    staleness: StalenessControl
    buffer: Buffer
    unfinished: list[int]
    untrained_batch: tuple[Group, ...] | None = None
    num_checkpoints: int = 0
    evaluated_before: bool = False


class Controller:
    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        workers: Workers,
        tasks: Tasks,
        progress: Progress,
        log: RunLog,
        directory: Path,
    ):
        self.config, self.tasks, self.log = config, tasks, log
        self.directory = directory
        self.version = progress.version
        self.staleness, self.buffer = progress.staleness, progress.buffer
        self._progress = progress
        self._proofs = defaultdict[tuple[str, int], ScoreProof](lambda: ScoreProof(config.model.dtype))
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._meter = StatsMeter()
        self._supervisor = Supervisor(fleet, config.supervise, log)
        self._trainer: Kept[RankedTrainer] = Kept("trainer", workers.trainer, fleet.start_trainer)
        self.roster = Roster(
            *(config, fleet, workers.generation, self._supervisor, log),
            *(self._send_to, self._on_stats, self._meter.begin, self._changed),
        )
        self._evaluation: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._num_skipped = 0
        self._unsaved: list[float] = []  # when checkpoints were begun, all since the last that could be written
        self._num_checkpoints = progress.num_checkpoints
        self._num_generating = 0
        self._admission_wait_s = 0.0
        self._trainer_wait_s = 0.0

    async def run(self) -> None:
        """From the current version to the last; ends early with the cause if any part of it dies."""
        try:
            async with self._tasks:
                background = [self._tasks.create_task(self._supervisor.watch())]
                background.append(self._tasks.create_task(self._keep_trainer()))
                background.append(self._tasks.create_task(self._look_after_trainer()))
                self.roster.keep_all(self._tasks)
                self.roster.publish(await self._with_trainer(self._publish))
                await self.roster.current()
                if not self._progress.evaluated_before:
                    await self._evaluate_alone("before")
                background.append(self._tasks.create_task(self._admit()))
                background.append(self._tasks.create_task(self._resize()))
                await self._train()
                await self._finish()
                self.roster.let_go()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _first_cause(errors) from errors

    # Admission

    async def _admit(self) -> None:
        """Consumes prompts; waits for room; is unblocked by a confirmed version, a take or a drop; produces groups."""
        for group_id in self._progress.unfinished:
            self._tasks.create_task(self._generate(self._admission(group_id, self.version)))
        while True:
            started = time.time()
            while not self._has_room():
                self._changed.clear()
                await self._changed.wait()
            self._admission_wait_s += time.time() - started
            version = self.roster.confirmed
            assert version is not None  # there is room
            group_id = self.staleness.admit(version)
            admission = self._admission(group_id, version)
            self.log.append(
                events.Admitted(group=group_id, prompt=admission.prompt.index, eta=admission.eta, version=version)
            )
            self._tasks.create_task(self._generate(admission))
            # A burst of admissions must not keep finished groups from being taken.
            await asyncio.sleep(0)

    def _has_room(self) -> bool:
        """Eq. 3, the configured limit, no group more than the run will train, and an engine that serves."""
        control, limit = self.staleness, self.config.rollout.max_groups
        num_wanted = self.config.run.steps * control.batch_groups
        if control.num_admitted - control.num_dropped >= num_wanted or (limit and control.num_untaken >= limit):
            return False
        version = self.roster.confirmed
        return version is not None and control.may_admit(version)

    def _admission(self, group_id: int, version: int) -> Admission:
        return Admission(
            group=group_id,
            prompt=self.tasks.stream[group_id],
            size=self.config.rollout.group_size,
            eta=self.config.staleness.max_staleness,
            version=version,
            sampling=self.tasks.sampling,
        )

    async def _generate(self, admission: Admission) -> None:
        """One group's life from admission to the buffer, or to its drop."""
        started = time.time()
        self._num_generating += 1
        group = await self.roster.run(admission)
        self._num_generating -= 1
        if group.trajectories:
            self.log.finished(group, seconds=time.time() - started)
            self.buffer.put(group)
            return
        self._drop((group.id,), DropReason.FAILED, events.FailedTrajectory.of(group))
        self._check_not_all_failing(group)

    def _drop(self, groups: tuple[int, ...], reason: DropReason, failures: Failures = (), tokens: int = 0) -> None:
        for group_id in groups:
            self.buffer.drop(group_id, reason)
        tokens += sum(failure.tokens for failure in failures)
        self.log.append(events.Dropped(groups=groups, reason=reason.value, tokens=tokens, failures=failures))
        self._changed.set()

    def _check_not_all_failing(self, group: Group) -> None:
        """A verifier that fails on everything would have the run generate for ever and train on nothing."""
        num_failed = self.buffer.num_dropped[DropReason.FAILED]
        if num_failed >= 4 * self.staleness.batch_groups and self.staleness.num_admitted <= 2 * num_failed:
            raise RunFailed(
                f"{num_failed} of {self.staleness.num_admitted} groups failed whole, the last with "
                f"'{group.failures[0].reason}'; check the verifier and the workflow"
            )

    # Training

    async def _train(self) -> None:
        """Consumes batches; waits for B groups in the window; produces a version each, and its weights."""
        while self.version < self.config.run.steps:
            started = time.time()
            groups = self._progress.untrained_batch or await self._take_batch()
            wait_s = time.time() - started
            self._trainer_wait_s += wait_s
            batch = Batch(self.version, groups)
            if self._progress.untrained_batch is None:
                self.log.append(events.Taken(version=self.version, groups=tuple(group.id for group in groups)))
            self._progress.untrained_batch = None
            self._changed.set()
            report, published = await self._with_trainer(partial(self._step, batch))
            if published is None:
                self._skip(batch, report)
                continue
            self._accept(batch, report, published.update, wait_s)
            self.roster.publish(published)
            await self._save_and_evaluate()

    async def _take_batch(self) -> tuple[Group, ...]:
        """Waits longer than any call to a worker may take, so that a silent worker is named rather than its groups."""
        seconds = 2 * self.config.run.deadline_s
        # Not wait_for, which on Python 3.11 loses a cancellation that comes as its wait ends: the run would not stop.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self.buffer.take_batch()
        what = f"{self.staleness.batch_groups} finished groups"
        raise DeadlineExceeded(f"waited more than {seconds:g} s for {what}; raise run.deadline_s if that is too short")

    async def _step(self, batch: Batch, trainer: RankedTrainer) -> tuple[StepReport, Published | None]:
        """One batch, to weights that may travel; all by one life of the trainer, or all of it again by the next."""
        report = await trainer.train(batch)
        if report.skipped:
            return report, None
        await self.roster.current()  # publishing writes over the version before the last
        return report, await self._publish(trainer)

    def _accept(self, batch: Batch, report: StepReport, update: WeightUpdate, wait_s: float) -> None:
        """A training step succeeded: record it; its weights travel beside the next step."""
        self._num_skipped = 0
        self.version = report.version
        self.staleness.trained(group.id for group in batch.groups)
        self.staleness.check_ledger()
        ages = batch.staleness
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        self.log.append(
            events.Trained(
                version=report.version,
                groups=tuple(group.id for group in batch.groups),
                tokens=report.num_tokens,
                started=report.started,
                seconds=report.seconds,
                wait_s=wait_s,
                staleness_mean=float(np.mean(ages)) if ages else 0.0,
                staleness_max=max(ages, default=0),
                reward=float(np.mean(rewards)) if rewards else None,
                metrics=dict(report.metrics),
                digest=digest(update.fingerprints),
            )
        )

    def _skip(self, batch: Batch, report: StepReport) -> None:
        groups = tuple(group.id for group in batch.groups)
        self.log.append(events.Skipped(version=self.version, groups=groups, reason=report.skipped))
        self._drop(groups, DropReason.NON_FINITE, tokens=batch.num_sampled)
        self._num_skipped += 1
        if self._num_skipped >= self.config.trainer.max_skipped:
            raise RunFailed(
                f"{self._num_skipped} training steps in a row were not finite (version {self.version}: "
                f"{report.skipped}); lower trainer.lr or look at the data"
            )

    async def _save_and_evaluate(self) -> None:
        last = self.version == self.config.run.steps
        if self.version % self.config.checkpoint.every == 0 or last:
            await self._keep()
        every = self.config.evaluate.every
        idle = self._evaluation is None or self._evaluation.done()
        if every and self.version % every == 0 and not last and idle and self.tasks.held_out:
            self._evaluation = self._tasks.create_task(self._evaluate("step", 8))

    async def _keep(self) -> None:
        """Have the trainer set its state aside; it is written beside the steps to come, one checkpoint at a time."""
        await self._saved()
        keeper = await self._with_trainer(_kept_by)
        self._saving = self._tasks.create_task(self._save(self.version, keeper))

    async def _saved(self) -> None:
        if self._saving is not None:
            await self._saving

    async def _save(self, version: int, keeper: RankedTrainer) -> None:
        started, slot = time.time(), slot_for(self._num_checkpoints)
        await self.log.flush()
        # A disk that is full may have room later; the other slot and the record lead to the same weights until then.
        try:
            await self._with_trainer(partial(self._write, version, slot, keeper))
        except SaveFailed as error:
            self.log.append(events.CheckpointFailed(version=version, slot=slot, cause=str(error)))
            self._unsaved.append(started)
            too_many = len(self._unsaved) > self.config.supervise.max_failures
            if too_many and time.time() - self._unsaved[0] > _ROOM_S:
                raise
            return
        self._unsaved.clear()
        self._num_checkpoints += 1
        self.log.append(events.Checkpointed(version=version, slot=slot, seconds=time.time() - started))

    async def _write(self, version: int, slot: str, keeper: RankedTrainer, trainer: RankedTrainer) -> None:
        # One that came back has kept nothing, and may be a step further by now, unless that was the last.
        if trainer is not keeper and version == self.config.run.steps:
            await trainer.snapshot()
        await trainer.save(str(self.directory / "checkpoint" / slot))

    async def _finish(self) -> None:
        await self.roster.current()
        await self._saved()
        if self._evaluation is not None:
            await self._evaluation
        await self._evaluate_alone("after")
        await self._with_trainer(lambda trainer: trainer.save_model(str(self.directory / "model")))
        await self.roster.look_at_engines()

    # The trainer

    async def _with_trainer(self, call: Callable[[RankedTrainer], Awaitable[R]]) -> R:
        """What the trainer answers; when it is lost meanwhile, what it answers when it is back."""
        while True:
            trainer = await self._trainer.get()
            try:
                return await call(trainer)
            except LOST as error:
                self._trainer.lose(trainer, error)

    async def _keep_trainer(self) -> None:
        async def serve(trainer: RankedTrainer) -> None:
            if self._trainer.life:
                await self._bring_back(trainer)
            self._supervisor.serves(self._trainer)
            await asyncio.Event().wait()

        # Meanwhile generation goes on with the weights it has, as far as admission allows.
        await self._supervisor.keep(self._trainer, serve)

    async def _look_after_trainer(self) -> None:
        """Finds one that hangs, whatever it was asked to do; produces a loss, which its keeper answers."""
        health_s = self.config.supervise.health_s
        period_s = min(self.config.metrics.stats_every_s, health_s / 2)
        look_s = (health_s - period_s) / 2
        while True:
            await asyncio.sleep(period_s)
            if (trainer := self._trainer.worker) is None:
                continue
            try:
                with suppress(DeadlineExceeded):  # perhaps this process stood still, and the answer lies unread
                    await trainer.ping(look_s)
                    continue
                await trainer.ping(look_s)
            except DeadlineExceeded as error:
                self._trainer.lose(trainer, error)

    async def _bring_back(self, trainer: RankedTrainer) -> None:
        """A new trainer to the version of the lost one, as a resume would; its weights to whom they did not reach."""
        await self.log.flush()
        state = fold(await asyncio.to_thread(read, self.directory / EVENTS_NAME))
        if state.num_trained != self.version:
            raise InvariantBroken(f"the record is at version {state.num_trained}, the controller at {self.version}")
        from_version = await load_newest_checkpoint(state, trainer, self.directory, self._warn)
        with phase(self.log.append, f"retraining {self.version - from_version} recorded steps") as progress:
            await retrain(self.log.record.load, state, trainer, from_version, progress)
        if self.roster.newest is not None:
            self.roster.publish(await self._publish(trainer))

    async def _publish(self, trainer: RankedTrainer) -> Published:
        return Published(await trainer.publish(), await trainer.score(self.tasks.probe, 1.0))

    # Weights

    async def _send_to(self, name: str, update: WeightUpdate, reference: Scores) -> None:
        """The engine receives the update beside its work, swaps, and proves what it runs."""
        engine = self.roster.engine(name)
        started = time.time()
        await engine.stage_weights(update)
        stage_s = time.time() - started
        report = await engine.swap(update.version, self.config.engine.kv_on_swap)
        wrong = [key for key, value in update.fingerprints.items() if report.fingerprints.get(key) != value]
        if wrong and report.fingerprints:
            raise WeightMismatch(f"{name} runs other weights than version {update.version}: {wrong[0]} differs")
        scores = await engine.score(self.tasks.probe, 1.0)
        if not report.fingerprints:
            self._proofs[name, self.roster.engines[name].life].check(name, scores, reference)
        self.log.append(
            events.Swapped(
                version=update.version,
                engine=name,
                stage_s=stage_s,
                pause_ms=report.pause_ms,
                interrupted=report.num_interrupted,
                recomputed=report.num_recomputed,
                parity_max_abs=parity(scores, reference),
            )
        )

    async def _resize(self) -> None:
        """Consumes what a person asks for; produces engines that join or leave."""
        while True:
            await asyncio.sleep(_WISHES_EVERY_S)
            if (count := take(self.directory)) is not None:
                await self.roster.resize(count)

    # Looking

    async def _evaluate_alone(self, label: str) -> None:
        """Before and after training, with the engines to itself."""
        if self.tasks.held_out:
            with phase(self.log.append, f"evaluating {label} training") as progress:
                await self._evaluate(label, 1, progress)

    async def _evaluate(
        self, label: str, share: int, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Held-out accuracy, on one part in `share` of the engines' places."""
        concurrency = max(1, self.config.engine.max_num_seqs * len(self.roster.engines) // share)
        found = await evaluate(
            self.roster.run, self.tasks.held_out, self.tasks.eval_sampling, self.version, concurrency, on_progress
        )
        self.log.append(
            events.Evaluated(
                label=label,
                version=found.version,
                version_last=found.version_last,
                accuracy=found.accuracy,
                num=found.num,
                num_failed=found.num_failed,
                mean_tokens=found.mean_tokens,
                seconds=found.seconds,
            )
        )

    def _on_stats(self, engine: str, stats: EngineStats) -> None:
        queues = self._num_generating, self.buffer.num_ready
        waits_s = self._admission_wait_s, self._trainer_wait_s
        self.log.append(self._meter.measure(engine, stats, queues, waits_s))

    def _warn(self, message: str) -> None:
        self.log.append(events.Warned(message=message))


async def _kept_by(trainer: RankedTrainer) -> RankedTrainer:
    await trainer.snapshot()
    return trainer


def parity(one: Scores, other: Scores) -> float:
    """The largest difference of two scores of the same tokens under the same version."""
    if one.version != other.version:
        raise WeightMismatch(
            f"a probe was scored at version {one.version} by one side and {other.version} by the other"
        )
    return max(float(np.abs(a - b).max()) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def _first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the run: a task group wraps it, sometimes more than once."""
    first = errors.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
