"""One model definition on both sides: our attention and fused log-probs against plain transformers, FSDP2 or not.

Invariant 12: packing-independent gradient, for any rank count.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from training import distance, gradients_of, plain_model, reference_logprobs

from headway.config import InitSection
from headway.model import logprobs
from headway.model.attention import PackedAttention, causal_attention
from headway.model.loading import build_model, compile_blocks, load_model
from headway.model.logprobs import Policy, hidden_states, linear_logprobs
from headway.model.sharding import Masters, full_tensor, shard, wrap

FAMILIES = ["llama", "llama-untied", "qwen2", "qwen2-tied", "qwen3"]
FAMILIES += ["mistral", "gemma", "gemma2", "gemma2-untied", "gemma3_text"]
CUDA = torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
Variant = Callable[[str], str]


def draw_rows(lengths: list[int], seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 52, length) for length in lengths]


def policy_logprobs(policy: Policy, rows: list[Any], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of every token of every row but the first, packed end to end."""
    lengths, device = [len(row) for row in rows], next(policy.parameters()).device
    starts = np.cumsum([0, *lengths[:-1]])
    where = np.concatenate([np.arange(1, length) + start for length, start in zip(lengths, starts, strict=True)])
    out: tuple[Tensor, Tensor] = policy(
        torch.from_numpy(np.concatenate(rows)).long().to(device),
        torch.cat([torch.arange(length) for length in lengths]).to(device),
        lengths,
        torch.from_numpy(where).to(device),
        torch.full((len(where),), temperature, device=device),
    )
    return out


# The fused linear log-prob


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


# Attention


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


# Masters


def test_masters_collect_the_gradients_of_cast_weights_in_fp32_and_refresh_them(tiny_model: str) -> None:
    parts = [draw_rows([20, 9]), draw_rows([4, 14], seed=1)]
    policy = Policy(load_model(tiny_model), 16).train()
    masters = shard(policy, torch.bfloat16)
    one, other = (summed_gradients(policy, [part], 43, masters) for part in parts)
    both = summed_gradients(policy, parts, 43, masters)
    assert all(torch.equal(both[name], one[name] + other[name]) for name in both)
    assert all(parameter.grad is None for parameter in policy.parameters())
    with torch.no_grad():
        for master in masters.named.values():
            master.add_(1e-3)
    masters.refresh()
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, masters.named[name].bfloat16())
    masters.put_back()
    assert all(torch.equal(parameter, masters.named[name]) for name, parameter in policy.named_parameters())


def test_masters_are_the_parameters_themselves_where_nothing_is_cast(tiny_model: str) -> None:
    policy = Policy(load_model(tiny_model), 16)
    assert shard(policy, torch.float32).named == dict(policy.named_parameters())


# FSDP2


@pytest.fixture
def one_rank_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def summed_gradients(
    policy: Policy, parts: list[list[Any]], denominator: int, masters: Masters | None = None
) -> dict[str, Tensor]:
    """Gradients of a weighted sum of log-probs over a global denominator, in as many passes as there are parts."""
    for weight in masters.named.values() if masters else policy.parameters():
        weight.grad = None
    for rows in parts:
        logprobs_M, _ = policy_logprobs(policy, rows, 0.7)
        (logprobs_M * torch.linspace(0.5, 1.5, len(logprobs_M))).sum().div(denominator).backward()
    return gradients_of(masters or policy, "model.")


def test_invariant_12_one_wrapped_rank_has_the_gradient_of_the_unwrapped_module(
    tiny_model: str, one_rank_mesh: DeviceMesh
) -> None:
    parts = [draw_rows([20, 9]), draw_rows([4, 14], seed=1)]
    plain, wrapped = (Policy(load_model(tiny_model), 16).train() for _ in range(2))
    wrap(wrapped, one_rank_mesh, torch.float32)
    assert distance(summed_gradients(wrapped, parts, 43), summed_gradients(plain, parts, 43)) < 1e-6


def test_wrapped_parameters_are_fp32_before_and_after_a_pass_that_has_no_backward(
    tiny_model: str, one_rank_mesh: DeviceMesh
) -> None:
    policy = Policy(load_model(tiny_model), 16).train()
    wrap(policy, one_rank_mesh, torch.bfloat16)
    names = [name for name, _ in policy.named_parameters()]
    before = {name: full_tensor(parameter.detach()).clone() for name, parameter in policy.named_parameters()}
    with torch.no_grad():
        policy_logprobs(policy, draw_rows([20]), 1.0)
    after = {name: full_tensor(parameter.detach()) for name, parameter in policy.named_parameters()}
    assert list(after) == names and all(tensor.dtype == torch.float32 for tensor in after.values())
    assert all(torch.equal(before[name], after[name]) for name in names)


def test_a_wrapped_bf16_pass_is_that_of_a_model_loaded_in_bf16_at_any_temperature(
    tiny_model: str, one_rank_mesh: DeviceMesh
) -> None:
    policy = Policy(load_model(tiny_model), 16).train()
    wrap(policy, one_rank_mesh, torch.bfloat16)
    with torch.no_grad():
        found, _ = policy_logprobs(policy, draw_rows([20, 6]), 0.7)
        expected, _ = policy_logprobs(Policy(load_model(tiny_model, torch.bfloat16), 16), draw_rows([20, 6]), 0.7)
    assert torch.equal(found, expected)


TWO_RANKS = """
import sys
sys.path[:0] = ["tests/model", "tests/support", "tests"]
import torch, torch.distributed as dist
from headway.model.loading import load_model
from headway.model.logprobs import Policy
from headway.model.sharding import shard
from test_model import draw_rows, summed_gradients
path, store, rank, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
policy = Policy(load_model(path), 16).train()
shard(policy, torch.float32)
gradients = summed_gradients(policy, [draw_rows([20, 9], seed=rank)], 54)
if rank == 0:
    torch.save(gradients, out)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_invariant_12_two_ranks_with_half_the_sequences_each_have_the_gradient_of_one(
    tiny_model: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", TWO_RANKS, tiny_model, str(tmp_path / "store")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "gradients")], cwd=root, env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(240) for rank in ranks] == [0, 0]
    parts = [draw_rows([20, 9], seed=rank) for rank in range(2)]
    expected = summed_gradients(Policy(load_model(tiny_model), 16).train(), parts, 54)
    assert distance(torch.load(tmp_path / "gradients"), expected) < 2e-6
