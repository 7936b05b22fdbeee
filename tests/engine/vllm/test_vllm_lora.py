"""Adapters on real vLLM servers: each version's tokens and log-probs are those of transformers with it merged in."""

import asyncio
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import complete, group_of, make_request, prompt, teacher_forced
from system import check_finished, events_of, make_config
from vllm_driving import RANK, Adapters
from vllm_servers import ARGS, MODEL, Watched, opened, run, running_server, vllm_python

from headway import launch
from headway.engine.vllm.messages import PROCESSED
from headway.engine.vllm.process import lora_arguments
from headway.errors import ConfigError, WeightMismatch
from headway.monitor.view import PlainView

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BOUND = 1e-4  # nats
FLAGS = [*lora_arguments(RANK), "--logprobs-mode", PROCESSED]


@pytest.fixture(scope="module")
def model(tiny_variant: Callable[[str], str]) -> str:
    return tiny_variant(MODEL)


@pytest.fixture(scope="module", params=["spans", "no spans"])
def server(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--enable-scale-out"] if request.param == "spans" else ["--stream-interval", "8"]
    with running_server(model, tmp_path_factory.mktemp("server"), *FLAGS, *flags) as url:
        yield url


@pytest.mark.parametrize("kv", ["recompute", "drain"])
def test_invariant_3_adapters_in_mid_sequence_stamp_what_each_version_sampled(server: str, model: str, kv: Any) -> None:
    async def scenario() -> None:
        async with opened(model, server, lora_rank=RANK, kv_on_swap=kv) as engine:
            adapters, watched = Adapters(model), list[Watched]()
            watched += [Watched(engine, r) for g in range(3) for r in group_of(4, prompt(70, g), g, max_tokens=300)]
            for number in (10, 20):
                await asyncio.gather(*(one.began.wait() for one in watched))
                watched += [Watched(engine, r) for r in group_of(3, prompt(70, 1), number, max_tokens=40)]
                await adapters.update(engine, kv)
                await engine.score((prompt(15), prompt(9, 1)), 1.0)  # with others in its batch
            await asyncio.gather(*(one.task for one in watched))
            scores = await engine.score((prompt(30),), 1.0)
            assert scores.version == 2
            assert np.abs(teacher_forced(adapters.models[2], prompt(30)) - scores.logprobs[0]).max() < BOUND
            for one in watched:
                assert np.all(np.diff(one.task.result().versions) >= 0)
                assert adapters.error(one) < BOUND
            num_mixed = sum(len(set(one.task.result().versions)) > 1 for one in watched)
            assert (num_mixed == 0) if kv == "drain" else (num_mixed >= 8)
            assert kv == "drain" or {v for one in watched for v in one.task.result().versions.tolist()} == {0, 1, 2}

    run(scenario())


def test_generation_goes_on_while_an_adapter_is_staged(server: str, model: str) -> None:
    """Staged and never swapped, it samples nothing; a version that is staged again replaces it."""

    async def scenario() -> None:
        async with opened(model, server, lora_rank=RANK) as engine:
            adapters = Adapters(model)
            await adapters.update(engine)
            watched = [Watched(engine, r) for r in group_of(4, prompt(40), max_tokens=200)]
            await asyncio.gather(*(one.began.wait() for one in watched))
            for _ in range(4):  # more than a server holds
                await engine.stage_weights(adapters.publish(version=2))
            await asyncio.gather(*(one.task for one in watched))
            assert all(set(one.task.result().versions) == {1} and adapters.error(one) < BOUND for one in watched)
            await engine.swap(2, "recompute")
            _, completion = await complete(engine, make_request(prompt(40), group=1))
            tokens = np.concatenate([prompt(40), completion.tokens])
            assert np.abs(teacher_forced(adapters.models[2], tokens)[40:] - completion.logprobs).max() < BOUND

    run(scenario())


def test_invariant_11_an_adapter_of_another_base_is_refused(server: str, model: str) -> None:
    async def scenario() -> None:
        async with opened(model, server, lora_rank=RANK) as engine:
            with pytest.raises(
                WeightMismatch, match=r"version 1: its adapter was made for the base 1234, and the base"
            ):
                await engine.stage_weights(Adapters(model).publish(base="1234"))

    run(scenario())


def test_a_server_without_large_enough_adapters_is_refused(server: str, model: str) -> None:
    async def scenario() -> None:
        async with opened(model, server, lora_rank=20):
            pass

    said = r"loads no adapters of rank 20 for the layers alone; start it with .* --max-lora-rank 32"
    with pytest.raises(ConfigError, match=said) as error:
        run(scenario())
    assert "\n" not in str(error.value)


def test_invariant_6_a_run_with_adapters_reports_parity_at_every_swap(tiny_variant: Any, tmp_path: Path) -> None:
    """The adapters alone are published; the run trains, evaluates and ends as any other."""
    config = make_config(
        tmp_path,
        tiny_variant(MODEL),
        run={"deterministic": False, "steps": 3},
        model={"lora": {"rank": RANK}},
        engine={"kind": "vllm", "vllm_python": vllm_python(), "vllm_args": ARGS},
    )
    run(launch.train(config, False, PlainView(io.StringIO())))
    events = events_of(config)
    check_finished(config, events)
    swaps = [event for event in events if event.kind == "swapped"]
    assert [event.version for event in swaps] == [0, 1, 2, 3]
    assert max(event.parity_max_abs for event in swaps) < BOUND
