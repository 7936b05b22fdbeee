"""A model that does not fit is one sentence before anything is loaded."""

from typing import Any

import pytest

from headway.config import Config, validate
from headway.errors import ConfigError
from headway.model import memory
from headway.model.loading import load_config, load_model, model_shape
from headway.model.memory import check_fit, count_parameters, needed
from headway.model.shape import ModelShape

QWEN_1_5B = ModelShape(
    num_layers=28,
    hidden_size=1536,
    intermediate_size=8960,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=151936,
)
CONTEXT = 4096


def config_on(engine: str, trainer: str, sections: dict[str, Any] | None = None) -> Config:
    made = {"model": {"path": "model", "dtype": "bfloat16"}, "task": {"train": "rows.jsonl", "verifier": "x.py:verify"}}
    made |= {"engine": {"device": engine}, "trainer": {"device": trainer, "token_budget": 8192}}
    for name, knobs in (sections or {}).items():
        made[name] = {**made.get(name, {}), **knobs}
    return validate(made)


def test_parameters_are_counted_as_a_model_has_them(tiny_model: str) -> None:
    config, model = load_config(tiny_model), load_model(tiny_model)
    counted = count_parameters(model_shape(config), bool(config.tie_word_embeddings))
    assert counted == sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(QWEN_1_5B, tied=True) == pytest.approx(1.54e9, rel=0.01)


@pytest.mark.parametrize(
    ("sections", "engine", "trainer"),
    [
        ({}, 2 * 2 * 1.54e9, 18 * 1.54e9),
        ({"trainer": {"ranks": 2, "device": "cuda:1, cuda:2"}}, 2 * 2 * 1.54e9, 9 * 1.54e9),
        ({"engine": {"kv_tokens": 10**6}}, 2 * 2 * 1.54e9 + 28.7e9, 18 * 1.54e9),
        ({"model": {"dtype": "float32"}}, 2 * 4 * 1.54e9, 16 * 1.54e9),
    ],
)
def test_what_each_worker_needs(sections: dict[str, Any], engine: float, trainer: float) -> None:
    found = needed(config_on("cuda:0", "cuda:1", sections), QWEN_1_5B, True, CONTEXT)
    assert found["cuda:0"]["engine"] == pytest.approx(engine, rel=0.1)
    assert min(found["cuda:1"].values()) == pytest.approx(trainer, rel=0.01)


def test_a_model_too_large_for_its_gpu_is_refused_with_what_each_worker_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "capacity", lambda device: 24 * 10**9)
    with pytest.raises(ConfigError) as refused:
        check_fit(config_on("cuda", "cuda"), QWEN_1_5B, True, CONTEXT)
    said = str(refused.value)
    assert said.startswith("model needs at least 34.2") and said.count(". ") == 0
    assert "on cuda (engine 6.4" in said and "trainer 27.79" in said and "which has 24.00 GB; put engine" in said
    apart = config_on("cuda:0", "cuda:1, cuda:2", {"trainer": {"ranks": 2}})
    check_fit(apart, QWEN_1_5B, True, CONTEXT)
    check_fit(config_on("cuda", "cpu"), QWEN_1_5B, True, CONTEXT)


def test_no_gpu_is_asked_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "capacity", lambda device: pytest.fail(f"asked for {device}"))
    check_fit(config_on("cpu", "cpu"), QWEN_1_5B, True, CONTEXT)
