"""The GPU engine's kernels against plain torch: on a GPU where there is one, else on the CPU by Triton's interpreter.

The interpreter is slow and rounds bfloat16 its own way, so shapes are tiny and bfloat16 is for GPUs alone.
"""

import numpy as np
import pytest
import torch
from kernel_checks import DEVICE, DTYPES, ON_GPU, ints, randn
from torch import Tensor

from headway.engine.embedded import sampler
from headway.engine.embedded.kernels import (
    add_rms_norm,
    begin_step,
    end_step,
    gated_activation,
    rms_norm,
    rope_and_write,
    sample,
)
from headway.types import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's, where NaN is meant


STEP = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""One step of the dtype, relative; several of fp32's, which fast functions and another order of a sum may cost."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_rounded_alike(actual: Tensor, expected: Tensor, atol: float = 2e-6, differing: float = 0.01) -> None:
    """Both went through the same roundings: nearly all elements are equal, the others one step of the dtype apart.

    A GPU's compiler may keep an intermediate result as precise as it has it, so there more of them are a step apart.
    """
    differing = max(differing, 0.15) if ON_GPU else differing
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=2 * STEP[actual.dtype], atol=atol)
    if actual.dtype != torch.float32:
        assert (actual != expected).float().mean() < differing


# Norms, rope, activation: the arithmetic of transformers' eager modules


def reference_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype) if unit_offset else weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("num_columns", [64, 100])
def test_the_norm_adds_the_residual_and_rounds_as_transformers_does(
    dtype: torch.dtype, unit_offset: bool, num_columns: int
) -> None:
    x, residual = 3 * randn(5, num_columns, dtype=dtype), 3 * randn(5, num_columns, dtype=dtype)
    weight = 1 + 0.2 * randn(num_columns, dtype=dtype)
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-5, unit_offset=unit_offset)
    assert torch.equal(new_residual, x + residual)
    assert_rounded_alike(normed, reference_norm(x + residual, weight, 1e-5, unit_offset))


def test_the_norm_without_a_residual_passes_its_input_on() -> None:
    x, weight = randn(3, 96), randn(96)
    normed, residual = add_rms_norm(x, None, weight, 1e-6)
    assert residual is x
    assert_rounded_alike(normed, reference_norm(x, weight, 1e-6, False))
    assert torch.equal(rms_norm(x, weight, 1e-6), normed)
    large_eps = rms_norm(x, weight, 10.0)
    assert_rounded_alike(large_eps, reference_norm(x, weight, 10.0, False))


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rope_tables(num_positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(DEVICE), angles.sin().to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 64), (12, 6, 24), (2, 2, 16)])
@pytest.mark.parametrize("norm", ["none", "plain", "unit_offset"])
def test_rope_rotates_queries_and_keys_and_writes_keys_and_values_to_their_slots(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, norm: str
) -> None:
    num_tokens, page = 6, 4
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos, sin = rope_tables(40, head_dim)
    positions, slots = ints([3, 0, 39, 7, 7, 12]), ints([5, 0, -1, 23, 9, -1], torch.int64)
    k_cache, v_cache = (randn(6, page, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    q_norm, k_norm = (1 + 0.3 * randn(head_dim, dtype=dtype) for _ in range(2))
    q, k, v = qkv.view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if norm != "none":
        q, k = (reference_norm(x, w, 1e-6, norm == "unit_offset") for x, w in ((q, q_norm), (k, k_norm)))
    turn_cos, turn_sin = (table[positions.long()].to(dtype)[:, None] for table in (cos, sin))
    q, k = (x * turn_cos + rotate_half(x) * turn_sin for x in (q, k))
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    written = slots >= 0
    k_expected.view(-1, num_kv_heads, head_dim)[slots[written]] = k[written]
    v_expected.view(-1, num_kv_heads, head_dim)[slots[written]] = v[written]

    norms = {} if norm == "none" else {"q_norm": q_norm, "k_norm": k_norm}
    got = rope_and_write(
        qkv, positions, cos, sin, slots, k_cache, v_cache, num_heads, num_kv_heads,
        eps=1e-6, unit_offset=norm == "unit_offset", **norms,
    )  # fmt: skip
    assert got.is_contiguous()
    # A GPU makes one operation of a product and a sum: about a quarter is rounded otherwise, and where the two cancel,
    # what is left is the product's rounding.
    atol, differing = (STEP[dtype], 0.35) if ON_GPU and dtype != torch.float32 else (2e-6, 0.01)
    assert_rounded_alike(got, q.contiguous(), atol, differing)
    assert_rounded_alike(k_cache, k_expected, atol, differing)
    assert torch.equal(v_cache, v_expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_the_activation_is_rounded_before_it_meets_up(dtype: torch.dtype, kind: str) -> None:
    gate_up = 3 * randn(3, 2 * 1100, dtype=dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -1e4, 1e4])
    gate, up = gate_up.chunk(2, -1)
    functional = torch.nn.functional
    active = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")
    # torch computes 1 + tanh(x), which cancels where x is far below 0; times up, that is visible.
    assert_rounded_alike(gated_activation(gate_up, kind), active * up, atol=5e-6, differing=0.05)


# Sampling: what the CPU sampler chooses


def run_sample(
    logits: Tensor, temperatures: list[float], counters: np.ndarray, draws: np.ndarray
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and log-probs of the kernel, then those of the CPU sampler."""
    inverse = torch.tensor([1 / t if t else 1.0 for t in temperatures], device=DEVICE)
    greedy = torch.tensor([t == 0 for t in temperatures], device=DEVICE)
    tokens, logprobs = sample(
        logits, inverse, greedy, ints(counters.view(np.int64), torch.int64), ints(draws.astype(np.int64), torch.int64)
    )
    samplings = [Sampling(temperature=t) for t in temperatures]
    expected = sampler.sample(logits.cpu(), samplings, sampler.uniforms(counters, draws.astype(np.uint64)))
    return tokens.cpu(), logprobs.cpu(), *expected


def random_keys(num: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 2**64, num, dtype=np.uint64), generator.integers(0, 2**15, num)


@pytest.mark.parametrize("vocab", [50, 256, 5000])
def test_sampling_chooses_the_tokens_and_log_probs_of_the_cpu_sampler(vocab: int) -> None:
    logits = 3 * randn(24, vocab)
    logits[:, vocab // 2] += 4
    logits[3, : vocab // 3] = float("-inf")
    temperatures = [1.0, 0.7, 0.0, 1.5] * 6
    tokens, logprobs, expected_tokens, expected_logprobs = run_sample(logits, temperatures, *random_keys(24))
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=2e-5)
    assert len(set(tokens.tolist())) > 4


def test_greedy_takes_the_first_of_equal_maxima_wherever_blocks_begin() -> None:
    logits = randn(3, 9000)
    for row, first in enumerate((0, 4095, 4096)):
        logits[row, first] = logits[row, 8999] = 20.0
    tokens, *_ = run_sample(logits, [0.0] * 3, *random_keys(3))
    assert tokens.tolist() == [0, 4095, 4096]


def test_large_and_distant_logits_lose_no_precision() -> None:
    logits = torch.full((4, 600), -1e4, device=DEVICE)
    logits[:, 599] = 1e4
    logits[:, 3] = 1e4 - 1
    temperatures = [1.0, 0.0, 2.0, 0.25]
    tokens, logprobs, expected_tokens, expected_logprobs = run_sample(logits, temperatures, *random_keys(4))
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_give_nan_and_a_token_of_the_vocabulary(temperature: float) -> None:
    vocab = 700
    logits = randn(6, vocab)
    logits[0, 5] = float("nan")
    logits[1, 650] = float("inf")
    logits[2] = float("nan")
    logits[3] = float("-inf")
    logits[4, 300:] = float("nan")
    inverse, greedy = torch.ones(6, device=DEVICE), torch.full((6,), temperature == 0, device=DEVICE)
    counters, draws = random_keys(6)
    tokens, logprobs = sample(logits, inverse, greedy, ints(counters.view(np.int64), torch.int64), ints(draws).long())
    assert logprobs[:5].isnan().all() and logprobs[5].isfinite()
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    num = 4000 if ON_GPU else 100
    logits = probabilities.log().to(DEVICE).repeat(num, 1)
    counters = np.full(num, 2**63 + 12345, np.uint64)
    tokens, *_ = run_sample(logits, [1.0] * num, counters, np.arange(num))
    shares = tokens.bincount(minlength=4) / num
    assert shares[1] == 0
    assert (shares - probabilities).abs().max() < 3 * 0.5 / num**0.5


# The bookkeeping of a step


def test_a_step_begins_at_each_rows_last_token_and_finished_rows_write_nowhere() -> None:
    lengths, alive = ints([1, 16, 17, 40, 0]), ints([1, 1, 1, 0, 0])
    table = ints(np.arange(5 * 4).reshape(5, 4))
    positions, slots, step = (ints([7] * size, torch.int64) for size in (5, 5, 1))
    visible = ints([7] * 5)
    begin_step(lengths, alive, table, positions, slots, visible, step, 16)
    assert positions.tolist() == [0, 15, 16, 39, 0]
    assert slots.tolist() == [0, 4 * 16 + 15, 9 * 16, -1, -1]
    assert visible.tolist() == [1, 16, 17, 0, 0]
    assert step.tolist() == [8]


@pytest.mark.parametrize("num_rows", [5, 300])
def test_a_step_ends_rows_at_their_stop_tokens_and_limits(num_rows: int) -> None:
    draws = np.random.default_rng(num_rows)
    sampled, logprobs = draws.integers(0, 6, num_rows), draws.normal(size=num_rows).astype(np.float32)
    stops = np.where(draws.integers(0, 2, (num_rows, 8)) > 0, draws.integers(0, 30, (num_rows, 8)), -1)
    lengths, alive = draws.integers(1, 9, num_rows), draws.integers(0, 2, num_rows)
    limits, before = lengths + draws.integers(1, 4, num_rows), draws.integers(0, 9, num_rows)
    tensors = {
        "tokens": ints(before, torch.int64),
        "draws": ints(before, torch.int64),
        "lengths": ints(lengths),
        "alive": ints(alive),
        "all_sampled": torch.full((4, num_rows + 3), -1, device=DEVICE),
        "all_logprobs": torch.zeros(4, num_rows + 3, device=DEVICE),
    }
    step = ints([3], torch.int64)
    given = ints(sampled, torch.int64), torch.as_tensor(logprobs, device=DEVICE), ints(stops, torch.int64), ints(limits)
    end_step(*given, step, *tensors.values())
    ends = np.array([token in row for token, row in zip(sampled, stops, strict=True)]) | (lengths + alive >= limits)
    assert tensors["tokens"].tolist() == sampled.tolist()
    assert tensors["draws"].tolist() == (before + alive).tolist()
    assert tensors["lengths"].tolist() == (lengths + alive).tolist()
    assert tensors["alive"].tolist() == (alive * ~ends).tolist()
    assert tensors["all_sampled"][2, :num_rows].tolist() == sampled.tolist()
    assert tensors["all_sampled"][[0, 1, 3]].unique().tolist() == [-1]
    assert tensors["all_logprobs"][2, :num_rows].tolist() == logprobs.tolist()
