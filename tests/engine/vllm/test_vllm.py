"""The vLLM engine against real servers: what it samples is what transformers would, whichever weights sampled it.

Every test runs on a server that says which weights sampled a token, and where it can on one that does not. Versions and
log-probs are checked by teacher forcing each segment under its own version's weights, with transformers alone.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import complete, forced_with_kept_kv, group_of, make_request, plain_model, prompt, teacher_forced
from transformers import PreTrainedModel
from vllm_servers import (
    CONTEXT,
    MODEL,
    Watched,
    opened,
    run,
    running_server,
)

from headway.engine.vllm.engine import VllmEngine
from headway.engine.vllm.messages import PROCESSED, RAW
from headway.errors import ConfigError, RequestRefused
from headway.model.loading import named_weights
from headway.model.tokenizer import decode, load_tokenizer
from headway.types import Chunk, Completion, Request, StopReason, SwapReport
from headway.weights.publish import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BOUND = 1e-4  # nats; vLLM and transformers in fp32 were seen to differ by 3e-6


@pytest.fixture(scope="module")
def model(tiny_variant: Callable[[str], str]) -> str:
    return tiny_variant(MODEL)


@pytest.fixture(scope="module", params=["spans", "no spans"])
def server(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all tests of a kind: with spans, or as a vLLM that has none is started."""
    flags = ["--enable-scale-out"] if request.param == "spans" else ["--stream-interval", "8"]
    with running_server(model, tmp_path_factory.mktemp("server"), "--logprobs-mode", PROCESSED, *flags) as url:
        yield url


@pytest.fixture
def spans(server: str, request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["server"] == "spans")


def only_with(spans: bool) -> None:
    if not spans:
        pytest.skip("keys and values are kept only where the server says which weights sampled a token")


class Trainer:
    """Publishes other weights under the next version, and knows every version's."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.models: list[PreTrainedModel] = [plain_model(path)]
        self._publisher = Publisher()

    async def update(self, engine: VllmEngine, kv: Any) -> SwapReport:
        version = len(self.models)
        self.models.append(plain_model(self.path, noise_seed=version))
        await engine.stage_weights(self._publisher.publish(version, named_weights(self.models[-1])))
        report = await engine.swap(version, kv)
        assert (report.version, report.fingerprints) == (version, {}), "vLLM repacks weights: proved by score alone"
        return report

    def forced(self, request: Request, completion: Completion, kv: str = "recompute") -> Any:
        """Log-probs of the completion, each token under the weights it is stamped with."""
        tokens = np.concatenate([request.tokens, completion.tokens])
        if kv == "keep":
            return forced_with_kept_kv(self.models, tokens, len(request.tokens), completion.versions)
        temperature = request.sampling.temperature or 1.0
        rows = np.stack([teacher_forced(model, tokens, temperature) for model in self.models])
        return rows[completion.versions, np.arange(len(request.tokens), len(tokens))]


def check_chunks(chunks: list[Chunk], completion: Completion, num_given: int = 0) -> None:
    for name in ("tokens", "logprobs", "versions"):
        told = [getattr(chunk, name) for chunk in chunks]
        assert np.array_equal(np.concatenate(told), getattr(completion, name)[num_given:])


# What is sampled


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_invariant_6_tokens_and_logprobs_are_those_of_transformers(server: str, model: str, temperature: float) -> None:
    requests = group_of(4, prompt(40), temperature=temperature, max_tokens=64)

    async def scenario() -> list[tuple[list[Chunk], Completion]]:
        async with opened(model, server) as engine:
            return await asyncio.gather(*(complete(engine, request) for request in requests))

    trainer = Trainer(model)
    made = run(scenario())
    for request, (chunks, completion) in zip(requests, made, strict=True):
        assert len(completion.tokens) == 64 and completion.stop is StopReason.LENGTH
        assert set(completion.versions) == {0}
        assert np.abs(trainer.forced(request, completion) - completion.logprobs).max() < BOUND
        check_chunks(chunks, completion)
    texts = {completion.tokens.tobytes() for _, completion in made}
    assert len(texts) == (1 if temperature == 0 else 4), "greedy ones agree, sampled ones of a group do not"
    if temperature == 0:
        (_, completion), *_ = made
        tokens = np.concatenate([requests[0].tokens, completion.tokens])
        assert np.array_equal(greedy(trainer.models[0], tokens)[len(requests[0].tokens) :], completion.tokens)


def greedy(model: PreTrainedModel, tokens: Any) -> Any:
    """At each place the token the model finds likeliest."""
    import torch

    with torch.inference_mode():
        likeliest = model(torch.from_numpy(tokens).long()[None]).logits[0].argmax(-1)
    return np.concatenate([[0], likeliest[:-1].numpy()])


def test_what_is_sampled_depends_on_the_seed_and_the_key(server: str, model: str) -> None:
    requests = [
        make_request(prompt(20), seed=1),
        make_request(prompt(20), seed=1, trajectory=1),
        make_request(prompt(20), seed=2),
    ]

    async def scenario() -> list[Completion]:
        async with opened(model, server) as engine:
            first = [(await complete(engine, request))[1] for request in requests]
            return [*first, (await complete(engine, requests[0]))[1]]

    first, other_key, other_seed, again = run(scenario())
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other_key.tokens)
    assert not np.array_equal(first.tokens, other_seed.tokens)


def test_invariant_9_stop_reasons_are_those_of_the_embedded_engine(server: str, model: str) -> None:
    """Stop tokens and strings end a completion and belong to it; the context's end is not a wanted length."""
    stop_tokens = tuple(range(13, 30))

    async def scenario() -> dict[str, Completion]:
        async with opened(model, server) as engine:
            wanted = {
                "token": make_request(prompt(20), max_tokens=400, stop_tokens=stop_tokens),
                "string": make_request(prompt(20), group=1, max_tokens=400, stop_strings=("a", "1b")),
                "length": make_request(prompt(20), group=2, max_tokens=5),
                "context": make_request(prompt(CONTEXT - 7), group=3, max_tokens=50),
                "both": make_request(prompt(CONTEXT - 7), group=4, max_tokens=7),
                "full": make_request(prompt(CONTEXT), group=5, max_tokens=7),
            }
            made = await asyncio.gather(*(complete(engine, request) for request in wanted.values()))
            with pytest.raises(RequestRefused, match="more than the context of 512"):
                await complete(engine, make_request(prompt(CONTEXT + 1)))
            with pytest.raises(RequestRefused, match="outside the model's vocabulary"):
                await complete(engine, make_request(np.array([52], np.int32)))
            with pytest.raises(RequestRefused, match="with top-k or top-p"):
                await complete(engine, make_request(prompt(5), top_k=3))
            return dict(zip(wanted, (completion for _, completion in made), strict=True))

    made = run(scenario())
    assert [made[name].stop for name in made] == [
        StopReason.STOP,
        StopReason.STOP,
        StopReason.LENGTH,
        StopReason.CONTEXT,
        StopReason.LENGTH,
        StopReason.CONTEXT,
    ]
    assert [token in stop_tokens for token in made["token"].tokens] == [False] * (len(made["token"].tokens) - 1) + [
        True
    ]
    texts = [decode(load_tokenizer(model), made["string"].tokens[:end]) for end in (-1, None)]
    assert "a" not in texts[0] and "1b" not in texts[0] and ("a" in texts[1] or "1b" in texts[1])
    assert [len(made[name].tokens) for name in ("length", "context", "both", "full")] == [5, 7, 7, 0]


def test_score_is_parity_with_transformers_up_to_a_whole_context(server: str, model: str) -> None:
    rows = (prompt(1), prompt(2), prompt(30, seed=1), prompt(CONTEXT - 1, seed=2))

    async def scenario() -> Any:
        async with opened(model, server) as engine:
            with pytest.raises(RequestRefused, match="vLLM scores up to 511"):
                await engine.score((prompt(CONTEXT),), 1.0)
            with pytest.raises(RequestRefused, match="at temperature 1 only"):
                await engine.score((prompt(5),), 0.5)
            return await engine.score(rows, 1.0)

    scores, reference = run(scenario()), plain_model(model)
    assert scores.version == 0
    for tokens, found in zip(rows, scores.logprobs, strict=True):
        assert np.abs(teacher_forced(reference, tokens) - found).max() < BOUND


def test_a_request_goes_on_from_what_was_sampled_elsewhere(server: str, model: str) -> None:
    """Its completion contains what was given; a stop string across the border is seen; a whole one asks nobody."""
    request = make_request(prompt(30), max_tokens=40)

    async def scenario() -> None:
        async with opened(model, server) as engine:
            _, whole = await complete(engine, request)
            given = Chunk(whole.tokens[:15], whole.logprobs[:15] - 1, whole.versions[:15] + 7)
            chunks, continued = await complete(engine, dataclasses.replace(request, sampled=given))
            assert len(continued.tokens) == 40 and continued.stop is StopReason.LENGTH
            for name in ("tokens", "logprobs", "versions"):
                assert np.array_equal(getattr(continued, name)[:15], getattr(given, name))
            assert set(continued.versions[15:]) == {0}
            check_chunks(chunks, continued, num_given=15)
            exact = teacher_forced(plain_model(model), np.concatenate([request.tokens, continued.tokens]))[30:]
            assert np.abs(exact - continued.logprobs)[15:].max() < BOUND
            _, again = await complete(engine, dataclasses.replace(request, sampled=given))
            assert np.array_equal(continued.tokens, again.tokens), "a retry samples alike"

            border = decode(load_tokenizer(model), continued.tokens[14:16])
            sampling = dataclasses.replace(request.sampling, stop_strings=(border,))
            _, stopped = await complete(engine, dataclasses.replace(request, sampled=given, sampling=sampling))
            assert np.array_equal(stopped.tokens, continued.tokens[:16]) and stopped.stop is StopReason.STOP

            num_asked = (await engine.stats()).num_prefilled
            everything = Chunk(whole.tokens, whole.logprobs, whole.versions)
            chunks, done = await complete(engine, dataclasses.replace(request, sampled=everything))
            assert not chunks and done.stop is StopReason.LENGTH and np.array_equal(done.tokens, whole.tokens)
            assert (await engine.stats()).num_prefilled == num_asked

    run(scenario())


def test_an_aborted_request_ends_with_what_it_had_and_leaves_the_server(server: str, model: str, spans: bool) -> None:
    async def scenario() -> None:
        async with opened(model, server, max_num_seqs=2) as engine:
            trainer = Trainer(model)
            first, second, waiting = (Watched(engine, r) for r in group_of(3, prompt(20), max_tokens=480))
            await asyncio.gather(first.began.wait(), second.began.wait())
            await engine.abort(waiting.request.key)
            assert (await waiting.task).stop is StopReason.ABORTED
            await engine.abort(first.request.key)
            # After a swap only the server knows which weights sampled what, and an abort still gets to know it.
            await trainer.update(engine, "recompute")
            await asyncio.sleep(0.2)
            await engine.abort(second.request.key)
            await engine.abort(make_request(prompt(3), group=99).key)
            for watched in (first, second):
                completion = await watched.task
                assert completion.stop is StopReason.ABORTED and 0 < len(completion.tokens) < 480
                forced = trainer.forced(watched.request, completion)
                assert np.abs(forced - completion.logprobs).max() < BOUND
            deadline = time.monotonic() + 20
            while (stats := await engine.stats()).running or stats.waiting:
                assert time.monotonic() < deadline, "the server still works on aborted requests"
                await asyncio.sleep(0.05)

    run(scenario())


# Weights


@pytest.mark.parametrize("kv", ["recompute", "keep", "drain"])
def test_invariant_3_updates_in_mid_sequence_stamp_what_each_version_sampled(
    server: str, model: str, spans: bool, kv: Any
) -> None:
    """Two updates with a dozen requests in flight, and more that arrive as they happen; each segment teacher-forced."""
    if kv == "keep":
        only_with(spans)

    async def scenario() -> tuple[Trainer, list[Watched], list[SwapReport]]:
        async with opened(model, server, kv_on_swap=kv) as engine:
            trainer, reports = Trainer(model), []
            watched = [Watched(engine, r) for g in range(3) for r in group_of(4, prompt(70, g), g, max_tokens=300)]
            for number in (10, 20):
                await asyncio.gather(*(one.began.wait() for one in watched))
                late = group_of(3, prompt(70, 1), number, max_tokens=40)
                watched += [Watched(engine, request) for request in late]
                await asyncio.sleep(0)
                reports.append(await trainer.update(engine, kv))
            await asyncio.gather(*(one.task for one in watched))
            scores = await engine.score((prompt(30),), 1.0)
            assert scores.version == 2
            assert np.abs(teacher_forced(trainer.models[2], prompt(30)) - scores.logprobs[0]).max() < BOUND
            return trainer, watched, reports

    trainer, watched, reports = run(scenario())
    num_mixed = 0
    for one in watched:
        completion = one.task.result()
        assert np.all(np.diff(completion.versions) >= 0)
        assert np.abs(trainer.forced(one.request, completion, kv) - completion.logprobs).max() < BOUND
        check_chunks(one.chunks, completion)
        num_mixed += len(set(completion.versions)) > 1
    assert all(0 < report.pause_ms < 60_000 for report in reports)
    assert (num_mixed == 0) if kv == "drain" else (num_mixed >= 8)
    assert kv != "recompute" or reports[0].num_recomputed >= 12 * 70


def test_a_groups_prompt_is_computed_once_and_never_again_used_under_newer_weights(server: str, model: str) -> None:
    """The prefix cache is used within a version, by blocks of 32 tokens, and not across versions."""
    text = prompt(100)

    async def prefilled(engine: VllmEngine, group: int) -> tuple[int, list[Completion]]:
        before = (await engine.stats()).num_prefilled
        made = [(await complete(engine, request))[1] for request in group_of(4, text, group, max_tokens=4)]
        return (await engine.stats()).num_prefilled - before, made

    async def scenario() -> None:
        async with opened(model, server) as engine:
            trainer = Trainer(model)
            for version in range(2):
                num_computed, made = await prefilled(engine, version)
                assert num_computed == 100 + 3 * (100 - 96)
                for completion in made:
                    forced = trainer.forced(make_request(text), completion)
                    assert np.abs(forced - completion.logprobs).max() < BOUND and set(completion.versions) == {version}
                if version == 0:
                    await trainer.update(engine, "recompute")

    run(scenario())


# Servers that will not do


def test_a_server_that_does_not_fit_is_refused_in_one_sentence(
    server: str, model: str, spans: bool, tiny_variant: Callable[[str], str], tmp_path: Path
) -> None:
    def refusal(path: str = model, mode: str = PROCESSED, **settings: Any) -> str:
        async def scenario() -> None:
            async with opened(path, server, mode, **settings):
                pass

        with pytest.raises(ConfigError) as error:
            run(scenario())
        assert "\n" not in str(error.value)
        return str(error.value)

    assert f"start it with --logprobs-mode {RAW}" in refusal(mode=RAW)
    assert "start it on a copy of that model" in refusal(tiny_variant("llama-wide"))  # other tokens than the server's
    assert "set engine.weights_dir to a directory that both can see" in refusal(tiny_variant("llama-untied"))
    assert f"engine.weights_dir = {tmp_path / 'none'} cannot be written to" in refusal(
        weights_dir=str(tmp_path / "none")
    )
    if not spans:
        assert "engine.kv_on_swap = keep needs that; serve with --enable-scale-out" in refusal(kv_on_swap="keep")
