"""Compiled blocks: one graph for all layers of a kind and any number of tokens, with the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed import draw_rows, policy_logprobs
from torch import Tensor
from torch._dynamo.utils import counters

from headway.config import InitSection
from headway.model.attention import PackedAttention
from headway.model.loading import build_model, compile_blocks, load_model
from headway.model.logprobs import Policy, hidden_states

FAMILIES = ["llama", "llama-untied", "qwen2", "qwen2-tied", "qwen3"]
FAMILIES += ["mistral", "gemma", "gemma2", "gemma2-untied", "gemma3_text"]
CUDA = torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
Variant = Callable[[str], str]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_compiled_blocks_of_every_kind_of_layer_give_the_same_log_probs(tiny_variant: Variant, family: str) -> None:
    plain, compiled = (Policy(load_model(tiny_variant(family), torch.bfloat16), 16).to(CUDA) for _ in range(2))
    torch._dynamo.reset()
    compile_blocks(compiled.model)
    with torch.no_grad():
        for lengths in ([9, 40, 60], [30, 33], [70]):
            found, expected = (policy_logprobs(policy, draw_rows(lengths), 1.0)[0] for policy in (compiled, plain))
            assert (found - expected).abs().max() < 0.2


class Straight(PackedAttention):
    """What packed attention is to a compiler, without its loop over sequences."""

    def attend(self, query_THD: Tensor, *others: Any) -> Tensor:
        _, _, scaling, window, softcap = others
        return query_THD * scaling * self.longest + window + softcap


def test_one_compiled_block_serves_every_layer_and_any_number_of_tokens() -> None:
    """Else a model of 28 layers would be compiled 28 times, or, past torch's limit, not at all."""
    init = InitSection(hidden_size=32, num_layers=9, num_heads=2, num_kv_heads=1, intermediate_size=48)
    model = build_model(init, 20, 0, 1, 64, seed=0).train()
    torch._dynamo.reset()
    counters.clear()
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend="eager")
    for lengths in ([9, 4], [7], [3, 3, 12]):
        tokens = torch.arange(sum(lengths)) % 20
        hidden_states(model, tokens, tokens, Straight(lengths)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_layers_with_and_without_a_window_are_compiled_once_each(tiny_variant: Variant) -> None:
    torch._dynamo.reset()
    for family, num_kinds in (("mistral", 1), ("gemma3_text", 2)):
        model = load_model(tiny_variant(family)).train()
        torch._dynamo.reset()
        counters.clear()
        for layer in model.model.layers:
            layer.compile(dynamic=True, backend="eager")
        for lengths in ([9, 4], [7], [3, 3, 12]):
            tokens = torch.arange(sum(lengths)) % 20
            hidden_states(model, tokens, tokens, Straight(lengths)).sum().backward()
        assert counters["stats"]["unique_graphs"] == num_kinds and not counters["graph_break"]


def test_capped_attention_which_goes_sequence_by_sequence_is_left_out_of_what_is_compiled(
    tiny_variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(type(self).__name__))
    compile_blocks(load_model(tiny_variant("gemma2")))
    compile_blocks(load_model(tiny_variant("gemma3_text")))
    assert compiled == ["Gemma2MLP"] * 2 + ["Gemma3DecoderLayer"] * 2
