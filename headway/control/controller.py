"""The controller: owns the version and the loops that move groups between workers. It sees workers only as handles.

    prompts ──► rollout ──► reward ──► buffer ──► trainer
                  ▲                                  │
                  └───────────── weights ◄───────────┘

Three loops, joined by what they wait for: admission waits for room under Eq. 3, training waits for a batch, and the
weights of each training step are sent to the engines during the next one. Everything that happens is an event first.
Pools own the workers: `engine_pool` engines and versions, `rollout_pool` rollout workers and the reward pool,
`trainer_worker` the trainer; `saving` writes checkpoints and models.

Invariants that live here:
  1. Single admission authority: every admission asks `StalenessControl` with the lowest version confirmed by all
     engines that may serve.
  2. Conservation: the ledger is checked after every training step.
  4. η = 0 is synchronous training: no line here asks whether it is; Eq. 3 alone makes the two sides take turns.
 13. Non-blocking generation: no loop that feeds the engines waits for training, saving, evaluation or logging;
     training waits for a checkpoint only while its state is snapshotted.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.config import Config
from headway.control.adaptive import AdaptiveStaleness
from headway.control.buffer import Buffer
from headway.control.engine_pool import EnginePool, Published, RunLoad
from headway.control.filters import GroupFilter
from headway.control.outage import FailureWatch
from headway.control.resize import take
from headway.control.rollout_pool import RolloutPool
from headway.control.saving import Saving
from headway.control.staleness import StalenessControl
from headway.control.supervisor import Supervisor
from headway.control.trainer_worker import TrainerWorker
from headway.control.workers import Fleet
from headway.errors import DeadlineExceeded, RunFailed
from headway.record.events import (
    Admitted,
    Dropped,
    Evaluated,
    FailedTrajectory,
    Requeued,
    Resumed,
    Skipped,
    Taken,
    Trained,
)
from headway.record.phases import phase
from headway.record.shards import RunLog
from headway.rollout.evaluate import evaluate, reward_parts
from headway.runtime.gather import first_cause, together
from headway.tasks.prompts import MixedStream, PromptStream
from headway.training.ranks import RankedTrainer
from headway.types import Admission, Batch, DropReason, Group, Ints, Prompt, Sampling, StepReport, WeightUpdate

_POLL_S = 0.5
_STOP_S = 60.0
"""For a checkpoint and the model after an interrupt; then the run ends without them."""


@dataclass
class Tasks:
    """What the run is about: prompts in the order of their groups, held-out prompts, a probe for parity."""

    prompts: list[Prompt]
    stream: PromptStream | MixedStream
    held_out: list[Prompt]
    probe: tuple[Ints, ...]
    sampling: Sampling
    eval_sampling: Sampling


@dataclass
class Progress:
    """Where a run stands when the controller takes over: at the beginning, or what the record says."""

    version: int
    staleness: StalenessControl
    buffer: Buffer
    adaptive: AdaptiveStaleness
    unfinished: dict[int, tuple[int, int]] = field(default_factory=dict)  # group to the row of its prompt, and its η
    num_streamed: int = 0  # prompts taken from the stream so far
    requeued: list[tuple[int, int]] = field(default_factory=list)  # groups that failed in an outage, with their rows
    replaced: tuple[tuple[int, str], ...] = ()  # dropped groups in order: the row of the prompt, and the reason
    finished: list[tuple[Group, int]] = field(default_factory=list)  # with the versions at admission; not taken yet
    failing: list[tuple[int, int]] = field(default_factory=list)  # the last groups, all failed whole, with their rows
    has_succeeded: bool = False  # whether any group had a trajectory
    untrained_batch: tuple[Group, ...] | None = None
    num_checkpoints: int = 0
    evaluated_before: bool = False
    best_accuracy: float | None = None
    resumes: bool = False
    lost_tokens: int = 0


class Controller:
    def __init__(
        self, config: Config, fleet: Fleet, tasks: Tasks, progress: Progress, log: RunLog, directory: Path
    ) -> None:
        self.config, self.tasks, self.log, self.directory = config, tasks, log, directory
        self.version = progress.version
        self.staleness, self.buffer, self._adaptive = progress.staleness, progress.buffer, progress.adaptive
        self._progress = progress
        self._tasks = asyncio.TaskGroup()
        self._supervisor = Supervisor(fleet, config.supervise, log.append)
        shared = config, fleet, self._supervisor
        self.rollout = RolloutPool(*shared, log.append)
        self.engines = EnginePool(*shared, self.rollout, log.append, tasks.probe, self._load)
        self.trainer = TrainerWorker(*shared, self.engines, log, directory, tasks.probe)
        self.saving = Saving(config, self.trainer, log, directory, progress.num_checkpoints, progress.best_accuracy)
        self._changed = self.engines.changed  # set when admission may have room
        self.buffer.on_take = self._changed.set
        self._by_row = {prompt.index: prompt for prompt in tasks.prompts}
        self._failures = FailureWatch(
            config.supervise, config.run.deadline_s, self.staleness.batch_groups, progress.has_succeeded
        )
        self._failures.restore((group, self._by_row[row]) for group, row in progress.failing)
        self._failures.prompts.extend((group, self._by_row[row]) for group, row in progress.requeued)
        self._num_streamed = progress.num_streamed
        self._evaluation: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None  # after the last training step
        self._generating: set[asyncio.Task[None]] = set()
        self._batch_wait: asyncio.Timeout | None = None  # while training waits for a batch
        self._is_training = self.is_stopped = False
        self._num_skipped = 0
        self._filter = GroupFilter(config.algorithm, config.trainer.batch_groups)
        self._filter.restore(progress.replaced)
        self._admission_wait_s = self._trainer_wait_s = 0.0

    async def run(self) -> None:
        """From the current version to the last, or until `stop`; ends early with the cause if any part of it dies."""
        try:
            async with self._tasks:
                background = await self._start()
                if not self._progress.evaluated_before:
                    await self._evaluate_alone("before")
                background.append(self._tasks.create_task(self._admit()))
                background.append(self._tasks.create_task(self._watch_directory()))
                await self._train()
                if not self.is_stopped:
                    self._finishing = self._tasks.create_task(self._finish())
                    await asyncio.wait({self._finishing})
                if self.is_stopped:
                    await self._end_early()
                self.engines.stop()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors

    async def _start(self) -> list[asyncio.Task[Any]]:
        """Start every worker; returns when the engines serve the weights of the current version."""
        with phase(self.log.append, "starting workers"):
            starts = self.engines.start(), self._supervisor.start(self.trainer), self.rollout.start()
            await together(*starts)
        background: list[asyncio.Task[Any]] = [self._tasks.create_task(self._supervisor.watch())]
        background += self.trainer.supervise(self._tasks, self._progress.resumes)
        background += self.rollout.supervise(self._tasks)
        background += self.engines.supervise(self._tasks)
        published = await self.trainer.call(self.trainer.publish)
        if self._progress.resumes:
            self.log.append(
                Resumed(
                    version=self.version,
                    checkpoint_version=self.trainer.checkpoint_version,
                    num_regenerated=len(self._progress.unfinished),
                    lost_tokens=self._progress.lost_tokens,
                )
            )
        self.engines.publish(published)
        await self.engines.current()
        return background

    def stop(self) -> bool:
        """End with a checkpoint, after the training step in progress or in place of the last evaluation.

        False when neither is going on: then just cancel.
        """
        if self._finishing is not None:
            self.is_stopped = self._finishing.cancel()
            return True
        self.is_stopped = self._is_training
        if self._batch_wait is not None:
            self._batch_wait.reschedule(asyncio.get_running_loop().time())
        return self.is_stopped

    # Admission

    async def _admit(self) -> None:
        """Consumes prompts; waits for room; is unblocked by a confirmed version, a take or a drop; produces groups."""
        for group, admitted_at in self._progress.finished:
            self._keep(group, admitted_at)
        for group_id, (row, eta) in self._progress.unfinished.items():
            self._begin(self._admission(group_id, self._by_row[row], eta, self.version))
        while True:
            started = time.monotonic()
            while not self._has_room():
                self._changed.clear()
                await self._changed.wait()
            self._admission_wait_s += time.monotonic() - started
            version = self.engines.confirmed
            assert version is not None  # there is room
            if self._failures.is_outage:
                self._failures.probe()
            group_id = self.staleness.admit(version)
            repeats, prompt = self._next_prompt()
            admission = self._admission(group_id, prompt, self.staleness.eta, version)
            self.log.append(
                Admitted(group=group_id, prompt=prompt.index, eta=admission.eta, version=version, repeats=repeats)
            )
            if repeats is None and self._filter.rests(prompt.index):
                self._drop((group_id,), DropReason.RESTING)
            else:
                self._begin(admission)
            # A burst of admissions must not keep finished groups from being taken.
            await asyncio.sleep(0)

    def _has_room(self) -> bool:
        """Eq. 3, the configured limit, no group more than the run will train, and an engine that serves."""
        control, limit = self.staleness, self.config.rollout.max_groups
        num_needed = self.config.run.steps * control.batch_groups
        if control.num_admitted - control.num_dropped >= num_needed or (limit and control.num_untaken >= limit):
            return False
        if self._failures.is_outage and not self._may_probe():
            return False
        version = self.engines.confirmed
        return version is not None and control.may_admit(version)

    def _may_probe(self) -> bool:
        """During an outage: one group at a time, after a growing pause."""
        wait_s = self._failures.seconds_to_probe()
        if wait_s and not self._generating:
            asyncio.get_running_loop().call_later(wait_s, self._changed.set)
        return not wait_s and not self._generating

    def _next_prompt(self) -> tuple[int | None, Prompt]:
        """A prompt whose group failed in an outage, with that group, or the stream's next one."""
        if self._failures.prompts:
            return self._failures.prompts.popleft()
        self._num_streamed += 1
        return None, self.tasks.stream[self._num_streamed - 1]

    def _admission(self, group_id: int, prompt: Prompt, eta: int, version: int) -> Admission:
        return Admission(
            group=group_id,
            prompt=prompt,
            size=self.config.rollout.group_size,
            eta=eta,
            version=version,
            sampling=self.tasks.sampling,
        )

    def _begin(self, admission: Admission) -> None:
        task = self._tasks.create_task(self._generate(admission))
        self._generating.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._generating.discard(task)
        if self._failures.is_outage:
            self._changed.set()  # the next group may be tried

    async def _generate(self, admission: Admission) -> None:
        """One group from admission to the buffer, or to its drop."""
        started = time.monotonic()
        group = await self.rollout.run(admission)
        if not group.trajectories:
            self._drop((group.id,), DropReason.FAILED, FailedTrajectory.of(group))
            reason = group.failures[0].reason
            if again := self._failures.failed(group.id, admission.prompt, reason):
                self.log.append(Requeued(groups=again, reason=reason))
            return
        self._failures.succeeded()
        self.log.finished(group, seconds=time.monotonic() - started)
        self._keep(group, admission.version)

    def _keep(self, group: Group, admitted_at: int) -> None:
        """A finished group enters the buffer, unless it is too old or the algorithm replaces it; also after a resume,
        because a crash may come between the event that it finished and the one that it was dropped."""
        oldest = group.oldest_version
        # Older than its admission: an engine served older weights than it had confirmed.
        is_too_old = oldest is not None and oldest < admitted_at
        if reason := DropReason.TOO_OLD if is_too_old else self._filter.reason(group):
            self._drop((group.id,), reason)
            return
        self.buffer.put(group)
        self._changed.set()  # an outage may be over

    def _drop(
        self, groups: tuple[int, ...], reason: DropReason, failures: tuple[FailedTrajectory, ...] = (), tokens: int = 0
    ) -> None:
        for group_id in groups:
            self.buffer.drop(group_id)
        tokens += sum(failure.tokens for failure in failures)
        self.log.append(Dropped(groups=groups, reason=reason.value, tokens=tokens, failures=failures))
        self._changed.set()

    # Training

    async def _train(self) -> None:
        """Consumes batches; waits for B groups in the window; produces a version each, and its weights."""
        self._is_training = True
        while self.version < self.config.run.steps:
            started = time.monotonic()
            groups = self._progress.untrained_batch or await self._take_batch()
            if self.is_stopped:
                break
            wait_s = time.monotonic() - started
            self._trainer_wait_s += wait_s
            batch = Batch(self.version, groups)
            if self._progress.untrained_batch is None:
                self.log.append(Taken(version=self.version, groups=tuple(group.id for group in groups)))
            self._progress.untrained_batch = None
            report, published = await self.trainer.call(partial(self._step, batch))
            if published is None:
                self._skip(batch, report)
                continue
            assert published.update is not None
            self._accept(batch, report, published.update, wait_s)
            self.engines.publish(published)
            await self._save_and_evaluate()
        self._is_training = False

    async def _take_batch(self) -> tuple[Group, ...]:
        """Waits longer than any call to a worker may take, so that the error names a silent worker, not its groups."""
        seconds = 2 * self.config.run.deadline_s
        # Not wait_for, which on Python 3.11 loses a cancellation that comes as its wait ends: the run would not stop.
        try:
            async with asyncio.timeout(0 if self.is_stopped else seconds) as self._batch_wait:
                return await self.buffer.take_batch()
        except TimeoutError:
            if self.is_stopped:
                return ()
        finally:
            self._batch_wait = None
        what = f"{self.staleness.batch_groups} finished groups"
        last = f"; the last failed group: {self._failures.reason}" if self._failures.reason else ""
        raise DeadlineExceeded(
            f"waited more than {seconds:g} s for {what}; raise run.deadline_s if that is too short{last}"
        )

    async def _step(self, batch: Batch, trainer: RankedTrainer) -> tuple[StepReport, Published | None]:
        """One batch, to published weights; all by one incarnation of the trainer, or all of it again by the next."""
        report = await trainer.train(batch)
        if report.skipped:
            return report, None
        await self.engines.current()  # publishing writes over the version before the last
        return report, await self.trainer.publish(trainer)

    def _accept(self, batch: Batch, report: StepReport, update: WeightUpdate, wait_s: float) -> None:
        """A training step succeeded: record it."""
        self._num_skipped = 0
        self.version = report.version
        self.staleness.trained(group.id for group in batch.groups)
        self.staleness.check_ledger()
        ages = batch.staleness
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        self.log.append(
            Trained(
                version=report.version,
                groups=tuple(group.id for group in batch.groups),
                tokens=report.num_tokens,
                started=report.started,
                seconds=report.seconds,
                wait_s=wait_s,
                staleness_mean=float(np.mean(ages)) if ages else 0.0,
                staleness_max=max(ages, default=0),
                reward=float(np.mean(rewards)) if rewards else None,
                metrics={**report.metrics, **reward_parts(batch.groups)},
                digest=update.digest,
                weights_sample=report.weights_sample,
                tokens_at=self.log.record.append(report.tokens) if report.tokens else None,
            )
        )
        etas = (group.eta for group in batch.groups)
        if decision := self._adaptive.observe(report.version, report.metrics, etas):
            self.log.append(decision)
            self.staleness.adapt(decision.after)
            self._changed.set()

    def _skip(self, batch: Batch, report: StepReport) -> None:
        groups = tuple(group.id for group in batch.groups)
        self.log.append(Skipped(version=self.version, groups=groups, reason=report.skipped))
        self._drop(groups, DropReason.SKIPPED, tokens=batch.num_sampled)
        self._num_skipped += 1
        if self._num_skipped >= self.config.trainer.max_skipped:
            raise RunFailed(
                f"{self._num_skipped} training steps in a row were skipped (version {self.version}: "
                f"{report.skipped}); lower trainer.lr, relax the masks of [algorithm], or look at the data"
            )

    # Saving and evaluation

    async def _save_and_evaluate(self) -> None:
        last, every = self.version == self.config.run.steps, self.config.evaluate.every
        idle = self._evaluation is None or self._evaluation.done()
        evaluates = bool(every and self.version % every == 0 and not last and idle and self.tasks.held_out)
        checkpoints = self.version % self.config.checkpoint.every == 0 or last
        if checkpoints or evaluates:
            await self.saving.save(self.version, self._tasks, checkpoints, evaluates)
        if evaluates:
            self._evaluation = self._tasks.create_task(self._evaluate("step"))

    async def _finish(self) -> None:
        await self.engines.current()
        await self.saving.written()
        if self.saving.model_version != self.version:  # resumed after its last step
            await self.saving.save(self.version, self._tasks, checkpoints=False)
            await self.saving.written()
        if self._evaluation is not None:
            await self._evaluation
        if self.tasks.held_out:
            await self.saving.set_aside()
            await self._evaluate_alone("after")
        await self.engines.read_final_stats()

    async def _end_early(self) -> None:
        """After an interrupt: save what there is, within a bounded time, and give up what is in flight."""
        for task in (*self._generating, *([self._evaluation] if self._evaluation else [])):
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self.saving.written()
                if self.version and self.saving.written_version < self.version:
                    await self.saving.save(self.version, self._tasks)
                    await self.saving.written()
                await self.saving.judge(None)
                await self.engines.read_final_stats()

    async def _evaluate_alone(self, label: str) -> None:
        """Before and after training, when nothing else uses the engines."""
        if self.tasks.held_out:
            with phase(self.log.append, f"evaluating {label} training") as progress:
                await self._evaluate(label, progress)

    async def _evaluate(self, label: str, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Held-out accuracy: urgent requests that may use every place of the engines, ahead of training's."""
        await self.engines.current()
        concurrency = max(1, self.config.engine.max_num_seqs * len(self.engines.engines))
        section, tasks = self.config.evaluate, self.tasks
        how_many = concurrency, on_progress, section.samples, section.pass_at
        groups: list[Group] = []

        def keep(_: Prompt, group: Group) -> None:
            groups.append(group)

        found = await evaluate(self.rollout.run, tasks.held_out, tasks.eval_sampling, self.version, *how_many, keep)
        batch = Batch(found.version, tuple(sorted(groups, key=lambda group: group.id)))
        await self.saving.judge(found.accuracy)
        self.log.append(
            Evaluated(
                label=label,
                version=found.version,
                version_last=found.version_last,
                accuracy=found.accuracy,
                num=found.num,
                num_failed=found.num_failed,
                mean_tokens=found.mean_tokens,
                seconds=found.seconds,
                groups_at=self.log.record.append(batch),
                **found.summary(),
            )
        )

    # What else goes on

    async def _watch_directory(self) -> None:
        """Consumes resize requests; produces engines that join or leave. Notices when the directory is deleted."""
        while True:
            await asyncio.sleep(_POLL_S)
            if (count := take(self.directory)) is not None:
                await self.engines.resize(count)
            if lost := self.log.lost_file():
                raise RunFailed(f"{lost} was deleted, replaced or cut while the run wrote it; start the run again")

    def _load(self) -> RunLoad:
        queues = len(self._generating), self.buffer.num_ready
        return queues, (self._admission_wait_s, self._trainer_wait_s)
