"""Servers that the vLLM engine starts itself: how they start, how they end, and whole runs on them.

Apart from test_vllm.py, so that never two servers run at a time. Invariant 15: bounded waits, and nothing is left.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from driving import complete, group_of, make_request, plain_model, prompt, teacher_forced
from system import HeadwayProcess, check_finished, write_config
from vllm_servers import ARGS, MODEL, Watched, descendants, opened, run, vllm_python

from headway.config import load
from headway.engine.vllm.messages import RAW
from headway.errors import ConfigError, HeadwayError, RequestRefused, WorkerDied
from headway.record.events import Event
from headway.types import Completion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BOUND = 1e-4  # nats; vLLM and transformers in fp32 were seen to differ by 3e-6


@pytest.fixture(scope="module")
def model(tiny_variant: Callable[[str], str]) -> str:
    return tiny_variant(MODEL)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Weights and sockets go with the server, however it ended."""
    temporary = Path(tempfile.gettempdir())
    before = set(temporary.glob("headway-vllm-*"))
    yield
    assert not set(temporary.glob("headway-vllm-*")) - before


def test_with_top_k_and_top_p_logprobs_are_those_of_the_full_distribution(model: str) -> None:
    """Which is `raw_logprobs`; the tokens are still drawn from what is left."""
    requests = group_of(4, prompt(40), max_tokens=40, top_k=4, top_p=0.9)

    async def scenario() -> list[Completion]:
        async with opened(model, mode=RAW) as engine:
            with pytest.raises(RequestRefused, match=r"sampled at temperature 0\.5, and the server gives raw_logprobs"):
                await complete(engine, make_request(prompt(5), temperature=0.5))
            return [completion for _, completion in await asyncio.gather(*(complete(engine, r) for r in requests))]

    reference = plain_model(model)
    for request, completion in zip(requests, run(scenario()), strict=True):
        tokens = np.concatenate([request.tokens, completion.tokens])
        exact = teacher_forced(reference, tokens)[len(request.tokens) :]
        assert np.abs(exact - completion.logprobs).max() < BOUND
        with torch.inference_mode():
            logits = reference(torch.from_numpy(tokens).long()[None]).logits[0, len(request.tokens) - 1 : -1]
        ranks = (logits > logits.gather(1, torch.from_numpy(completion.tokens).long()[:, None])).sum(1)
        assert int(ranks.max()) < 4 and int(ranks.max()) > 0


def test_more_prompts_than_fit_into_one_step_do_not_end_the_server(model: str) -> None:
    """vLLM would compute one of them in parts, and that does not go with a seed on a CPU."""
    requests = [make_request(prompt(150, seed=group), group, max_tokens=4) for group in range(12)]

    async def scenario() -> None:
        async with opened(model, vllm_args=f"{ARGS} --max-num-batched-tokens 512") as engine:
            found = await asyncio.gather(*(complete(engine, request) for request in requests))
            assert [len(completion.tokens) for _, completion in found] == [4] * 12

    run(scenario())


def test_a_server_that_cannot_start_says_why_in_one_sentence(model: str) -> None:
    async def scenario() -> None:
        async with opened(model, vllm_args="--tensor-parallel-size nonsense"):
            pass

    with pytest.raises(ConfigError) as error:
        run(scenario())
    said = str(error.value)
    assert "the vLLM server ended (exit code 2)" in said and "nonsense" in said and "check engine.vllm_args" in said
    assert "\n" not in said


def test_a_killed_server_is_noticed_at_once_and_leaves_nothing_behind(model: str) -> None:
    before = descendants(os.getpid())  # a cluster of other tests may be among them

    async def scenario() -> tuple[str, list[psutil.Process]]:
        async with opened(model) as engine:
            family = [one for one in descendants(os.getpid()) if one not in before]
            processes = [one for one in family if one.status() != psutil.STATUS_ZOMBIE]
            (api_server,) = (one for one in processes if "serve" in one.cmdline() and "-c" not in one.cmdline())
            watched = [Watched(engine, request) for request in group_of(4, prompt(20), max_tokens=480)]
            await asyncio.gather(*(one.began.wait() for one in watched))
            started = time.monotonic()
            os.kill(api_server.pid, signal.SIGKILL)
            results = await asyncio.gather(*(one.task for one in watched), return_exceptions=True)
            assert time.monotonic() - started < 20
            assert all(isinstance(result, WorkerDied) for result in results), results
            with pytest.raises(HeadwayError, match="the vLLM server"):
                await engine.stats()
            await asyncio.wait({engine._connection._watching}, timeout=20)
            for call in (engine.stats(), engine.score((prompt(5),), 1.0), complete(engine, make_request(prompt(5)))):
                with pytest.raises(WorkerDied, match=r"the vLLM server ended .signal 9."):
                    await call
            return str(results[0]), processes

    said, processes = run(scenario())
    assert said.startswith("the vLLM server") and "\n" not in said
    _, left = psutil.wait_procs(processes, timeout=20)
    assert not left


# Whole runs


def train_config(directory: Path, model: str, **run_section: Any) -> Path:
    engine = {"kind": "vllm", "vllm_python": vllm_python(), "vllm_args": ARGS, "max_num_seqs": 8, "kv_tokens": 4096}
    sections = {"engine": engine, "run": {"runtime": "local", "deterministic": False, "steps": 3, **run_section}}
    return write_config(directory, model, **sections)


def has_swapped(events: list[Event]) -> bool:
    return any(event.kind == "swapped" for event in events)


def test_a_run_trains_on_vllm_with_parity_reported_and_every_load_proved(tmp_path: Path, model: str) -> None:
    path = train_config(tmp_path, model)
    config = load(path)
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as headway:
        headway.wait_until(has_swapped, "weights in the server")  # which takes a while to start
        assert headway.wait() == 0, headway.output
        assert not headway.descendants()
    events = headway.events()
    check_finished(config, events)
    swapped = [event for event in events if event.kind == "swapped"]
    assert [event.version for event in swapped] == [0, 1, 2, 3]
    assert all(0 < event.parity_max_abs < BOUND for event in swapped)
    assert (Path(config.run.dir) / "logs/engine.log").stat().st_size > 1000, (
        "the server's output is in the worker's log"
    )


def test_a_killed_run_takes_its_server_with_it(tmp_path: Path, model: str) -> None:
    path = train_config(tmp_path, model, steps=100_000)
    with HeadwayProcess("train", path, run=Path(load(path).run.dir)) as headway:
        headway.wait_until(has_swapped, "weights in the server")
        headway.wait_until(lambda events: any(event.kind == "trained" for event in events), "a training step")
        assert any("vllm.entrypoints.cli.main" in one.cmdline() for one in headway.descendants())
        headway.kill(everything=False)  # asserts that nothing is left
