"""Recorded training steps, trained again: from the newest whole checkpoint to the last version the record knows.

Invariants that live here:
 14. Crash safety: versions never go back, because batches the record says were trained are trained again
     first, to the recorded weights; a checkpoint that is damaged is named and passed over. On a GPU outside
     deterministic mode, where backward passes do not repeat bit for bit, `retrained` events give the difference.
 16. Replay: from the record, the same batches lead to identical weights where arithmetic is repeatable.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headway.errors import DeadlineExceeded, HeadwayError, InvariantBroken, WorkerDied
from headway.record.events import Event, Place, Retrained, Warned
from headway.record.run import Run
from headway.training.ranks import RankedTrainer
from headway.training.state import weight_difference
from headway.types import Batch, Group


async def load_newest_checkpoint(
    run: Run, trainer: RankedTrainer, directory: Path, warn: Callable[[str], object]
) -> int:
    """The version of the newest whole checkpoint; a damaged one is named and passed over; with none, the beginning."""
    for _, slot in run.checkpoints:
        # A damaged slot is a decision: the other one, or the beginning, leads to the same weights.
        try:
            _check_not_newer(directory / "checkpoint" / slot, run.num_trained)
            return await trainer.load(str(directory / "checkpoint" / slot))
        except (WorkerDied, DeadlineExceeded):
            raise
        except HeadwayError as error:
            warn(f"{error}; trying the one before")
    return 0


def _check_not_newer(slot: Path, num_trained: int) -> None:
    """A log restored from an older copy may name a slot that was overwritten since."""
    version = 0
    with suppress(OSError, ValueError, KeyError, TypeError):  # loading it says what is wrong
        version = int(json.loads((slot / "checkpoint.json").read_text())["version"])
    if version > num_trained:
        raise HeadwayError(f"checkpoint {slot} is of version {version}, and the log ends at {num_trained}")


async def retrain(
    load_group: Callable[[Place], Group],
    run: Run,
    trainer: RankedTrainer,
    from_version: int,
    progress: Callable[[int, int], None],
    emit: Callable[[Event], object],
) -> None:
    """Retrain the recorded batches, packed as they were, and compare the weights with the recorded ones."""
    largest: float | None = None
    for version, ids in run.batches[from_version : run.num_trained]:
        groups = tuple(load_group(run.ref(group)) for group in ids)
        await trainer.set_fit(run.steps[version].event.metrics)
        report = await trainer.train(Batch(version, groups))
        found = (await trainer.publish()).digest
        equal = found == run.digests[version + 1]
        if not equal and not report.skipped and not trainer.is_repeatable:
            max_abs, relative_norm = weight_difference(run.steps[version].event.weights_sample, report.weights_sample)
            emit(Retrained(version=version + 1, digest=found, max_abs=max_abs, relative_norm=relative_norm))
            largest = max(largest or 0.0, relative_norm)
        elif not equal or report.skipped:
            raise InvariantBroken(
                f"training step {version + 1} of the record, trained again, gave other weights than recorded; "
                "the hardware, the software or the number of threads must have changed"
            )
        progress(version + 1 - from_version, run.num_trained - from_version)
    if largest is not None:
        emit(
            Warned(
                message=f"retrained steps gave other weights than recorded (relative difference up to {largest:.1e}), "
                "as GPU arithmetic does not repeat bit for bit; run.deterministic = true makes it repeat"
            )
        )
    await trainer.restore_fit(run.steps[run.num_trained - 1].event.metrics if run.num_trained else {})
