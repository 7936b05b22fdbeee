"""The vLLM engine against a small server that speaks vLLM's wire format: swaps at exact moments, in seconds.
Servers that fail are in test_vllm_faults.py, real ones in test_vllm.py.

Invariant 3: the engine stamps versions.
"""

import asyncio
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import complete, group_of, make_request, prompt
from system import check_finished, events_of, make_config
from vllm_driving import BOUND, RANK, Adapters, Updates, engine_on, pair, steps
from vllm_servers import Watched
from vllm_wire import WireServer, run, until

from headway import launch
from headway.engine.vllm import messages
from headway.engine.vllm.client import Client
from headway.engine.vllm.messages import PROCESSED, RAW, Submission
from headway.errors import InvariantBroken, RequestRefused, WeightMismatch
from headway.model.loading import named_weights
from headway.monitor.view import PlainView
from headway.record.events import Event
from headway.types import Chunk, Sampling, StopReason
from headway.weights.publish import Publisher

both = pytest.mark.parametrize("spans", [True, False], ids=["spans", "no spans"])
adapted = pytest.mark.parametrize("lora_rank", [0, RANK], ids=["all weights", "adapters"])


# Swaps


@both
@pytest.mark.parametrize("kv", ["recompute", "keep", "drain"])
def test_invariant_3_every_token_is_stamped_with_the_weights_that_sampled_it(
    tiny_model: str, spans: bool, kv: Any
) -> None:
    """At the first swap one group is in flight and another is not begun; at the second all are in flight."""
    if kv == "keep" and not spans:
        return

    async def scenario() -> None:
        async with pair(tiny_model, spans, kv_on_swap=kv) as (server, engine):
            updates = Updates(tiny_model)
            server.budget = 0
            first = [Watched(engine, request) for request in group_of(2, prompt(9), 0, max_tokens=25)]
            await until(lambda: len(server.jobs) == 2)
            await steps(server, 7)
            # The same prompt: what the cache holds of it was computed by the weights that are about to go.
            second = [Watched(engine, request) for request in group_of(2, prompt(9), 1, max_tokens=25)]
            await until(lambda: len(server.jobs) == 4)
            swapping = asyncio.create_task(updates.swap(engine, kv))
            if kv == "drain":
                await until(lambda: not engine._may_submit.is_set())
                third = Watched(engine, make_request(prompt(9), 2))
                server.budget = None
            report = await swapping
            assert report.num_interrupted == (0 if kv == "drain" else 2)
            num_told = 5 if spans else 7  # with spans tokens are streamed by fours after the first
            assert report.num_recomputed == {"recompute": 4 * 9 + 2 * num_told, "keep": 2 * 9, "drain": 0}[kv]
            if kv == "drain":
                assert set((await third.task).versions) == {1}
            else:
                await until(lambda: len(server.jobs) == 4)
                await steps(server, 6)
                await updates.swap(engine, kv)
            server.budget = None
            for one in [*first, *second]:
                completion = await one.task
                updates.check(one, completion)
                if kv == "drain":
                    assert set(completion.versions) == {0}
                else:
                    num_old = 7 if one in first else 0
                    assert completion.versions.tolist() == [0] * num_old + [1] * 6 + [2] * (19 - num_old)
            assert server.num_stale_prompts == 0 and (server.version != "default") == spans
            assert (await engine.stats()).num_generated == 100 + (24 if kv == "drain" else 0)

    run(scenario())


@both
def test_invariant_3_a_submission_names_the_adapter_of_its_version(tiny_model: str, spans: bool) -> None:
    """What is in flight at a swap is submitted again; a staged adapter that another replaces is not left there."""

    async def scenario() -> None:
        wire = WireServer(tiny_model, scale_out=spans, adapter_rank=8)
        async with wire.listening() as server, engine_on(server, tiny_model, lora_rank=RANK) as engine:
            adapters = Adapters(tiny_model)
            server.budget = 0
            first = [Watched(engine, request) for request in group_of(2, prompt(9), 0, max_tokens=25)]
            await until(lambda: len(server.jobs) == 2)
            await steps(server, 7)
            for version in (1, 2):
                await engine.stage_weights(adapters.publish())
                await engine.stage_weights(adapters.publish(version))
                report = await engine.swap(version, "recompute")
                assert (report.num_interrupted, report.fingerprints) == (2, {})
                await until(lambda: len(server.jobs) == 2)
                (live,) = server.adapters
                assert [body["model"] for body in server.bodies[-2:]] == [live, live]
                await steps(server, 6)
            server.budget = None
            for one in first:
                await one.task
                assert one.task.result().versions.tolist() == [0] * 7 + [1] * 6 + [2] * 12
                assert adapters.error(one) < BOUND

    run(scenario())


def test_an_adapter_that_the_server_cannot_load_ends_the_engine(tiny_model: str) -> None:
    async def scenario() -> None:
        wire = WireServer(tiny_model, adapter_rank=8)
        async with wire.listening() as server, engine_on(server, tiny_model, lora_rank=RANK) as engine:
            server.broken[messages.LOAD_ADAPTER] = 500
            with pytest.raises(WeightMismatch, match=r"could not load version 1: .*out of order"):
                await engine.stage_weights(Adapters(tiny_model).publish())
            with pytest.raises(WeightMismatch, match="could not load version 1"):
                await engine.score((prompt(5),), 1.0)

    run(scenario())


def test_tokens_of_unknown_version_are_handed_out_only_when_the_server_has_said_it(tiny_model: str) -> None:
    """The server streams by fours: what it held back at the swap comes after it, mixed with what is newer."""

    async def scenario() -> None:
        async with pair(tiny_model) as (server, engine):
            updates = Updates(tiny_model)
            server.budget = 0
            one = Watched(engine, make_request(prompt(9), max_tokens=20))
            await until(lambda: len(server.jobs) == 1)
            await steps(server, 7)
            await until(lambda: sum(len(chunk.tokens) for chunk in one.chunks) == 5)
            await updates.swap(engine, "recompute")
            await steps(server, 6)
            await asyncio.sleep(0.05)
            assert sum(len(chunk.tokens) for chunk in one.chunks) == 5
            server.budget = None
            completion = await one.task
            assert completion.versions.tolist() == [0] * 7 + [1] * 13
            updates.check(one, completion)

    run(scenario())


def test_spans_that_contradict_what_is_known_stop_the_run(tiny_model: str) -> None:
    async def scenario() -> None:
        async with pair(tiny_model) as (server, engine):
            server.version = "3"  # somebody else told the server
            with pytest.raises(InvariantBroken, match="the server reports versions 0 and 3 for the same token"):
                await complete(engine, make_request(prompt(9)))
            server.version = "mine"
            with pytest.raises(InvariantBroken, match="a version that is not ours"):
                await complete(engine, make_request(prompt(9)))

    run(scenario())


def test_weights_are_staged_in_order_and_only_what_was_staged_is_swapped_in(tiny_model: str) -> None:
    async def scenario() -> None:
        async with pair(tiny_model) as (_, engine):
            updates = Updates(tiny_model)
            with pytest.raises(InvariantBroken, match="version 1 was not staged"):
                await engine.swap(1, "recompute")
            await updates.swap(engine, "recompute")
            stale = Publisher().publish(1, named_weights(updates.models[0]))
            with pytest.raises(InvariantBroken, match="versions never go back"):
                await engine.stage_weights(stale)
            damaged = updates.publisher.publish(2, named_weights(updates.models[0]))
            wrong = dataclasses.replace(damaged.tensors[3], fingerprint="0")
            damaged = dataclasses.replace(damaged, tensors=(*damaged.tensors[:3], wrong, *damaged.tensors[4:]))
            with pytest.raises(WeightMismatch, match=f"{wrong.name} arrived with another checksum"):
                await engine.stage_weights(damaged)
            files = engine._connection.files
            kept = {path.name for path in files.root.iterdir()}
            assert kept == {"served", "version-1"} and files.root.stat().st_mode & 0o077 == 0
            await updates.swap(engine, "recompute")
            assert {path.name for path in files.root.iterdir()} == {"served", "version-2"}
        assert not files.root.exists()

    run(scenario())


def test_a_load_that_fails_ends_everything_with_its_cause(tiny_model: str) -> None:
    async def scenario() -> None:
        async with pair(tiny_model) as (server, engine):
            server.budget = 0
            one = Watched(engine, make_request(prompt(9)))
            await until(lambda: len(server.jobs) == 1)
            server.broken["/collective_rpc"] = 500
            with pytest.raises(WeightMismatch, match="could not load version 1: /collective_rpc answered 500: out of"):
                await Updates(tiny_model).swap(engine, "recompute")
            for call in (one.task, engine.stats(), complete(engine, make_request(prompt(9), 1))):
                with pytest.raises(WeightMismatch, match="could not load version 1"):
                    await call

    run(scenario())


# Requests


@both
def test_aborts_end_requests_wherever_they_are(tiny_model: str, spans: bool) -> None:
    async def scenario() -> None:
        async with pair(tiny_model, spans, max_num_seqs=2) as (server, engine):
            updates = Updates(tiny_model)
            server.budget = 0
            first, second, waiting = (Watched(engine, request) for request in group_of(3, prompt(9)))
            await until(lambda: len(server.jobs) == 2)
            assert (await engine.stats()).waiting == 1
            await engine.abort(waiting.request.key)
            assert (await waiting.task).stop is StopReason.ABORTED and not waiting.chunks
            await steps(server, 5)
            await until(lambda: bool(first.chunks) and bool(second.chunks))
            await engine.abort(first.request.key)
            await updates.swap(engine, "recompute")
            await until(lambda: len(server.jobs) == 1)
            await steps(server, 5)
            await until(lambda: len(engine._sequences[second.request.key.__str__()].tokens) > 5)
            await engine.abort(second.request.key)
            for one in (first, second):
                completion = await one.task
                assert completion.stop is StopReason.ABORTED
                updates.check(one, completion)
            assert set((await second.task).versions) == {0, 1}
            await until(lambda: not server.jobs)

    run(scenario())


@both
def test_a_stop_string_across_the_border_of_two_submissions_ends_the_completion(tiny_model: str, spans: bool) -> None:
    async def scenario() -> None:
        async with pair(tiny_model, spans) as (server, engine):
            request = make_request(prompt(9), max_tokens=30)
            _, whole = await complete(engine, request)
            given = Chunk(whole.tokens[:4], whole.logprobs[:4], whole.versions[:4])
            _, continued = await complete(engine, dataclasses.replace(request, sampled=given))
            border = engine._decode_text(continued.tokens[3:5].tolist())
            sampling = dataclasses.replace(request.sampling, stop_strings=(border,))
            asked = dataclasses.replace(request, sampled=given, sampling=sampling)
            _, stopped = await complete(engine, asked)
            assert np.array_equal(stopped.tokens, continued.tokens[:5]) and stopped.stop is StopReason.STOP
            await until(lambda: not server.jobs)
            num_bodies = len(server.bodies)
            sampled = Chunk(continued.tokens[:20], continued.logprobs[:20], continued.versions[:20])
            _, known = await complete(engine, dataclasses.replace(asked, sampled=sampled))
            assert np.array_equal(known.tokens, continued.tokens[:5]) and len(server.bodies) == num_bodies

    run(scenario())


def test_no_more_requests_run_than_sequences_are_allowed_and_urgent_ones_go_first(tiny_model: str) -> None:
    async def scenario() -> None:
        async with pair(tiny_model, max_num_seqs=2) as (server, engine):
            server.budget = 0
            running = [Watched(engine, request) for request in group_of(2, prompt(9), 0, max_tokens=3)]
            await until(lambda: len(server.jobs) == 2)
            waiting = [Watched(engine, request) for request in group_of(2, prompt(9), 1, max_tokens=3)]
            urgent = Watched(engine, make_request(prompt(9), 2, max_tokens=3, urgent=True, stream="eval"))
            await asyncio.sleep(0.02)
            assert len(server.jobs) == 2 and (await engine.stats()).waiting == 3
            server.budget = None
            await asyncio.gather(*(one.task for one in [*running, *waiting, urgent]))
            names = [body["request_id"] for body in server.bodies]
            assert names[2].startswith("eval/2/0/0/")
            assert (await engine.stats()).num_generated == 4 * 3, "only training rollouts are counted"

    run(scenario())


def test_a_key_in_use_is_refused_and_free_again_afterwards(tiny_model: str) -> None:
    async def scenario() -> None:
        async with pair(tiny_model) as (server, engine):
            server.budget = 0
            request = make_request(prompt(9))
            one = Watched(engine, request)
            await until(lambda: len(server.jobs) == 1)
            with pytest.raises(RequestRefused, match="is already being generated"):
                await complete(engine, request)
            one.task.cancel()
            await asyncio.gather(one.task, return_exceptions=True)
            await until(lambda: not server.jobs)
            server.budget = None
            assert len((await complete(engine, request))[1].tokens) == 24

    run(scenario())


def test_stats_are_the_servers_metrics_and_our_own_counts(tiny_model: str) -> None:
    async def scenario() -> None:
        async with pair(tiny_model) as (_, engine):
            for trajectory in range(2):
                await complete(engine, make_request(prompt(9), trajectory=trajectory))
            stats = await engine.stats()
            assert (stats.version, stats.running, stats.waiting, stats.num_generated) == (0, 0, 0, 48)
            assert (stats.num_prefilled, stats.kv_used, stats.kv_total) == (9, 512, 2048) and stats.busy_s > 0

    run(scenario())


# Whole runs


def train_on(server: WireServer, directory: Path, model: str, lora_rank: int = 0) -> list[Event]:
    """`headway train`, with everything in one process and one event loop, the server too."""

    async def scenario() -> list[Event]:
        async with server.listening():
            engine = {"kind": "vllm", "urls": server.url, "max_num_seqs": 8, "kv_tokens": 0, "chunk_tokens": 4}
            sections = {"engine": engine, "run": {"steps": 2, "deterministic": False}, "sampling": {"max_tokens": 6}}
            sections["model"] = {"lora": {"rank": lora_rank}}
            config = make_config(directory, model, **sections, task={"eval": ""})
            await launch.train(config, False, PlainView(io.StringIO()))
            events = events_of(config)
            check_finished(config, events)
            return events

    return run(scenario())


@both
@adapted
def test_a_run_trains_on_a_server_and_proves_every_load(
    tmp_path: Path, tiny_model: str, spans: bool, lora_rank: int
) -> None:
    server = WireServer(tiny_model, scale_out=spans, context=32, adapter_rank=lora_rank)
    swapped = [event for event in train_on(server, tmp_path, tiny_model, lora_rank) if event.kind == "swapped"]
    assert [event.version for event in swapped] == [0, 1, 2]
    assert all(event.parity_max_abs < BOUND for event in swapped)
    assert server.num_stale_prompts == 0
    assert server.calls.count("/collective_rpc") == (1 if lora_rank else 4), "of a run's weights adapters alone travel"


@adapted
def test_invariant_11_a_server_that_loads_nothing_stops_the_run(
    tmp_path: Path, tiny_model: str, lora_rank: int
) -> None:
    server = WireServer(tiny_model, context=32, adapter_rank=lora_rank)
    server.stale_loads = True
    with pytest.raises(WeightMismatch, match="engine does not run version 1: "):
        train_on(server, tmp_path, tiny_model, lora_rank)


# What is said on the wire


def test_a_request_is_said_in_the_words_of_either_endpoint() -> None:
    sampling = Sampling(0.7, 0, 1.0, 99, (1, 5), ("end",))
    submission = Submission("train/3/0/0/1/salt", "policy", [7, 8], sampling, 12, 345, "salt")
    params = {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "seed": 345,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [1, 5],
        "stop": ["end"],
        "skip_special_tokens": False,
    }
    assert messages.generate_body(submission, 16) == {
        "request_id": "train/3/0/0/1/salt",
        "model": "policy",
        "token_ids": [7, 8],
        "sampling_params": params | {"detokenize": True, "stream_interval": 16},
        "cache_salt": "salt",
        "stream": True,
    }
    assert messages.completions_body(submission) == params | {
        "model": "policy",
        "prompt": [7, 8],
        "cache_salt": "salt",
        "return_token_ids": True,
        "stream": True,
    }


def test_seeds_depend_on_run_seed_key_and_position_and_fit_into_63_bits() -> None:
    request = make_request(prompt(5))
    others = [make_request(prompt(5), seed=8), make_request(prompt(5), group=1), make_request(prompt(5), trajectory=1)]
    seeds = [
        messages.seed_of(request, 0),
        messages.seed_of(request, 7),
        *(messages.seed_of(other, 0) for other in others),
    ]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert messages.seed_of(make_request(prompt(9)), 7) == seeds[1]


@pytest.mark.parametrize(
    ("mode", "sampling", "refused"),
    [
        (PROCESSED, Sampling(0.5), False),
        (PROCESSED, Sampling(1.0, top_k=5), True),
        (PROCESSED, Sampling(1.0, top_p=0.9), True),
        (PROCESSED, Sampling(0.0, top_k=5), False),
        (RAW, Sampling(1.0, top_k=5, top_p=0.9), False),
        (RAW, Sampling(0.0), False),
        (RAW, Sampling(0.5), True),
    ],
)
def test_what_a_servers_logprobs_would_be_wrong_for_is_refused(mode: str, sampling: Sampling, refused: bool) -> None:
    if refused:
        with pytest.raises(RequestRefused):
            messages.check_mode(sampling, mode, "a request")
    else:
        messages.check_mode(sampling, mode, "a request")


def test_metrics_of_several_engines_are_added_up() -> None:
    text = '# HELP a b\nvllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\nup 1\n'
    assert messages.metrics_of(text) == {"num_requests_running": 7.0, "up": 1.0}


def test_no_connection_is_used_twice_because_a_server_closes_idle_ones_when_it_likes() -> None:
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        assert await reader.read() == b"", "a second request would meet the end of the connection"
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 10.0)
        try:
            assert [await client.get("/health") for _ in range(3)] == [(200, "{}")] * 3
        finally:
            await client.close()
            server.close()

    run(scenario())
    assert num_connections == 3
