"""Which engine serves a group, how many sequences it may hold, and what a rollout worker does when one is lost."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from stage import StandInRewards

from headway.config import RolloutSection
from headway.engine.fake import FakeEngine
from headway.engine.protocol import Engine
from headway.errors import DeadlineExceeded, WorkerDied
from headway.rollout.reward_pool import RewardPool
from headway.rollout.router import Placement, Router
from headway.rollout.worker import RolloutWorker
from headway.types import (
    Admission,
    Chunk,
    Completion,
    Group,
    Prompt,
    Request,
    Sampling,
)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def turns(num: int = 10) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


# Which engine


def make_router(num: int, deadline_s: float = 5.0) -> Router:
    router = Router(deadline_s)
    names = [f"engine-{number}" for number in range(num)]
    router.set_engines({name: cast(Engine, FakeEngine()) for name in names}, dict.fromkeys(names, 0), ())
    return router


def test_others_count_too() -> None:
    router = make_router(3)
    router.set_loads({"engine-0": 4, "engine-1": 1, "engine-2": 6}, {})
    found = router.least_loaded(0)
    assert found is not None and found.name == "engine-1"
    Placement(router, 0, 4)
    found = router.least_loaded(0)
    assert found is not None and found.name == "engine-0", "5 are at the second now, 4 at the first"


def test_a_group_moves_as_a_whole_and_takes_its_count_along() -> None:
    async def scenario() -> None:
        router = make_router(2)
        placement = Placement(router, 0, 4)
        first = await placement.slot()
        placement.done()
        first.withdraw("it died")
        second = await placement.slot()
        assert second is not first and await placement.slot() is second
        assert (first.num_own, second.num_own) == (0, 3)
        for _ in range(3):
            placement.done()
        assert second.num_own == 0

    run(scenario())


def test_an_engine_stays_faulty_until_its_next_incarnation() -> None:
    router = make_router(1)
    slot = router.least_loaded(0)
    assert slot is not None
    slot.withdraw("it lied")
    router.set_engines({"engine-0": slot.engine}, {"engine-0": 0}, ())
    assert router.least_loaded(0) is None and [fault.reason for fault in router.faults] == ["it lied"]
    router.set_engines({"engine-0": slot.engine}, {"engine-0": 1}, ())
    assert router.least_loaded(0) is not None and not router.faults


def test_while_no_engine_serves_a_group_waits_no_longer_than_a_deadline() -> None:
    async def scenario() -> None:
        router = make_router(1, deadline_s=0.05)
        slot = router.least_loaded(0)
        assert slot is not None
        slot.withdraw("it died")
        with pytest.raises(DeadlineExceeded, match=r"no engine served group 7 within 0.05 s \(engine-0: it died\)"):
            await Placement(router, 7, 1).slot()

    run(scenario())


# Continuing elsewhere, as the worker does it


class Halting(FakeEngine):
    """Sends the first half of a completion, and then does what it was made to."""

    def __init__(self, then: str) -> None:
        super().__init__(mean_tokens=40.0)
        self.then, self.requests, self.aborted = then, list[Request](), asyncio.Event()

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        self.requests.append(request)
        async for item in super().generate(request):
            if isinstance(item, Completion) and self.then:
                await self._halt()
            if self.then == "lie" and isinstance(item, Completion):
                item = replace(item, tokens=item.tokens + 90)
            yield item

    async def _halt(self) -> None:
        await turns()  # the others of the group have their halves too
        if self.then == "die":
            raise WorkerDied("worker engine-0 ended (signal 9)")
        if self.then == "break":
            raise IndexError("out of bounds")
        if self.then == "hang":
            await asyncio.Event().wait()


async def make_worker(model: str, deadline_s: float = 5.0) -> RolloutWorker:
    return RolloutWorker(model, RolloutSection(), 0, 60, 512, 512, deadline_s)


async def connect(worker: RolloutWorker, leaving: tuple[str, ...] = (), **engines: FakeEngine) -> None:
    named = cast(dict[str, Engine], {name.replace("_", "-"): engine for name, engine in engines.items()})
    lives = dict.fromkeys([*named, "reward"], 0)
    await worker.connect(named, lives, leaving, cast(RewardPool, StandInRewards()))


def admission(group: int, size: int = 2) -> Admission:
    prompt = Prompt(group, np.array([3, 4, 5], np.int32), "1+1", {"prompt": f"{group}", "answer": "2"})
    return Admission(group, prompt, size, 0, 0, Sampling(max_tokens=64, stop_tokens=(1,)))


def tokens_of(group: Group) -> list[list[int]]:
    return [trajectory.sequences[0].tokens.tolist() for trajectory in group.trajectories]


async def undisturbed(model: str) -> list[list[int]]:
    worker = await make_worker(model)
    await connect(worker, engine_0=Halting(""))
    return tokens_of(await worker.run(admission(0)))


@pytest.mark.parametrize("then", ["die", "break"])
def test_a_request_goes_on_elsewhere_with_every_token_received(tiny_model: str, then: str) -> None:
    async def scenario() -> None:
        bad, good = Halting(then), Halting("")
        worker = await make_worker(tiny_model)
        await connect(worker, engine_0=bad, engine_1=good)
        group = await worker.run(admission(0))
        assert tokens_of(group) == await undisturbed(tiny_model) and not group.failures
        found = await worker.stats()
        assert [fault.engine for fault in found.faults] == ["engine-0"]
        brought = [len(request.sampled.tokens) for request in good.requests if request.sampled is not None]
        assert len(brought) == 2 and min(brought) > 0
        assert sorted(item.tokens for item in found.retries) == sorted(brought)
        assert not (await worker.stats()).retries, "each is reported once"

    run(scenario())


def test_invariant_10_nothing_that_a_lying_engine_sampled_is_kept(tiny_model: str) -> None:
    async def scenario() -> None:
        bad, good = Halting("lie"), Halting("")
        worker = await make_worker(tiny_model)
        await connect(worker, engine_0=bad, engine_1=good)
        group = await worker.run(admission(0))
        assert tokens_of(group) == await undisturbed(tiny_model)
        assert all(request.sampled is None for request in good.requests)
        (fault,) = (await worker.stats()).faults
        assert "engine-0 sent an invalid answer to request train/0/" in fault.reason

    run(scenario())


def test_requests_of_an_engine_that_hangs_go_on_as_soon_as_the_worker_knows(tiny_model: str) -> None:
    async def scenario() -> None:
        bad, good = Halting("hang"), Halting("")
        worker = await make_worker(tiny_model)
        await connect(worker, engine_0=bad)
        running = asyncio.create_task(worker.run(admission(0)))
        while not bad.requests:
            await asyncio.sleep(0)
        await turns()
        await connect(worker)
        await turns()
        assert not running.done(), "with no engine it waits"
        await connect(worker, engine_1=good)
        assert tokens_of(await running) == await undisturbed(tiny_model)
        assert min(len(request.sampled.tokens) for request in good.requests if request.sampled) > 0

    run(scenario())


def test_an_engine_that_leaves_gives_back_what_it_has_sampled(tiny_model: str) -> None:
    async def scenario() -> None:
        old, new = FakeEngine(mean_tokens=40.0, seconds_per_token=60.0), Halting("")
        worker = await make_worker(tiny_model)
        await connect(worker, engine_0=old)
        running = asyncio.create_task(worker.run(admission(0)))
        while (await old.stats()).running < 2:
            await asyncio.sleep(0)
        await turns()
        await connect(worker, engine_0=old, engine_1=new, leaving=("engine-0",))
        assert tokens_of(await running) == await undisturbed(tiny_model)
        assert (await old.stats()).running == 0
        brought = sum(len(request.sampled.tokens) for request in new.requests if request.sampled)
        assert brought == (await old.stats()).num_generated, "not one of its tokens is lost"
        assert not (await worker.stats()).faults

    run(scenario())


def test_a_limit_holds_requests_back_and_lets_them_in_as_others_end(tiny_model: str) -> None:
    async def scenario() -> None:
        most = 0

        class Counting(FakeEngine):
            async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
                nonlocal most
                async for item in super().generate(request):
                    most = max(most, (await self.stats()).running)
                    yield item

        worker = await make_worker(tiny_model)
        await connect(worker, engine_0=Counting(mean_tokens=4.0, seconds_per_token=0.0005))
        await worker.inform(0, {}, {"engine-0": 3})
        groups = await asyncio.gather(*(worker.run(admission(group)) for group in range(6)))
        assert most == 3 and all(group.complete for group in groups)

    run(scenario())


def test_3_an_evaluation_does_not_wait_for_training_under_a_limit(tiny_model: str) -> None:
    """The preemptions of an evaluation look like memory pressure, and the limit that follows is for training alone."""

    class Stuck(FakeEngine):
        async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
            if not request.urgent:
                await asyncio.Event().wait()
            async for item in super().generate(request):
                yield item

    async def scenario() -> None:
        worker = await make_worker(tiny_model)
        await connect(worker, engine_0=Stuck(mean_tokens=4.0))
        training = asyncio.create_task(worker.run(admission(0)))
        await turns()
        await worker.inform(0, {}, {"engine-0": 1})
        assert (await worker.run(replace(admission(1), stream="eval@0"))).complete
        training.cancel()

    run(scenario())


# Verdicts


class DyingPool(StandInRewards):
    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Any:
        raise WorkerDied("worker reward ended (signal 9)")

    async def stats(self) -> dict[str, int]:
        raise WorkerDied("worker reward ended (signal 9)")


class CutPool(StandInRewards):
    """Lives, but the connections to it break under the first texts."""

    num_cuts = 2

    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Any:
        if self.num_cuts:
            self.num_cuts -= 1
            raise WorkerDied("worker reward ended while it was still needed")
        return await super().verify(task, text, source)


def test_a_pool_to_which_the_connection_broke_is_asked_again(tiny_model: str) -> None:
    async def scenario() -> None:
        worker, pool = await make_worker(tiny_model), CutPool()
        await with_pool(worker, pool, 0)
        assert (await worker.run(admission(0))).complete and not pool.num_cuts

    run(scenario())


async def with_pool(worker: RolloutWorker, pool: StandInRewards, life: int) -> None:
    engines = {"engine-0": cast(Engine, FakeEngine())}
    await worker.connect(engines, {"engine-0": 0, "reward": life}, (), cast(RewardPool, pool))


def test_a_text_that_outlives_its_pool_is_judged_by_the_next(tiny_model: str) -> None:
    async def scenario() -> None:
        worker = await make_worker(tiny_model)
        await with_pool(worker, DyingPool(), 0)
        running = asyncio.create_task(worker.run(admission(0)))
        for _ in range(5):
            await turns(50)
            await with_pool(worker, DyingPool(), 0)
        assert not running.done(), "told of the dead one again, it goes on waiting"
        await with_pool(worker, StandInRewards(), 1)
        assert (await running).complete

    run(scenario())


def test_a_text_that_ends_every_pool_costs_its_trajectory_alone(tiny_model: str) -> None:
    async def scenario() -> None:
        worker = await make_worker(tiny_model)
        await with_pool(worker, DyingPool(), 0)
        running, life = asyncio.create_task(worker.run(admission(0))), 0
        while not running.done():
            await turns(50)
            life += 1
            await with_pool(worker, DyingPool(), life)
        group = await running
        assert [f.reason for f in group.failures] == ["verifier: 3 reward pools died while they judged one text"] * 2

    run(scenario())


def test_invariant_15_a_pool_that_does_not_come_back_is_named(tiny_model: str) -> None:
    async def scenario() -> None:
        worker = await make_worker(tiny_model, deadline_s=0.05)
        await with_pool(worker, DyingPool(), 0)
        with pytest.raises(DeadlineExceeded, match=r"no reward pool answered for 0.05 s"):
            await worker.run(admission(0))

    run(scenario())
