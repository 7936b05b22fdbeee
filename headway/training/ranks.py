"""The controller's side of the trainer: starts its ranks, calls all of them, and checks that they agree.

Each rank is a `Trainer` in a process of its own; a trainer of one rank has no rendezvous and no collective operations.
Every rank is given the same arguments (SPMD), picks its share, and publishes and saves its own rows: no process ever
holds the whole state.

Invariants that live here:
 12. Packing-independent gradient: any rank count, same gradient to fp32 rounding.
 15. Bounded waits: when a rank dies or is silent, the call fails with its name, and the others, which may wait for it
     in a pass, are ended.
"""

import asyncio
import copy
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.algorithm import AlgorithmSection
from headway.config import ModelSection, TrainerSection, WeightsSection
from headway.errors import DeadlineExceeded, HeadwayError, InvariantBroken, OutOfMemory, SaveFailed, WorkerDied
from headway.runtime.channel import RemoteError
from headway.runtime.gather import together
from headway.runtime.handle import with_deadline
from headway.runtime.protocol import Runtime
from headway.trained_tokens import TrainedTokens
from headway.training import checkpoint
from headway.training.batches import MemoryFit, longest_of
from headway.training.collective import LOOPBACK, RankSpec, Rendezvous
from headway.training.trainer import Trainer
from headway.types import Batch, Ints, Scores, StepReport, WeightUpdate
from headway.weights.publish import joined
from headway.weights.stream import own_address

_SETTLE_S = 10.0  # after one rank failed, the time the others have to report what they know
_PING_S = 5.0
_RESCUED = "rescued"

Answer = asyncio.Future[Any]


class RankedTrainer:
    """All ranks of a trainer. `end` and then `start` replace them by new ones, which begin with the first weights."""

    def __init__(
        self,
        runtime: Runtime,
        model: ModelSection,
        section: TrainerSection,
        algorithm: AlgorithmSection,
        worst_staleness: int | None,
        weights: WeightsSection,
        directory: Path,
        deadline_s: float,
        deterministic: bool = False,
        rank_class: type[Trainer] = Trainer,
    ):
        """`directory` is for the state that new ranks take over when memory ran out."""
        self._runtime, self._section, self._rank_class = runtime, section, rank_class
        self._given = algorithm, worst_staleness, weights, deterministic
        self._model = model
        self._directory, self._deadline_s = directory, deadline_s
        self._fit = self._configured = MemoryFit(section.token_budget, section.gradient_checkpointing)
        self._names = list(section.placement)
        self._rendezvous: Rendezvous | None = None
        self._writing = asyncio.Lock()
        self.ranks: list[Any] = []  # handles of `Trainer`: its methods are awaited
        self.silent: set[str] = set()
        self._cause: HeadwayError | None = None
        self._ending: asyncio.Future[list[None]] | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether the same batches lead to the same weights, bit for bit."""
        return self._given[-1] or set(self._section.devices) == {"cpu"}

    async def start(self) -> None:
        """Start all ranks at the same time; all or none."""
        self._cause = self._ending = None
        specs: list[RankSpec | None] = [None]
        if len(self._names) > 1:
            host = own_address() if await self._runtime.num_machines() > 1 else LOOPBACK
            self._rendezvous = Rendezvous(self._names, self._deadline_s, host)
            specs = list(self._rendezvous.specs)
        starts = zip(self._names, specs, self._section.placement.values(), strict=True)
        self.ranks = await together(*(self._start_rank(*start) for start in starts))

    async def _start_rank(self, name: str, spec: RankSpec | None, device: str) -> Any:
        section = self._section.model_copy(update={"device": device, "ranks": 1})
        given = self._model, section, *self._given, self._fit, spec
        return await self._runtime.start(name, self._rank_class, *given, threads=section.threads)

    async def end(self) -> None:
        """End all ranks, whatever they are doing. Only the first call does: later ranks may have the same names."""
        self._cause = self._cause or WorkerDied("the trainer's ranks were ended while they were still needed")
        self.ranks.clear()
        if self._ending is None:
            self._ending = asyncio.ensure_future(together(*(self._runtime.stop(name) for name in self._names)))
        await asyncio.shield(self._ending)
        self._rendezvous = None

    async def ping(self, seconds: float) -> None:
        """Raise `DeadlineExceeded` naming a rank that does not answer in time; the runtime reports deaths.

        `silent` are those that have not answered yet.
        """
        self.silent = {*self._names}

        async def ping(name: str, rank: Any) -> None:
            await with_deadline(rank, seconds).ping()
            self.silent.discard(name)

        with suppress(WorkerDied):
            await together(*map(ping, self._names, self.ranks))

    # What a trainer does

    async def train(self, batch: Batch) -> StepReport:
        while True:
            # The one error that a tighter fit resolves, if all ranks have it.
            try:
                reports: list[StepReport] = await self._pass("train", batch)
                break
            except OutOfMemory:
                await self._restart_with_less_memory(batch)
        self._check_agreement("the step", [(each.version, each.skipped, repr(each.metrics)) for each in reports])
        started = min(report.started for report in reports)
        ended = max(report.started + report.seconds for report in reports)
        sample = tuple(value for report in reports for value in report.weights_sample)
        parts = [report.tokens for report in reports if report.tokens is not None]
        tokens = TrainedTokens.join(parts) if len(parts) > 1 else reports[0].tokens
        return replace(reports[0], started=started, seconds=ended - started, weights_sample=sample, tokens=tokens)

    async def set_fit(self, metrics: Mapping[str, float | None]) -> None:
        """Pack batches as in the training step that has these metrics."""
        fit = MemoryFit.of_metrics(metrics)
        if fit is not None and fit.as_metrics() != self._fit.as_metrics():
            self._fit = fit
            await self._each("set_fit", fit)

    async def restore_fit(self, metrics: Mapping[str, float | None]) -> None:
        """Continue after that training step with its fit where it was tighter than the configured one."""
        fit = MemoryFit.of_metrics(metrics) or self._configured
        budget = min(fit.token_budget, self._configured.token_budget)
        await self.set_fit(MemoryFit(budget, fit.recompute or self._configured.recompute).as_metrics())

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        scores: list[Scores] = await self._pass("score", sequences, temperature)
        self._check_agreement("the version", [each.version for each in scores])
        return scores[0]

    async def publish(self) -> WeightUpdate:
        parts: list[WeightUpdate] = await self._each("publish")
        self._check_agreement("the version", [part.version for part in parts])
        return joined(parts) if len(parts) > 1 else parts[0]

    async def snapshot(self) -> None:
        """Copy the state of this version to the host, to be written by `save` while training continues."""
        await self._each("snapshot")

    async def save(self, directory: str) -> None:
        async with self._writing:
            await self._save("save", Path(directory))

    async def load(self, directory: str) -> int:
        """Continue from a checkpoint; no rank changes before every rank has read its rows and found them undamaged."""
        await self._each("read", directory)
        versions: list[int] = await self._each("adopt")
        self._check_agreement("the version", versions)
        return versions[0]

    async def copy_model(self) -> None:
        """Copy the current model to the host, to be written by `write_model` while training continues."""
        await self._pass("copy_model")

    async def save_model(self, directory: str) -> None:
        """Write the current weights as a transformers directory, in the published type."""
        checkpoint.check_replaceable(Path(directory))
        await self.copy_model()
        await self.write_model(directory)

    async def write_model(self, directory: str) -> None:
        """Write the copied model as a transformers directory."""
        path = Path(directory)
        checkpoint.check_replaceable(path)
        async with _discarded_if_unfinished(path):
            await asyncio.to_thread(checkpoint.begin, path)
            await self._each("write_model", directory)
            await asyncio.to_thread(checkpoint.finish_model, path)

    async def _save(self, method: str, directory: Path) -> None:
        async with _discarded_if_unfinished(directory):
            await asyncio.to_thread(checkpoint.begin, directory)
            parts: list[checkpoint.CheckpointPart] = await self._each(method, str(directory))
            self._check_agreement("the version", [part.version for part in parts])
            await asyncio.to_thread(checkpoint.finish, directory, parts)

    async def _restart_with_less_memory(self, batch: Batch) -> None:
        """Replace all ranks by new ones with a tighter fit and the state from before this training step."""
        rescued = self._directory / _RESCUED
        # Without a rescue there is nothing to wait for: the other ranks are stuck in a pass.
        try:
            self._fit = self._fit.reduce(longest_of(batch))
            await self._save("rescue", rescued)
        except HeadwayError as error:
            raise await self._fail(error) from None
        async with self._writing:  # a checkpoint that is being written needs the processes there are
            await self.end()
        await self.start()
        await self.load(str(rescued))
        await asyncio.to_thread(shutil.rmtree, rescued)

    # Calling ranks

    async def _pass(self, method: str, *args: Any) -> list[Any]:
        """Call a method in which ranks wait for each other: one that fails leaves the others waiting."""
        return await self._call(method, args, joint=True)

    async def _each(self, method: str, *args: Any) -> list[Any]:
        """Call a method that each rank completes by itself."""
        return await self._call(method, args, joint=False)

    async def _call(self, method: str, args: tuple[Any, ...], joint: bool) -> list[Any]:
        if self._cause is not None:
            raise copy.copy(self._cause)
        tasks = [asyncio.ensure_future(getattr(rank, method)(*args)) for rank in self.ranks]
        try:
            until = asyncio.FIRST_EXCEPTION if joint else asyncio.ALL_COMPLETED
            done, waiting = await asyncio.wait(tasks, return_when=until)
            waiting = await _settled(done, waiting)
        finally:
            for task in tasks:
                task.cancel()
        errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        if errors:
            raise await self._judge(errors, joint, in_order=not waiting)
        return [task.result() for task in tasks]

    async def _judge(self, errors: list[BaseException], joint: bool, in_order: bool) -> BaseException:
        """The error that caused the others. Ranks that can no longer work together are ended."""
        cause = min(errors, key=_rank_of_cause)
        out_of_step = isinstance(cause, WorkerDied | DeadlineExceeded) or (joint and _rank_of_cause(cause) == _BUG)
        if isinstance(cause, OutOfMemory) or (in_order and not out_of_step):
            return cause
        if isinstance(cause, DeadlineExceeded):
            cause = await self._name_silent_ranks(cause)
        return await self._fail(cause)

    async def _name_silent_ranks(self, late: DeadlineExceeded) -> DeadlineExceeded:
        """When one rank is silent all calls are late, but the others still answer a ping."""
        pings = [with_deadline(rank, _PING_S).ping() for rank in self.ranks]
        answers = await asyncio.gather(*pings, return_exceptions=True)
        silent = [name for name, answer in zip(self._names, answers, strict=True) if answer is not None]
        if not silent:
            return late
        return DeadlineExceeded(f"{late}; no answer to a ping from {', '.join(silent)}")

    async def _fail(self, cause: BaseException) -> BaseException:
        if isinstance(cause, HeadwayError):
            self._cause = cause
        await self.end()
        return cause

    def _check_agreement(self, what: str, answers: Sequence[object]) -> None:
        for name, answer in zip(self._names, answers, strict=True):
            if answer != answers[0]:
                raise InvariantBroken(
                    f"trainer ranks disagree on {what}: {self._names[0]} says {answers[0]}, {name} says {answer}"
                )


@asynccontextmanager
async def _discarded_if_unfinished(directory: Path) -> AsyncIterator[None]:
    """On a failed save, delete what was written: a full disk needs the room."""
    try:
        yield
    except SaveFailed:
        await asyncio.to_thread(checkpoint.discard, directory)
        raise


_CAUSES = (WorkerDied, OutOfMemory, DeadlineExceeded)
_BUG = len(_CAUSES) + 1


def _rank_of_cause(error: BaseException) -> int:
    """Smallest for the error that explains the others: a rank that lost its peer only reports a broken connection."""
    for place, kind in enumerate(_CAUSES):
        if isinstance(error, kind):
            return place
    return _BUG if isinstance(error, RemoteError) else len(_CAUSES)


async def _settled(done: set[Answer], waiting: set[Answer]) -> set[Answer]:
    """After a failure, the ranks that have not answered within a short time, or when a death explains it."""
    deadline = time.monotonic() + _SETTLE_S
    while waiting and not any(isinstance(task.exception(), WorkerDied) for task in done):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    return waiting
