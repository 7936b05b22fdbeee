"""The controller with a fake engine and a stand-in trainer: no model, every order of events that seeds can bring about.

Invariant 1: single admission authority. Eq. 3 holds at every admission, after resume, drops, odd sizes, worker deaths.
Invariant 2: conservation. Every admitted group leaves exactly once; admitted = trained + dropped + in flight.
Invariant 11: verified weight sync at every load; a mismatch stops the run.
Invariant 14: crash safety, after whatever event it comes.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stage import MakeStage, Stage, StandInRewards, StandInTrainer, crash_after, drawn_pace
from system import check_finished, check_record

from headway.control.adaptive import AdaptiveStaleness
from headway.control.buffer import Buffer
from headway.control.controller import Controller, Progress
from headway.control.workers import Fleet
from headway.engine.fake import FakeEngine
from headway.engine.protocol import KvPolicy
from headway.errors import DeadlineExceeded, InvariantBroken, RunFailed, WeightMismatch
from headway.record.events import Event
from headway.record.log import read
from headway.record.run import fold
from headway.record.shards import RunLog
from headway.rollout.worker import RolloutWorker
from headway.runtime.inline import InlineRuntime
from headway.training.checkpoint import CheckpointPart
from headway.training.ranks import RankedTrainer
from headway.types import (
    Batch,
    Chunk,
    Completion,
    Group,
    Request,
    StepReport,
    SwapReport,
    WeightUpdate,
)

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=40)


class SlowToLoad(FakeEngine):
    """Receives weights later than its fellow."""

    async def stage_weights(self, update: WeightUpdate) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        await super().stage_weights(update)


class Liar(FakeEngine):
    """Runs other weights than it was sent, from version 2 on."""

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        report = await super().swap(version, kv)
        return replace(report, fingerprints={"weights": "others"}) if version >= 2 else report


class Meeting(FakeEngine):
    """Receives weights only while all its fellows do."""

    def __init__(self, barrier: asyncio.Barrier) -> None:
        super().__init__(mean_tokens=6.0)
        self._barrier = barrier

    async def stage_weights(self, update: WeightUpdate) -> None:
        await self._barrier.wait()
        await super().stage_weights(update)


class Broken(FakeEngine):
    """Has a bug that shows from version 2 on."""

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        if self.version >= 2:
            raise IndexError("index 255 is out of bounds")
        async for item in super().generate(request):
            yield item


@dataclass(frozen=True)
class Case:
    batch: int = 3
    eta: int = 1
    window: int = 0
    group_size: int = 2
    workers: int = 2
    engines: int = 1
    spare: int = 0  # of rollout.max_groups over a batch; 0 is no limit
    steps: int = 9
    dropping: bool = True
    seed: int = 0


cases = st.builds(
    Case,
    batch=st.sampled_from([1, 2, 3, 5, 7]),
    eta=st.sampled_from([0, 1, 4]),
    window=st.sampled_from([-1, 0, 1, 2, 3, 11]),
    group_size=st.sampled_from([2, 3, 5]),
    workers=st.sampled_from([1, 2, 3]),
    engines=st.sampled_from([1, 2, 3]),
    spare=st.sampled_from([0, 0, 1, 4]),
    steps=st.sampled_from([1, 4, 9]),
    dropping=st.booleans(),
    seed=st.integers(0, 1000),
)


def sections_of(case: Case) -> dict[str, dict[str, Any]]:
    limit = case.batch + case.spare if case.spare else 0
    return {
        "run": {"steps": case.steps, "seed": case.seed},
        "rollout": {"group_size": case.group_size, "workers": case.workers, "max_groups": limit},
        "staleness": {"max_staleness": case.eta, "window": case.window},
        "trainer": {"batch_groups": case.batch},
        "checkpoint": {"every": 2},
    }


def rewards_of(case: Case) -> StandInRewards:
    """One prompt fails whole; of the others, one trajectory in eleven. Half of the groups failing would end the run."""
    return StandInRewards(case.seed, failing=lambda answer, draw: case.dropping and (answer == 8 or draw % 11 == 0))


def engines_of(case: Case) -> list[FakeEngine]:
    """Of several, every other one receives weights late."""
    kinds = (FakeEngine, SlowToLoad)
    return [kinds[number % 2](mean_tokens=6.0) for number in range(case.engines)]


@repeatable
@example(Case(batch=7, eta=0, window=-1, seed=1))
@example(Case(batch=5, eta=4, window=1, spare=1, workers=3, engines=2, seed=2))
@given(cases)
def test_invariants_1_and_2_eq_3_holds_at_every_admission_and_nothing_vanishes(
    make_stage: MakeStage, case: Case
) -> None:
    stage = make_stage(sections_of(case), rewards=rewards_of(case), engines=engines_of(case))
    stage.trainer.pace = drawn_pace(case.seed)
    events = stage.run()
    state = check_finished(stage.config, events)
    given_to_trainer = [tuple(group.id for group in batch.groups) for batch in stage.trainer.batches]
    assert given_to_trainer == [groups for _, groups in state.batches]
    assert {group.eta for group in state.groups} == {case.eta}
    limit = stage.config.rollout.max_groups
    assert not limit or most_waiting(events) < limit + case.batch


def most_waiting(events: list[Event]) -> int:
    """Groups admitted and in no whole batch; those collected for the next one no longer count against the limit."""
    untaken, most = set[int](), 0
    for event in events:
        if event.kind == "admitted":
            untaken.add(event.group)
        elif event.kind in ("taken", "dropped"):
            untaken -= set(event.groups)
        most = max(most, len(untaken))
    return most


def test_invariant_1_the_version_that_admits_is_the_lowest_of_all_engines(make_stage: MakeStage) -> None:
    engines = [FakeEngine(mean_tokens=6.0), SlowToLoad(mean_tokens=6.0)]
    sections = {"rollout": {"workers": 2}, "run": {"steps": 8}, "staleness": {"max_staleness": 1}}
    stage = make_stage(sections, engines=engines)
    events = stage.run()
    check_finished(stage.config, events)
    behind = {event.version for event in events if event.kind == "swapped" and event.engine == "engine-0"}
    assert behind == set(range(9))


def test_weights_are_staged_to_all_engines_at_the_same_time(make_stage: MakeStage) -> None:
    """If one waited for another, the first would wait for ever."""
    barrier = asyncio.Barrier(3)
    stage = make_stage({"run": {"steps": 4}}, engines=[Meeting(barrier) for _ in range(3)])
    events = stage.run()
    check_finished(stage.config, events)
    for engine in ("engine-0", "engine-1", "engine-2"):
        swapped = [event.version for event in events if event.kind == "swapped" and event.engine == engine]
        assert swapped == [0, 1, 2, 3, 4]


def test_two_processes_worth_of_groups_really_overlap_with_training(make_stage: MakeStage) -> None:
    """Without this, every other test here could pass on a loop that does one thing after the other."""
    stage = make_stage({"run": {"steps": 8}, "staleness": {"max_staleness": 4}})
    stage.trainer.pace = drawn_pace(1)
    events = stage.run()
    assert max(event.staleness_max for event in events if event.kind == "trained") >= 2
    in_training = False
    finished_meanwhile = 0
    for event in events:
        in_training = event.kind == "taken" or (in_training and event.kind != "trained")
        finished_meanwhile += in_training and event.kind == "finished"
    assert finished_meanwhile > 0


def test_staleness_is_0_throughout_at_eta_0(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 6}, "staleness": {"max_staleness": 0}})
    stage.trainer.pace = drawn_pace(2)
    events = stage.run()
    assert {event.staleness_max for event in events if event.kind == "trained"} == {0}


def test_every_version_is_swapped_into_the_engine_and_its_pause_recorded(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 5}})
    swapped = [event for event in stage.run() if event.kind == "swapped"]
    assert [event.version for event in swapped] == [0, 1, 2, 3, 4, 5]
    assert all(event.parity_max_abs == 0 for event in swapped)


@dataclass
class Patient(StandInTrainer):
    """Saves, and ends a step, only once more was generated since the last step, while there is more to generate."""

    rewards: StandInRewards = field(default_factory=StandInRewards)
    last_version: int = 0
    num_seen: int = 0

    async def train(self, batch: Batch) -> StepReport:
        await self._wait_for_generation()
        report = await super().train(batch)
        self.num_seen = self.rewards.num_verdicts
        return report

    async def save(self, directory: str) -> CheckpointPart:
        await self._wait_for_generation()
        return await super().save(directory)

    async def _wait_for_generation(self) -> None:
        while self.version < self.last_version and self.rewards.num_verdicts == self.num_seen:
            await asyncio.sleep(0)


@pytest.mark.parametrize("every", [1, 100])
def test_invariant_13_generation_waits_neither_for_training_nor_for_saving(make_stage: MakeStage, every: int) -> None:
    """If it did, each would wait for the other, and neither would come to its end."""
    stage = make_stage({"run": {"steps": 12}, "staleness": {"max_staleness": 3}, "checkpoint": {"every": every}})
    stage.trainer = Patient(3 + 1, rewards=stage.rewards, last_version=12 - 3 - 1)
    check_finished(stage.config, stage.run())


@dataclass
class SlowDisk(StandInTrainer):
    """Has written a checkpoint only once another training step has ended, while there is another."""

    last_version: int = 0

    async def save(self, directory: str) -> CheckpointPart:
        assert self.kept is not None
        version = self.kept[0]
        while self.version == version < self.last_version:
            await asyncio.sleep(0)
        return await super().save(directory)

    async def write_model(self, directory: str) -> None:
        assert self.copied is not None
        version = self.copied[0]
        while self.version == version < self.last_version:
            await asyncio.sleep(0)
        await super().write_model(directory)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_training_does_not_wait_for_a_checkpoint_to_be_written(make_stage: MakeStage, every: int) -> None:
    """If it did, neither would come to its end."""
    stage = make_stage({"run": {"steps": 8}, "checkpoint": {"every": every}})
    stage.trainer = SlowDisk(stage.trainer.worst_staleness, last_version=8)
    events = stage.run()
    check_finished(stage.config, events)
    written = [event.version for event in events if event.kind == "checkpointed"]
    assert written == [version for version in range(1, 9) if version % every == 0 or version == 8]
    order = [(event.kind, event.version) for event in events if event.kind in ("taken", "checkpointed")]
    assert all(order.index(("checkpointed", version)) > order.index(("taken", version)) for version in written[:-1])
    slot = [event.slot for event in events if event.kind == "checkpointed"][-1]
    assert json.loads((stage.directory / "checkpoint" / slot / "state.json").read_text())[0] == 8


class Told(FakeEngine):
    """Receives weights only once rollout workers know their version."""

    newest = 0

    async def stage_weights(self, update: WeightUpdate) -> None:
        assert update.version <= self.newest
        await super().stage_weights(update)


def test_training_does_not_wait_until_everybody_has_heard_of_its_weights(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollout workers listen only once the next step is running, and engines are sent nothing before."""
    engine = Told(mean_tokens=6.0)
    stage = make_stage({"run": {"steps": 8}, "staleness": {"max_staleness": 3}}, engines=[engine])
    inform = RolloutWorker.inform

    async def inform_late(self: RolloutWorker, newest: int, *others: Any) -> None:
        while 0 < newest < 8 and stage.trainer.num_asked <= newest:
            await asyncio.sleep(0)
        engine.newest = newest
        await inform(self, newest, *others)

    monkeypatch.setattr(RolloutWorker, "inform", inform_late)
    check_finished(stage.config, stage.run())


# A crash after any event


@settings(repeatable, max_examples=60)
@given(cases, st.floats(0, 1))
def test_invariant_14_a_crash_after_any_event_loses_nothing(make_stage: MakeStage, case: Case, part: float) -> None:
    sections, rewards = sections_of(case), rewards_of(case)
    not_finite = frozenset({1, 3} if case.dropping else ())
    first = make_stage(sections, rewards=rewards, engines=engines_of(case), not_finite=not_finite)
    first.trainer.pace = drawn_pace(case.seed)
    events = first.run()
    crashed = make_stage(sections, rewards=rewards, engines=engines_of(case))
    num_kept = 1 + int(part * (len(events) - 1))
    crash_after(num_kept, first, crashed)
    resumed = crashed.run()
    check_finished(crashed.config, resumed)
    assert resumed[:num_kept] == events[:num_kept]
    trained = [event.digest for event in resumed if event.kind == "trained"]
    kept = [event.digest for event in events[:num_kept] if event.kind == "trained"]
    assert trained[: len(kept)] == kept


def test_a_resume_that_trains_to_other_weights_is_refused(make_stage: MakeStage) -> None:
    first = make_stage({"run": {"steps": 3}, "checkpoint": {"every": 100}})
    events = first.run()
    crashed = make_stage({"run": {"steps": 3}})
    crash_after([event.kind for event in events].index("trained") + 1, first, crashed)
    crashed.trainer.weights = "another start"
    with pytest.raises(InvariantBroken, match="gave other weights than recorded"):
        crashed.run()


def test_where_arithmetic_does_not_repeat_a_resume_to_other_weights_continues_and_logs_the_difference(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_stage({"run": {"steps": 4}, "checkpoint": {"every": 100}})
    events = first.run()
    crashed = make_stage({"run": {"steps": 4}})
    second_step = [number for number, event in enumerate(events) if event.kind == "trained"][1]
    crash_after(second_step + 1, first, crashed)
    crashed.trainer.weights = "another start"
    monkeypatch.setattr(RankedTrainer, "is_repeatable", False)
    resumed = crashed.run()
    check_finished(crashed.config, resumed)
    retrained = [event for event in resumed if event.kind == "retrained"]
    digests = fold(resumed).digests
    assert [event.version for event in retrained] == [1, 2]
    assert [digests[event.version] for event in retrained] == [event.digest for event in retrained]
    assert retrained[0].digest != fold(events).digests[1]
    assert [event.version for event in resumed if event.kind == "trained"] == [1, 2, 3, 4]


# Steps that are skipped


def test_a_step_that_is_not_finite_drops_its_groups_and_adds_no_version(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 5}}, not_finite=frozenset({0, 2, 3}))
    events = stage.run()
    state = check_finished(stage.config, events)
    skipped = [group for event in events if event.kind == "skipped" for group in event.groups]
    assert len(skipped) == 9 and set(state.dropped) == set(skipped)
    assert set(state.dropped.values()) == {"skipped"}
    assert [event.version for event in events if event.kind == "skipped"] == [0, 1, 1]


def test_steps_in_a_row_that_are_not_finite_end_the_run_with_a_sentence(make_stage: MakeStage) -> None:
    sections = {"run": {"steps": 5}, "trainer": {"batch_groups": 3, "max_skipped": 2}}
    stage = make_stage(sections, not_finite=frozenset({1, 3, 4}))
    with pytest.raises(RunFailed, match=r"2 training steps in a row were skipped \(version 2: loss nan\); lower"):
        stage.run()
    state = check_record(stage.config, read(stage.directory / "events.jsonl"))
    assert state.num_trained == 2 and len(state.dropped) == 9


# Workers that lie, die or fall silent


def test_invariant_11_an_engine_that_runs_other_weights_stops_the_run(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 9}}, engines=[Liar(mean_tokens=6.0)])
    with pytest.raises(WeightMismatch, match="engine runs other weights than version 2: weights differs"):
        stage.run()
    swapped = [event.version for event in read(stage.directory / "events.jsonl") if event.kind == "swapped"]
    assert swapped == [0, 1], "a version that was not proved must not count as confirmed"


def test_invariant_11_a_version_that_one_of_several_engines_did_not_prove_admits_nothing(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 9}}, engines=[FakeEngine(mean_tokens=6.0), Liar(mean_tokens=6.0)])
    with pytest.raises(WeightMismatch, match="engine-1 runs other weights than version 2: weights differs"):
        stage.run()
    events = read(stage.directory / "events.jsonl")
    check_record(stage.config, events)
    assert {event.version for event in events if event.kind == "admitted"} <= {0, 1}
    assert [event.version for event in events if event.kind == "swapped" and event.engine == "engine-1"] == [0, 1]


def test_the_wait_for_a_batch_never_loses_a_cancellation(make_stage: MakeStage, tmp_path: Path) -> None:
    """Lost in the very moment in which the wait is over, it would leave a broken run waiting for ever."""
    stage = make_stage({"trainer": {"batch_groups": 1}})
    log = RunLog(tmp_path)

    async def cancel_after(num_turns: int) -> None:
        buffer, fleet = Buffer(stage.prepared.staleness()), Fleet(InlineRuntime(), stage.config)
        progress = Progress(0, buffer.staleness, buffer, AdaptiveStaleness(stage.config.staleness))
        controller = Controller(stage.config, fleet, stage.tasks(), progress, log, tmp_path)
        taking = asyncio.create_task(controller._take_batch())
        await asyncio.sleep(0.01)
        buffer.put(Group(buffer.staleness.admit(0), 0, 0, 0, ()))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_waiting = taking.cancel()
        await asyncio.wait({taking})
        assert taking.cancelled() == was_waiting, f"cancelled {num_turns} turns after the group came"

    for num_turns in range(6):
        asyncio.run(cancel_after(num_turns))
    log.close()


def test_a_run_that_is_stopped_at_any_moment_ends_at_once_and_can_go_on(make_stage: MakeStage) -> None:
    async def stop_after(stage: Stage, num_turns: int) -> None:
        running = asyncio.create_task(stage.play())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_running = running.cancel()
        done, _ = await asyncio.wait({running}, timeout=20)
        assert done and running.cancelled() == was_running, f"stopped after {num_turns} turns"

    for num_turns in range(1, 600, 13):
        stage = make_stage({"run": {"steps": 4}}, rewards=StandInRewards(num_turns))
        asyncio.run(stop_after(stage, num_turns))
        again = make_stage({"run": {"steps": 4, "dir": str(stage.directory)}})
        check_finished(again.config, again.run())


def test_an_engine_that_breaks_ends_the_run_and_does_not_pass_for_a_failing_workflow(make_stage: MakeStage) -> None:
    sections = {"run": {"steps": 9}, "supervise": {"max_failures": 2}}
    stage = make_stage(sections, engines=[Broken(mean_tokens=6.0)], remake=lambda number: Broken(mean_tokens=6.0))
    cause = r"engine failed more than 2 times within 600 s; the last time: "
    with pytest.raises(RunFailed, match=cause + r"engine broke at request train/\d+/\d/0: IndexError: index 255 is"):
        stage.run()
    events = read(stage.directory / "events.jsonl")
    state = check_record(stage.config, events)
    assert state.num_trained >= 2 and not state.dropped
    assert [event.kind for event in events].count("worker_lost") == 3


def test_invariant_15_groups_that_never_finish_are_waited_for_no_longer_than_a_deadline(
    make_stage: MakeStage,
) -> None:
    stage = make_stage({"run": {"deadline_s": 0.2}}, engines=[FakeEngine(mean_tokens=6.0, seconds_per_token=60.0)])
    stage.prepared = replace(stage.prepared, held_out=[])
    with pytest.raises(DeadlineExceeded, match=r"waited more than 0.4 s for 3 finished groups"):
        stage.run()


def test_a_verifier_that_fails_on_everything_ends_the_run_with_its_sentence(make_stage: MakeStage) -> None:
    stage = make_stage({}, rewards=StandInRewards(failing=lambda answer, draw: True))
    with pytest.raises(RunFailed, match=r"in each of the first 8 groups, the last with 'verifier: broken'; check"):
        stage.run()
    events = read(stage.directory / "events.jsonl")
    check_record(stage.config, events)
    assert not any(event.kind in ("finished", "taken") for event in events)


def test_an_error_is_never_a_reward_in_a_held_out_measurement(make_stage: MakeStage) -> None:
    """Accuracy over no verdict at all is unknown, not 0."""
    stage = make_stage({}, rewards=StandInRewards(failing=lambda answer, draw: True))
    with pytest.raises(RunFailed):
        stage.run()
    (before,) = [event for event in read(stage.directory / "events.jsonl") if event.kind == "evaluated"]
    assert before.num == 0 and before.accuracy is None


def test_a_clock_that_is_set_back_makes_no_duration_negative(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = count()
    monkeypatch.setattr(time, "time", lambda: 1.8e9 - 3600 * next(hours))
    sections = {"run": {"steps": 6}, "evaluate": {"every": 2}, "checkpoint": {"every": 2}}
    events = make_stage(sections).run()
    assert events[-1].time < events[0].time - 86400
    named = ("seconds", "stall_s", "stage_s", "wait_s", "admission_wait_s", "trainer_wait_s")
    durations = [getattr(event, name) for event in events for name in named if hasattr(event, name)]
    assert len(durations) > 50 and min(durations) >= 0
