"""Fused log-probs, entropies and gradients against plain log-softmax, without full logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed import draw_rows, policy_logprobs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.model import logprobs
from headway.model.loading import load_model
from headway.model.logprobs import Policy, linear_logprobs

FAMILIES = ["llama", "llama-untied", "qwen2", "qwen2-tied", "qwen3"]
FAMILIES += ["mistral", "gemma", "gemma2", "gemma2-untied", "gemma3_text"]
CUDA = torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
Variant = Callable[[str], str]


def head_case(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_TC = torch.randn(num_tokens, 16, generator=generator)
    weight_VC = torch.randn(300, 16, generator=generator)
    targets_T = torch.randint(0, 300, (num_tokens,), generator=generator)
    temperature_T = torch.tensor([0.3, 0.7, 1.0, 2.5]).repeat(num_tokens)[:num_tokens]
    return hidden_TC, weight_VC, targets_T, temperature_T


def exact_logprobs(hidden_TC: Tensor, weight_VC: Tensor, temperature_T: Tensor, softcap: float) -> Tensor:
    logits_TV = hidden_TC.double() @ weight_VC.double().T
    if softcap:
        logits_TV = torch.tanh(logits_TV / softcap) * softcap
    return torch.log_softmax(logits_TV / temperature_T[:, None].double(), -1)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("chunk", [1, 7, 49, 50, 2048])
def test_fused_log_probs_and_entropies_are_those_of_log_softmax(chunk: int, softcap: float) -> None:
    hidden_TC, weight_VC, targets_T, temperature_T = head_case(50)
    logprobs_T, entropy_T = linear_logprobs(hidden_TC, weight_VC, targets_T, temperature_T, chunk, softcap)
    exact_TV = exact_logprobs(hidden_TC, weight_VC, temperature_T, softcap)
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32
    torch.testing.assert_close(logprobs_T.double(), exact_TV.gather(-1, targets_T[:, None])[:, 0], rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(entropy_T.double(), -(exact_TV.exp() * exact_TV).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_fused_gradients_are_those_of_log_softmax(chunk: int, softcap: float) -> None:
    hidden_TC, weight_VC, targets_T, temperature_T = head_case(50)
    upstream_T = torch.linspace(-2, 3, 50)
    inputs = [hidden_TC.clone().requires_grad_(), weight_VC.clone().requires_grad_()]
    found, _ = linear_logprobs(inputs[0], inputs[1], targets_T, temperature_T, chunk, softcap)
    (found * upstream_T).sum().backward()
    exact = [hidden_TC.double().requires_grad_(), weight_VC.double().requires_grad_()]
    exact_TV = exact_logprobs(exact[0], exact[1], temperature_T, softcap)
    (exact_TV.gather(-1, targets_T[:, None])[:, 0] * upstream_T.double()).sum().backward()
    for mine, reference in zip(inputs, exact, strict=True):
        assert mine.grad is not None and reference.grad is not None
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_fused_gradients_of_the_entropy_are_those_of_log_softmax(softcap: float) -> None:
    hidden_TC, weight_VC, targets_T, temperature_T = head_case(50)
    upstream_T = torch.linspace(-2, 3, 50)
    inputs = [hidden_TC.clone().requires_grad_(), weight_VC.clone().requires_grad_()]
    found, entropy_T = linear_logprobs(inputs[0], inputs[1], targets_T, temperature_T, 7, softcap)
    (entropy_T * upstream_T + 0.5 * found).sum().backward()
    exact = [hidden_TC.double().requires_grad_(), weight_VC.double().requires_grad_()]
    exact_TV = exact_logprobs(exact[0], exact[1], temperature_T, softcap)
    bonus = -(exact_TV.exp() * exact_TV).sum(-1) * upstream_T.double()
    (bonus + 0.5 * exact_TV.gather(-1, targets_T[:, None])[:, 0]).sum().backward()
    for mine, reference in zip(inputs, exact, strict=True):
        assert mine.grad is not None and reference.grad is not None
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


def test_log_probs_of_certain_and_impossible_tokens_stay_finite() -> None:
    hidden_TC, weight_VC = torch.full((2, 1), 100.0), torch.tensor([[100.0], [-100.0]])
    logprobs_T, entropy_T = linear_logprobs(hidden_TC, weight_VC, torch.tensor([0, 1]), torch.ones(2), 8)
    assert logprobs_T.tolist() == [0.0, -20000.0] and entropy_T.tolist() == [0.0, 0.0]


def test_no_tokens_have_no_log_probs_and_no_gradient() -> None:
    hidden_TC, weight_VC, targets_T, temperature_T = head_case(0)
    logprobs_T, entropy_T = linear_logprobs(hidden_TC, weight_VC.requires_grad_(), targets_T, temperature_T, 8)
    assert logprobs_T.shape == entropy_T.shape == (0,)
    logprobs_T.sum().backward()
    assert weight_VC.grad is not None and not weight_VC.grad.any()


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor made inside it has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in (out if isinstance(out, tuple) else (out,)) if isinstance(tensor, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return out


def test_full_logits_never_exist_forward_or_backward() -> None:
    num_tokens, chunk = 50, 7
    hidden_TC, weight_VC, targets_T, temperature_T = head_case(num_tokens)
    with Largest() as largest:
        logprobs_T, _ = linear_logprobs(
            hidden_TC.requires_grad_(), weight_VC.requires_grad_(), targets_T, temperature_T, chunk
        )
        logprobs_T.sum().backward()
    assert chunk * 300 <= largest.num_elements < 2 * weight_VC.numel() < num_tokens * 300
    with Largest() as largest:
        linear_logprobs(hidden_TC, weight_VC, targets_T, temperature_T, num_tokens)
    assert largest.num_elements == num_tokens * 300


def test_bf16_operands_give_fp32_logits() -> None:
    hidden_TC, weight_VC, targets_T, temperature_T = head_case(20)
    hidden_TC, weight_VC = hidden_TC.bfloat16(), weight_VC.bfloat16()
    found, _ = linear_logprobs(hidden_TC, weight_VC, targets_T, temperature_T, 8)
    exact_TV = torch.log_softmax(hidden_TC.double() @ weight_VC.double().T / temperature_T[:, None].double(), -1)
    torch.testing.assert_close(found.double(), exact_TV.gather(-1, targets_T[:, None])[:, 0], rtol=2e-6, atol=1e-5)


def test_head_logits_are_asked_for_in_chunks(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    sizes: list[int] = []
    exact = logprobs.head_logits

    def counting(hidden_TC: Tensor, weight_VC: Tensor) -> Tensor:
        sizes.append(len(hidden_TC))
        return exact(hidden_TC, weight_VC)

    monkeypatch.setattr(logprobs, "head_logits", counting)
    policy_logprobs(Policy(load_model(tiny_model), 7), draw_rows([20, 32]), 1.0)[0].sum().backward()
    assert sizes == [7] * 7 + [1] + [7] * 7 + [1]
