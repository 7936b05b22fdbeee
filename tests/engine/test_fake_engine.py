"""The stand-in engine: deterministic by seed, and honest about versions, aborts, pauses and swaps."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from headway.engine.fake import FakeEngine
from headway.engine.protocol import Engine
from headway.types import (
    Chunk,
    Completion,
    Request,
    RequestKey,
    Sampling,
    StopReason,
    TensorInfo,
    WeightUpdate,
)

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def make_request(group: int = 0, trajectory: int = 0, seed: int = 0, max_tokens: int = 1000) -> Request:
    return Request(RequestKey(group, trajectory), np.ones(4, np.int32), Sampling(max_tokens=max_tokens), seed)


def make_update(version: int) -> WeightUpdate:
    info = TensorInfo("w", "float32", (1,), 0, 4, f"print-{version}")
    return WeightUpdate(version, "full", "shared_memory", "nowhere", (info,))


async def complete(engine: Engine, request: Request) -> Completion:
    items = [item async for item in engine.generate(request)]
    assert [isinstance(item, Completion) for item in items] == [False] * (len(items) - 1) + [True]
    completion = items[-1]
    assert isinstance(completion, Completion)
    return completion


def test_a_completion_depends_on_its_key_and_seed_and_on_nothing_else() -> None:
    async def scenario() -> None:
        engine = FakeEngine(vocab_size=16)
        alone = await complete(engine, make_request(3, 1))
        crowd = await asyncio.gather(*(complete(FakeEngine(), make_request(g, 1)) for g in range(6)))
        assert crowd[3].tokens.tolist() == alone.tokens.tolist()
        others = [make_request(3, 2), make_request(4, 1), make_request(3, 1, seed=1)]
        texts = {(await complete(engine, other)).tokens.tobytes() for other in others}
        assert len(texts | {alone.tokens.tobytes()}) == 4
        assert alone.tokens.min() >= 0 and alone.tokens.max() < 16
        assert np.allclose(alone.logprobs, -np.log(16))

    run(scenario())


def test_lengths_have_a_long_tail_and_only_those_cut_off_say_so() -> None:
    async def scenario() -> list[Completion]:
        engine = FakeEngine(mean_tokens=30)
        return [await complete(engine, make_request(group, max_tokens=60)) for group in range(300)]

    completions = run(scenario())
    lengths = np.array([len(completion.tokens) for completion in completions])
    assert lengths.min() >= 1 and lengths.max() == 60
    assert 20 < np.median(lengths) < 40
    assert all(completion.stop == StopReason.STOP for completion in completions if len(completion.tokens) < 60)
    assert sum(completion.stop == StopReason.LENGTH for completion in completions) > 10


def test_a_swap_during_generation_stamps_both_versions_and_reports_what_was_staged() -> None:
    async def scenario() -> None:
        engine = FakeEngine(seconds_per_token=0.01)
        task = asyncio.create_task(complete(engine, make_request()))
        while not (await engine.stats()).running:
            await asyncio.sleep(0)
        await engine.stage_weights(make_update(1))
        assert (await engine.stats()).version == 0
        report = await engine.swap(1, "keep")
        assert report.version == 1 and report.fingerprints == {"w": "print-1"} and report.num_interrupted == 1
        completion = await task
        assert set(completion.versions.tolist()) == {0, 1} and (np.diff(completion.versions) >= 0).all()
        assert (await engine.score((np.ones(5, np.int32),), 1.0)).version == 1
        assert (await engine.stats()).num_generated == len(completion.tokens)

    run(scenario())


def test_a_version_that_was_not_staged_cannot_go_live() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        await engine.stage_weights(make_update(1))
        with pytest.raises(AssertionError):
            await engine.swap(2, "keep")
        assert engine.version == 0

    run(scenario())


def test_an_abort_ends_a_request_long_before_its_time_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        engine = FakeEngine(seconds_per_token=1000.0)
        tasks = [asyncio.create_task(complete(engine, make_request(group))) for group in range(2)]
        while (await engine.stats()).running < 2:
            await asyncio.sleep(0)
        await engine.abort(RequestKey(9, 9))
        await engine.abort(make_request(0).key)
        assert (await tasks[0]).stop == StopReason.ABORTED
        assert not tasks[1].done() and (await engine.stats()).running == 1
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        assert (await engine.stats()).running == 0
        await engine.close()

    run(scenario())


@pytest.mark.parametrize("num_known", [0, 1, 7, 20])
def test_a_request_that_brings_what_was_sampled_elsewhere_becomes_the_completion_it_would_have_been(
    num_known: int,
) -> None:
    async def scenario() -> None:
        sampling = Sampling(max_tokens=20, stop_tokens=(3,))
        request = replace(make_request(5), sampling=sampling)
        whole = await complete(FakeEngine(mean_tokens=40), request)
        known = slice(0, num_known)
        elsewhere = np.full(len(whole.versions[known]), 2, np.int32)
        sampled = Chunk(whole.tokens[known], whole.logprobs[known], elsewhere)
        engine = FakeEngine(mean_tokens=40)
        items = [item async for item in engine.generate(replace(request, sampled=sampled))]
        found = items[-1]
        assert isinstance(found, Completion) and found.tokens.tolist() == whole.tokens.tolist()
        assert found.stop == whole.stop and found.versions.tolist()[known] == elsewhere.tolist()
        assert set(found.versions.tolist()[num_known:]) <= {0}
        assert (await engine.stats()).num_generated == len(whole.tokens) - num_known
        sent = np.concatenate([item.tokens for item in items[:-1]])
        assert sent.tolist() == whole.tokens.tolist()[num_known : num_known + len(sent)]

    run(scenario())


def test_a_finished_request_leaves_no_task_behind() -> None:
    async def scenario() -> None:
        before = len(asyncio.all_tasks())
        engine = FakeEngine(mean_tokens=4, seconds_per_token=0.0001)
        await asyncio.gather(*(complete(engine, make_request(group)) for group in range(5)))
        assert len(asyncio.all_tasks()) == before

    run(scenario())
