"""The embedded engine as a service: requests at any time, weights in between, and an error instead of silence."""

import asyncio
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import alone, complete, drive, group_of, make_core, make_request, plain_model, prompt, teacher_forced
from serving import opened, run

from headway.engine.embedded import service
from headway.engine.embedded.service import EmbeddedEngine
from headway.errors import ConfigError, RequestRefused, WeightMismatch, WorkerDied
from headway.model.loading import named_weights
from headway.types import Chunk, Completion, Request, StopReason
from headway.weights.publish import Publisher


def requests_of_all_lengths() -> list[Request]:
    longs = [make_request(prompt(10 + 40 * i, seed=i), group=i, max_tokens=20 + 7 * i) for i in range(4)]
    return [*longs, *group_of(6, prompt(30), group=9, max_tokens=33)]


def test_concurrent_requests_each_get_their_own_chunks_then_their_completion(tiny_model: str) -> None:
    requests = requests_of_all_lengths()

    async def scenario() -> list[tuple[list[Chunk], Completion]]:
        async with opened(tiny_model) as engine:
            results = await asyncio.gather(*(complete(engine, request) for request in requests))
            stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used, stats.version) == (0, 0, 0, 0)
            assert stats.num_generated == sum(len(completion.tokens) for _, completion in results)
            assert stats.busy_s > 0 and stats.kv_total >= 65536
            return results

    for request, (chunks, completion) in zip(requests, run(scenario()), strict=True):
        assert completion.tokens.tobytes() == alone(tiny_model, request).tokens.tobytes()
        assert np.concatenate([chunk.tokens for chunk in chunks]).tobytes() == completion.tokens.tobytes()


async def publish_and_swap(engine: EmbeddedEngine, publisher: Publisher, model: Any, version: int, kv: Any) -> Any:
    update = publisher.publish(version, named_weights(model))
    await engine.stage_weights(update)
    report = await engine.swap(version, kv)
    assert report.fingerprints == update.fingerprints and report.version == version
    return report


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_swaps_under_load_lose_no_request_and_stamp_the_versions(tiny_model: str, kv: Any) -> None:
    requests = requests_of_all_lengths()
    models = [plain_model(tiny_model), plain_model(tiny_model, noise_seed=1), plain_model(tiny_model, noise_seed=2)]

    async def scenario() -> list[Completion]:
        async with opened(tiny_model) as engine:
            tasks = [asyncio.create_task(complete(engine, request)) for request in requests]
            for version in (1, 2):
                while (await engine.stats()).num_generated < 80 * version:
                    await asyncio.sleep(0)
                report = await publish_and_swap(engine, Publisher(), models[version], version, kv)
                assert report.num_interrupted > 0
            return [completion for _, completion in await asyncio.gather(*tasks)]

    completions = run(scenario())
    assert {int(version) for completion in completions for version in completion.versions} == {0, 1, 2}
    for request, completion in zip(requests, completions, strict=True):
        assert completion.stop == StopReason.LENGTH and len(completion.tokens) == request.sampling.max_tokens
        if kv == "recompute":
            tokens = np.concatenate([request.tokens, completion.tokens])
            forced = np.stack([teacher_forced(model, tokens)[len(request.tokens) :] for model in models])
            expected = forced[completion.versions, np.arange(len(completion.tokens))]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


def test_a_draining_swap_waits_for_what_is_in_flight_and_lets_nothing_new_begin(tiny_model: str) -> None:
    """Every completion is of one version, also those that memory preempted while they drained."""
    requests = [make_request(prompt(60, seed=i), group=i, max_tokens=150, urgent=i % 3 == 0) for i in range(20)]
    other = plain_model(tiny_model, noise_seed=1)

    async def scenario() -> list[Completion]:
        async with opened(tiny_model, max_num_seqs=18, max_context=256, kv_tokens=4096) as engine:
            tasks = [asyncio.create_task(complete(engine, request)) for request in requests]
            while (await engine.stats()).num_generated < 400:
                await asyncio.sleep(0)
            late = make_request(prompt(9), group=99, urgent=True)
            swap = asyncio.create_task(publish_and_swap(engine, Publisher(), other, 1, "drain"))
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(complete(engine, late)))
            report = await swap
            assert report.num_interrupted == 0 and (await engine.stats()).num_preempted > 0
            return [completion for _, completion in await asyncio.gather(*tasks)]

    completions = run(scenario())
    versions = [set(completion.versions.tolist()) for completion in completions]
    assert all(len(found) == 1 for found in versions) and {0} in versions and {1} in versions
    assert [len(completion.tokens) for completion in completions[:-1]] == [150] * 20


def test_invariant_13_receiving_weights_does_not_stop_generation(tiny_model: str) -> None:
    """Non-blocking generation: not for the transfer. An update that never arrives in full stops nobody."""

    async def scenario() -> None:
        async with opened(tiny_model, max_context=512) as engine:
            update = Publisher().publish(1, named_weights(plain_model(tiny_model, noise_seed=1)))
            task = asyncio.create_task(complete(engine, make_request(prompt(10), max_tokens=400)))
            while not (before := (await engine.stats()).num_generated):
                await asyncio.sleep(0)
            staging = asyncio.create_task(engine.stage_weights(update))
            while not staging.done():
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)
            assert (await engine.stats()).num_generated > before
            assert (await engine.stats()).version == 0, "staged is not live"
            await engine.swap(1, "recompute")
            _, completion = await task
            assert completion.versions[0] == 0 and completion.versions[-1] == 1

    run(scenario())


def test_invariant_11_weights_that_are_not_what_was_published_never_go_live(tiny_model: str) -> None:
    async def scenario() -> None:
        async with opened(tiny_model) as engine:
            model = plain_model(tiny_model, noise_seed=1)
            before = await engine.score((prompt(30),), 1.0)
            good = Publisher().publish(1, named_weights(model))
            bad = replace(good, tensors=(replace(good.tensors[0], fingerprint="0"), *good.tensors[1:]))
            with pytest.raises(WeightMismatch, match="another checksum"):
                await engine.stage_weights(bad)
            after = await engine.score((prompt(30),), 1.0)
            assert after.version == 0 and after.logprobs[0].tobytes() == before.logprobs[0].tobytes()

    run(scenario())


def test_a_consumer_that_leaves_ends_its_request_and_its_key_can_be_used_again(tiny_model: str) -> None:
    request = make_request(prompt(20), max_tokens=200)

    async def scenario() -> Completion:
        async with opened(tiny_model) as engine:
            stream = engine.generate(request)
            assert isinstance(await anext(stream), Chunk)
            await stream.aclose()
            stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)
            _, completion = await complete(engine, request)
            return completion

    completion = run(scenario())
    assert completion.stop == StopReason.LENGTH
    assert completion.tokens.tobytes() == alone(tiny_model, request).tokens.tobytes()


def test_a_cancelled_consumer_ends_its_request(tiny_model: str) -> None:
    async def scenario() -> None:
        async with opened(tiny_model, max_num_seqs=1) as engine:
            tasks = [
                asyncio.create_task(complete(engine, make_request(prompt(9), i, max_tokens=400))) for i in range(2)
            ]
            while not (await engine.stats()).num_generated:
                await asyncio.sleep(0)
            listening = len(asyncio.all_tasks())
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)
            assert len(asyncio.all_tasks()) == listening - 2, "nothing but the two consumers"

    run(scenario())


def test_an_abort_ends_the_request_now_and_its_completion_says_so(tiny_model: str) -> None:
    async def scenario() -> None:
        async with opened(tiny_model) as engine:
            request = make_request(prompt(20), max_tokens=400)
            task = asyncio.create_task(complete(engine, request))
            while (await engine.stats()).num_generated < 10:
                await asyncio.sleep(0)
            await engine.abort(request.key)
            await engine.abort(make_request(prompt(5), group=77).key)
            chunks, completion = await task
            assert completion.stop == StopReason.ABORTED and len(completion.tokens) >= 10
            assert sum(len(chunk.tokens) for chunk in chunks) == len(completion.tokens)
            assert (await engine.stats()).kv_used == 0

    run(scenario())


@pytest.mark.parametrize("fate", ["cancelled", "aborted", "refused"])
def test_what_arrives_during_a_step_can_be_taken_back_aborted_or_refused(tiny_model: str, fate: str) -> None:
    async def scenario() -> None:
        async with opened(tiny_model) as engine:
            other = asyncio.create_task(complete(engine, make_request(prompt(20), max_tokens=40)))
            while not (await engine.stats()).num_generated:
                await asyncio.sleep(0)
            long = prompt(5000 if fate == "refused" else 20)
            async with engine._between_steps:  # a decode step is running
                task = asyncio.create_task(complete(engine, make_request(long, group=1, max_tokens=400)))
                await asyncio.sleep(0)
                assert (await engine.stats()).waiting == 1
                aborting = asyncio.create_task(engine.abort(make_request(long, group=1).key))
                if fate == "cancelled":
                    task.cancel()
                    await asyncio.sleep(0)
                    assert (await engine.stats()).waiting == 0
                if fate == "refused":
                    aborting.cancel()
            if fate == "aborted":
                _, completion = await task
                assert completion.stop is StopReason.ABORTED and len(completion.tokens) < 400
            else:
                with pytest.raises(asyncio.CancelledError if fate == "cancelled" else RequestRefused):
                    await task
            assert (await other)[1].stop is StopReason.LENGTH
            assert (await engine.stats()).kv_used == 0

    run(scenario())


def test_a_key_whose_user_has_just_died_is_given_to_who_begins_again(tiny_model: str) -> None:
    async def scenario() -> None:
        async with opened(tiny_model) as engine:
            request = make_request(prompt(20), max_tokens=200)
            dying = asyncio.create_task(complete(engine, request))
            while not (await engine.stats()).num_generated:
                await asyncio.sleep(0)
            async with engine._between_steps:  # a decode step is running
                dying.cancel()
                again = asyncio.create_task(complete(engine, request))
                for _ in range(20):
                    await asyncio.sleep(0)
            _, completion = await again
            assert completion.tokens.tolist() == alone(tiny_model, request).tokens.tolist()
            assert dying.cancelled() and (await engine.stats()).kv_used == 0

    run(scenario())


def test_a_key_in_use_is_refused_and_its_first_user_goes_on(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEY_WAIT_S", 0.05)

    async def scenario() -> None:
        async with opened(tiny_model) as engine:
            request = make_request(prompt(20), max_tokens=50)
            task = asyncio.create_task(complete(engine, request))
            while not (await engine.stats()).num_generated:
                await asyncio.sleep(0)
            async with engine._between_steps:  # or the first might be done before the second is refused
                with pytest.raises(RequestRefused, match="train/0/0/0 is already being generated"):
                    await complete(engine, request)
            _, completion = await task
            assert completion.stop == StopReason.LENGTH and len(completion.tokens) == 50

    run(scenario())


def test_a_request_the_engine_cannot_serve_is_refused_to_its_own_consumer_alone(tiny_model: str) -> None:
    async def scenario() -> None:
        async with opened(tiny_model, max_context=64) as engine:
            good = asyncio.create_task(complete(engine, make_request(prompt(20), max_tokens=30)))
            with pytest.raises(RequestRefused, match="more than the context of 64"):
                await complete(engine, make_request(prompt(65), group=1))
            with pytest.raises(RequestRefused, match="vocabulary"):
                await complete(engine, make_request(np.array([1, 1000], np.int32), group=2))
            _, nothing = await complete(engine, make_request(prompt(64), group=3))
            assert nothing.stop == StopReason.CONTEXT and len(nothing.tokens) == 0
            assert (await good)[1].stop == StopReason.LENGTH

    run(scenario())


def test_a_broken_step_reaches_every_waiting_consumer_as_an_error_not_as_a_hang(
    tiny_model: str, tmp_path: Path
) -> None:
    """A directory without a tokenizer generates well, until a request asks for a stop string."""
    shutil.copytree(tiny_model, tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()

    async def scenario() -> None:
        async with opened(str(tmp_path / "bare")) as engine:
            traces: list[int] = []

            async def fail(request: Request) -> None:
                with pytest.raises(ConfigError, match="no tokenizer") as caught:
                    await complete(engine, request)
                traces.append(len(traceback.format_exception(caught.value)))

            requests = [make_request(prompt(20), trajectory=i, max_tokens=400) for i in range(7)]
            bystanders = [asyncio.create_task(fail(request)) for request in requests]
            while not (await engine.stats()).num_generated:
                await asyncio.sleep(0)
            await fail(make_request(prompt(20), group=1, stop_strings=("x",)))
            await asyncio.gather(*bystanders)
            await fail(make_request(prompt(20), group=2))
            assert max(traces) < min(traces) + 5, "one error told to many does not grow from one to the next"

    run(scenario())


def test_closing_tells_consumers_that_still_wait_instead_of_cancelling_them(tiny_model: str) -> None:
    async def scenario() -> None:
        async with opened(tiny_model) as engine:
            task = asyncio.create_task(complete(engine, make_request(prompt(20), max_tokens=400)))
            while not (await engine.stats()).num_generated:
                await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(WorkerDied, match="closed"):
                await task
            with pytest.raises(WorkerDied, match="closed"):
                await complete(engine, make_request(prompt(20)))

    run(scenario())


def test_score_is_answered_between_two_steps_of_running_generation(tiny_model: str) -> None:
    requests = requests_of_all_lengths()
    expected = drive(make_core(tiny_model), requests)
    forced = teacher_forced(plain_model(tiny_model), prompt(200))

    async def scenario() -> list[Completion]:
        async with opened(tiny_model, kv_tokens=4096) as engine:
            tasks = [asyncio.create_task(complete(engine, request)) for request in requests]
            for _ in range(5):
                scores = await engine.score((prompt(200), prompt(100)), 1.0)
                np.testing.assert_allclose(scores.logprobs[0], forced, atol=1e-5, rtol=0)
                assert len(scores.logprobs[1]) == 100
            return [completion for _, completion in await asyncio.gather(*tasks)]

    for request, completion in zip(requests, run(scenario()), strict=True):
        assert completion.tokens.tobytes() == expected[request].tokens.tobytes()
