"""fp32 masters and FSDP2 against the unwrapped module.

Invariant 12: packing-independent gradient, for any rank count.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packed import draw_rows, policy_logprobs
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training import distance, gradients_of

from headway.model.loading import load_model
from headway.model.logprobs import Policy
from headway.model.sharding import Masters, full_tensor, shard, wrap

FAMILIES = ["llama", "llama-untied", "qwen2", "qwen2-tied", "qwen3"]
FAMILIES += ["mistral", "gemma", "gemma2", "gemma2-untied", "gemma3_text"]
CUDA = torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
Variant = Callable[[str], str]


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
from packed import draw_rows
from test_sharding import summed_gradients
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
