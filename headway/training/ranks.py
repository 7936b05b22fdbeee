"""Several trainer ranks as one trainer: `Rank` is the process of each, `RankedTrainer` is what the controller calls.

The façade lives in the controller's process. It deals a batch out by samples, so that each rank is sent only what it
trains, asks all ranks at the same time, and sees that they agree. Weights are published, saved and written by every
rank for its own rows: nobody ever holds the whole model. Advantages are of whole groups, from before the dealing.

Invariants that live here:
 12. Packing-independent gradient: any rank count, same gradient to fp32 rounding.
 15. Bounded waits: when a rank dies or is silent, the call fails with its name, and the others, which may wait for it
     in the middle of a pass, are ended.
"""

import asyncio
import copy
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.config import AlgorithmSection, ModelSection, TrainerSection, WeightsSection
from headway.errors import (
    DeadlineExceeded,
    HeadwayError,
    InvariantBroken,
    OutOfMemory,
    SaveFailed,
    WorkerDied,
)
from headway.model.device import DTYPES, find_device
from headway.model.loading import load_config, model_shape
from headway.model.shape import flops
from headway.runtime.channel import RemoteError
from headway.runtime.compute import offload
from headway.runtime.gather import together
from headway.runtime.handle import with_deadline
from headway.runtime.protocol import Runtime
from headway.training import checkpoint
from headway.training.batches import Fit, deal, shares_of
from headway.training.collective import Meeting, Place, join
from headway.training.trainer import Trainer, check_staleness
from headway.types import (
    Batch,
    Floats,
    Ints,
    Scores,
    Share,
    StepReport,
    WeightUpdate,
)
from headway.weights.fingerprints import digest
from headway.weights.publish import joined

_SETTLE_S = 10.0  # after one rank failed, the others have this long to say what they know
_SIGN_OF_LIFE_S = 5.0
_RESCUED = "rescued"

Answer = asyncio.Future[Any]


class Rank:
    """One rank of several, in a process of its own. What takes part in a pass runs on the compute thread."""

    def __init__(
        self,
        place: Place,
        model: ModelSection,
        section: TrainerSection,
        algorithm: AlgorithmSection,
        weights: WeightsSection,
        fit: Fit,
    ):
        ranks = join(place, find_device("trainer.device", section.device, DTYPES[model.dtype]))
        self.trainer = Trainer(model, section, algorithm, None, weights, ranks)
        self.trainer.make_fit(fit)

    async def close(self) -> None:
        await self.trainer.close()
        # Waiting in a pass for a rank that has left already, the compute thread would keep this process for ever.
        os._exit(0)

    async def alive(self) -> None:
        """Answered even in the middle of a pass."""

    async def train(self, share: Share) -> StepReport:
        return await offload(self.trainer.train_share, share)

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return await offload(self.trainer.score_sequences, sequences, temperature)

    async def publish(self) -> WeightUpdate:
        return await offload(self.trainer.publish_weights)

    async def keep(self) -> None:
        await offload(self.trainer.keep_state)

    async def save(self, directory: str) -> tuple[int, checkpoint.Part, dict[str, str]]:
        """Write this rank's part of what was kept; its version, what it wrote, and the fingerprints of its weights."""
        return await asyncio.to_thread(self._save, Path(directory))

    async def rescue(self, directory: str) -> tuple[int, checkpoint.Part, dict[str, str]]:
        """The same of what there is, while the compute thread waits in a pass for a rank that will not come."""
        return await asyncio.to_thread(self._rescue, Path(directory))

    async def read(self, directory: str) -> None:
        await offload(self.trainer.read_state, Path(directory))

    async def adopt(self) -> int:
        return await offload(self.trainer.adopt_state)

    async def describe_model(self, directory: str) -> None:
        await offload(self.trainer.describe_model, Path(directory))

    async def write_rows(self, directory: str) -> None:
        await offload(self.trainer.write_rows, Path(directory))

    def _save(self, directory: Path) -> tuple[int, checkpoint.Part, dict[str, str]]:
        return self._write(directory, self.trainer.take_kept(directory))

    def _rescue(self, directory: Path) -> tuple[int, checkpoint.Part, dict[str, str]]:
        device = self.trainer.device
        # The stream of the pass stands still.
        with torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None):
            return self._write(directory, checkpoint.State(self.trainer.version, *self.trainer.state_to_save(), {}))

    def _write(self, directory: Path, state: checkpoint.State) -> tuple[int, checkpoint.Part, dict[str, str]]:
        ranks = self.trainer.ranks
        file = f"state-{ranks.rank}-of-{ranks.num}.safetensors"
        return state.version, checkpoint.write_part(directory, file, state.tensors, state.pieces), state.fingerprints


class RankedTrainer:
    """Looks like `Trainer`. `end` and `start` again make new ranks, which begin with the first weights."""

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
        rank_class: type[Rank] = Rank,
    ):
        """`directory` is for what is carried over when all ranks begin anew with a tighter fit."""
        self._runtime, self._rank_class = runtime, rank_class
        self._model, self._section, self._algorithm = model, section, algorithm
        self._worst_staleness, self._weights = worst_staleness, weights
        self._directory, self._deadline_s = directory, deadline_s
        self._fit = Fit(section.token_budget, section.gradient_checkpointing)
        self._cost = partial(flops, shape=model_shape(load_config(model.path)))
        self._names = list(section.placement)
        self._meeting: Meeting | None = None
        self._writing = asyncio.Lock()
        self.ranks: list[Rank] = []
        self._cause: HeadwayError | None = None
        self._ending: asyncio.Future[list[None]] | None = None

    async def start(self) -> None:
        """Start all ranks at the same time; all or none."""
        self._cause = self._ending = None
        self._meeting = Meeting(self._names, self._deadline_s)
        starts = zip(self._meeting.places, self._section.placement.values(), strict=True)
        self.ranks = await together(*(self._start_rank(place, device) for place, device in starts))

    async def _start_rank(self, place: Place, device: str) -> Rank:
        section = self._section.model_copy(update={"device": device, "ranks": 1})
        given = place, self._model, section, self._algorithm, self._weights, self._fit
        return await self._runtime.start(self._names[place.rank], self._rank_class, *given, threads=section.threads)

    async def end(self) -> None:
        """End all ranks at once, whatever they are doing; once, because others may have their names afterwards."""
        self._cause = self._cause or WorkerDied("the trainer's ranks were ended while they were still needed")
        self.ranks.clear()
        if self._ending is None:
            self._ending = asyncio.ensure_future(together(*(self._runtime.stop(name) for name in self._names)))
        await asyncio.shield(self._ending)
        self._meeting = None

    # What a trainer does

    async def train(self, batch: Batch) -> StepReport:
        check_staleness(batch, self._worst_staleness)
        num_ranks, num_minibatches = len(self._names), self._section.minibatches
        shares = await asyncio.to_thread(shares_of, batch, self._algorithm, num_minibatches, num_ranks, self._cost)
        while True:
            # The one error that a tighter fit mends, if it is that of all ranks.
            try:
                reports = await self._pass("train", [(share,) for share in shares])
                break
            except OutOfMemory:
                await self._begin_anew(shares[0].longest)
        self._check_agreement("the step", [(each.version, each.skipped, repr(each.metrics)) for each in reports])
        started = min(report.started for report in reports)
        ended = max(report.started + report.seconds for report in reports)
        first: StepReport = reports[0]
        return replace(first, started=started, seconds=ended - started)

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        dealt = deal([len(tokens) for tokens in sequences], len(self._names), self._cost)
        shares = [(tuple(sequences[i] for i in mine), temperature) for mine in dealt]
        found: list[Scores] = await self._pass("score", shares)
        self._check_agreement("the version", [scores.version for scores in found])
        logprobs: dict[int, Floats] = {}
        for mine, scores in zip(dealt, found, strict=True):
            logprobs |= zip(mine, scores.logprobs, strict=True)
        return Scores(found[0].version, tuple(logprobs[i] for i in range(len(sequences))))

    async def publish(self) -> WeightUpdate:
        parts: list[WeightUpdate] = await self._each("publish")
        self._check_agreement("the version", [part.version for part in parts])
        return joined(parts)

    async def keep(self) -> None:
        await self._each("keep")

    async def save(self, directory: str) -> None:
        async with self._writing:
            await self._save("save", Path(directory))

    async def load(self, directory: str) -> int:
        """No rank changes before every rank has read its rows and found them undamaged."""
        await self._each("read", directory)
        versions: list[int] = await self._each("adopt")
        self._check_agreement("the version", versions)
        return versions[0]

    async def save_model(self, directory: str) -> None:
        path = Path(directory)
        checkpoint.check_replaceable(path)
        async with _discarded_if_unfinished(path):
            await asyncio.to_thread(checkpoint.begin, path)
            await self._ask("describe_model", [(directory,)], joint=False)
            await self._each("write_rows", directory)
            await asyncio.to_thread(checkpoint.finish_model, path)

    async def _save(self, method: str, directory: Path) -> None:
        async with _discarded_if_unfinished(directory):
            await asyncio.to_thread(checkpoint.begin, directory)
            saved: list[tuple[int, checkpoint.Part, dict[str, str]]] = await self._each(method, str(directory))
            self._check_agreement("the version", [version for version, _, _ in saved])
            prints = {key: value for _, _, found in saved for key, value in found.items()}
            parts, extra = [part for _, part, _ in saved], {"digest": digest(prints)}
            await asyncio.to_thread(checkpoint.finish, directory, saved[0][0], parts, extra)

    async def _begin_anew(self, longest: int) -> None:
        """All ranks as new processes with a tighter fit, and the state they had before this training step."""
        rescued = self._directory / _RESCUED
        # Nothing is left to wait for: the other ranks are stuck in a pass.
        try:
            self._fit = self._fit.tighter(longest)
            await self._save("rescue", rescued)
        except HeadwayError as error:
            raise await self._fail(error) from None
        async with self._writing:  # a checkpoint that is being written needs the processes there are
            await self.end()
        await self.start()
        await self.load(str(rescued))
        await asyncio.to_thread(shutil.rmtree, rescued)

    # Asking ranks

    async def _pass(self, method: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What ranks do together: one that fails leaves the others waiting for it."""
        return await self._ask(method, shares, joint=True)

    async def _each(self, method: str, *args: Any) -> list[Any]:
        """What each rank does by itself."""
        return await self._ask(method, [args] * len(self._names), joint=False)

    async def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], joint: bool) -> list[Any]:
        """The answers of all ranks, or of the first few if there are arguments for those only."""
        if self._cause is not None:
            raise copy.copy(self._cause)
        calls = zip(self.ranks, arguments, strict=False)
        tasks = [asyncio.ensure_future(getattr(rank, method)(*given)) for rank, given in calls]
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
        gravest = min(errors, key=_gravity)
        out_of_step = isinstance(gravest, WorkerDied | DeadlineExceeded) or (joint and _gravity(gravest) == _BUG)
        if isinstance(gravest, OutOfMemory) or (in_order and not out_of_step):
            return gravest
        if isinstance(gravest, DeadlineExceeded):
            gravest = await self._name_the_silent(gravest)
        return await self._fail(gravest)

    async def _name_the_silent(self, late: DeadlineExceeded) -> DeadlineExceeded:
        """When one rank is silent all calls are late, but the others still give a sign of life."""
        signs = [with_deadline(rank, _SIGN_OF_LIFE_S).alive() for rank in self.ranks]
        answers = await asyncio.gather(*signs, return_exceptions=True)
        silent = [name for name, answer in zip(self._names, answers, strict=True) if answer is not None]
        if not silent:
            return late
        return DeadlineExceeded(f"{late}; no sign of life from {', '.join(silent)}")

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


AnyTrainer = Trainer | RankedTrainer


async def sign_of_life(trainer: AnyTrainer, seconds: float) -> None:
    """Of every rank, even in the middle of a pass; one that gives none in time is named. Deaths are told by others."""
    ranks: Sequence[Trainer | Rank] = trainer.ranks if isinstance(trainer, RankedTrainer) else [trainer]
    with suppress(WorkerDied):
        await together(*(with_deadline(rank, seconds).alive() for rank in ranks))


@asynccontextmanager
async def _discarded_if_unfinished(directory: Path) -> AsyncIterator[None]:
    """A disk that is full gets back what the part of a slot or a model took of it."""
    try:
        yield
    except SaveFailed:
        await asyncio.to_thread(checkpoint.discard, directory)
        raise


_CAUSES = (WorkerDied, OutOfMemory, DeadlineExceeded)
_BUG = len(_CAUSES) + 1


def _gravity(error: BaseException) -> int:
    """Smallest for what explains the rest: whoever lost its peer says only that a connection broke."""
    for place, kind in enumerate(_CAUSES):
        if isinstance(error, kind):
            return place
    return _BUG if isinstance(error, RemoteError) else len(_CAUSES)


async def _settled(done: set[Answer], waiting: set[Answer]) -> set[Answer]:
    """Once a rank has failed, those that have not answered within a little while, or when a death explains it all."""
    deadline = time.monotonic() + _SETTLE_S
    while waiting and not any(isinstance(task.exception(), WorkerDied) for task in done):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    return waiting
