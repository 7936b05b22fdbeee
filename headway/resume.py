"""Going on from the record: the newest whole checkpoint, then the recorded batches since, then what was under way.

Invariants that live here:
 14. A crash loses nothing: killed anywhere, the run resumes; no prompt is skipped, none trained twice. Versions never
     go back: batches the record says were trained are trained again first, to the recorded weights.
 16. Replay: from the record, the training of a finished run is repeated to identical weights on the same hardware,
     software and rank count.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from headway.buffer import Buffer
from headway.config import Config
from headway.controller import Progress
from headway.errors import HeadwayError, InvariantBroken
from headway.events import Event, read
from headway.fleet import open_runtime, start_trainer
from headway.launch import Prepared
from headway.ledger import RunState, fold, ledger
from headway.record import EVENTS_NAME, RECORD_NAME, Record, RunLog, ShardRef
from headway.staleness import StalenessControl
from headway.trainer import Trainer
from headway.types import Batch, DropReason, Group
from headway.view import View
from headway.weights import digest


async def progress_from(
    prepared: Prepared,
    log: RunLog,
    state: RunState,
    history: list[Event],
    trainer: Trainer,
    directory: Path,
    view: View,
) -> Progress:
    """Where to start: at the beginning, or exactly where the record says the run was."""
    staleness = prepared.staleness()
    if not history:
        return Progress(0, staleness, Buffer(staleness), [])
    checkpoint_version = await _load_checkpoint(state, trainer, directory, view)
    with view.phase(f"retraining {state.num_trained - checkpoint_version} recorded steps") as phase:
        await retrain(log.record.load, state, trainer, checkpoint_version, phase.progress)
    untrained = state.untrained_batch
    staleness = StalenessControl.restore(
        staleness.batch_groups,
        staleness.max_staleness,
        staleness.window,
        num_admitted=len(state.admitted),
        trained={group for _, groups in state.batches[: state.num_trained] for group in groups},
        dropped=set(state.dropped),
        taken=set(untrained or ()),
    )
    waiting = [log.record.load(state.finished[group]) for group in state.waiting]
    log.append(
        "resumed",
        version=state.num_trained,
        checkpoint_version=checkpoint_version,
        num_regenerated=len(state.unfinished),
        lost_tokens=ledger(history).in_flight,
    )
    return Progress(
        version=state.num_trained,
        staleness=staleness,
        buffer=Buffer.restore(staleness, waiting, Counter(DropReason(reason) for reason in state.dropped.values())),
        unfinished=state.unfinished,
        untrained_batch=tuple(log.record.load(state.finished[group]) for group in untrained) if untrained else None,
        num_checkpoints=len([event for event in history if event.kind == "checkpointed"]),
        evaluated_before=any(event["label"] == "before" for event in state.evaluations),
    )


async def _load_checkpoint(state: RunState, trainer: Trainer, directory: Path, view: View) -> int:
    """The newest whole checkpoint; a damaged one is named and passed over; with none, the beginning."""
    for _, slot in state.checkpoints:
        # A damaged slot is a decision: the other one, or the beginning, leads to the same weights.
        try:
            return await trainer.load(str(directory / "checkpoint" / slot))
        except HeadwayError as error:
            view.message(f"{error}; trying the one before")
    return 0


async def retrain(
    load_group: Callable[[ShardRef], Group],
    state: RunState,
    trainer: Trainer,
    from_version: int,
    progress: Callable[[int, int], None],
) -> None:
    """Train the recorded batches again, and see that they lead to the recorded weights."""
    for version, ids in state.batches[from_version : state.num_trained]:
        groups = tuple(load_group(state.finished[group]) for group in ids)
        report = await trainer.train(Batch(version, groups))
        found = digest((await trainer.publish()).fingerprints)
        if report.skipped or found != state.digests[version + 1]:
            raise InvariantBroken(
                f"training step {version + 1} of the record, trained again, gave other weights than recorded; "
                "the hardware, the software or the number of threads must have changed"
            )
        progress(version + 1 - from_version, state.num_trained - from_version)


async def replay(directory: Path, view: View) -> tuple[int, str]:
    """Train a recorded run again from its first weights; the last version and its digest, equal to the record's."""
    history = read(directory / EVENTS_NAME)
    state = fold(history)
    config = Config.model_validate(state.config)
    if config.run.runtime == "ray":  # the cluster may be gone, and one machine is enough
        config = config.model_copy(update={"run": config.run.model_copy(update={"runtime": "local"})})
    if not state.num_trained:
        raise HeadwayError(f"{directory} has no training step to replay")
    record = Record(directory / RECORD_NAME)
    async with open_runtime(config, directory / "replay") as runtime:
        with view.phase("starting the trainer"):
            trainer = await start_trainer(runtime, config, None)
        with view.phase(f"retraining {state.num_trained} recorded steps") as phase:
            await retrain(record.load, state, trainer, 0, phase.progress)
        await trainer.save_model(str(directory / "replay" / "model"))
    return state.num_trained, state.digests[state.num_trained]
