"""The engine's decoder: the module's numbers by fewer operations, in torch and in C++, whatever shares the batch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import training
from driving import Swapper, alone, drive, group_of, make_core, make_request, plain_model, prompt, teacher_forced

from headway.engine.embedded import native
from headway.engine.embedded.decoder import TorchOperations
from headway.errors import RequestRefused

VARIANTS = ["llama", "llama-untied", "qwen2", "qwen3", "llama-wide", "qwen2-wide"]
VARIANTS += ["mistral", "gemma", "gemma2", "gemma2-untied", "gemma2-wide", "gemma3_text"]
OPERATIONS = ["torch", "native"]


@pytest.fixture(params=OPERATIONS)
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines made in the test use these operations."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C++ compiler here")
    return str(request.param)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoded_and_scored_logprobs_are_those_of_transformers(
    tiny_variant: Callable[[str], str], variant: str, operations: str
) -> None:
    path = tiny_variant(variant)
    core = make_core(path, deterministic=False, prefill_chunk=16)
    assert isinstance(core._executor.operations, TorchOperations) == (operations == "torch")
    requests = [make_request(prompt(length, seed=length), group=length) for length in (1, 5, 40, 70)]
    outcome = drive(core, requests)
    reference = training.plain_model(path)
    for request in requests:
        tokens = np.concatenate([request.tokens, outcome[request].tokens])
        expected = teacher_forced(reference, tokens)
        assert np.abs(outcome[request].logprobs - expected[len(request.tokens) :]).max() < 2e-5
        assert np.abs(core.score((tokens,), 1.0).logprobs[0] - expected).max() < 2e-5


@pytest.mark.parametrize("variant", ["mistral", "gemma2", "gemma3_text"])
def test_who_shares_the_batch_changes_no_bit(tiny_variant: Callable[[str], str], variant: str, operations: str) -> None:
    path = tiny_variant(variant)
    requests = [make_request(prompt(length, seed=length), group=length, max_tokens=30) for length in (2, 23, 40, 60)]
    together = drive(make_core(path), requests)
    for request in requests:
        found, expected = together[request], alone(path, request)
        assert np.array_equal(found.tokens, expected.tokens) and np.array_equal(found.logprobs, expected.logprobs)


def test_a_swap_reaches_norms_before_and_after_branches_and_of_heads(
    tiny_variant: Callable[[str], str], operations: str
) -> None:
    path = tiny_variant("gemma3_text")
    core, other = make_core(path, deterministic=False), plain_model(path, noise_seed=3, noise=0.1)
    before = core.score((prompt(40),), 1.0).logprobs[0]
    Swapper().swap(core, other, "recompute")
    request = make_request(prompt(40), max_tokens=8)
    tokens = np.concatenate([request.tokens, drive(core, [request])[request].tokens])
    expected = teacher_forced(other, tokens)
    assert np.abs(core.score((tokens,), 1.0).logprobs[0] - expected).max() < 2e-5
    assert np.abs(before - expected[:40]).max() > 0.1


@pytest.mark.parametrize("variant", ["llama", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text"])
def test_the_two_kinds_of_operations_agree_in_bfloat16(
    tiny_variant: Callable[[str], str], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding to bfloat16 happens in the same places, so what is left is the order of sums."""
    if native.library() is None:
        pytest.skip("no C++ compiler here")
    path = tiny_variant(variant)
    tokens = prompt(60)
    found = [make_core(path, dtype=torch.bfloat16).score((tokens,), 1.0).logprobs[0]]
    monkeypatch.setattr(native, "library", lambda: None)
    found.append(make_core(path, dtype=torch.bfloat16).score((tokens,), 1.0).logprobs[0])
    assert np.abs(found[0] - found[1]).mean() < 5e-3
    assert np.abs(found[0] - found[1]).max() < 5e-2


def test_weights_that_give_nan_end_requests_with_an_error_and_scores_with_nan(tiny_model: str, operations: str) -> None:
    """A broken weight must reach the comparison of scores, and never a trajectory."""
    core = make_core(tiny_model, deterministic=False)
    core.model.get_parameter("model.layers.0.input_layernorm.weight").data.fill_(float("nan"))
    outcome = drive(core, [make_request(prompt(8), max_tokens=2)])
    assert not outcome.completions and "are not finite" in str(outcome.errors["train/0/0/0"])
    assert np.isnan(core.score((prompt(8),), 1.0).logprobs[0][1:]).all()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_whose_logits_are_nan_fails_alone_and_leaves_nothing_behind(
    tiny_variant: Callable[[str], str], operations: str, deterministic: bool
) -> None:
    """One token's embedding is NaN: the request that holds it is named, and neither others of its batch nor those that
    get its place in memory afterwards notice."""
    path = tiny_variant("llama-untied")
    requests = [*group_of(3, prompt(40), max_tokens=30), make_request(prompt(70, seed=1), group=1, max_tokens=40)]
    calm = drive(make_core(path, deterministic), requests)
    seen = {*prompt(40).tolist(), *prompt(70, seed=1).tolist(), *(t for r in requests for t in calm[r].tokens.tolist())}
    poison = next(token for token in range(50) if token not in seen)
    core = make_core(path, deterministic)
    core.model.get_parameter("model.embed_tokens.weight").data[poison] = float("nan")
    poisoned = [
        make_request(np.append(prompt(39), poison).astype(np.int32), group=5, max_tokens=30),
        *group_of(2, np.append(prompt(9), [poison, 5]).astype(np.int32), group=6, max_tokens=30),
    ]
    together = drive(core, [poisoned[0], *requests, *poisoned[1:]])
    assert together.errors.keys() == {str(request.key) for request in poisoned}
    error = together.errors["train/5/0/0"]
    assert isinstance(error, RequestRefused)
    assert "request train/5/0/0 cannot be generated: the logits after its 40 tokens are not finite" in str(error)
    drive(core, poisoned)
    core.score((poisoned[0].tokens,), 1.0)
    for outcome in (together, drive(core, requests)):
        for request in requests:
            assert outcome[request].tokens.tolist() == calm[request].tokens.tolist()
            assert np.abs(outcome[request].logprobs - calm[request].logprobs).max() < (1e-9 if deterministic else 1e-5)
    assert core.stats().kv_used == 0


def test_without_a_compiler_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiler", lambda: None)
    assert native.library.__wrapped__() is None


def test_a_compiler_that_fails_costs_the_library_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "compiler", lambda: "/bin/false")
    assert native.library.__wrapped__() is None
    assert list((tmp_path / "headway").iterdir()) == []
