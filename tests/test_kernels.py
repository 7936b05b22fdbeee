"""The GPU engine's kernels against plain torch: on a GPU where there is one, else on the CPU by Triton's interpreter.

The interpreter is slow and rounds bfloat16 its own way, so shapes are tiny and bfloat16 is for GPUs alone.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, Triton's own too: before Triton is imported
pytest.importorskip("triton")

from headway.engine.embedded import paged_attention, sampler  # noqa: E402
from headway.engine.embedded.decode_plan import SharedPrefix, plan_decode  # noqa: E402
from headway.engine.embedded.kernels import (  # noqa: E402
    add_rms_norm,
    begin_step,
    end_step,
    gated_activation,
    rms_norm,
    rope_and_write,
    sample,
)
from headway.engine.embedded.paged_attention import decode_attention, prefill_attention  # noqa: E402
from headway.types import Sampling  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's, where NaN is meant

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
if not ON_GPU:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: type, scope: Any) -> None:
        # Triton 3.6: a loop's bound is an array of one element, which NumPy 2.4 no longer takes for an integer.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index

STEP = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""One step of the dtype, relative; several of fp32's, which fast functions and another order of a sum may cost."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def ints(values: list[int] | np.ndarray, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(np.asarray(values), device=DEVICE).to(dtype)


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
    assert_rounded_alike(got, q.contiguous())
    assert_rounded_alike(k_cache, k_expected)
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


# Attention


class Cache:
    """Sequences in shuffled pages of a cache whose unused tokens, page 0 among them, are NaN: reading them shows."""

    def __init__(self, lengths: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, page: int = 16):
        self.page, self.lengths = page, lengths
        counts = [-(-length // page) for length in lengths]
        pages = (1 + torch.randperm(sum(counts) + 2)).split([*counts, 2])
        shape = (sum(counts) + 3, page, num_kv_heads, head_dim)
        self.k, self.v = (torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
        # A table is wider than it must be, and what it says past a row's pages is no page at all.
        self.table = torch.full((len(lengths), max(counts) + 2), -(10**6), dtype=torch.int32, device=DEVICE)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for row, length in enumerate(lengths):
            self.table[row, : counts[row]] = pages[row].to(DEVICE, torch.int32)
            self.keys.append(randn(length, num_kv_heads, head_dim, dtype=dtype))
            self.values.append(randn(length, num_kv_heads, head_dim, dtype=dtype))
        self.write()

    def write(self) -> None:
        for row, length in enumerate(self.lengths):
            position = torch.arange(length, device=DEVICE)
            slots = self.table[row, position // self.page].long() * self.page + position % self.page
            self.k.flatten(0, 1)[slots] = self.keys[row]
            self.v.flatten(0, 1)[slots] = self.values[row]

    def share(self, first: int, count: int, length: int) -> None:
        """Rows first..first+count-1 begin with the first row's keys and values, in its pages."""
        for row in range(first + 1, first + count):
            self.table[row, : length // self.page] = self.table[first, : length // self.page]
            self.keys[row][:length] = self.keys[first][:length]
            self.values[row][:length] = self.values[first][:length]
        self.k.fill_(float("nan"))
        self.v.fill_(float("nan"))
        self.write()


def reference_attention(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, start: int, scaling: float, window: int, softcap: float
) -> Tensor:
    """In double precision; queries are at positions start, start+1, …"""
    q, k, v = (x.double() for x in (q_THD, k_SKD, v_SKD))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = torch.einsum("thd,shd->hts", q, k) * scaling
    if softcap:
        score = torch.tanh(score / softcap) * softcap
    query = start + torch.arange(len(q), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)
    seen = (key <= query) & (key > query - window if window else key >= 0)
    return torch.einsum("hts,shd->thd", score.masked_fill(~seen, float("-inf")).softmax(-1), v)


def reference_decode(cache: Cache, q: Tensor, scaling: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    rows = [
        reference_attention(q[row, None], cache.keys[row], cache.values[row], length - 1, scaling, window, softcap)
        if length
        else torch.zeros_like(q[row, None]).double()
        for row, length in enumerate(cache.lengths)
    ]
    return torch.cat(rows).flatten(1)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


SMALL = [(2, 1, 64), (6, 2, 16), (3, 3, 24), (16, 1, 32)]
"""Query heads, key/value heads, head dimension: one that is no power of two, ratios from 1 to 16."""
if ON_GPU:
    # Every combination is compiled anew: small shapes in fp32 for the arithmetic, real ones in 16 bits for the tiles.
    REAL = [(torch.bfloat16, *sizes) for sizes in ((12, 2, 128), (9, 3, 64), (8, 4, 256), (4, 4, 96))]
    REAL.append((torch.float16, 12, 2, 128))
    SHAPES = [*((torch.float32, *sizes) for sizes in SMALL), *REAL]
    SHARING = [(torch.float32, 12, 1, 16), *REAL]
else:
    SHAPES = [(dtype, *sizes) for dtype in DTYPES for sizes in SMALL]
    SHARING = [(dtype, 12, 1, 16) for dtype in DTYPES]
SIZES = ("dtype", "num_heads", "num_kv_heads", "head_dim")


@pytest.mark.parametrize(SIZES, SHAPES)
def test_decode_attends_to_each_rows_own_tokens(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    cache = Cache([1, 0, 17, 300, 128, 129], num_kv_heads, head_dim, dtype)
    q = randn(6, num_heads, head_dim, dtype=dtype)
    out = decode_attention(q, cache.k, cache.v, cache.table, ints(cache.lengths), 0.1)
    assert out.dtype == dtype and out.shape == (6, num_heads * head_dim)
    assert_close(out, reference_decode(cache, q, 0.1))


@pytest.mark.parametrize("heads", [1, 4, 16])
def test_however_the_merging_is_shared_out_decode_merges_all_items_of_a_row(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "_combined_heads", lambda num_rows: heads)
    cache = Cache([2500, 0, 40], 2, 16, torch.float32)
    q = randn(3, 6, 16)
    out = decode_attention(q, cache.k, cache.v, cache.table, ints(cache.lengths), 0.3)
    assert_close(out, reference_decode(cache, q, 0.3))


@pytest.mark.parametrize(("window", "softcap"), [(5, 0.0), (200, 0.0), (0, 2.0), (130, 1.5)])
def test_decode_sees_its_window_through_its_softcap(window: int, softcap: float) -> None:
    cache = Cache([3, 260, 131, 0], 2, 32, torch.float32, page=8)
    q = 3 * randn(4, 4, 32)
    out = decode_attention(q, cache.k, cache.v, cache.table, ints(cache.lengths), 0.4, window=window, softcap=softcap)
    assert_close(out, reference_decode(cache, q, 0.4, window, softcap))


@pytest.mark.parametrize("shared", [32, 320])
@pytest.mark.parametrize(SIZES, SHARING)
def test_a_shared_prefix_changes_nothing_but_what_is_read(
    dtype: torch.dtype, shared: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Groups of 3 and of 12 rows, one row alone, an empty row; a group of 12 does not fit one tile of queries."""
    suffixes = [1, 16, 300, *range(1, 13)]
    cache = Cache([37, 0] + [shared + suffix for suffix in suffixes], num_kv_heads, head_dim, dtype)
    cache.share(2, 3, shared)
    cache.share(5, 12, shared)
    starts = [0, 0] + [shared] * 15
    prefix = SharedPrefix(ints([2, 5, 0]), ints([3, 12, 0]), ints([shared, shared, 0]), ints(starts), max_count=12)
    assert prefix.num_groups_max == 3
    q = randn(17, num_heads, head_dim, dtype=dtype)
    lengths = ints(cache.lengths)
    out = decode_attention(q, cache.k, cache.v, cache.table, lengths, 0.1, prefix=prefix)
    assert_close(out, reference_decode(cache, q, 0.1))
    # Only the first row's table names the shared pages that are read.
    for first, count in ((2, 3), (5, 12)):
        cache.table[first + 1 : first + count, : shared // cache.page] = -(10**6)
    again = decode_attention(q, cache.k, cache.v, cache.table, lengths, 0.1, prefix=prefix)
    assert torch.equal(out, again)


def test_a_row_that_is_all_prefix_gets_the_prefixs_attention() -> None:
    cache = Cache([32, 32], 1, 16, torch.float32)
    cache.share(0, 2, 32)
    q = randn(2, 2, 16)
    prefix = SharedPrefix(ints([0]), ints([2]), ints([32]), ints([32, 32]), max_count=2)
    out = decode_attention(q, cache.k, cache.v, cache.table, ints(cache.lengths), 0.3, prefix=prefix)
    assert_close(out, reference_decode(cache, q, 0.3))


def test_a_prefix_and_a_window_are_refused_together() -> None:
    prefix = SharedPrefix(ints([0]), ints([0]), ints([0]), ints([0]), max_count=1)
    with pytest.raises(ValueError, match="cannot be combined"):
        plan_decode(ints([4]), 1, window=2, prefix=prefix)


@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("shape", ["even", "long_tail", "one", "empty", "many"])
def test_the_plan_covers_every_token_once_in_no_more_items_than_there_are(shape: str, window: int) -> None:
    generator = np.random.default_rng(0)
    lengths = {
        "even": np.full(100, 384),
        "long_tail": np.minimum(16384, generator.lognormal(5, 2, 300).astype(int)),
        "one": np.array([131072]),
        "empty": np.zeros(7, int),
        "many": generator.integers(0, 3000, 1500),
    }[shape]
    plan = plan_decode(ints(lengths), 2, window=window)
    items, counts, offsets = plan.items_W4.cpu(), plan.counts_B.cpu(), plan.offsets_B.cpu()
    num_used = int(counts.sum())
    assert num_used <= len(items) and (items[num_used:, 0] == -1).all()
    starts = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    for row, length in enumerate(lengths):
        own = items[offsets[row] : offsets[row] + counts[row]]
        assert len(own) == counts[row] and (len(own) > 0) == (length > 0)
        if length:
            assert (own[:, 0] == row).all() and own[0, 1] == starts[row] and own[-1, 2] == length
            assert (own[1:, 1] == own[:-1, 2]).all() and (own[:, 1] < own[:, 2]).all()
            assert own[:, 3].tolist() == ([3] if len(own) == 1 else [2] + [0] * (len(own) - 1))
    if num_used:
        spans = items[:num_used, 2] - items[:num_used, 1]
        assert spans.max() <= max(512, 64 + -(-int((lengths - starts).sum()) // (len(items) - len(lengths))))


@pytest.mark.parametrize(SIZES, SHAPES)
def test_prefill_is_causal_within_and_before_each_chunk(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    check_prefill([0, 70, 0, 3, 64], [1, 20, 150, 0, 64], dtype, num_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (20, 0.0), (100, 2.0), (0, 1.5)])
def test_prefill_sees_its_window_through_its_softcap(window: int, softcap: float) -> None:
    check_prefill([0, 70, 5], [90, 20, 1], torch.float32, 4, 2, 32, window, softcap)


def test_prefill_of_short_chunks_uses_small_tiles() -> None:
    check_prefill([0, 130, 16], [16, 3, 9], torch.float32, 4, 2, 32)


def check_prefill(
    starts: list[int],
    lengths: list[int],
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Chunks packed one after the other, then padding, which must come out as zeros."""
    num_padding = 21
    cache = Cache([s + n for s, n in zip(starts, lengths, strict=True)], num_kv_heads, head_dim, dtype)
    cu = np.cumsum([0, *lengths])
    q = 2 * randn(int(cu[-1]) + num_padding, num_heads, head_dim, dtype=dtype)
    out = prefill_attention(
        q, cache.k, cache.v, cache.table, ints(starts), ints(lengths), ints(cu), max(lengths), 0.1,
        window=window, softcap=softcap,
    )  # fmt: skip
    expected = [
        reference_attention(q[cu[n] : cu[n + 1]], cache.keys[n], cache.values[n], start, 0.1, window, softcap)
        for n, start in enumerate(starts)
    ]
    assert_close(out[: cu[-1]], torch.cat(expected))
    assert (out[cu[-1] :] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_captured_graph_follows_lengths_that_change_on_the_device() -> None:
    cache = Cache([900, 40, 1500, 3], 2, 64, torch.float16)
    q = randn(4, 4, 64, dtype=torch.float16)
    lengths = ints(cache.lengths)
    decode_attention(q, cache.k, cache.v, cache.table, lengths, 0.125)  # compiles, which capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, cache.k, cache.v, cache.table, lengths, 0.125)
    keys, values = cache.keys, cache.values
    for shorter in ([900, 40, 1500, 3], [1, 0, 700, 2], [640, 33, 0, 3]):
        lengths.copy_(ints(shorter))
        graph.replay()
        cache.lengths = shorter
        cache.keys = [own[:length] for own, length in zip(keys, shorter, strict=True)]
        cache.values = [own[:length] for own, length in zip(values, shorter, strict=True)]
        assert_close(out, reference_decode(cache, q, 0.125))


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
