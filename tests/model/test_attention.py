"""Packed attention against plain transformers and a schoolbook formula."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from packed import draw_rows, policy_logprobs
from torch import Tensor
from training import distance, gradients_of, plain_model, reference_logprobs

from headway.model.attention import PackedAttention, causal_attention
from headway.model.loading import load_model
from headway.model.logprobs import Policy

FAMILIES = ["llama", "llama-untied", "qwen2", "qwen2-tied", "qwen3"]
FAMILIES += ["mistral", "gemma", "gemma2", "gemma2-untied", "gemma3_text"]
CUDA = torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
Variant = Callable[[str], str]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_log_probs_are_those_of_plain_transformers(
    tiny_variant: Variant, family: str, temperature: float
) -> None:
    rows = draw_rows([9, 2, 30, 17, 60])
    with torch.no_grad():
        found, entropy = policy_logprobs(Policy(load_model(tiny_variant(family)), 16), rows, temperature)
        expected = reference_logprobs(plain_model(tiny_variant(family)), rows, [temperature] * len(rows))
    torch.testing.assert_close(found, torch.cat([logprobs[1:] for logprobs in expected]), rtol=0, atol=1e-5)
    assert (entropy > 0).all() and (entropy <= np.log(52)).all()


@pytest.mark.parametrize("family", ["mistral", "gemma", "gemma2", "gemma3_text"])
def test_packed_gradients_are_those_of_plain_transformers(tiny_variant: Variant, family: str) -> None:
    rows, plain = draw_rows([9, 40, 60]), plain_model(tiny_variant(family))
    policy = Policy(load_model(tiny_variant(family)), 16).train()
    upstream = torch.linspace(0.5, 1.5, 106)
    (policy_logprobs(policy, rows, 0.7)[0] * upstream).sum().backward()
    expected = torch.cat([logprobs[1:] for logprobs in reference_logprobs(plain, rows, [0.7] * 3)])
    (expected * upstream).sum().backward()
    assert distance(gradients_of(policy, "model."), gradients_of(plain)) < 1e-5


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("family", ["mistral", "gemma", "gemma2", "gemma3_text"])
def test_packed_log_probs_and_gradients_on_a_gpu_are_those_of_plain_transformers(
    tiny_variant: Variant, family: str, dtype: torch.dtype, bound: float
) -> None:
    rows, plain = draw_rows([9, 40, 60]), plain_model(tiny_variant(family))
    policy = Policy(load_model(tiny_variant(family), dtype), 16).train().to(CUDA)
    found = policy_logprobs(policy, rows, 0.7)[0]
    found.sum().backward()
    expected = torch.cat([logprobs[1:] for logprobs in reference_logprobs(plain, rows, [0.7] * 3)])
    expected.sum().backward()
    assert (found.cpu() - expected).abs().max() < bound
    gradients = {name: gradient.float().cpu() for name, gradient in gradients_of(policy, "model.").items()}
    assert distance(gradients, gradients_of(plain)) < (1e-4 if dtype == torch.float32 else 0.1)


def test_a_sequence_attends_to_nothing_of_its_neighbours_in_the_pack(tiny_model: str) -> None:
    policy = Policy(load_model(tiny_model), 64)
    first, second, third = draw_rows([8, 12, 5])
    with torch.no_grad():
        alone, _ = policy_logprobs(policy, [second], 1.0)
        packed, _ = policy_logprobs(policy, [first, second, third], 1.0)
    torch.testing.assert_close(packed[7 : 7 + 11], alone, rtol=0, atol=1e-6)


LOOKS = [(0, 0.0), (1, 0.0), (4, 0.0), (10, 0.0), (0, 0.5), (4, 0.5)]
"""Windows and soft caps."""


def schoolbook_attention(query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, window: int, softcap: float) -> Tensor:
    """Query by query and head by head, in double precision."""
    out = torch.empty(query_HTD.shape, dtype=torch.double)
    for head, position in np.ndindex(*query_HTD.shape[:2]):
        kv_head = head * len(key_KTD) // len(query_HTD)
        seen = slice(max(0, position - window + 1) if window else 0, position + 1)
        scores = key_KTD[kv_head, seen].double() @ query_HTD[head, position].double() * 0.3
        weights = (softcap * torch.tanh(scores / softcap) if softcap else scores).softmax(0)
        out[head, position] = weights @ value_KTD[kv_head, seen].double()
    return out.float()


@pytest.mark.parametrize(("window", "softcap"), LOOKS)
def test_the_last_queries_of_a_longer_past_see_their_window_of_keys_before_them(window: int, softcap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(heads, 10, 8, generator=generator) for heads in (4, 2, 2))
    expected = schoolbook_attention(query, key, value, window, softcap)
    whole = causal_attention(query, key, value, 0.3, window, softcap)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6)
    last = causal_attention(query[:, 7:], key, value, 0.3, window, softcap)
    torch.testing.assert_close(last, expected[:, 7:], rtol=0, atol=1e-6)
    operands = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    packed = PackedAttention([10]).attend(*operands, 0.3, window, softcap)
    torch.testing.assert_close(packed.transpose(0, 1), expected, rtol=0, atol=1e-6)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("window", "softcap"), [(7, 0.0), (50, 0.0), (1000, 0.0), (0, 0.5), (50, 0.5)])
@pytest.mark.parametrize("head_dim", [16, 256])
def test_windows_and_soft_caps_on_a_gpu_are_those_of_the_cpu(window: int, softcap: float, head_dim: int) -> None:
    lengths, generator = [1, 300, 17, 129], torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, head_dim, generator=generator).bfloat16() for heads in (4, 2, 2)]
    upstream = torch.randn(inputs[0].shape, generator=generator)
    fast = [tensor.to(CUDA).requires_grad_() for tensor in inputs]
    exact = [tensor.float().requires_grad_() for tensor in inputs]
    scaling = head_dim**-0.5
    found = PackedAttention(lengths, CUDA).attend(fast[0], fast[1], fast[2], scaling, window, softcap)
    expected = PackedAttention(lengths).attend(exact[0], exact[1], exact[2], scaling, window, softcap)
    found.float().mul(upstream.to(CUDA)).sum().backward()
    expected.mul(upstream).sum().backward()
    assert (found.detach().cpu().float() - expected.detach()).norm() < 1e-2 * expected.detach().norm()
    for one, other in zip(fast, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad.cpu().float() - other.grad).norm() < 2e-2 * other.grad.norm()
