"""What the controller survives: engines, rollout workers, reward pool and trainer that are lost, in any order.

Invariant 1: single admission authority; an engine that is down does not count, one that joins counts from what it
proved. Invariant 2: conservation. Invariant 14: crash safety. Invariant 15: bounded waits.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stage import During, MakeStage, Stage, StandInRewards, StandInTrainer, drawn_pace, kinds, steps_done, timed_engines
from system import check_finished, check_record

from headway.control.controller import Controller
from headway.engine.fake import FakeEngine
from headway.engine.protocol import KvPolicy
from headway.errors import RunFailed, WorkerDied
from headway.record.log import read
from headway.types import Chunk, Completion, EngineStats, Request, SwapReport

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=40)


def killing(
    name: str, at: int, times: int = 1, told: bool = True, when: Callable[[Any, Controller], bool] = lambda *_: True
) -> During:
    """A worker dies when a version is reached, and again each time it is back, a few turns after `when` is true."""

    async def during(stage: Stage, controller: Controller) -> None:
        await steps_done(controller, at)
        for _ in range(times):
            for _ in range(7):
                await asyncio.sleep(0)
            while name not in stage.runtime.workers or not when(stage.runtime.workers[name].worker, controller):
                if controller.version == controller.config.run.steps:
                    return
                await asyncio.sleep(0)
            stage.runtime.kill(name, told)
            await asyncio.sleep(0.005)

    return during


# Each kind of worker


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("engines", "name"), [(1, "engine"), (2, "engine-1")])
def test_a_dead_engine_is_replaced_and_the_run_goes_on(
    make_stage: MakeStage,
    engines: int,
    name: str,
    told: bool,
) -> None:
    during = killing(name, 2, times=3, told=told)
    stage = make_stage({"run": {"steps": 12}}, engines=timed_engines(engines), mortal=True, during=during)
    events = stage.run()
    check_finished(stage.config, events)
    lost = kinds(events, "worker_lost")
    assert {event.worker for event in lost} == {name} and 1 <= len(lost) <= 3
    assert 1 <= len(kinds(events, "worker_restarted")) <= len(lost)
    after = events[events.index(kinds(events, "worker_restarted")[-1]) :]
    assert any(event.kind == "stats" and event.engine == name and event.generated > 0 for event in after)


def test_a_worker_that_dies_while_it_starts_again_is_reported_as_lost_each_time(make_stage: MakeStage) -> None:
    lives = itertools.count(1)

    def remake(number: int) -> FakeEngine:
        if next(lives) < 3:
            raise WorkerDied("worker engine-1 ended (signal 9) while it started", "engine-1")
        return FakeEngine(mean_tokens=6.0)

    engines = timed_engines(2)
    stage = make_stage(
        {"run": {"steps": 12}}, engines=engines, mortal=True, remake=remake, during=killing("engine-1", 2)
    )
    events = stage.run()
    check_finished(stage.config, events)
    lost = [event.cause for event in kinds(events, "worker_lost")]
    assert [cause.endswith("while it started") for cause in lost] == [False, True, True]
    assert len(kinds(events, "worker_restarted")) == 1


def test_a_restarted_engine_proves_the_current_weights_before_it_serves(make_stage: MakeStage) -> None:
    served: list[tuple[int, int]] = []

    class Watchful(FakeEngine):
        async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
            served.append((id(self), self.version))
            async for item in super().generate(request):
                yield item

    def remake(number: int) -> FakeEngine:
        return Watchful(mean_tokens=6.0, seconds_per_token=0.0005)

    sections = {"run": {"steps": 12}}
    stage = make_stage(
        sections, engines=timed_engines(2), mortal=True, remake=remake, during=killing("engine-0", 5, times=2)
    )
    events = stage.run()
    check_finished(stage.config, events)
    assert kinds(events, "worker_restarted")
    assert served and min(version for _, version in served) >= 5, "weights of the start must never serve"


def has_groups(worker: Any, controller: Controller) -> bool:
    return bool(controller.rollout._groups["rollout-1"])


def test_a_dead_rollout_worker_has_its_groups_begun_again_under_their_ids(make_stage: MakeStage) -> None:
    sections = {"run": {"steps": 12}, "rollout": {"workers": 2, "group_size": 3}}
    stage = make_stage(
        sections, engines=timed_engines(1, 0.002), mortal=True, during=killing("rollout-1", 2, times=2, when=has_groups)
    )
    events = stage.run()
    check_finished(stage.config, events)
    lost = kinds(events, "worker_lost")
    assert {event.worker for event in lost} == {"rollout-1"}
    again = [group for event in lost for group in event.groups]
    assert again, "it had groups"
    trained = [group for event in kinds(events, "trained") for group in event.groups]
    assert set(again) <= set(trained)
    assert 1 <= len(kinds(events, "worker_restarted")) <= len(lost)


def test_the_only_rollout_worker_may_die(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 6}}, engines=timed_engines(1), mortal=True, during=killing("rollout-0", 1))
    events = stage.run()
    check_finished(stage.config, events)
    assert [event.worker for event in kinds(events, "worker_lost")] == ["rollout-0"]


def test_a_dead_reward_pool_costs_nothing_but_time(make_stage: MakeStage) -> None:
    during = killing("reward", 1, times=2)
    stage = make_stage({"run": {"steps": 12}}, rewards=StandInRewards(longest_delay=400), mortal=True, during=during)
    events = stage.run()
    check_finished(stage.config, events)
    assert {event.worker for event in kinds(events, "worker_lost")} == {"reward"}
    assert not kinds(events, "dropped")


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5])
def test_a_dead_trainer_comes_back_at_its_version_and_the_outcome_is_the_same(
    make_stage: MakeStage,
    at: int,
) -> None:
    """At η = 0 one outcome is possible, whichever worker dies."""
    sections = {"run": {"steps": 8}, "staleness": {"max_staleness": 0}, "checkpoint": {"every": 2}}
    undisturbed = make_stage(sections)
    expected = [event.digest for event in kinds(undisturbed.run(), "trained")]
    during = killing("trainer", at, times=2)
    stage = make_stage(sections, mortal=True, during=during)
    stage.trainer.pace = drawn_pace(at)
    events = stage.run()
    check_finished(stage.config, events)
    assert [event.digest for event in kinds(events, "trained")] == expected
    assert {event.worker for event in kinds(events, "worker_lost")} == {"trainer"}


def test_generation_goes_on_while_the_trainer_is_away(make_stage: MakeStage) -> None:
    stage = make_stage(
        {"run": {"steps": 6}, "staleness": {"max_staleness": 3}, "supervise": {"backoff_s": 0.1}},
        mortal=True,
        during=killing("trainer", 1),
    )
    events = stage.run()
    check_finished(stage.config, events)
    (lost,), (back,) = kinds(events, "worker_lost"), kinds(events, "worker_restarted")
    meanwhile = events[events.index(lost) : events.index(back)]
    assert any(event.kind == "finished" for event in meanwhile)


# Any worker, any time


@dataclass(frozen=True)
class Chaos:
    deaths: tuple[tuple[int, int, bool], ...] = ((10, 0, True),)  # turns to wait, which worker, told
    engines: int = 2
    workers: int = 2
    eta: int = 2
    seed: int = 0


chaos = st.builds(
    Chaos,
    deaths=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 7), st.booleans()), max_size=8).map(tuple),
    engines=st.sampled_from([1, 2, 3]),
    workers=st.sampled_from([1, 2]),
    eta=st.sampled_from([0, 2]),
    seed=st.integers(0, 100),
)


@repeatable
@example(Chaos(deaths=((0, 0, True), (0, 1, True), (0, 2, True), (0, 3, True), (0, 4, True)), eta=0))
@given(chaos)
def test_invariants_1_2_and_14_whichever_worker_dies_nothing_is_lost(
    make_stage: MakeStage,
    case: Chaos,
) -> None:
    async def during(stage: Stage, controller: Controller) -> None:
        for turns, which, told in case.deaths:
            for _ in range(turns):
                await asyncio.sleep(0)
            names = sorted(stage.runtime.workers)
            if names:
                stage.runtime.kill(names[which % len(names)], told)

    sections = {
        "run": {"steps": 6, "seed": case.seed},
        "rollout": {"workers": case.workers, "group_size": 2},
        "staleness": {"max_staleness": case.eta},
        "checkpoint": {"every": 2},
        "supervise": {"backoff_s": 0.0001, "max_failures": 20},
        "metrics": {"stats_every_s": 0.005, "tensorboard": False},
    }
    rewards = StandInRewards(case.seed, failing=lambda answer, draw: draw % 13 == 0)
    stage = make_stage(sections, rewards=rewards, engines=timed_engines(case.engines, 0.0), mortal=True, during=during)
    stage.trainer.pace = drawn_pace(case.seed)
    events = stage.run()
    check_finished(stage.config, events)
    lost, back = kinds(events, "worker_lost"), kinds(events, "worker_restarted")
    assert len(back) <= len(lost) <= len(case.deaths)


# Too often


def dying_always(name: str) -> During:
    async def during(stage: Stage, controller: Controller) -> None:
        while True:
            stage.runtime.kill(name)
            await asyncio.sleep(0.001)

    return during


@pytest.mark.parametrize("name", ["engine", "trainer", "rollout-0", "reward"])
def test_invariant_15_a_worker_that_is_lost_again_and_again_ends_the_run_with_the_cause(
    make_stage: MakeStage,
    name: str,
) -> None:
    sections = {"run": {"steps": 1000}, "supervise": {"max_failures": 3}}
    stage = make_stage(sections, mortal=True, during=dying_always(name))
    with pytest.raises(RunFailed, match=rf"{name} failed more than 3 times within 600 s; the last time: .*{name} end"):
        stage.run()
    events = read(stage.directory / "events.jsonl")
    check_record(stage.config, events)
    assert len(kinds(events, "worker_lost")) <= 4


def test_an_engine_that_cannot_be_kept_is_left_out_while_others_serve(make_stage: MakeStage) -> None:
    sections = {"run": {"steps": 60}, "supervise": {"max_failures": 2}}

    async def during(stage: Stage, controller: Controller) -> None:
        while "engine-0" in controller.engines.engines and controller.version < 60:
            stage.runtime.kill("engine-0")
            await asyncio.sleep(0.001)

    stage = make_stage(sections, engines=timed_engines(2), mortal=True, during=during)
    events = stage.run()
    check_finished(stage.config, events)
    (left,) = kinds(events, "engine_left")
    assert left.engine == "engine-0" and "engine-0 ended" in left.cause
    assert not any(event.engine == "engine-0" for event in events[left.seq :] if event.kind == "swapped")


# Engines that live and are of no use


@dataclass
class Ills:
    """What an engine of the first life does wrong, from version 2 on."""

    hangs: bool = False
    falls_silent: bool = False
    is_cut_off: bool = False  # a connection to it breaks in the middle of a swap
    wrong: dict[str, Any] | None = None


class Ill(FakeEngine):
    def __init__(self, ills: Ills) -> None:
        super().__init__(mean_tokens=6.0, seconds_per_token=0.0005)
        self._ills = ills

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        async for item in super().generate(request):
            if self.version >= 2 and (self._ills.hangs or self._ills.falls_silent):
                await asyncio.Event().wait()
            if self.version >= 2 and self._ills.wrong is not None and isinstance(item, Completion):
                item = replace(item, **{name: change(getattr(item, name)) for name, change in self._ills.wrong.items()})
            yield item

    async def stats(self) -> EngineStats:
        if self.version >= 2 and self._ills.hangs:
            await asyncio.Event().wait()
        return await super().stats()

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        if self.version >= 2 and self._ills.is_cut_off:
            raise WorkerDied("worker engine-1 ended while it was still needed", "engine-1")
        return await super().swap(version, kv)


@pytest.mark.parametrize("eta", [0, 2])
def test_an_engine_cut_off_in_the_middle_of_a_swap_is_replaced_at_once(make_stage: MakeStage, eta: int) -> None:
    sections = {"run": {"steps": 8}, "staleness": {"max_staleness": eta}}
    stage = make_stage(sections, engines=[*timed_engines(1), Ill(Ills(is_cut_off=True))], mortal=True)
    events = stage.run()
    check_finished(stage.config, events)
    (lost,) = kinds(events, "worker_lost")
    assert lost.worker == "engine-1"


def test_an_engine_that_hangs_is_found_by_a_look_and_its_requests_go_on(make_stage: MakeStage) -> None:
    sections = {"run": {"steps": 10}, "supervise": {"health_s": 0.4}}
    stage = make_stage(sections, engines=[*timed_engines(1), Ill(Ills(hangs=True))], mortal=True)
    events = stage.run()
    check_finished(stage.config, events)
    (lost,) = kinds(events, "worker_lost")
    assert lost.worker == "engine-1" and "a health check of engine-1 took longer than" in lost.cause
    swapped = next(e for e in events if e.kind == "swapped" and e.engine == "engine-1" and e.version == 2)
    assert lost.time - swapped.time < 0.4 + 3.0


def drop_last(array: Any) -> Any:
    return array[:-1]


def test_invariant_3_an_engine_that_answers_nonsense_is_replaced_and_nothing_of_it_is_trained(
    make_stage: MakeStage,
) -> None:
    ills = Ills(wrong={"logprobs": lambda logprobs: logprobs + np.float32(100)})
    stage = make_stage({"run": {"steps": 12}}, engines=[*timed_engines(1), Ill(ills)], mortal=True)
    events = stage.run()
    check_finished(stage.config, events)
    (lost,) = kinds(events, "worker_lost")
    assert lost.worker == "engine-1"
    assert "engine-1 sent an invalid answer to request train/" in lost.cause
    assert "a log-prob is above 0" in lost.cause
    trained = [t for batch in stage.trainer.batches for group in batch.groups for t in group.trajectories]
    assert max(float(s.logprobs.max()) for t in trained for s in t.sequences) <= 0
    assert sum(event.requests for event in kinds(events, "retried")) > 0


def test_requests_of_a_lost_engine_bring_their_tokens_to_the_next(make_stage: MakeStage) -> None:
    """Half of each completion is sent at once, half after a wait: it must not be sampled twice."""

    async def during(stage: Stage, controller: Controller) -> None:
        await steps_done(controller, 2)
        while stage.engines[0].num_running < 4:  # a whole group, which has then sent its first halves
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        stage.runtime.kill("engine-0")

    stage = make_stage(
        {"run": {"steps": 8}, "rollout": {"group_size": 4}},
        engines=timed_engines(2, 0.02),
        mortal=True,
        during=during,
    )
    events = stage.run()
    check_finished(stage.config, events)
    continued = kinds(events, "retried")
    assert sum(event.tokens for event in continued) > 0
    assert max(event.seconds for event in continued) < 5
    assert sum(event.requests for event in continued) > 0


def test_every_trajectory_of_a_disturbed_run_is_that_of_an_undisturbed_one(
    make_stage: MakeStage,
    tmp_path: Path,
) -> None:
    """What a request samples depends on its key alone, however many engines it took."""

    def tokens_of(stage: Stage) -> dict[tuple[int, int], list[int]]:
        groups = [group for batch in stage.trainer.batches for group in batch.groups]
        return {(group.id, t.index): t.sequences[0].tokens.tolist() for group in groups for t in group.trajectories}

    sections = {"run": {"steps": 8}, "staleness": {"max_staleness": 0}}
    calm = make_stage(sections, engines=timed_engines(2, 0.002))
    calm.run()
    during = killing("engine-0", 1, times=4)
    stage = make_stage(sections, engines=timed_engines(2, 0.002), mortal=True, during=during)
    events = stage.run()
    assert kinds(events, "worker_lost")
    assert tokens_of(stage) == tokens_of(calm)


def test_a_trainer_that_fails_in_the_middle_of_a_step_has_its_batch_trained_once(make_stage: MakeStage) -> None:
    class Dying(StandInTrainer):
        async def publish(self) -> Any:
            if self.version == 3 and not stage_died:
                stage_died.append(True)
                stage.runtime.kill("trainer")
                await asyncio.Event().wait()
            return await super().publish()

    stage_died: list[bool] = []
    stage = make_stage({"run": {"steps": 6}, "checkpoint": {"every": 2}}, mortal=True)
    stage.trainer = Dying(stage.trainer.worst_staleness)
    events = stage.run()
    check_finished(stage.config, events)
    assert stage_died and len(kinds(events, "trained")) == 6
