"""Continues from the record: what a resumed run still has to do, and the replay of a finished one.

Invariants that live here:
 14. Crash safety: killed anywhere, the run resumes; no prompt is skipped, none trained twice. Versions never
     decrease: the trainer restores the recorded version before anything is admitted (trainer_worker.py).
 16. Replay: from the record, the training of a finished run is repeated to identical weights on the same hardware,
     software and rank count.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headway.config import Config, StalenessSection
from headway.control.adaptive import AdaptiveStaleness
from headway.control.buffer import Buffer
from headway.control.controller import Progress
from headway.control.retrain import load_newest_checkpoint, retrain
from headway.control.run_directory import changes, changes_arithmetic, check_model
from headway.control.staleness import StalenessControl
from headway.control.workers import open_runtime, start_trainer
from headway.errors import HeadwayError
from headway.record.events import Checkpointed, ConfigChanged, Evaluated, Event, Warned
from headway.record.phases import phase
from headway.record.run import Run
from headway.record.shards import RECORD_NAME, Record, RunLog
from headway.training.checkpoint import slot_for


def progress_from(staleness: StalenessControl, section: StalenessSection, log: RunLog, run: Run) -> Progress:
    """Where to start: at the beginning, or exactly where the record says the run was."""
    adaptive = AdaptiveStaleness(section)
    if not run.is_resumed:
        return Progress(0, staleness, Buffer(staleness), adaptive)
    untrained = run.untrained_batch
    staleness = StalenessControl.restore(
        staleness.batch_groups,
        staleness.max_staleness,
        staleness.window,
        num_admitted=len(run.groups),
        trained={group for _, groups in run.batches[: run.num_trained] for group in groups},
        dropped=set(run.dropped),
        taken=set(untrained or ()),
    )
    decided = [adaptive.observe(*step) for step in run.observed]
    if decided and (last := decided[-1]) and run.eta != last.after:  # the run ended between a step and its decision
        log.append(last)
    staleness.adapt(adaptive.eta)
    of_models = [event for event in run.all(Evaluated) if event.label != "before"]
    return Progress(
        version=run.num_trained,
        staleness=staleness,
        adaptive=adaptive,
        buffer=Buffer(staleness),
        finished=[(log.record.load(run.ref(group)), run.groups[group].version) for group in run.waiting],
        failing=[(group, run.groups[group].prompt) for group in run.failing],
        has_succeeded=any(group.ref for group in run.groups),
        unfinished={group: (run.groups[group].prompt, run.groups[group].eta) for group in run.unfinished},
        num_streamed=sum(group.repeats is None for group in run.groups),
        requeued=[(group, run.groups[group].prompt) for group in run.requeued],
        replaced=tuple((group.prompt, group.dropped) for group in run.groups if group.dropped),
        untrained_batch=tuple(log.record.load(run.ref(group)) for group in untrained) if untrained else None,
        num_checkpoints=len(run.all(Checkpointed)),
        evaluated_before=any(event.label == "before" for event in run.all(Evaluated)),
        best_accuracy=max((one.accuracy for one in of_models if one.accuracy is not None), default=None),
        resumes=True,
        lost_tokens=run.tokens.in_flight,
    )


async def change_config(config: Config, log: RunLog, run: Run, directory: Path) -> None:
    """Record the knobs that a resume changes. Steps of the record are first retrained with those they were trained
    with, to a checkpoint from which the new ones hold."""
    found = changes(run.config, config)
    if not found:
        return
    if run.num_trained and changes_arithmetic(found):
        before = {**run.config, "run": config.run, "ray": config.ray}
        slot, started = slot_for(len(run.all(Checkpointed))), time.monotonic()
        async with open_runtime(config, directory) as runtime:
            with phase(log.append, "retraining with the knobs of the record"):
                trainer = await start_trainer(runtime, Config.model_validate(before), None)
                version = await load_newest_checkpoint(run, trainer, directory, _warn(log))
                await retrain(log.record.load, run, trainer, version, lambda done, total: None, log.append)
                await trainer.snapshot()
                await trainer.save(str(directory / "checkpoint" / slot))
        log.append(Checkpointed(version=run.num_trained, slot=slot, seconds=time.monotonic() - started))
    log.append(ConfigChanged(version=run.num_trained, changes=found))


def _warn(log: RunLog) -> Callable[[str], object]:
    return lambda message: log.append(Warned(message=message))


async def replay(directory: Path, emit: Callable[[Event], object]) -> tuple[int, str]:
    """Train a recorded run again from its first weights; the last version and its digest, equal to the record's."""
    run = Run.read(directory)
    if not run.num_trained:
        raise HeadwayError(f"{directory} has no training step to replay")
    check_model(directory, run.config["model"]["path"], run)
    record, checkpoint = Record(directory / RECORD_NAME), str(directory / "replay" / "checkpoint" / "a")
    ends = [*(version for version, _ in run.configs[1:]), run.num_trained]
    for (first, knobs), end in zip(run.configs, ends, strict=True):
        config = Config.model_validate(knobs)
        if config.run.runtime == "ray":  # the cluster may be gone, and one machine is enough
            config = config.model_copy(update={"run": config.run.model_copy(update={"runtime": "local"})})
        if first == end:
            continue
        async with open_runtime(config, directory / "replay") as runtime:
            with phase(emit, "starting the trainer"):
                trainer = await start_trainer(runtime, config, None)
            if first:
                await trainer.load(checkpoint)
            with phase(emit, f"retraining {end - first} recorded steps") as progress:
                await retrain(record.load, replace(run, num_trained=end), trainer, first, progress, emit)
            if end == run.num_trained:
                await trainer.save_model(str(directory / "replay" / "model"))
            else:
                await trainer.snapshot()
                await trainer.save(checkpoint)
    return run.num_trained, run.digests[run.num_trained]
