"""The engine's decoder: the module's numbers by fewer operations, in torch and in C++, whoever shares the batch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from driving import drive, make_core, make_request, plain_model, prompt, teacher_forced

from headway.engine.embedded import native
from headway.engine.embedded.decoder import TorchOperations

VARIANTS = ["llama", "llama-untied", "qwen2", "qwen3", "llama-wide", "qwen2-wide"]
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
    reference = plain_model(path)
    for request in requests:
        tokens = np.concatenate([request.tokens, outcome[request].tokens])
        expected = teacher_forced(reference, tokens)
        assert np.abs(outcome[request].logprobs - expected[len(request.tokens) :]).max() < 2e-5
        assert np.abs(core.score((tokens,), 1.0).logprobs[0] - expected).max() < 2e-5


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
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


def test_a_number_that_is_none_stays_visible(tiny_model: str, operations: str) -> None:
    """A broken weight must reach the log-prob, where the trainer looks, and not be clamped away on its way."""
    core = make_core(tiny_model, deterministic=False)
    core.model.get_parameter("model.layers.0.input_layernorm.weight").data.fill_(float("nan"))
    request = make_request(prompt(8), max_tokens=2)
    assert np.isnan(drive(core, [request])[request].logprobs).all()


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
