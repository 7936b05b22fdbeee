"""Shared fixtures: tiny model directories with a character tokenizer, built once a session. torch only where asked for.

`tiny_model` is the one most tests want: a Llama of 2 layers, width 64, 4 heads over 2 key/value heads, tied head,
context 512. `tiny_variant(name)` builds another family or dtype next to it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is first imported, here and in the processes tests start

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=().,:?\n"
CONTEXT = 512
VARIANTS = (
    "llama",
    "llama-untied",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3-tied",
    "mistral",
    "gemma",
    "gemma3_text",
    "llama-wide",
    "qwen2-wide",
)
"""Those that transformers runs by sdpa: all but gemma2, whose soft cap it has in eager attention alone."""
WINDOW = 24
PECULIAR: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
    },
}
"""What a family has that others have not, in numbers that matter to a model this small."""


def build_variant(directory: Path, name: str) -> None:
    """A model directory of the named family: `-tied` or `-untied` says how its head is, where it is not the usual way;
    `-wide` has few layers whose matrices, and the head, are as large as those the engine treats apart.

    Biases and norms are drawn too: as initialised (0 and 1), an engine that left them out would go unnoticed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headway.model.tokenizer import build_character_tokenizer
    from headway.training.checkpoint import save_model

    torch.set_num_threads(1)
    tokenizer = build_character_tokenizer(ALPHABET)
    family, _, kind = name.partition("-")
    wide, gemma = kind == "wide", family.startswith("gemma")
    sizes: dict[str, Any] = {
        "vocab_size": 512 if wide else len(tokenizer),
        "hidden_size": 512 if wide else 64,
        "intermediate_size": 512 if wide else 128,
        "num_hidden_layers": 1 if wide and not gemma else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256 if wide and gemma else 128 if wide else 32 if family == "qwen3" else 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 512**-0.5 if wide else 64**-0.5,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": kind == "tied" or ((family == "llama" or gemma) and kind != "untied"),
        **PECULIAR.get(family, {}),
    }
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn(parameter.shape)
    save_model(directory, model, tokenizer)


@pytest.fixture(scope="session")
def tiny_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a variant by name, built when first asked for."""
    parent = tmp_path_factory.mktemp("models")

    def variant(name: str) -> str:
        if not (parent / name).is_dir():
            build_variant(parent / name, name)
        return str(parent / name)

    return variant


@pytest.fixture(scope="session")
def tiny_model(tiny_variant: Callable[[str], str]) -> str:
    """A model directory every part of Headway can load within milliseconds."""
    return tiny_variant("llama")


@pytest.fixture(scope="module")
def make_stage(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A controller's stage (`stage.MakeStage`) in a directory of its own."""
    from stage import stage_maker

    return stage_maker(tiny_model, tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def stage(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two trainer ranks in processes of their own (`ranked.Stage`)."""
    from ranked import Stage

    made = Stage(tiny_model, 2, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture
def publisher() -> Any:
    """One that serves its weights over connections (`weights.Publisher`)."""
    from headway.weights.publish import Publisher

    made = Publisher(["stream"])
    yield made
    made.close()


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights travel in many pieces."""
    from headway.weights import receive

    monkeypatch.setattr(receive, "_BUCKET_BYTES", 1000)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who fetches weights tries again at once."""
    from headway.weights import stream

    monkeypatch.setattr(stream, "_PAUSE_S", 0.001)
