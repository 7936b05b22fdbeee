"""Checkpoints and models: what of a run is on disk, written while training continues.

Invariants that live here:
 13. Non-blocking generation: training waits only for the trainer's snapshot of its state, generation not even for that.
 14. Crash safety: a checkpoint that could not be written leaves the other slot, which leads to the same weights.
"""

import asyncio
import os
import shutil
import time
from functools import partial
from pathlib import Path

from headway.config import Config
from headway.control.run_directory import BEST_MODEL, MODEL
from headway.control.trainer_worker import TrainerWorker
from headway.errors import SaveFailed, first_line
from headway.record.events import Checkpointed, CheckpointFailed, Warned
from headway.record.shards import RunLog
from headway.training.checkpoint import replace, slot_for
from headway.training.ranks import RankedTrainer

_CANDIDATE = "model-candidate"
_GRACE_S = 60.0
"""Grace period before repeated checkpoint failures end the run, so that a person can free space on the disk."""


class Saving:
    """Writes checkpoints alternately into two slots, one at a time; the latest model with each, and the best one."""

    def __init__(
        self,
        config: Config,
        trainer: TrainerWorker,
        log: RunLog,
        directory: Path,
        num_checkpoints: int,
        best_accuracy: float | None,
    ) -> None:
        self._config, self._trainer, self._log, self._directory = config, trainer, log, directory
        self._num_checkpoints = num_checkpoints
        self._writing: asyncio.Task[None] | None = None
        self._failed: list[float] = []  # when checkpoints were begun, all since the last that was written
        self.written_version = 0  # of the newest whole checkpoint this process wrote
        self.model_version = -1
        self.best_accuracy = best_accuracy
        shutil.rmtree(directory / _CANDIDATE, ignore_errors=True)  # of an evaluation that a crash ended

    async def save(
        self, version: int, tasks: asyncio.TaskGroup, checkpoints: bool = True, set_aside: bool = False
    ) -> None:
        """Have the trainer copy its model, and with `checkpoints` its state; they are written during the steps to come.

        With `set_aside` the model is the candidate of the evaluation that begins now.
        """
        started = time.monotonic()
        await self.written()
        source = await self._trainer.call(partial(_copy, checkpoints))
        stall_s = time.monotonic() - started
        self._writing = tasks.create_task(self._write(version, source, stall_s, checkpoints, set_aside))

    async def written(self) -> None:
        """Wait for what is being written, if anything is."""
        if self._writing is not None:
            await asyncio.shield(self._writing)  # who waits may be cancelled

    async def _write(
        self, version: int, source: RankedTrainer, stall_s: float, checkpoints: bool, set_aside: bool
    ) -> None:
        if checkpoints:
            await self._write_checkpoint(version, source, stall_s)
        # The checkpoint and the record lead to the same weights; only the last model is the result.
        try:
            await self._trainer.call(partial(self._write_model, version, source))
        except SaveFailed as error:
            if version == self._config.run.steps:
                raise
            self._log.append(Warned(message=f"{error}; the model of version {version} was not written"))
            return
        self.model_version = version
        if set_aside:
            await self.set_aside()

    async def _write_checkpoint(self, version: int, source: RankedTrainer, stall_s: float) -> None:
        started, slot = time.monotonic(), slot_for(self._num_checkpoints)
        await self._log.flush()
        # A full disk may have room later; the other slot and the record lead to the same weights until then.
        try:
            await self._trainer.call(partial(self._write_slot, version, slot, source))
        except SaveFailed as error:
            self._log.append(CheckpointFailed(version=version, slot=slot, cause=str(error)))
            self._failed.append(started)
            too_many = len(self._failed) > self._config.supervise.max_failures
            if too_many and time.monotonic() - self._failed[0] > _GRACE_S:
                raise
            return
        self._failed.clear()
        self._num_checkpoints += 1
        self.written_version = version
        seconds = time.monotonic() - started
        self._log.append(Checkpointed(version=version, slot=slot, seconds=seconds, stall_s=stall_s))

    async def _write_slot(self, version: int, slot: str, source: RankedTrainer, trainer: RankedTrainer) -> None:
        # A restarted trainer has no snapshot, and may be a step further by now, unless that was the last.
        if trainer is not source and version == self._config.run.steps:
            await trainer.snapshot()
        await trainer.save(str(self._directory / "checkpoint" / slot))

    async def _write_model(self, version: int, source: RankedTrainer, trainer: RankedTrainer) -> None:
        """An ordinary model directory, in place of the last."""
        if trainer is not source and version == self._config.run.steps:
            await trainer.copy_model()
        await trainer.write_model(str(self._directory / MODEL))

    async def set_aside(self) -> None:
        """The latest model becomes the best one if the evaluation of it says so."""
        # The best model is worth less than the run.
        try:
            await asyncio.to_thread(_link, self._directory / MODEL, self._directory / _CANDIDATE)
        except OSError as error:
            self._log.append(Warned(message=f"the model under evaluation cannot be kept aside: {first_line(error)}"))
            await asyncio.to_thread(shutil.rmtree, self._directory / _CANDIDATE, True)

    async def judge(self, accuracy: float | None) -> None:
        """The evaluation of the candidate has ended, without an accuracy if it was given up."""
        await self.written()  # it may not have been set aside yet
        candidate = self._directory / _CANDIDATE
        is_best = accuracy is not None and (self.best_accuracy is None or accuracy > self.best_accuracy)
        if is_best and candidate.exists():
            self.best_accuracy = accuracy
            await asyncio.to_thread(replace, candidate, self._directory / BEST_MODEL)
        await asyncio.to_thread(shutil.rmtree, candidate, True)


async def _copy(with_state: bool, trainer: RankedTrainer) -> RankedTrainer:
    if with_state:
        await trainer.snapshot()
    await trainer.copy_model()
    return trainer


def _link(source: Path, target: Path) -> None:
    """A copy that takes no space where the disk has hard links: model files are replaced, never changed."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
