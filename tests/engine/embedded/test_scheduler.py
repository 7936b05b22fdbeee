"""The embedded engine's core, step by step: whose weights sampled a token, why a completion ended, and that neither
an interruption nor a neighbour can be seen in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VARIANTS
from driving import (
    Outcome,
    Swapper,
    alone,
    drive,
    forced_with_kept_kv,
    group_of,
    make_core,
    make_request,
    plain_model,
    prompt,
    teacher_forced,
)
from transformers import GPT2Config, MixtralConfig, Qwen2Config

from headway.engine.embedded.scheduler import EngineCore
from headway.engine.protocol import KvPolicy
from headway.errors import ConfigError, InvariantBroken, RequestRefused
from headway.model.loading import load_model
from headway.types import Completion, Request, StopReason


def whole(request: Request, completion: Completion) -> np.ndarray:
    return np.concatenate([request.tokens, completion.tokens])


def assert_same(found: Completion, expected: Completion, atol: float = 0.0) -> None:
    """The same tokens for the same reason; log-probs bit for bit, or to `atol`."""
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.stop == expected.stop
    if atol:
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=atol, rtol=0)
    else:
        assert found.logprobs.tobytes() == expected.logprobs.tobytes()


def mixed_requests() -> list[Request]:
    """A group of three, prompts from one token to several chunks, and settings of all kinds."""
    return [
        *group_of(3, prompt(90, seed=1), group=0, max_tokens=40),
        make_request(prompt(1, seed=2), group=1, max_tokens=45),
        make_request(prompt(64, seed=3), group=2, max_tokens=30, temperature=0.6),
        make_request(prompt(20, seed=4), group=3, max_tokens=70, top_k=5),
        make_request(prompt(150, seed=5), group=4, max_tokens=25, top_p=0.8, stream="eval"),
    ]


def run_with_three_versions(path: str, kv: KvPolicy, deterministic: bool) -> tuple[list[Any], list[Request], Outcome]:
    models = [plain_model(path), plain_model(path, noise_seed=1), plain_model(path, noise_seed=2)]
    swapper, requests = Swapper(), mixed_requests()
    core = make_core(path, deterministic, chunk_tokens=7)
    events = {9: lambda core: swapper.swap(core, models[1], kv), 24: lambda core: swapper.swap(core, models[2], kv)}
    outcome = drive(core, requests, arrivals=[0, 0, 5, 0, 3, 12, 10], events=events)
    assert [report.num_interrupted > 0 for report in swapper.reports] == [True, True]
    assert [report.num_recomputed > 0 for report in swapper.reports] == [kv == "recompute"] * 2
    return models, requests, outcome


@pytest.mark.parametrize("deterministic", [True, False])
def test_invariant_3_teacher_forcing_reproduces_each_segment_under_its_version(
    tiny_model: str, deterministic: bool
) -> None:
    """The engine stamps versions. Under `recompute` a token is sampled from the whole prefix as its version sees it."""
    models, requests, outcome = run_with_three_versions(tiny_model, "recompute", deterministic)
    num_versions = set()
    for request in requests:
        completion = outcome[request]
        num_versions.add(len(set(completion.versions)))
        assert (np.diff(completion.versions) >= 0).all()
        tokens, temperature = whole(request, completion), request.sampling.temperature
        forced = [teacher_forced(model, tokens, temperature)[len(request.tokens) :] for model in models]
        for version in set(completion.versions):
            segment = completion.versions == version
            np.testing.assert_allclose(completion.logprobs[segment], forced[version][segment], atol=1e-5, rtol=0)
            other = forced[(version + 1) % 3]
            assert np.abs(completion.logprobs[segment] - other[segment]).max() > 0.01, "the weights must differ visibly"
    assert max(num_versions) == 3


@pytest.mark.parametrize("deterministic", [True, False])
def test_invariant_3_under_keep_each_earlier_segments_kv_is_its_own_versions(
    tiny_model: str, deterministic: bool
) -> None:
    """Teacher-forcing reproduces the log-probs, with each earlier segment's KV computed under its own version."""
    models, requests, outcome = run_with_three_versions(tiny_model, "keep", deterministic)
    differs_from_recompute = False
    for request in requests:
        completion = outcome[request]
        if request.sampling.temperature != 1:
            continue
        tokens, num_prompt = whole(request, completion), len(request.tokens)
        expected = forced_with_kept_kv(models, tokens, num_prompt, completion.versions)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)
        last = teacher_forced(models[completion.versions[-1]], tokens)[num_prompt:]
        differs_from_recompute |= bool(np.abs(last - completion.logprobs)[-1] > 1e-3)
    assert differs_from_recompute, "the old keys and values must be visible in the result"


def swaps_to_itself(path: str, kv: KvPolicy, steps: list[int]) -> tuple[dict[int, Any], Swapper]:
    swapper, same = Swapper(), plain_model(path)
    return {step: lambda core: swapper.swap(core, same, kv) for step in steps}, swapper


@pytest.mark.parametrize("steps", [[1], [7], [2, 3, 4, 11, 30], list(range(1, 60, 2))])
def test_invariant_5_interruption_is_invisible_bit_for_bit_under_keep(tiny_model: str, steps: list[int]) -> None:
    """Identical weights swapped in at any points, in deterministic mode: only the versions can tell."""
    requests = mixed_requests()
    calm = drive(make_core(tiny_model), requests)
    events, swapper = swaps_to_itself(tiny_model, "keep", steps)
    disturbed = drive(make_core(tiny_model), requests, events=events)
    for request in requests:
        assert_same(disturbed[request], calm[request])
    newest = max(disturbed[request].versions.max() for request in requests)
    assert newest == len(swapper.reports) == len(steps)


@pytest.mark.parametrize("name", ["llama", "llama-wide"])
def test_invariant_5_where_weights_lie_in_memory_is_invisible_too(
    tiny_variant: Callable[[str], str], name: str
) -> None:
    """A loaded file's tensors start at odd addresses, swapped ones do not; products of a single row notice that."""
    path, request = tiny_variant(name), make_request(prompt(130), max_tokens=60)
    core = make_core(path, max_num_seqs=1)
    loaded = EngineCore(load_model(path), core.section, core.max_context, True, str)
    events, _ = swaps_to_itself(path, "keep", [2, 20, 30])
    calm = drive(core, [request])[request]
    assert_same(drive(loaded, [request], events=events)[request], calm)


@pytest.mark.parametrize("deterministic", [True, False])
def test_invariant_5_interruption_is_invisible_to_the_parity_bound_under_recompute(
    tiny_model: str, deterministic: bool
) -> None:
    requests = mixed_requests()
    calm = drive(make_core(tiny_model, deterministic), requests)
    events, swapper = swaps_to_itself(tiny_model, "recompute", [1, 2, 9, 10, 25, 44])
    disturbed = drive(make_core(tiny_model, deterministic), requests, events=events)
    for request in requests:
        assert_same(disturbed[request], calm[request], atol=1e-5)
    assert sum(report.num_recomputed for report in swapper.reports) > 500


@pytest.mark.parametrize(("name", "max_num_seqs"), [("llama", 7), ("llama", 16), ("qwen2-wide", 7)])
def test_what_a_request_samples_does_not_depend_on_who_shares_its_batch(
    tiny_variant: Callable[[str], str], name: str, max_num_seqs: int
) -> None:
    """Deterministic mode: tokens and log-probs bit for bit alone, in any order, in any batch, at any load."""
    path, requests = tiny_variant(name), mixed_requests()
    expected = [alone(path, request, max_num_seqs=max_num_seqs) for request in requests]
    crowd = [make_request(prompt(10 + 30 * i, seed=50 + i), group=100 + i, max_tokens=60) for i in range(12)]
    draw = np.random.default_rng(0)
    for others in ([], crowd[:3], crowd):
        together = [*requests, *others]
        order = draw.permutation(len(together))
        core = make_core(path, max_num_seqs=max_num_seqs)
        outcome = drive(core, [together[i] for i in order], arrivals=draw.integers(0, 25, len(together)).tolist())
        for request, completion in zip(requests, expected, strict=True):
            assert_same(outcome[request], completion)


def test_other_seed_group_trajectory_or_stream_means_other_tokens(tiny_model: str) -> None:
    base = make_request(prompt(12), max_tokens=30)
    others = [
        make_request(prompt(12), max_tokens=30, seed=8),
        make_request(prompt(12), max_tokens=30, group=1),
        make_request(prompt(12), max_tokens=30, trajectory=1),
        make_request(prompt(12), max_tokens=30, stream="eval"),
    ]
    texts = {alone(tiny_model, request).tokens.tobytes() for request in [base, *others]}
    assert len(texts) == 5
    assert alone(tiny_model, base).tokens.tobytes() in texts, "and the same request means the same tokens"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_supported_family_has_the_logprobs_of_plain_transformers(
    tiny_variant: Callable[[str], str], name: str
) -> None:
    path = tiny_variant(name)
    requests = [make_request(prompt(70, seed=1), max_tokens=70, group=1), make_request(prompt(9), temperature=0.7)]
    core = make_core(path, deterministic=False)
    model, outcome = plain_model(path), drive(core, requests)
    for request in requests:
        tokens, temperature = whole(request, outcome[request]), request.sampling.temperature
        forced = teacher_forced(model, tokens, temperature)
        np.testing.assert_allclose(outcome[request].logprobs, forced[len(request.tokens) :], atol=1e-5, rtol=0)
        np.testing.assert_allclose(core.score((tokens,), temperature).logprobs[0], forced, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [
        ("llama", torch.float32, 1e-5),
        ("qwen2", torch.float32, 1e-5),
        ("llama-wide", torch.float32, 1e-5),
        ("qwen2-wide", torch.float32, 1e-5),
        ("llama", torch.bfloat16, 0.2),
        ("qwen2-wide", torch.bfloat16, 0.2),
    ],
)
def test_a_swap_reaches_every_matrix_tied_or_not_wide_or_not_whatever_the_type(
    tiny_variant: Callable[[str], str], name: str, dtype: torch.dtype, bound: float
) -> None:
    path = tiny_variant(name)
    core, swapper = make_core(path, dtype=dtype), Swapper()
    before = core.score((prompt(60),), 1.0).logprobs[0]
    for version in (1, 2, 3):
        other = plain_model(path, noise_seed=version, noise=0.02 if name.endswith("wide") else 0.1)
        swapper.swap(core, other, "recompute")
        after = core.score((prompt(60),), 1.0)
        assert after.version == version
        np.testing.assert_allclose(after.logprobs[0], teacher_forced(other, prompt(60)), atol=bound, rtol=0)
        assert np.abs(after.logprobs[0] - before).max() > 5 * bound
        before = after.logprobs[0]


def test_a_bf16_model_runs_and_stays_near_fp32(tiny_model: str) -> None:
    request = make_request(prompt(40), max_tokens=50)
    completion = alone(tiny_model, request, dtype=torch.bfloat16)
    assert len(completion.tokens) == 50
    exact = teacher_forced(plain_model(tiny_model), whole(request, completion))[40:]
    gap = np.abs(completion.logprobs - exact)
    assert 1e-4 < gap.max() < 0.15
    assert gap.mean() < 0.03


@pytest.mark.parametrize("config", [GPT2Config(n_layer=1, n_embd=8, n_head=1), MixtralConfig(num_hidden_layers=1)])
def test_a_family_the_engine_cannot_run_is_refused_by_name(tmp_path: Path, config: GPT2Config | MixtralConfig) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{config.model_type} model, which the trainer does not run.*families llama"):
        load_model(str(tmp_path))


def test_sliding_window_attention_is_refused(tmp_path: Path) -> None:
    Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=16).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sliding-window"):
        load_model(str(tmp_path))


def test_weights_that_were_not_staged_or_go_back_are_refused(tiny_model: str) -> None:
    core, swapper, model = make_core(tiny_model), Swapper(), plain_model(tiny_model)
    with pytest.raises(InvariantBroken, match="not staged"):
        core.swap(1, "keep")
    swapper.swap(core, model, "keep")
    with pytest.raises(InvariantBroken, match="never go back"):
        core.stage(swapper.publisher.publish(1, dict(core.model.named_parameters())))
    assert core.version == 1


def test_chunks_laid_end_to_end_are_the_completion(tiny_model: str) -> None:
    requests = [make_request(prompt(5), group=i, max_tokens=num) for i, num in enumerate([1, 9, 10, 11, 35])]
    outcome = drive(make_core(tiny_model, chunk_tokens=10), requests)
    for request in requests:
        chunks, completion = outcome.chunks[str(request.key)], outcome[request]
        assert [len(chunk.tokens) for chunk in chunks[:-1]] == [10] * (len(chunks) - 1)
        for field in ("tokens", "logprobs", "versions"):
            laid = np.concatenate([getattr(chunk, field) for chunk in chunks])
            assert laid.tobytes() == getattr(completion, field).tobytes()


def test_greedy_takes_the_likeliest_token_each_time(tiny_model: str) -> None:
    request = make_request(prompt(10), temperature=0.0, max_tokens=15)
    completion = alone(tiny_model, request)
    tokens, model = whole(request, completion), plain_model(tiny_model)
    with torch.inference_mode():
        likeliest = model(torch.from_numpy(tokens).long()[None]).logits[0].argmax(-1).numpy()
    assert completion.tokens.tolist() == likeliest[9:-1].tolist()
    np.testing.assert_allclose(completion.logprobs, teacher_forced(model, tokens)[10:], atol=1e-5, rtol=0)


def test_invariant_9_stop_reasons_travel_with_the_completion(tiny_model: str) -> None:
    free = alone(tiny_model, make_request(prompt(10), max_tokens=60))
    assert free.stop == StopReason.LENGTH and len(free.tokens) == 60
    # A stop token ends the text and belongs to it; whichever listed one comes first.
    first = free.tokens.tolist().index(free.tokens[20])
    stopped = alone(tiny_model, make_request(prompt(10), max_tokens=60, stop_tokens=(10**6, int(free.tokens[20]))))
    assert stopped.stop == StopReason.STOP
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    # On the last allowed token a stop is still a stop: truncation is never inferred from length.
    exact = alone(tiny_model, make_request(prompt(10), max_tokens=first + 1, stop_tokens=(int(free.tokens[20]),)))
    assert exact.stop == StopReason.STOP and len(exact.tokens) == first + 1
    full = alone(tiny_model, make_request(prompt(10), max_tokens=60), context=40)
    assert full.stop == StopReason.CONTEXT and full.tokens.tolist() == free.tokens[:30].tolist()
    both = alone(tiny_model, make_request(prompt(10), max_tokens=30), context=40)
    assert both.stop == StopReason.LENGTH and len(both.tokens) == 30


def test_a_stop_string_that_spans_tokens_ends_the_completion(tiny_model: str) -> None:
    from headway.model.tokenizer import decode, load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    free = alone(tiny_model, make_request(prompt(10, seed=6), max_tokens=80))
    text = decode(tokenizer, free.tokens)
    stop = text[20:25]
    sampling: dict[str, Any] = {"max_tokens": 80, "stop_strings": ("not in there", stop)}
    stopped = alone(tiny_model, make_request(prompt(10, seed=6), **sampling))
    assert stopped.stop == StopReason.STOP
    assert decode(tokenizer, stopped.tokens) == text[: text.index(stop) + 5]
    # What the prompt ends with is not the completion's: a stop string never straddles the two.
    tail = decode(tokenizer, prompt(10, seed=6))[-2:] + text[0]
    assert tail not in text
    across = alone(tiny_model, make_request(prompt(10, seed=6), max_tokens=80, stop_strings=(tail,)))
    assert across.stop == StopReason.LENGTH


def test_a_prompt_as_long_as_the_context_completes_with_nothing(tiny_model: str) -> None:
    core = make_core(tiny_model, context=64)
    outcome = drive(core, [make_request(prompt(64), group=0), make_request(prompt(63), group=1)])
    nothing, one = outcome.completions.values()
    assert nothing.stop == StopReason.CONTEXT and len(nothing.tokens) == len(nothing.logprobs) == 0
    assert one.stop == StopReason.CONTEXT and len(one.tokens) == 1


def test_what_the_engine_cannot_serve_is_refused_and_costs_nobody_else_anything(tiny_model: str) -> None:
    core, good = make_core(tiny_model, context=64), make_request(prompt(20))
    with pytest.raises(RequestRefused, match="65 tokens, more than the context of 64"):
        core.submit(make_request(prompt(65)))
    for outside in (-1, 52, 10**6):
        with pytest.raises(RequestRefused, match="outside the model's vocabulary of 52"):
            core.submit(make_request(np.array([5, outside, 5], np.int32), group=1))
        with pytest.raises(RequestRefused, match="vocabulary"):
            core.score((np.array([5, outside, 5], np.int32),), 1.0)
    with pytest.raises(RequestRefused, match="65 tokens"):
        core.score((prompt(65),), 1.0)
    assert_same(drive(core, [good])[good], alone(tiny_model, good, context=64))
    assert core.stats().kv_used == 0
