"""vLLM servers that fail, do not fit, or are none, as a small server plays them; what real ones do is in test_vllm.py.

Invariant 15: bounded waits.
"""

from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from driving import complete, group_of, make_request, prompt
from vllm_driving import Updates, engine_on, pair, steps
from vllm_servers import Watched
from vllm_wire import WireServer, run, until

from headway.config import EngineSection
from headway.engine.vllm.engine import VllmEngine
from headway.engine.vllm.messages import PROCESSED, RAW
from headway.errors import ConfigError, DeadlineExceeded, WorkerDied

# Servers that fail


def test_an_engine_core_that_dies_fails_every_request_with_its_words(tiny_model: str) -> None:
    async def scenario() -> None:
        async with pair(tiny_model) as (server, engine):
            server.budget = 0
            watched = [Watched(engine, request) for request in group_of(3, prompt(9))]
            await until(lambda: len(server.jobs) == 3)
            await steps(server, 2)
            server.fail("EngineCore encountered an issue.")
            for one in watched:
                with pytest.raises(WorkerDied, match=r"the vLLM server at http.* failed: EngineCore encountered"):
                    await one.task
            await until(lambda: engine._connection.failure is not None)
            with pytest.raises(WorkerDied, match="reports that its engine is dead"):
                await engine.stats()

    run(scenario())


def test_a_server_that_vanishes_fails_what_waits_for_it(tiny_model: str) -> None:
    async def scenario() -> None:
        async with WireServer(tiny_model).listening() as server, engine_on(server, tiny_model) as engine:
            server.broken["/inference/v1/generate"] = 502
            with pytest.raises(WorkerDied, match="/inference/v1/generate answered 502: out of order"):
                await complete(engine, make_request(prompt(9)))
            with pytest.raises(WorkerDied, match="answered 502"):
                await engine.score((prompt(9),), 1.0)

    run(scenario())


def test_invariant_15_a_silent_server_is_named_when_its_deadline_has_passed(tiny_model: str) -> None:
    async def scenario() -> None:
        async with WireServer(tiny_model).listening() as server, engine_on(server, tiny_model, 1.0) as engine:
            server.budget = 0
            with pytest.raises(DeadlineExceeded, match="did not answer /inference/v1/generate within 1 s"):
                await complete(engine, make_request(prompt(9)))
            server.deaf.add("/pause")
            with pytest.raises(DeadlineExceeded, match="did not answer /pause within 1 s"):
                await Updates(tiny_model).swap(engine, "recompute")

    run(scenario())


def refusal(path: str, server: WireServer, mode: str = PROCESSED, **settings: Any) -> str:
    async def scenario() -> None:
        async with server.listening(), engine_on(server, path, mode=mode, **settings):
            pass

    with pytest.raises(ConfigError) as error:
        run(scenario())
    assert "\n" not in str(error.value)
    return str(error.value).replace(server.url, "URL")


def test_servers_that_do_not_fit_are_refused_in_one_sentence_each(
    tiny_model: str, tiny_variant: Callable[[str], str]
) -> None:
    assert refusal(tiny_model, WireServer(tiny_model, dev_mode=False)) == (
        "the vLLM server at URL has no endpoints for weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
    )
    assert refusal(tiny_model, WireServer(tiny_model, context=300)) == (
        "the vLLM server at URL takes sequences of up to 300 tokens, and 512 are needed; start it with --max-model-len "
        "512, or set engine.max_context = 300"
    )
    assert refusal(tiny_model, WireServer(tiny_model), mode=RAW) == (
        "the vLLM server at URL gives processed_logprobs; start it with --logprobs-mode raw_logprobs"
    )
    assert "engine.kv_on_swap = keep needs that; serve with --enable-scale-out (vLLM 0.32), or set" in refusal(
        tiny_model, WireServer(tiny_model, scale_out=False), kv_on_swap="keep"
    )
    wide = tiny_variant("llama-wide")  # 512 tokens against 52
    assert refusal(tiny_model, WireServer(wide)).startswith("the vLLM server at URL cannot load")
    assert refusal(wide, WireServer(tiny_model)).startswith("the vLLM server at URL cannot load")
    assert "set engine.weights_dir to a directory that both can see" in refusal(
        tiny_model, broken(WireServer(tiny_model), "/collective_rpc")
    )
    assert refusal(tiny_model, broken(WireServer(tiny_model), "/v1/models", 401)) == (
        "the vLLM server at URL answers /v1/models with 401 (out of order); "
        "start it without options that restrict endpoints"
    )
    other = WireServer(tiny_variant("llama-untied"))
    other.stale_loads = True
    assert "serves another model than" in refusal(
        tiny_model, other
    ) and "nats a token, and 0.01 is the bound" in refusal(tiny_model, other)


def broken(server: WireServer, path: str, status: int = 500) -> WireServer:
    server.broken[path] = status
    return server


def test_what_is_no_vllm_server_is_refused_in_one_sentence(tiny_model: str) -> None:
    async def scenario(body: str, status: int) -> None:
        app = web.Application()

        async def page(request: web.Request) -> web.Response:
            return web.Response(text=body, status=status)

        app.add_routes([web.get("/version", page)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            section = EngineSection(kind="vllm", urls=url)
            with pytest.raises(ConfigError, match=r"does not look like a vLLM server; check engine\.urls") as error:
                await VllmEngine(tiny_model, "float32", section, url, PROCESSED, 5.0).open()
            assert url in str(error.value) and "\n" not in str(error.value)
        finally:
            await runner.cleanup()

    for body, status in (("<html>\nhello</html>", 200), ("[]", 200), ('{"version": 3}', 200), ("{}", 404)):
        run(scenario(body, status))


def test_an_address_where_nobody_listens_is_refused_in_one_sentence(tiny_model: str) -> None:
    section = EngineSection(kind="vllm", urls="http://127.0.0.1:9")
    engine = VllmEngine(tiny_model, "float32", section, "http://127.0.0.1:9", PROCESSED, 5.0)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 does not look like a vLLM server; check engine\.urls"):
        run(engine.open())
