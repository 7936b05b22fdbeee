"""Attention over paged keys and values, in Triton: one query per row (decode), or packed chunks of queries (prefill).

Decode reads every key and value once and computes little, so what counts is that all of the GPU reads all of the time.
A program attends from all query heads of one key/value head to one item of the step's plan. A row that is a single
item is then done; the others leave partial results, which a second kernel merges. A prompt that adjacent rows share is
read once for all of them, by a kernel before, and each row's first item merges what that found.

Grids are sized by Python integers alone and nothing waits for the device, so all of it can be captured in CUDA graphs;
programs for which the device finds no work leave at once. Scores are exponents of two, scaled by log2(e).

Shape suffixes: B rows, T packed tokens, N chunks, H query heads, K key/value heads, D head dimension, P pages of a row.
A cache is (pages, tokens of a page, K, D), contiguous. A row of a page table lists the pages of one sequence.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.engine.embedded.decode_plan import (
    ALIGN,
    FIRST_ITEM,
    ONLY_ITEM,
    DecodePlan,
    SharedPrefix,
    num_sms,
    plan_decode,
)

_LOG2_E = 1.4426950408889634
_NOTHING = tl.constexpr(float("-inf"))
_PREFIX_PART = tl.constexpr(128)
"""The fewest tokens of a shared prompt that are worth a program of their own."""
_MAX_PREFIX_PARTS = 64
_MAX_PREFIX_QUERIES = 128
_DECODE_QUERIES = 16
_COMBINED_ITEMS = 16


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: keys per iteration, queries (prefill alone chooses them), warps, stages of the pipeline."""

    keys: int
    num_warps: int
    num_stages: int
    queries: int = _DECODE_QUERIES


@triton.jit
def _tanh(x):
    # Saturates at ±1 where the exponential overflows or vanishes, so nothing gives NaN but NaN.
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _attend(
    q, acc, peak, mass, k_ptr, v_ptr, pages_ptr, begin, end, position, scaling,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries to the keys [begin, end), going on from (acc, peak, mass), by online softmax.

    Unless RAGGED, the keys are whole tiles. Under CAUSAL, keys past a query's position or before its window are hidden.
    """
    dimension = tl.arange(0, BLOCK_D)[None, :]
    for first in range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        live = key < end
        page = tl.load(pages_ptr + key // PAGE, mask=live, other=0).to(tl.int64)
        at = (page * PAGE + key % PAGE)[:, None] * TOKEN_STRIDE + dimension
        # What lies past the end may be anything, NaN too, and a weight of 0 would not hide that: load zeros there.
        inside = live[:, None]
        if D != BLOCK_D:
            inside = inside & (dimension < D)
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if SOFTCAP > 0:
            score = _tanh(score * (1.0 / SOFTCAP)) * SOFTCAP
        if RAGGED:
            score = tl.where(live[None, :], score, _NOTHING)
        if CAUSAL:
            score = tl.where(key[None, :] <= position[:, None], score, _NOTHING)
        if WINDOW > 0:
            score = tl.where(key[None, :] > position[:, None] - WINDOW, score, _NOTHING)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A query that has seen no key yet has the peak -inf, and -inf minus itself would be NaN.
        base = tl.where(new_peak == _NOTHING, 0.0, new_peak)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, mass


@triton.jit
def _merge(acc, peak, mass, partial, partial_peak):
    """Add a finished partial result; its peak is the log2 of its sum of exponentials, so its mass at that peak is 1."""
    new_peak = tl.maximum(peak, partial_peak)
    base = tl.where(new_peak == _NOTHING, 0.0, new_peak)
    shrink = tl.exp2(peak - base)
    weight = tl.exp2(partial_peak - base)
    return acc * shrink[:, None] + partial * weight[:, None], new_peak, mass * shrink + weight


@triton.jit
def _finish(acc, peak, mass):
    """The weighted mean, and the log2 of the sum of exponentials: 0 and -inf where no key was seen."""
    divisor = tl.where(mass > 0, mass, 1.0)
    return acc / divisor[:, None], peak + tl.log2(divisor)


@triton.jit
def _prefix_part(length, num_parts):
    """How many tokens of a shared prompt one program reads."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, num_parts), ALIGN) * ALIGN, _PREFIX_PART)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _prefix_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, first_ptr, count_ptr, length_ptr, partial_ptr, peak_ptr, table_stride, num_rows,
    num_parts, scaling,
    PAGE: tl.constexpr, K: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of a group, each with all query heads of one key/value head, and one part of the prompt they share."""
    ROWS: tl.constexpr = BLOCK_M // RATIO
    kv_head = tl.program_id(0) % K
    part = tl.program_id(0) // K
    group = tl.program_id(2)
    count = tl.load(count_ptr + group)
    length = tl.load(length_ptr + group)
    first = tl.load(first_ptr + group)
    size = _prefix_part(length, num_parts)
    if (tl.program_id(1) * ROWS >= count) | (part * size >= length):
        return
    query = tl.arange(0, BLOCK_M)
    member = tl.program_id(1) * ROWS + query // RATIO
    real = (query < ROWS * RATIO) & (member < count)
    row_head = (first + member) * (K * RATIO) + kv_head * RATIO + query % RATIO
    dimension = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (dimension < D)[None, :]
    at = row_head[:, None] * D + dimension[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], _NOTHING, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    pages_ptr = table_ptr + first.to(tl.int64) * table_stride
    begin = part * size
    end = tl.minimum(begin + size, length)
    acc, peak, mass = _attend(
        q, acc, peak, mass, k_ptr + kv_head * D, v_ptr + kv_head * D, pages_ptr, begin, end, query, scaling,
        PAGE, K * D, D, BLOCK_D, BLOCK_N, True, False, 0, SOFTCAP, PRECISION,
    )  # fmt: skip
    out, peak = _finish(acc, peak, mass)
    base = part.to(tl.int64) * num_rows * (K * RATIO)
    tl.store(partial_ptr + base * D + at, out, mask=inside)
    tl.store(peak_ptr + base + row_head, peak, mask=real)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, items_ptr, starts_ptr, prefix_ptr, prefix_peak_ptr, partial_ptr, peak_ptr, out_ptr,
    table_stride, num_rows, num_parts, scaling,
    PAGE: tl.constexpr, K: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_PREFIX: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One item and all query heads of one key/value head."""
    # An item's heads are neighbours in the grid, because their keys and values are neighbours in memory.
    kv_head = tl.program_id(0) % K
    item = tl.program_id(0) // K
    row = tl.load(items_ptr + item * 4)
    begin = tl.load(items_ptr + item * 4 + 1)
    end = tl.load(items_ptr + item * 4 + 2)
    flags = tl.load(items_ptr + item * 4 + 3)
    if row < 0:
        return
    query = tl.arange(0, BLOCK_M)
    head = kv_head * RATIO + query
    dimension = tl.arange(0, BLOCK_D)
    inside = (query < RATIO)[:, None] & (dimension < D)[None, :]
    at = head[:, None] * D + dimension[None, :]
    row_heads = row.to(tl.int64) * (K * RATIO)
    q = tl.load(q_ptr + row_heads * D + at, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], _NOTHING, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    pages_ptr = table_ptr + row.to(tl.int64) * table_stride
    acc, peak, mass = _attend(
        q, acc, peak, mass, k_ptr + kv_head * D, v_ptr + kv_head * D, pages_ptr, begin, end, query, scaling,
        PAGE, K * D, D, BLOCK_D, BLOCK_N, True, False, 0, SOFTCAP, PRECISION,
    )  # fmt: skip
    if HAS_PREFIX:
        shared = tl.where((flags & FIRST_ITEM) > 0, tl.load(starts_ptr + row), 0)
        for part in range(tl.cdiv(shared, _prefix_part(shared, num_parts))):
            base = row_heads + part * num_rows * (K * RATIO)
            prefix = tl.load(prefix_ptr + base * D + at, mask=inside, other=0.0)
            prefix_peak = tl.load(prefix_peak_ptr + base + head, mask=query < RATIO, other=_NOTHING)
            acc, peak, mass = _merge(acc, peak, mass, prefix, prefix_peak)
    out, peak = _finish(acc, peak, mass)
    if (flags & ONLY_ITEM) > 0:
        tl.store(out_ptr + row_heads * D + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        item_heads = item.to(tl.int64) * (K * RATIO)
        tl.store(partial_ptr + item_heads * D + at, out, mask=inside)
        tl.store(peak_ptr + item_heads + head, peak, mask=query < RATIO)


@triton.jit
def _combine_kernel(
    partial_ptr, peak_ptr, offsets_ptr, counts_ptr, out_ptr,
    H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Merge the items of one row, for some of its heads; a row without items is empty and gets zeros."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + row)
    offset = tl.load(offsets_ptr + row).to(tl.int64)
    if count == 1:
        return
    dimension = tl.arange(0, BLOCK_D)
    in_head = dimension < D
    first_head = tl.program_id(1) * HEADS
    for head in range(first_head, tl.minimum(first_head + HEADS, H)):
        acc = tl.zeros([BLOCK_D], tl.float32)
        peak = tl.max(tl.full([BLOCK_I], _NOTHING, tl.float32), 0)
        mass = 0.0
        for first in range(0, count, BLOCK_I):
            item = first + tl.arange(0, BLOCK_I)
            at = (offset + item) * H + head
            peaks = tl.load(peak_ptr + at, mask=item < count, other=_NOTHING)
            inside = (item < count)[:, None] & in_head[None, :]
            partial = tl.load(partial_ptr + at[:, None] * D + dimension[None, :], mask=inside, other=0.0)
            new_peak = tl.maximum(peak, tl.max(peaks, 0))
            base = tl.where(new_peak == _NOTHING, 0.0, new_peak)
            # A finished partial result has the mass 1 at its peak.
            weight = tl.exp2(peaks - base)
            shrink = tl.exp2(peak - base)
            acc = acc * shrink + tl.sum(partial * weight[:, None], 0)
            mass = mass * shrink + tl.sum(weight, 0)
            peak = new_peak
        out = acc / tl.where(mass > 0, mass, 1.0)
        tl.store(out_ptr + (row * H + head) * D + dimension, out.to(out_ptr.dtype.element_ty), mask=in_head)


def _combined_heads(num_rows: int) -> int:
    """Heads of one program: with few rows, which are then long, one each; with many, few programs that do nothing."""
    return 1 if num_rows <= 64 else 4 if num_rows <= 256 else 16


def _decode_tile(bytes_per_key: int) -> Tile:
    """Some 16 KiB of keys and as much of values per stage: enough in flight, and several programs on an SM."""
    return Tile(keys=max(16, min(128, 16384 // bytes_per_key)), num_warps=4, num_stages=3)


def _precision(dtype: torch.dtype) -> str:
    """Three TF32 products make nearly one of fp32; the single one that is Triton's default would cost parity."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _attend_to_prefix(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix: SharedPrefix,
    scaling: float,
    softcap: float,
) -> tuple[Tensor, Tensor, int]:
    """Every row's partial result over the prompt it shares, with its peaks, by part."""
    num_rows, num_heads, head_dim = q_BHD.shape
    _, page, num_kv_heads, _ = k_cache.shape
    ratio = num_heads // num_kv_heads
    block_m = triton.next_power_of_2(max(16, min(_MAX_PREFIX_QUERIES, prefix.max_count * ratio)))
    block_d = triton.next_power_of_2(head_dim)
    num_tiles = triton.cdiv(prefix.max_count, block_m // ratio)
    num_programs = prefix.num_groups_max * num_kv_heads * num_tiles
    capacity = page_table.shape[1] * page
    most = min(_MAX_PREFIX_PARTS, triton.cdiv(capacity, _PREFIX_PART.value))
    num_parts = max(1, min(most, triton.cdiv(2 * num_sms(q_BHD.device), num_programs)))
    partial = q_BHD.new_empty(num_parts, num_rows, num_heads, head_dim, dtype=torch.float32)
    peak = q_BHD.new_empty(num_parts, num_rows, num_heads, dtype=torch.float32)
    _prefix_kernel[(num_kv_heads * num_parts, num_tiles, prefix.num_groups_max)](
        q_BHD, k_cache, v_cache, page_table, prefix.first_G, prefix.count_G, prefix.length_G, partial, peak,
        page_table.stride(0), num_rows, num_parts, scaling * _LOG2_E, page, num_kv_heads, ratio, head_dim, block_m,
        block_d, max(16, min(64, 16384 // (block_d * q_BHD.element_size()))), softcap * _LOG2_E,
        _precision(q_BHD.dtype),
        num_warps=8 if block_m == 128 else 4, num_stages=3,
    )  # fmt: skip
    return partial, peak, num_parts


def decode_attention(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths_B: Tensor,
    scaling: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    prefix: SharedPrefix | None = None,
    plan: DecodePlan | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """(B, H·D): each row's query, at position length-1, attends to its first `length` tokens, or the last `window` of
    them; an empty row gets zeros. A plan is one for the same lengths, window and prefix; without it, one is made.
    """
    num_rows, num_heads, head_dim = q_BHD.shape
    _, page, num_kv_heads, _ = k_cache.shape
    assert q_BHD.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous() and page_table.stride(1) == 1
    if plan is None:
        plan = plan_decode(lengths_B, num_kv_heads, window=window, prefix=prefix)
    block_d = triton.next_power_of_2(head_dim)
    tile = tile or _decode_tile(block_d * q_BHD.element_size())
    num_items = plan.items_W4.shape[0]
    out = q_BHD.new_empty(num_rows, num_heads * head_dim)
    partial = q_BHD.new_empty(num_items, num_heads, head_dim, dtype=torch.float32)
    peak = q_BHD.new_empty(num_items, num_heads, dtype=torch.float32)
    prefix_partial, prefix_peak, num_parts, starts_B = partial, peak, 0, lengths_B
    if prefix is not None:
        prefix_partial, prefix_peak, num_parts = _attend_to_prefix(
            q_BHD, k_cache, v_cache, page_table, prefix, scaling, softcap
        )
        starts_B = prefix.start_B
    _decode_kernel[(num_items * num_kv_heads,)](
        q_BHD, k_cache, v_cache, page_table, plan.items_W4, starts_B, prefix_partial, prefix_peak, partial, peak, out,
        page_table.stride(0), num_rows, num_parts, scaling * _LOG2_E, page, num_kv_heads, num_heads // num_kv_heads,
        head_dim, _DECODE_QUERIES, block_d, tile.keys, prefix is not None, softcap * _LOG2_E, _precision(q_BHD.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    heads = _combined_heads(num_rows)
    _combine_kernel[(num_rows, triton.cdiv(num_heads, heads))](
        partial, peak, plan.offsets_B, plan.counts_B, out, num_heads, head_dim, heads, block_d, _COMBINED_ITEMS,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, starts_ptr, lengths_ptr, cu_ptr, out_ptr, table_stride, num_tokens, num_chunks,
    scaling,
    PAGE: tl.constexpr, K: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one chunk's queries, of one head."""
    head = tl.program_id(0)
    kv_head = head // RATIO
    # Later tiles see more keys, so they go first. Chunk n owns the tiles from cu[n] // BLOCK_M + n on; these are enough
    # for any lengths, and strictly increasing, so counting finds the chunk. What follows the last chunk is padding.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    index = tl.arange(0, BLOCK_CHUNKS)
    cu = tl.load(cu_ptr + index, mask=index <= num_chunks, other=0).to(tl.int32)
    chunk = tl.sum(((index <= num_chunks) & (cu // BLOCK_M + index <= tile)).to(tl.int32), 0) - 1
    chunk_first = tl.load(cu_ptr + chunk).to(tl.int32)
    offset = (tile - chunk_first // BLOCK_M - chunk) * BLOCK_M
    is_chunk = chunk < num_chunks
    start = tl.load(starts_ptr + chunk, mask=is_chunk, other=0).to(tl.int32)
    length = tl.load(lengths_ptr + chunk, mask=is_chunk, other=0).to(tl.int32)
    num_queries = tl.where(is_chunk, length, num_tokens - chunk_first)
    if offset >= num_queries:
        return
    query = tl.arange(0, BLOCK_M)
    dimension = tl.arange(0, BLOCK_D)
    inside = (offset + query < num_queries)[:, None] & (dimension < D)[None, :]
    base = ((chunk_first + offset).to(tl.int64) * (K * RATIO) + head) * D
    at = query[:, None] * (K * RATIO * D) + dimension[None, :]
    q = tl.load(q_ptr + base + at, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], _NOTHING, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    k_ptr += kv_head * D
    v_ptr += kv_head * D
    pages_ptr = table_ptr + tl.where(is_chunk, chunk, 0).to(tl.int64) * table_stride
    position = start + offset + query
    end = tl.where(is_chunk, start + tl.minimum(offset + BLOCK_M, length), 0)
    if WINDOW > 0:
        edge = tl.maximum(start + offset - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        # Whole tiles of keys up to the first query are seen by every query and need no mask.
        edge = tl.where(is_chunk, (start + offset + 1) // BLOCK_N * BLOCK_N, 0)
        acc, peak, mass = _attend(
            q, acc, peak, mass, k_ptr, v_ptr, pages_ptr, 0, edge, position, scaling,
            PAGE, K * D, D, BLOCK_D, BLOCK_N, False, False, 0, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, peak, mass = _attend(
        q, acc, peak, mass, k_ptr, v_ptr, pages_ptr, edge, end, position, scaling,
        PAGE, K * D, D, BLOCK_D, BLOCK_N, True, True, WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip
    out, peak = _finish(acc, peak, mass)
    tl.store(out_ptr + base + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def _prefill_tile(bytes_per_key: int, max_length: int) -> Tile:
    queries = 16 if max_length <= 16 else 64 if max_length <= 64 or bytes_per_key > 256 else 128
    keys = max(16, min(64, 16384 // bytes_per_key))
    return Tile(keys, 8 if queries == 128 else 4, 3 if bytes_per_key <= 256 else 2, queries)


def prefill_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_NP: Tensor,
    starts_N: Tensor,
    lengths_N: Tensor,
    cu_T: Tensor,
    max_length: int,
    scaling: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    tile: Tile | None = None,
) -> Tensor:
    """(T, H, D): chunk n is tokens cu[n]..cu[n+1]-1, at positions from starts[n] on; its own keys and values, and all
    before them, are in the cache already. Causal. Tokens after the last chunk get zeros. `max_length` bounds the
    lengths and only chooses the tile.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    _, page, num_kv_heads, _ = k_cache.shape
    num_chunks = starts_N.shape[0]
    assert q_THD.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert page_table_NP.stride(1) == 1
    block_d = triton.next_power_of_2(head_dim)
    tile = tile or _prefill_tile(block_d * q_THD.element_size(), max_length)
    out_THD = torch.empty_like(q_THD)
    _prefill_kernel[(num_heads, num_tokens // tile.queries + num_chunks + 1)](
        q_THD, k_cache, v_cache, page_table_NP, starts_N, lengths_N, cu_T, out_THD, page_table_NP.stride(0),
        num_tokens, num_chunks, scaling * _LOG2_E, page, num_kv_heads, num_heads // num_kv_heads, head_dim,
        max(64, triton.next_power_of_2(num_chunks + 1)), tile.queries, block_d, tile.keys, window, softcap * _LOG2_E,
        _precision(q_THD.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out_THD
