"""Promises under faults that single workers do not show: poisoned requests, late engines, outages, room for groups."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stage import MakeStage, Stage, StandInRewards, crash_after, kinds, steps_done, timed_engines
from system import check_finished

from headway.control import controller
from headway.control.controller import Controller
from headway.engine.fake import FakeEngine
from headway.errors import RunFailed
from headway.record.events import Event
from headway.record.run import Run, fold
from headway.rollout.worker import RolloutWorker
from headway.types import Admission, Chunk, Completion, Group, Request, Verdict, WeightUpdate


@pytest.mark.parametrize("at_turn", [0, 3, 30])
def test_5_an_interrupt_after_the_last_step_saves_and_resume_only_evaluates(
    make_stage: MakeStage, at_turn: int
) -> None:
    async def during(stage: Stage, controller: Controller) -> None:
        while controller._finishing is None:
            await asyncio.sleep(0)
        for _ in range(at_turn):
            await asyncio.sleep(0)
        assert controller.stop() and controller.is_stopped

    stage = make_stage({"run": {"steps": 5}, "checkpoint": {"every": 100}}, during=during)
    events = stage.run()
    assert [event.version for event in kinds(events, "checkpointed")] == [5]
    assert "after" not in [event.label for event in kinds(events, "evaluated")]
    assert json.loads((stage.directory / "model" / "model.safetensors").read_text())[0] == 5
    assert not (stage.directory / "model-candidate").exists()
    again = make_stage({"run": {"steps": 5, "dir": str(stage.directory)}})
    events = again.run()
    assert kinds(events, "evaluated")[-1].label == "after" and len(kinds(events, "trained")) == 5


class Poisoned(FakeEngine):
    """Every engine gives NaN for the requests of one group, or dies of them by an error."""

    group, raises = 5, False

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        async for item in super().generate(request):
            if request.key.group == self.group and request.key.stream == "train" and len(item.tokens):
                if self.raises:
                    raise IndexError("index out of bounds in a kernel")
                item = replace(item, logprobs=np.full(len(item.tokens), np.nan, np.float32))
            yield item


class Killing(Poisoned):
    raises = True


@pytest.mark.parametrize("engine", [Poisoned, Killing])
def test_8_a_poisoned_request_fails_its_trajectory_and_not_every_engine(
    make_stage: MakeStage, engine: type[Poisoned]
) -> None:
    stage = make_stage(
        {"run": {"steps": 6}},
        engines=[engine(mean_tokens=6.0) for _ in range(2)],
        remake=lambda number: engine(mean_tokens=6.0),
        mortal=True,
    )
    events = stage.run()
    state = check_finished(stage.config, events)
    # An engine that dies takes others' requests along; they go on once the poisoned group is known.
    assert state.dropped == {5: "failed"}
    (dropped,) = (event for event in kinds(events, "dropped") if event.groups == (5,))
    said = "engine: engines failed 3 times at this request or its group"
    assert all(said in each.reason for each in dropped.failures)
    # The run may end before the last loss is reported.
    assert len(kinds(events, "worker_lost")) <= (3 if engine.raises else 0)


class LateJoiner(FakeEngine):
    """Takes so long to receive its first weights that they are old by then."""

    def __init__(self, controller_version: list[int]) -> None:
        super().__init__(mean_tokens=6.0, seconds_per_token=0.0005)
        self.first, self.versions, self.now = True, list[int](), controller_version

    async def stage_weights(self, update: WeightUpdate) -> None:
        if self.first:
            self.first = False
            for _ in range(400):
                await asyncio.sleep(0)
        await super().stage_weights(update)

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        self.versions.append(self.version)
        async for item in super().generate(request):
            yield item


@pytest.mark.parametrize("eta", [0, 2])
def test_9_a_late_engine_never_serves_older_weights_than_a_group_was_admitted_at(
    make_stage: MakeStage, eta: int
) -> None:
    joiners: list[LateJoiner] = []

    def remake(number: int) -> FakeEngine:
        joiners.append(LateJoiner([]))
        return joiners[-1]

    async def during(stage: Stage, controller: Controller) -> None:
        await steps_done(controller, 2)
        await controller.engines.resize(2)
        for version in range(3, 12):
            await steps_done(controller, version)
            stage.runtime.kill(f"engine-{version % 2}" if version % 2 else "engine")

    sections = {
        "run": {"steps": 14},
        "staleness": {"max_staleness": eta, "window": 1},
        "supervise": {"max_failures": 50},
    }
    stage = make_stage(sections, engines=timed_engines(1), remake=remake, mortal=True, during=during)
    events = stage.run()
    check_finished(stage.config, events)  # compares each group's oldest token with its admission
    assert not kinds(events, "dropped") and any(joiner.versions for joiner in joiners)


def test_9_a_group_with_older_tokens_than_its_admission_is_dropped_with_that_reason(make_stage: MakeStage) -> None:
    class Backdated(FakeEngine):
        async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
            async for item in super().generate(request):
                if request.key.group == 7 and request.key.stream == "train":
                    item = replace(item, versions=np.zeros_like(item.versions))
                yield item

    sections = {"run": {"steps": 5}, "staleness": {"max_staleness": 0}}
    stage = make_stage(sections, engines=[Backdated(mean_tokens=6.0)])
    events = stage.run()
    state = check_finished(stage.config, events)
    assert state.dropped == {7: "too_old"}
    # Also where a crash comes before the event that it was dropped.
    crashed = make_stage(sections)
    crash_after(next(event.seq for event in kinds(events, "dropped")), stage, crashed)
    assert check_finished(crashed.config, crashed.run()).dropped == {7: "too_old"}


class Outage(StandInRewards):
    """The verifier fails on everything for a while, after some verdicts."""

    def __init__(self, first: int, num: int) -> None:
        super().__init__(longest_delay=4)
        self._first, self._last, self._num_asked = first, first + num, 0
        self.failing = lambda answer, draw: self._first <= self._num_asked < self._last

    async def verify(self, task: dict[str, object], text: str, source: str = "") -> object:
        self._num_asked += 1
        return await super().verify(task, text, source)


def test_11_a_reward_outage_pauses_admission_and_no_prompt_is_lost(make_stage: MakeStage) -> None:
    sections = {"run": {"steps": 12}, "staleness": {"max_staleness": 4}}
    stage = make_stage(sections, rewards=Outage(first=60, num=45))
    stage.prepared = replace(stage.prepared, held_out=[])
    events = stage.run()
    state = check_finished(stage.config, events)  # every requeued prompt is admitted at most once more
    requeued = [group for event in kinds(events, "requeued") for group in event.groups]
    assert requeued and set(requeued) == set(state.dropped)
    assert not state.requeued, "all of them were admitted again"
    assert {event.reason for event in kinds(events, "requeued")} == {"verifier: broken"}
    assert len(requeued) < 5 * 3 + 4 + 12, "what was in flight, and then one group at a time"


@pytest.mark.parametrize("num_failed", [1, 3])
def test_11_an_outage_before_the_first_step_survives_a_crash_without_losing_a_prompt(
    make_stage: MakeStage, num_failed: int
) -> None:
    """The run is killed as the outage begins, and resumed while it lasts."""
    sections = {"run": {"steps": 6}, "trainer": {"batch_groups": 5}, "staleness": {"max_staleness": 4}}
    stage = make_stage(sections, rewards=Outage(first=6, num=60))
    stage.prepared = replace(stage.prepared, held_out=[])
    events = stage.run()
    assert not state_before(events, kinds(events, "requeued")[0]).num_trained
    crashed = make_stage(sections, rewards=Outage(first=0, num=40))
    crashed.prepared = replace(crashed.prepared, held_out=[])
    crash_after(kinds(events, "dropped")[num_failed - 1].seq + 1, stage, crashed)
    resumed = crashed.run()
    state = check_finished(crashed.config, resumed)
    requeued = [group for event in kinds(resumed, "requeued") for group in event.groups]
    assert state.dropped and set(requeued) == set(state.dropped) and not state.requeued


def state_before(events: list[Event], event: Event) -> Run:
    return fold(events[: event.seq])


def test_11_an_outage_that_does_not_end_is_named(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 30, "deadline_s": 0.3}}, rewards=Outage(first=40, num=10**9))
    stage.prepared = replace(stage.prepared, held_out=[])
    with pytest.raises(RunFailed, match=r"every group failed for more than run.deadline_s = 0.3 s.*verifier: broken"):
        stage.run()


def test_16_a_take_wakes_admission_under_a_limit_on_groups(make_stage: MakeStage) -> None:
    """With max_groups = B, the next batch begins to be generated while the present one is still being collected."""
    sections = {
        "run": {"steps": 6},
        "rollout": {"max_groups": 4},
        "trainer": {"batch_groups": 4},
        "staleness": {"max_staleness": 4},
    }
    events = make_stage(sections, engines=timed_engines(1, 0.002)).run()
    first = [event.kind for event in events].index("taken")
    assert [event.kind for event in events[:first]].count("admitted") > 4


class Disappointing(StandInRewards):
    """The first evaluation, of the model that the run begins with, finds everything right."""

    async def verify(self, task: dict[str, object], text: str, source: str = "") -> Verdict:
        found = await super().verify(task, text, source)
        return Verdict(1.0, "", 0.0) if self.num_verdicts <= 6 else found


def best_model(stage: Stage) -> int:
    return int(json.loads((stage.directory / "model-best" / "model.safetensors").read_text())[0])


def best_evaluated(events: list[Event]) -> int:
    evaluated = [event for event in kinds(events, "evaluated") if event.label != "before"]
    return int(max(evaluated, key=lambda event: event.accuracy).version)


def leave_candidate(directory: Path) -> None:
    """What a run that is killed while it evaluates leaves behind."""
    (directory / "model-candidate").mkdir(parents=True)
    (directory / "model-candidate" / "model.safetensors").write_text("[99]")


@pytest.mark.parametrize("has_links", [True, False])
def test_30_the_best_model_is_that_of_the_best_evaluation_also_after_a_crash(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", lambda source, target: os.stat("/dev/null/no-links-on-this-disk"))
    sections = {"run": {"steps": 6}, "evaluate": {"every": 1}}
    whole = make_stage(sections, rewards=Disappointing())
    leave_candidate(whole.directory)
    events = whole.run()
    assert kinds(events, "evaluated")[0].accuracy == 1.0
    assert best_model(whole) == best_evaluated(events)
    crashed = make_stage(sections)
    crash_after(kinds(events, "trained")[1].seq, whole, crashed)
    leave_candidate(crashed.directory)
    resumed = crashed.run()
    assert best_model(crashed) == best_evaluated(resumed)
    assert not (crashed.directory / "model-candidate").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_8_a_group_whose_workflow_ends_its_process_is_dropped_and_not_the_run(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """As by running out of memory, a crash of native code, or a loop that blocks health checks."""
    run = RolloutWorker.run

    async def run_or_die(self: RolloutWorker, admission: Admission) -> Group:
        if admission.group != 5 or admission.stream != "train":
            return await run(self, admission)
        for _ in range(10):
            await asyncio.sleep(0)
        stage.runtime.kill(next(name for name, one in stage.runtime.workers.items() if one.worker is self))
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(RolloutWorker, "run", run_or_die)
    stage = make_stage({"run": {"steps": 6}, "rollout": {"workers": workers}}, engines=timed_engines(1), mortal=True)
    events = stage.run()
    state = check_finished(stage.config, events)
    assert state.dropped == {5: "failed"}, "those that ran with it are trained"
    (dropped,) = kinds(events, "dropped")
    assert "workflow: 4 rollout workers were lost while they ran this group" in dropped.failures[0].reason
    assert len(kinds(events, "worker_lost")) == 4


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("events.jsonl", lambda run: shutil.rmtree(run)),
        ("events.jsonl", lambda run: shutil.copytree(run, run.with_name("copy")) and exchange(run, "copy")),
        ("events.jsonl", lambda run: os.truncate(run / "events.jsonl", 500)),
        ("record/groups-00000.bin", lambda run: shutil.rmtree(run / "record")),
    ],
    ids=["deleted", "replaced", "cut", "record deleted"],
)
def test_20_a_run_whose_files_are_taken_away_says_so_at_once(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, name: str, harm: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(controller, "_POLL_S", 0.005)

    async def during(stage: Stage, controller: Controller) -> None:
        await steps_done(controller, 2)
        await controller.log.flush()
        harm(stage.directory)

    stage = make_stage({"run": {"steps": 100_000}}, engines=timed_engines(1), during=during)
    with pytest.raises(RunFailed, match=f"{stage.directory}/{name} was deleted, replaced or cut while the run wrote"):
        stage.run()


def exchange(run: Path, other: str) -> None:
    run.rename(run.with_name("before"))
    run.with_name(other).rename(run)
