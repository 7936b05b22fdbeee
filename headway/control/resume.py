"""Going on from the record: the newest whole checkpoint, then the recorded batches since, then what was under way.

Invariants that live here:
 14. Crash safety: killed anywhere, the run resumes; no prompt is skipped, none trained twice. Versions never
     go back: batches the record says were trained are trained again first, to the recorded weights.
 16. Replay: from the record, the training of a finished run is repeated to identical weights on the same hardware,
     software and rank count.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from headway.config import Config
from headway.control.buffer import Buffer
from headway.control.controller import Progress
from headway.control.retrain import load_newest_checkpoint, retrain
from headway.control.staleness import StalenessControl
from headway.control.workers import open_runtime, start_trainer
from headway.errors import HeadwayError
from headway.record.events import Event, Resumed, Warned
from headway.record.ledger import RunState, fold, ledger
from headway.record.log import EVENTS_NAME, read
from headway.record.phases import phase
from headway.record.shards import RECORD_NAME, Record, RunLog
from headway.training.ranks import RankedTrainer
from headway.types import DropReason


async def progress_from(
    staleness: StalenessControl,
    log: RunLog,
    state: RunState,
    history: list[Event],
    trainer: RankedTrainer,
    directory: Path,
) -> Progress:
    """Where to start: at the beginning, or exactly where the record says the run was."""
    if not history:
        return Progress(0, staleness, Buffer(staleness), [])
    checkpoint_version = await load_newest_checkpoint(
        state, trainer, directory, lambda message: log.append(Warned(message=message))
    )
    with phase(log.append, f"retraining {state.num_trained - checkpoint_version} recorded steps") as progress:
        await retrain(log.record.load, state, trainer, checkpoint_version, progress)
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
        Resumed(
            version=state.num_trained,
            checkpoint_version=checkpoint_version,
            num_regenerated=len(state.unfinished),
            lost_tokens=ledger(history).in_flight,
        )
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


async def replay(directory: Path, emit: Callable[[Event], object]) -> tuple[int, str]:
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
        with phase(emit, "starting the trainer"):
            trainer = await start_trainer(runtime, config, None)
        with phase(emit, f"retraining {state.num_trained} recorded steps") as progress:
            await retrain(record.load, state, trainer, 0, progress)
        await trainer.save_model(str(directory / "replay" / "model"))
    return state.num_trained, state.digests[state.num_trained]
