"""Engines that come and go while a run goes on, and how much each is sent: joining, leaving, slow ones, full memory.

Invariant 1: single admission authority; an engine that is down does not count, one that joins counts from what it
proved. Invariant 2: conservation.
"""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from stage import During, MakeStage, Stage, kinds, steps_done, timed_engines
from system import check_fates, check_finished

from headway.control import health
from headway.control.controller import Controller
from headway.control.resize import ask, take
from headway.engine.fake import FakeEngine
from headway.errors import ConfigError, HeadwayError
from headway.record.log import EventLog, read
from headway.types import EngineStats

# Joining and leaving


def requesting(*requests: tuple[int, int]) -> During:
    """Requests a number of engines at a version, as the command does."""

    async def during(stage: Stage, controller: Controller) -> None:
        for at, count in requests:
            await steps_done(controller, at)
            await controller.engines.resize(count)

    return during


def test_engines_join_with_current_weights_and_leave_with_nothing_lost(make_stage: MakeStage) -> None:
    during = requesting((2, 3), (8, 1))
    stage = make_stage(
        {"run": {"steps": 16}, "rollout": {"workers": 2}},
        engines=timed_engines(1),
        remake=lambda number: timed_engines(1)[0],
        mortal=True,
        during=during,
    )
    events = stage.run()
    check_finished(stage.config, events)
    joined, left = kinds(events, "engine_joined"), kinds(events, "engine_left")
    assert [event.engine for event in joined] == ["engine-1", "engine-2"]
    assert min(event.version for event in joined) >= 1, "of version 2, not every worker may know it yet"
    assert sorted(event.engine for event in left) == ["engine-1", "engine-2"]
    assert {event.cause for event in left} == {"it was asked to leave"}
    for engine in ("engine-1", "engine-2"):
        own = [event.generated for event in kinds(events, "stats") if event.engine == engine]
        assert sum(own) > 0, "it served"
    assert not kinds(events, "worker_lost")
    fates = check_fates(events)
    assert fates.lost == 0 and fates.in_flight == 0, "who leaves gives back what it has sampled"


def test_an_engine_that_was_asked_for_and_cannot_start_does_not_end_the_run(make_stage: MakeStage) -> None:
    def remake(number: int) -> FakeEngine:
        raise ConfigError("engine.device = cuda:7 is not there")

    stage = make_stage({"run": {"steps": 8}}, engines=timed_engines(1), remake=remake, during=requesting((2, 2)))
    events = stage.run()
    check_finished(stage.config, events)
    (left,) = kinds(events, "engine_left")
    assert left.engine == "engine-1" and "it did not start: engine.device = cuda:7 is not there" in left.cause


def test_a_wish_is_taken_up_once_and_only_if_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "engines.wanted"
    assert take(tmp_path) is None
    for text, expected in (("3\n", 3), ("0", None), ("257", None), ("many", None), ("-1", None), ("", None)):
        path.write_text(text)
        assert take(tmp_path) == expected
        assert not path.exists()


def test_a_wish_to_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=rf"no run is going on in {tmp_path}; start or resume it first"):
        ask(tmp_path, "events.jsonl", 2)
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(HeadwayError, match=r"did not acknowledge the resize within 0\.1 s"):
        ask(tmp_path, "events.jsonl", 2, deadline_s=0.1)
    assert not list(tmp_path.glob("engines.wanted*"))
    log.close()


# Slow ones


class Paced(FakeEngine):
    """Counts tokens as if it sampled a fixed number a second for each of four sequences."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__(mean_tokens=6.0, seconds_per_token=0.005)
        self._tokens_per_s, self._born = tokens_per_s, time.monotonic()

    async def stats(self) -> EngineStats:
        num_generated = int(4 * self._tokens_per_s * (time.monotonic() - self._born))
        return replace(await super().stats(), running=4, num_generated=num_generated)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_engine_far_slower_than_the_others_is_reported_once_and_replaced_if_wanted(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setattr(health, "RATE_WINDOW_S", 0.4)
    sections = {
        "run": {"steps": 40},
        "supervise": {"replace_slow": replaced},
        "metrics": {"stats_every_s": 0.01, "tensorboard": False},
    }
    engines = [Paced(1e4), Paced(1e5), Paced(1e5)]
    stage = make_stage(sections, engines=engines, mortal=True, remake=lambda number: Paced(1e5))

    async def until_told() -> None:
        while stage.trainer.version > 30 and not kinds(read(stage.directory / "events.jsonl"), "engine_slow"):
            await asyncio.sleep(0.01)

    stage.trainer.pace = until_told
    events = stage.run()
    check_finished(stage.config, events)
    (told,) = kinds(events, "engine_slow")
    assert told.engine == "engine-0"
    assert told.tokens_per_s < 0.25 * told.others_per_s
    lost = [(event.worker, event.cause) for event in kinds(events, "worker_lost")]
    assert len(lost) == replaced
    assert all(worker == "engine-0" and "is slow" in cause for worker, cause in lost)


# Key/value pressure


class Pressed(FakeEngine):
    """Preempts at every health check with more than six sequences."""

    num_preempted = 0

    async def stats(self) -> EngineStats:
        found = await super().stats()
        self.num_preempted += found.running > 6
        return replace(found, num_preempted=self.num_preempted)


def test_an_engine_under_pressure_is_sent_fewer_sequences_at_once(make_stage: MakeStage) -> None:
    sections = {
        "run": {"steps": 12},
        "rollout": {"group_size": 8, "workers": 2},
        "metrics": {"stats_every_s": 0.005, "tensorboard": False},
        "engine": {"max_num_seqs": 64, "kv_tokens": 4096},
    }
    stage = make_stage(sections, engines=[Pressed(mean_tokens=6.0, seconds_per_token=0.002)])
    stage.prepared = replace(stage.prepared, held_out=[])
    events = stage.run()
    check_finished(stage.config, events)
    running = [event.running for event in kinds(events, "stats")]
    assert max(running[:20]) > 16, "at first all of them"
    late = running[len(running) // 2 :]
    assert sum(late) / len(late) < 12, "then about as many as go without preemption"
