"""Checkpoints that cannot be written, or whose trainer dies, and a log that cannot: what the controller does then.

Invariant 14: crash safety.
"""

import asyncio
import os

import pytest
from stage import MakeStage, Stage, StandInTrainer, kinds, steps_done
from system import check_finished, check_record
from test_survive import killing

from headway.control import saving
from headway.control.controller import Controller
from headway.errors import HeadwayError, SaveFailed
from headway.record.log import read
from headway.training.checkpoint import CheckpointPart


class FullDisk(StandInTrainer):
    """Cannot save at the versions named."""

    full_at: frozenset[int] = frozenset()

    async def save(self, directory: str) -> CheckpointPart:
        if self.kept and self.kept[0] in self.full_at:
            raise SaveFailed(f"cannot write {directory}: No space left on device; make room or repair the disk")
        return await super().save(directory)


def on_full_disk(stage: Stage, *versions: int) -> None:
    stage.trainer = FullDisk(stage.trainer.worst_staleness)
    stage.trainer.full_at = frozenset(versions)


def test_a_failed_checkpoint_is_reported_and_retried_in_the_older_slot(
    make_stage: MakeStage,
) -> None:
    stage = make_stage({"run": {"steps": 12}, "checkpoint": {"every": 2}})
    on_full_disk(stage, 4, 6)
    events = stage.run()
    check_finished(stage.config, events)
    saves = [(e.kind, e.version, e.slot) for e in events if e.kind.startswith("checkpoint")]
    assert saves == [
        ("checkpointed", 2, "a"),
        ("checkpoint_failed", 4, "b"),
        ("checkpoint_failed", 6, "b"),
        ("checkpointed", 8, "b"),
        ("checkpointed", 10, "a"),
        ("checkpointed", 12, "b"),
    ]
    assert all("No space left" in event.cause for event in kinds(events, "checkpoint_failed"))


def test_a_trainer_that_dies_after_a_failed_checkpoint_comes_back_from_the_one_before(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 8}, "checkpoint": {"every": 2}}, mortal=True, during=killing("trainer", 5))
    on_full_disk(stage, 4)
    events = stage.run()
    check_finished(stage.config, events)
    assert kinds(events, "checkpoint_failed") and kinds(events, "worker_lost")


@pytest.mark.parametrize("version", [4, 8])
def test_a_trainer_that_dies_as_it_writes_a_checkpoint_costs_that_one_unless_it_is_the_last(
    make_stage: MakeStage, version: int
) -> None:
    class Dying(StandInTrainer):
        async def save(self, directory: str) -> CheckpointPart:
            if self.kept and self.kept[0] == version and not died:
                died.append(True)
                stage.runtime.kill("trainer")
                await asyncio.Event().wait()
            return await super().save(directory)

    died: list[bool] = []
    stage = make_stage({"run": {"steps": 8}, "checkpoint": {"every": 2}}, mortal=True)
    stage.trainer = Dying(stage.trainer.worst_staleness)
    events = stage.run()
    check_finished(stage.config, events)
    assert died and len(kinds(events, "trained")) == 8
    saved = [event.version for event in kinds(events, "checkpointed")]
    assert saved == [2, 4, 6, 8] if version == 8 else saved == [2, 6, 8]
    failed = [event.version for event in kinds(events, "checkpoint_failed")]
    assert failed == ([] if version == 8 else [4])


def test_checkpoints_that_fail_again_and_again_end_the_run_with_the_cause(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_GRACE_S", 0.0)
    stage = make_stage({"run": {"steps": 100}, "checkpoint": {"every": 1}, "supervise": {"max_failures": 2}})
    on_full_disk(stage, *range(3, 100))
    with pytest.raises(SaveFailed, match="No space left on device"):
        stage.run()
    events = read(stage.directory / "events.jsonl")
    check_record(stage.config, events)
    assert len(kinds(events, "checkpoint_failed")) == 3 and len(kinds(events, "checkpointed")) == 2


def test_however_many_checkpoints_fail_there_is_time_to_make_room(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 20}, "checkpoint": {"every": 1}, "supervise": {"max_failures": 2}})
    on_full_disk(stage, *range(3, 18))
    events = stage.run()
    check_finished(stage.config, events)
    assert len(kinds(events, "checkpoint_failed")) == 15 and kinds(events, "checkpointed")[-1].version == 20


def test_a_log_that_cannot_be_written_ends_the_run_at_once_with_the_cause(make_stage: MakeStage) -> None:
    async def during(stage: Stage, controller: Controller) -> None:
        await steps_done(controller, 2)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, controller.log._fd)
        os.close(full)

    stage = make_stage({"run": {"steps": 10_000}}, during=during)
    with pytest.raises(HeadwayError, match=r"cannot write .*events.jsonl: (No space|Invalid argument).*; make room"):
        stage.run()
    again = make_stage({"run": {"steps": 6, "dir": str(stage.directory)}})
    events = again.run()
    check_finished(again.config, events)
