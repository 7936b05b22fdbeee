"""The kernels of paged attention against attention in double precision, and the plan by which decoding shares it out.

On a GPU where there is one, else on the CPU by Triton's interpreter.
"""

import numpy as np
import pytest
import torch
from kernel_checks import DEVICE, DTYPES, ON_GPU, TOLERANCE, ints, randn
from torch import Tensor

from headway.engine.embedded import paged_attention
from headway.engine.embedded.decode_plan import SharedPrefix, plan_decode
from headway.engine.embedded.paged_attention import decode_attention, prefill_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's, where NaN is meant


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


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
