"""The controller: owns the version and the loops that move groups between workers. It sees workers only as handles.

    prompts ──► rollout ──► reward ──► buffer ──► trainer
                  ▲                                  │
                  └───────────── weights ◄───────────┘

Three loops, joined by what they wait for: admission waits for room under Eq. 3, training waits for a batch, and each
training step's weights travel to the engines beside the next step. Everything that happens is an event first.

Invariants that live here:
  1. One admission authority: every admission asks `StalenessControl` with the lowest version confirmed by all engines.
  2. Nothing vanishes: the ledger is checked after every training step.
  4. η = 0 is synchronous training: no line here asks whether it is; Eq. 3 alone makes the two sides take turns.
  6. Parity: after each swap, engine and trainer score the same probe, and the largest difference is an event.
 11. Weight sync is proved at every load, by fingerprint or by score, before a version counts as confirmed.
 13. Generation waits for little: no loop that feeds the engines waits for training, saving, evaluation or logging.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.buffer import Buffer
from headway.checkpoint import slot_for
from headway.config import Config
from headway.engine import Engine
from headway.errors import DeadlineExceeded, RunFailed, WeightMismatch, WorkerDied
from headway.evaluate import evaluate
from headway.prompts import PromptStream
from headway.proof import ScoreProof
from headway.record import RunLog
from headway.rollout import RolloutWorker
from headway.staleness import StalenessControl
from headway.trainer import Trainer
from headway.types import Admission, Batch, DropReason, Group, Ints, Prompt, Sampling, Scores, StepReport, WeightUpdate
from headway.view import View
from headway.weights import digest


@dataclass
class Workers:
    """Handles to everything the controller moves groups between."""

    engines: dict[str, Engine]
    trainer: Trainer
    rollout: list[RolloutWorker]
    failure: Callable[[], Awaitable[WorkerDied]]


@dataclass
class Tasks:
    """What the run is about: prompts in the order of their groups, held-out prompts, a probe for parity."""

    stream: PromptStream
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
        workers: Workers,
        tasks: Tasks,
        progress: Progress,
        log: RunLog,
        directory: Path,
        view: View,
    ):
        self.config, self.workers, self.tasks, self.log = config, workers, tasks, log
        self.directory, self.view = directory, view
        self.version = progress.version
        self.staleness, self.buffer = progress.staleness, progress.buffer
        self._progress = progress
        self._confirmed = -1
        self._proofs = defaultdict[str, ScoreProof](lambda: ScoreProof(config.model.dtype))
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._update: asyncio.Task[None] | None = None
        self._evaluation: asyncio.Task[None] | None = None
        self._num_skipped = 0
        self._num_checkpoints = progress.num_checkpoints
        self._num_generating = 0
        self._admission_wait_s = 0.0
        self._trainer_wait_s = 0.0

    async def run(self) -> None:
        """From the current version to the last; ends early with the cause if any part of it dies."""
        try:
            async with self._tasks:
                watch = self._tasks.create_task(self._watch())
                await self._send_weights(await self.workers.trainer.publish(), await self._score_probe())
                if not self._progress.evaluated_before:
                    await self._evaluate_alone("before")
                background = [self._tasks.create_task(self._observe()), self._tasks.create_task(self._admit()), watch]
                await self._train()
                await self._finish()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _first_cause(errors) from errors

    async def _watch(self) -> None:
        """Waits for a worker to die; produces the end of the run, with the cause."""
        raise await self.workers.failure()

    # Admission

    async def _admit(self) -> None:
        """Consumes prompts; waits for room; is unblocked by a confirmed version, a take or a drop; produces groups."""
        for group_id in self._progress.unfinished:
            self._tasks.create_task(self._generate(self._admission(group_id)))
        while True:
            started = time.time()
            while not self._has_room():
                self._changed.clear()
                await self._changed.wait()
            self._admission_wait_s += time.time() - started
            group_id = self.staleness.admit(self._confirmed)
            admission = self._admission(group_id)
            self.log.append(
                "admitted", group=group_id, prompt=admission.prompt.index, eta=admission.eta, version=self._confirmed
            )
            self._tasks.create_task(self._generate(admission))
            # A burst of admissions must not keep finished groups from being taken.
            await asyncio.sleep(0)

    def _has_room(self) -> bool:
        """Eq. 3, the configured limit, and no group more than the run will train."""
        control, limit = self.staleness, self.config.rollout.max_groups
        num_wanted = self.config.run.steps * control.batch_groups
        if control.num_admitted - control.num_dropped >= num_wanted or (limit and control.num_untaken >= limit):
            return False
        return control.may_admit(self._confirmed)

    def _admission(self, group_id: int) -> Admission:
        return Admission(
            group=group_id,
            prompt=self.tasks.stream[group_id],
            size=self.config.rollout.group_size,
            eta=self.config.staleness.max_staleness,
            version=self._confirmed,
            sampling=self.tasks.sampling,
        )

    async def _generate(self, admission: Admission) -> None:
        """One group's life from admission to the buffer, or to its drop."""
        started = time.time()
        self._num_generating += 1
        worker = self.workers.rollout[admission.group % len(self.workers.rollout)]
        group = await worker.run(admission)
        self._num_generating -= 1
        if group.trajectories:
            self.log.finished(group, seconds=time.time() - started)
            self.buffer.put(group)
            return
        lost = sum(failure.num_sampled for failure in group.failures)
        self._drop([group.id], DropReason.FAILED, lost)
        self._check_not_all_failing(group)

    def _drop(self, groups: list[int], reason: DropReason, num_tokens: int) -> None:
        for group_id in groups:
            self.buffer.drop(group_id, reason)
        self.log.append("dropped", groups=groups, reason=reason.value, tokens=num_tokens)
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
                self.log.append("taken", version=self.version, groups=[group.id for group in groups])
            self._progress.untrained_batch = None
            self._changed.set()
            report = await self.workers.trainer.train(batch)
            if report.skipped:
                self._skip(batch, report)
                continue
            await self._accept(batch, report, wait_s)
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

    async def _accept(self, batch: Batch, report: StepReport, wait_s: float) -> None:
        """A training step succeeded: publish, record, and let the weights travel beside the next step."""
        if self._update is not None:
            await self._update
        update = await self.workers.trainer.publish()
        reference = await self._score_probe()
        self._num_skipped = 0
        self.version = report.version
        self.staleness.trained(group.id for group in batch.groups)
        self.staleness.check_ledger()
        ages = batch.staleness
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        self.log.append(
            "trained",
            version=report.version,
            groups=[group.id for group in batch.groups],
            tokens=report.num_tokens,
            started=report.started,
            seconds=report.seconds,
            wait_s=wait_s,
            staleness_mean=float(np.mean(ages)) if ages else 0.0,
            staleness_max=max(ages, default=0),
            reward=float(np.mean(rewards)) if rewards else None,
            metrics=report.metrics,
            digest=digest(update.fingerprints),
        )
        self._update = self._tasks.create_task(self._send_weights(update, reference))

    def _skip(self, batch: Batch, report: StepReport) -> None:
        groups = [group.id for group in batch.groups]
        self.log.append("skipped", version=self.version, groups=groups, reason=report.skipped)
        self._drop(groups, DropReason.NON_FINITE, batch.num_sampled)
        self._num_skipped += 1
        if self._num_skipped >= self.config.trainer.max_skipped:
            raise RunFailed(
                f"{self._num_skipped} training steps in a row were not finite (version {self.version}: "
                f"{report.skipped}); lower trainer.lr or look at the data"
            )

    async def _save_and_evaluate(self) -> None:
        last = self.version == self.config.run.steps
        if self.version % self.config.checkpoint.every == 0 or last:
            await self._save()
        every = self.config.evaluate.every
        idle = self._evaluation is None or self._evaluation.done()
        if every and self.version % every == 0 and not last and idle and self.tasks.held_out:
            self._evaluation = self._tasks.create_task(self._evaluate("step", 8))

    async def _save(self) -> None:
        started = time.time()
        slot = slot_for(self._num_checkpoints)
        await self.log.flush()
        await self.workers.trainer.save(str(self.directory / "checkpoint" / slot))
        self._num_checkpoints += 1
        self.log.append("checkpointed", version=self.version, slot=slot, seconds=time.time() - started)

    async def _finish(self) -> None:
        for task in (self._update, self._evaluation):
            if task is not None:
                await task
        await self._evaluate_alone("after")
        await self.workers.trainer.save_model(str(self.directory / "model"))
        await self._look_at_engines()

    # Weights

    async def _score_probe(self) -> Scores:
        return await self.workers.trainer.score(self.tasks.probe, 1.0)

    async def _send_weights(self, update: WeightUpdate, reference: Scores) -> None:
        """Every engine, at the same time, receives the update beside its work, swaps, and proves what it runs."""
        async with asyncio.TaskGroup() as sending:
            for name in self.workers.engines:
                sending.create_task(self._send_to(name, update, reference))
        self._confirmed = update.version  # only now: it is the lowest of all engines
        self._changed.set()

    async def _send_to(self, name: str, update: WeightUpdate, reference: Scores) -> None:
        engine = self.workers.engines[name]
        started = time.time()
        await engine.stage_weights(update)
        stage_s = time.time() - started
        report = await engine.swap(update.version, self.config.engine.kv_on_swap)
        wrong = [key for key, value in update.fingerprints.items() if report.fingerprints.get(key) != value]
        if wrong and report.fingerprints:
            raise WeightMismatch(f"{name} runs other weights than version {update.version}: {wrong[0]} differs")
        scores = await engine.score(self.tasks.probe, 1.0)
        if not report.fingerprints:
            self._proofs[name].check(name, scores, reference)
        self.log.append(
            "swapped",
            version=update.version,
            engine=name,
            stage_s=stage_s,
            pause_ms=report.pause_ms,
            interrupted=report.num_interrupted,
            recomputed=report.num_recomputed,
            parity_max_abs=parity(scores, reference),
        )

    # Looking

    async def _evaluate_alone(self, label: str) -> None:
        """Before and after training, with the engines to itself."""
        if self.tasks.held_out:
            with self.view.phase(f"evaluating {label} training") as phase:
                await self._evaluate(label, 1, phase.progress)

    async def _evaluate(
        self, label: str, share: int, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Held-out accuracy, on one part in `share` of the engines' places."""
        concurrency = max(1, self.config.engine.max_num_seqs * len(self.workers.engines) // share)
        found = await evaluate(
            self.workers.rollout, self.tasks.held_out, self.tasks.eval_sampling, self.version, concurrency, on_progress
        )
        self.log.append(
            "evaluated",
            label=label,
            version=found.version,
            version_last=found.version_last,
            accuracy=found.accuracy,
            num=found.num,
            mean_tokens=found.mean_tokens,
            seconds=found.seconds,
        )

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(self.config.metrics.stats_every_s)
            await self._look_at_engines()

    async def _look_at_engines(self) -> None:
        engines = self.workers.engines
        looks = await asyncio.gather(*(engine.stats() for engine in engines.values()))
        for name, stats in zip(engines, looks, strict=True):
            fields = {field: getattr(stats, field) for field in stats.__dataclass_fields__}
            self.log.append(
                "stats",
                engine=name,
                **fields,
                inflight=self._num_generating,
                ready=self.buffer.num_ready,
                admission_wait_s=self._admission_wait_s,
                trainer_wait_s=self._trainer_wait_s,
            )


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
