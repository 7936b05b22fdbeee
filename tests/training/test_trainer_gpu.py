"""The trainer on a GPU: the same numbers as on the CPU, to the precision of the type, and no waiting inside a step.

Invariants 7, 11 and 12 where the arithmetic is another's: flash attention, Triton kernels, compiled blocks.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer_faults import nonfinite_temperature
from torch import Tensor
from torch._dynamo.utils import counters
from training import (
    digest_of,
    distance,
    gradients_of,
    load_state,
    make_batch,
    make_trainer,
    plain_model,
    reference_loss,
    rows_of,
    same_bits,
    save_state,
    stale_batch,
    state_of,
    trained_gradients,
    weights_of,
)

from headway.model.attention import PackedAttention
from headway.model.logprobs import linear_logprobs
from headway.training import trainer as trainer_module
from headway.training.collective import Ranks
from headway.training.trainer import Trainer
from headway.types import Batch
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.publish import as_part, joined
from headway.weights.shadow import ShadowWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


def gpu_trainer(path: str, **knobs: Any) -> Trainer:
    return make_trainer(path, **({"device": "cuda", "compile": False} | knobs))


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact.double().cpu()).norm() / exact.double().norm().cpu())


# Kernels


@pytest.mark.parametrize(("num_tokens", "vocabulary", "chunk"), [(50, 52, 7), (33, 5000, 2048), (300, 49152, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_log_probs_entropies_and_gradients_are_those_of_log_softmax(
    num_tokens: int, vocabulary: int, chunk: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    hidden_TC = torch.randn(num_tokens, 64, generator=generator).to(dtype)
    weight_VC = (torch.randn(vocabulary, 64, generator=generator) * 0.5).to(dtype)
    targets_T = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    temperature_T = torch.tensor([0.3, 0.7, 1.0, 2.5]).repeat(num_tokens)[:num_tokens]
    upstream_T = torch.linspace(-2, 3, num_tokens)
    mine = [tensor.to(CUDA).requires_grad_() for tensor in (hidden_TC, weight_VC)]
    logprobs_T, entropy_T = linear_logprobs(*mine, targets_T.to(CUDA), temperature_T.to(CUDA), chunk)
    (logprobs_T * upstream_T.to(CUDA)).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_TC, weight_VC)]
    log_softmax = torch.log_softmax(exact[0] @ exact[1].T / temperature_T[:, None].double(), -1)
    expected_T = log_softmax.gather(-1, targets_T[:, None])[:, 0]
    (expected_T * upstream_T.double()).sum().backward()
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32
    assert relative(logprobs_T.detach(), expected_T.detach()) < 1e-5
    assert relative(entropy_T, -(log_softmax.exp() * log_softmax).sum(-1).detach()) < 1e-5
    for found, reference in zip(mine, exact, strict=True):
        assert found.grad is not None and reference.grad is not None
        assert relative(found.grad, reference.grad) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_a_logit_that_is_not_finite_makes_the_log_prob_not_a_number() -> None:
    hidden_TC, weight_VC = torch.ones(2, 8, device=CUDA), torch.ones(40, 8, device=CUDA)
    hidden_TC[1, 3] = torch.inf
    weight_VC[7, 3] = -1.0
    targets_T = torch.tensor([3, 3], device=CUDA)
    logprobs_T, _ = linear_logprobs(hidden_TC, weight_VC, targets_T, torch.ones(2, device=CUDA), 8)
    assert logprobs_T.isfinite().tolist() == [True, False]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(12, 2, 128), (9, 3, 64), (4, 2, 16)])
def test_flash_attention_over_packed_sequences_is_attention_over_each_of_them(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    lengths = [1, 300, 17, 129, 64]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), heads, head_dim, generator=generator).bfloat16()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]
    upstream = torch.randn(inputs[0].shape, generator=generator)
    fast = [tensor.to(CUDA).requires_grad_() for tensor in inputs]
    found = PackedAttention(lengths, CUDA).attend(fast[0], fast[1], fast[2], 0.11)
    found.float().mul(upstream.to(CUDA)).sum().backward()
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = PackedAttention(lengths).attend(exact[0], exact[1], exact[2], 0.11)
    expected.mul(upstream).sum().backward()
    assert relative(found.detach(), expected.detach()) < 1e-2
    for one, other in zip(fast, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        assert relative(one.grad, other.grad) < 2e-2


# The step


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-tied"])
def test_invariant_7_fp32_gradients_are_those_of_a_plain_loop(tiny_variant: Callable[[str], str], family: str) -> None:
    path = tiny_variant(family)
    model, batch = plain_model(path), stale_batch(path)
    reference_loss(model, rows_of(batch.groups)).backward()
    found = trained_gradients(path, batch, device="cuda", token_budget=64)
    assert distance({name: gradient.cpu() for name, gradient in found.items()}, gradients_of(model)) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_invariant_12_the_gradient_does_not_depend_on_packing(tiny_model: str, dtype: str, bound: float) -> None:
    batch = stale_batch(tiny_model)
    whole, split = (
        trained_gradients(tiny_model, batch, device="cuda", compile=False, dtype=dtype, token_budget=budget)
        for budget in (4096, 32)
    )
    assert distance(split, whole) < bound


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_train_as_blocks_do_and_are_compiled_once_for_all_layers_and_lengths(
    tiny_model: str, checkpointing: bool
) -> None:
    torch._dynamo.reset()
    counters.clear()
    knobs = {"dtype": "bfloat16", "token_budget": 64, "gradient_checkpointing": checkpointing}
    plain, compiled = (gpu_trainer(tiny_model, compile=on, **knobs) for on in (False, True))
    for version in range(2):
        batch = stale_batch(tiny_model, version, first=10 * version)
        one, other = (each.train(batch).metrics for each in (plain, compiled))
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-2)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=5e-2)
    # One for training; some versions of torch make a second when a size first changes. More would be one a length.
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]
    rows = (np.arange(3, 40, dtype=np.int32),)
    np.testing.assert_allclose(
        plain.score(rows, 0.7).logprobs[0], compiled.score(rows, 0.7).logprobs[0], atol=1e-1
    )  # two trained models by now, each rounded to bf16 in its own order


def test_compiled_blocks_can_begin_to_recompute_their_activations_at_any_step(tiny_model: str) -> None:
    keeping, recomputing = (gpu_trainer(tiny_model, compile=True, dtype="bfloat16", token_budget=64) for _ in range(2))
    for version in range(3):
        if version == 1:
            recomputing.set_fit(recomputing.fit.reduce(longest=64))
            assert recomputing.fit.recompute
        batch = stale_batch(tiny_model, version, first=10 * version)
        one, other = (each.train(batch).metrics for each in (keeping, recomputing))
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)


def test_two_bf16_steps_of_two_minibatches_follow_those_of_the_cpu(tiny_model: str) -> None:
    knobs = {"dtype": "bfloat16", "minibatches": 2, "lr": 1e-3}
    here, there = make_trainer(tiny_model, **knobs), gpu_trainer(tiny_model, **knobs)
    start = weights_of(here)
    for version in range(2):
        batch = stale_batch(tiny_model, version, first=10 * version)
        one, other = (each.train(batch).metrics for each in (here, there))
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-2)
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-2)
    moved = {name: tensor.cpu() for name, tensor in weights_of(there).items()}
    assert distance(moved, weights_of(here)) < 0.3 * distance(weights_of(here), start)


@pytest.fixture
def waiting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From the call on, whatever makes the host wait for the device raises, up to the one place that may."""
    read_back = trainer_module.read_back

    def allowed(outcomes: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return read_back(outcomes)

    monkeypatch.setattr(trainer_module, "read_back", allowed)
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_waits_for_the_device_once_a_step(
    tiny_model: str, waiting_is_an_error: Callable[[], None], minibatches: int, compiled: bool
) -> None:
    trainer = gpu_trainer(tiny_model, dtype="bfloat16", minibatches=minibatches, token_budget=64, compile=compiled)
    batches = [stale_batch(tiny_model, version, first=10 * version) for version in range(3)]
    trainer.train(batches[0])
    for batch in batches[1:]:
        waiting_is_an_error()
        assert not trainer.train(batch).skipped


@pytest.mark.parametrize("culprit", [10, 11])
def test_a_loss_that_is_not_finite_leaves_no_trace(tiny_model: str, tmp_path: Path, culprit: int) -> None:
    trainer = gpu_trainer(tiny_model, lr=1e-2, minibatches=2, dtype="bfloat16")
    trainer.train(make_batch(0))
    before = state_of(trainer, tmp_path / "before")
    report = trainer.train(nonfinite_temperature(make_batch(1, first=10), culprit))
    assert report.skipped == "loss nan, gradient norm nan" and trainer.version == 1
    assert same_bits(state_of(trainer, tmp_path / "after"), before)
    published, masters = trainer.published_weights(), weights_of(trainer)
    assert all(torch.equal(published[name], masters[name].bfloat16()) for name in masters)
    assert trainer.train(make_batch(1, first=20)).version == 2


def test_invariant_11_what_is_published_from_a_gpu_has_the_fingerprints_of_the_cast_masters(tiny_model: str) -> None:
    trainer = gpu_trainer(tiny_model, dtype="bfloat16", lr=1e-3)
    trainer.train(make_batch())
    update = trainer.publish()
    expected = {name: master.bfloat16().cpu() for name, master in weights_of(trainer).items()}
    expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
    assert update.fingerprints == fingerprints(expected) and digest_of(trainer) == digest(update.fingerprints)


@pytest.mark.parametrize(("saved_on", "loaded_on"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_on_wherever_it_is_loaded(
    tiny_model: str, tmp_path: Path, saved_on: str, loaded_on: str
) -> None:
    first, second = (make_trainer(tiny_model, device=device, lr=1e-3) for device in (saved_on, loaded_on))
    first.train(make_batch(0))
    save_state(first, tmp_path / "a")
    assert load_state(second, tmp_path / "a") == 1
    assert same_bits(state_of(second, tmp_path / "b"), state_of(first, tmp_path / "c"))
    batch: Batch = make_batch(1, first=10)
    one, other = (each.train(batch).metrics for each in (first, second))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_invariant_11_pieces_of_several_ranks_are_put_together_and_proved_on_the_gpu(dtype: torch.dtype) -> None:
    """Rows of an odd number of 16-bit numbers begin in the middle of a word; one rank has no row of the last tensor."""
    from headway.weights.cuda import DevicePublisher

    exact = {"matrix": torch.randn(7, 3), "vector": torch.randn(11), "pair": torch.randn(2, 5)}
    exact = {name: tensor.to(CUDA, dtype) for name, tensor in exact.items()}
    publishers = [DevicePublisher(CUDA) for _ in range(3)]
    parts = []
    for rank, publisher in enumerate(publishers):
        rows = {name: (Ranks(rank, 3).rows(len(tensor)), len(tensor)) for name, tensor in exact.items()}
        mine = {name: exact[name][held.start : held.stop].clone() for name, (held, _) in rows.items() if held}
        parts.append(as_part(publisher.publish(0, mine), rows))
    update = joined(parts)
    live = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in exact.items()}
    shadow = ShadowWeights(live, in_place=True)
    shadow.stage(update)
    assert shadow.swap() == update.fingerprints and len(update.fingerprints) == 8
    assert all(torch.equal(live[name], tensor) for name, tensor in exact.items())
    for publisher in publishers:
        publisher.close()
