"""Triton kernels between the matrix products of a forward pass: norms, rope and cache write, activations,
sampling, and the bookkeeping of a decode step.

All are limited by memory bandwidth, so each reads its input once and holds intermediates in registers.
Arithmetic is in fp32, and every intermediate that eager torch would have rounded to the model's dtype is rounded here
too: the trainer computes the same tokens' log-probs with those roundings, and log-prob parity depends on them. A GPU's
compiler may still leave some of them out.
Launchers neither wait for the device nor read its data, so all can be captured in a CUDA graph.

Shape suffixes: T tokens, C hidden size, F intermediate size, H query heads, K key/value heads, D head dimension,
P positions (or pages of a row), B rows, V vocabulary, E stop tokens, S steps.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

_ACTIVATION_BLOCK = 1024
_HEADS_PER_PROGRAM = 16
_DRAW_BLOCK = 256
"""Tokens whose weights are summed together; the CPU sampler cuts the vocabulary the same way."""
_DRAW_BLOCKS_PER_PROGRAM = 16
_ROW_BLOCK = 128

Activation = Literal["silu", "gelu_tanh"]


@triton.jit
def _round_to(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _weigh(x, inverse_rms, weight, DTYPE: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """The normalised vector times its weight, rounded where transformers rounds: once for Gemma, twice for others."""
    scaled = x * inverse_rms
    return _round_to(scaled * (1.0 + weight) if UNIT_OFFSET else _round_to(scaled, DTYPE) * weight, DTYPE)


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, sum_ptr, eps,
    NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * NUM_COLUMNS
    column = tl.arange(0, BLOCK)
    inside = column < NUM_COLUMNS
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        x = _round_to(x + residual, dtype)
        tl.store(sum_ptr + row + column, x.to(dtype), mask=inside)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / NUM_COLUMNS + eps)
    normed = _weigh(x, inverse_rms, weight, dtype, UNIT_OFFSET)
    tl.store(normed_ptr + row + column, normed.to(dtype), mask=inside)


def add_rms_norm(
    x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, which is the next residual."""
    num_rows, num_columns = x_TC.shape
    assert x_TC.is_contiguous() and (residual_TC is None or residual_TC.is_contiguous())
    normed_TC = torch.empty_like(x_TC)
    sum_TC = x_TC if residual_TC is None else torch.empty_like(x_TC)
    if num_rows:
        block = triton.next_power_of_2(num_columns)
        _norm_kernel[(num_rows,)](
            x_TC, x_TC if residual_TC is None else residual_TC, weight_C, normed_TC, sum_TC, eps, num_columns, block,
            residual_TC is not None, unit_offset, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return normed_TC, sum_TC


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    return add_rms_norm(x_TC, None, weight_C, eps, unit_offset=unit_offset)[0]


@triton.jit
def _norm_heads(
    first, second, is_query, q_norm_ptr, k_norm_ptr, column, in_half, eps,
    D: tl.constexpr, DTYPE: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """RMS norm of every head, each given and returned as its two halves."""
    HALF: tl.constexpr = D // 2
    mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D
    inverse_rms = tl.rsqrt(mean_square + eps)[:, None]
    q_first = tl.load(q_norm_ptr + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    q_second = tl.load(q_norm_ptr + HALF + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    k_first = tl.load(k_norm_ptr + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    k_second = tl.load(k_norm_ptr + HALF + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    first = _weigh(first, inverse_rms, tl.where(is_query, q_first, k_first), DTYPE, UNIT_OFFSET)
    second = _weigh(second, inverse_rms, tl.where(is_query, q_second, k_second), DTYPE, UNIT_OFFSET)
    return first, second


@triton.jit
def _rope_kernel(
    qkv_ptr, positions_ptr, cos_ptr, sin_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, q_ptr, q_norm_ptr, k_norm_ptr, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    column = tl.arange(0, HALF_BLOCK)
    in_half = column < HALF
    is_query, is_value = head < H, head >= H + K
    inside = (head < H + 2 * K) & in_half[None, :]
    at = head * D + column[None, :]

    qkv_row = qkv_ptr + token * ((H + 2 * K) * D)
    raw_first = tl.load(qkv_row + at, mask=inside, other=0.0)
    raw_second = tl.load(qkv_row + at + HALF, mask=inside, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if HAS_NORM:
        first, second = _norm_heads(
            first, second, is_query, q_norm_ptr, k_norm_ptr, column, in_half, eps, D, dtype, UNIT_OFFSET
        )

    # transformers casts cos and sin to the model's dtype, and eager torch rounds each product and then their sum.
    table = position * D + column
    cos_first = _round_to(tl.load(cos_ptr + table, mask=in_half, other=0.0), dtype)[None, :]
    cos_second = _round_to(tl.load(cos_ptr + table + HALF, mask=in_half, other=0.0), dtype)[None, :]
    sin_first = _round_to(tl.load(sin_ptr + table, mask=in_half, other=0.0), dtype)[None, :]
    sin_second = _round_to(tl.load(sin_ptr + table + HALF, mask=in_half, other=0.0), dtype)[None, :]
    turned_first = (_round_to(first * cos_first, dtype) - _round_to(second * sin_first, dtype)).to(dtype)
    turned_second = (_round_to(second * cos_second, dtype) + _round_to(first * sin_second, dtype)).to(dtype)

    q_row = q_ptr + token * (H * D)
    tl.store(q_row + at, turned_first, mask=inside & is_query)
    tl.store(q_row + at + HALF, turned_second, mask=inside & is_query)
    written = inside & (slot >= 0)
    is_key = (head >= H) & (head < H + K)
    k_row = k_cache_ptr + slot * (K * D) - H * D
    tl.store(k_row + at, turned_first, mask=written & is_key)
    tl.store(k_row + at + HALF, turned_second, mask=written & is_key)
    v_row = v_cache_ptr + slot * (K * D) - (H + K) * D
    tl.store(v_row + at, raw_first, mask=written & is_value)
    tl.store(v_row + at + HALF, raw_second, mask=written & is_value)


def rope_and_write(
    qkv_T: Tensor,
    positions_T: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    slots_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> Tensor:
    """Rotated queries (T, H, D); keys, rotated too, and values go to their slots of the cache.

    A slot is page × page size + offset; a token with a negative slot writes nothing. With norms, queries and keys are
    normalised head by head first.
    """
    num_tokens, width = qkv_T.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    assert qkv_T.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert cos_PD.is_contiguous() and sin_PD.is_contiguous() and cos_PD.shape[1] == head_dim
    assert (q_norm is None) == (k_norm is None)
    q_THD = qkv_T.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens:
        num_head_blocks = triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS_PER_PROGRAM)
        _rope_kernel[(num_tokens, num_head_blocks)](
            qkv_T, positions_T, cos_PD, sin_PD, slots_T, k_cache, v_cache, q_THD,
            qkv_T if q_norm is None else q_norm, qkv_T if k_norm is None else k_norm, eps, num_heads, num_kv_heads,
            head_dim, _HEADS_PER_PROGRAM, triton.next_power_of_2(head_dim // 2), q_norm is not None, unit_offset,
            num_warps=4 if head_dim > 64 else 2,
        )  # fmt: skip
    return q_THD


@triton.jit
def _activation_kernel(gate_up_ptr, out_ptr, NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr):
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < NUM_COLUMNS
    gate_row = gate_up_ptr + row * (2 * NUM_COLUMNS)
    gate = tl.load(gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_row + NUM_COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    # Both are gate × sigmoid(x), since (1 + tanh(x)) / 2 is sigmoid(2x), and that loses nothing where tanh nears -1.
    x = gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    out = _round_to(gate / (1.0 + tl.exp(-x)), dtype) * up
    tl.store(out_ptr + row * NUM_COLUMNS + column, out.to(dtype), mask=inside)


def gated_activation(gate_up_T2F: Tensor, kind: Activation) -> Tensor:
    """act(gate) × up, where a row is all of the gate and then all of up."""
    num_rows, width = gate_up_T2F.shape
    assert gate_up_T2F.is_contiguous()
    out_TF = gate_up_T2F.new_empty(num_rows, width // 2)
    # A grid's second dimension ends at 65,535; a longer prefill goes in pieces.
    for first in range(0, num_rows, 65535):
        piece = gate_up_T2F[first : first + 65535]
        _activation_kernel[(triton.cdiv(width // 2, _ACTIVATION_BLOCK), piece.shape[0])](
            piece, out_TF[first : first + 65535], width // 2, _ACTIVATION_BLOCK, kind == "silu", num_warps=4
        )
    return out_TF


@triton.jit
def _masses_kernel(
    logits_ptr, inverse_temperature_ptr, peaks_ptr, masses_ptr, vocab, row_stride, num_blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The only pass over the logits: of each block its largest logit and its weights' sum relative to that."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab, other=float("-inf"))
    scaled = logits.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    peak = tl.max(scaled, 1)
    # A block of -inf has no weight; -inf minus its own peak would be NaN.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.sum(tl.exp(scaled - base[:, None]), 1)
    tl.store(peaks_ptr + row * num_blocks + block, peak, mask=block < num_blocks)
    tl.store(masses_ptr + row * num_blocks + block, mass, mask=block < num_blocks)


@triton.jit
def _uniform(counter, draw):
    """The SplitMix64 output at `draw` of the stream that starts at `counter`, as a number in [0, 1)."""
    z = counter.to(tl.uint64) + (draw.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _first_beyond(target, edges, weights, index, SIZE: tl.constexpr):
    """The first index whose cumulative weight exceeds the target, or the last with any weight; never one without.

    Asking for weight as well guards against edges that a parallel sum rounded up where nothing was added. Where weights
    are not numbers no comparison holds, and what comes out is still an index.
    """
    first = tl.min(tl.where((edges > target) & (weights > 0), index, SIZE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def _draw_kernel(
    logits_ptr, inverse_temperature_ptr, greedy_ptr, counters_ptr, draws_ptr, peaks_ptr, masses_ptr, tokens_ptr,
    logprobs_ptr, vocab, row_stride, num_blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    greedy = tl.load(greedy_ptr + row) != 0
    block = tl.arange(0, BLOCKS)
    peaks = tl.load(peaks_ptr + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    masses = tl.load(masses_ptr + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    peak = tl.max(peaks, 0)
    # Sums over the vocabulary are in double precision: in single, the borders between tokens would shift visibly.
    weights = masses.to(tl.float64) * tl.exp(peaks.to(tl.float64) - peak.to(tl.float64))
    edges = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)
    target = _uniform(tl.load(counters_ptr + row), tl.load(draws_ptr + row)) * total

    drawn = _first_beyond(target, edges, weights, block, BLOCKS)
    highest = tl.min(tl.where(peaks == peak, block, BLOCKS), 0)
    chosen = tl.minimum(tl.where(greedy, highest, drawn), num_blocks - 1)
    before = tl.sum(tl.where(block == chosen - 1, edges, 0.0), 0)
    chosen_peak = tl.sum(tl.where(block == chosen, peaks, 0.0), 0)

    inner = tl.arange(0, BLOCK)
    column = chosen * BLOCK + inner
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab, other=float("-inf"))
    scaled = logits.to(tl.float32) * tl.load(inverse_temperature_ptr + row)
    factor = tl.exp(chosen_peak.to(tl.float64) - peak.to(tl.float64))
    inner_weights = tl.exp(scaled - chosen_peak).to(tl.float64) * factor
    inner_drawn = _first_beyond(target - before, tl.cumsum(inner_weights, 0), inner_weights, inner, BLOCK)
    inner_highest = tl.min(tl.where(scaled == peak, inner, BLOCK), 0)
    token = tl.minimum(chosen * BLOCK + tl.where(greedy, inner_highest, inner_drawn), vocab - 1)

    # The maximum first: added to it, the mass of large logits would be rounded away.
    above = tl.sum(tl.where(column == token, scaled - peak, 0.0), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, above - tl.log(total).to(tl.float32))


def sample(
    logits_BV: Tensor, inverse_temperature_B: Tensor, greedy_B: Tensor, counters_B: Tensor, draws_B: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob: that of the full distribution at the row's temperature.

    Chooses what the CPU sampler chooses: one uniform number per token, hashed from (counter, draw), inverts the
    cumulative distribution. The counter is a uint64 in the bits of an int64. A greedy row takes the likeliest token,
    the first among equals, and has the inverse temperature 1. A row whose logits hold NaN or +inf, or nothing but
    -inf, gets the log-prob NaN and some token of the vocabulary.
    """
    num_rows, vocab = logits_BV.shape
    assert logits_BV.stride(1) == 1
    num_blocks = triton.cdiv(vocab, _DRAW_BLOCK)
    peaks = logits_BV.new_empty(num_rows, num_blocks, dtype=torch.float32)
    masses = torch.empty_like(peaks)
    tokens_B = logits_BV.new_empty(num_rows, dtype=torch.int64)
    logprobs_B = logits_BV.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        row_stride = logits_BV.stride(0)
        _masses_kernel[(triton.cdiv(num_blocks, _DRAW_BLOCKS_PER_PROGRAM), num_rows)](
            logits_BV, inverse_temperature_B, peaks, masses, vocab, row_stride, num_blocks, _DRAW_BLOCKS_PER_PROGRAM,
            _DRAW_BLOCK, num_warps=4,
        )  # fmt: skip
        _draw_kernel[(num_rows,)](
            logits_BV, inverse_temperature_B, greedy_B, counters_B, draws_B, peaks, masses, tokens_B, logprobs_B,
            vocab, row_stride, num_blocks, triton.next_power_of_2(num_blocks), _DRAW_BLOCK, num_warps=4,
        )  # fmt: skip
    return tokens_B, logprobs_B


@triton.jit(do_not_specialize=["num_rows"])
def _begin_kernel(
    lengths_ptr, alive_ptr, table_ptr, positions_ptr, slots_ptr, visible_ptr, step_ptr, table_stride, num_rows,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < num_rows
    length = tl.load(lengths_ptr + row, mask=real, other=0)
    alive = tl.load(alive_ptr + row, mask=real, other=0)
    position = tl.maximum(length - 1, 0)  # rows of padding have no tokens
    page = tl.load(table_ptr + row.to(tl.int64) * table_stride + position // PAGE, mask=real, other=0)
    slot = page.to(tl.int64) * PAGE + position % PAGE
    tl.store(positions_ptr + row, position.to(tl.int64), mask=real)
    tl.store(slots_ptr + row, tl.where(alive > 0, slot, -1), mask=real)
    tl.store(visible_ptr + row, length * alive, mask=real)
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1)


def begin_step(
    lengths_B: Tensor,
    alive_B: Tensor,
    table_BP: Tensor,
    positions_B: Tensor,
    slots_B: Tensor,
    visible_B: Tensor,
    step: Tensor,
    page: int,
) -> None:
    """Where each row's last token goes (nowhere once it is finished) and how many tokens it sees; counts the step."""
    num_rows = len(lengths_B)
    _begin_kernel[(triton.cdiv(num_rows, _ROW_BLOCK),)](
        lengths_B, alive_B, table_BP, positions_B, slots_B, visible_B, step, table_BP.stride(0), num_rows, page,
        _ROW_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _end_kernel(
    sampled_ptr, logprobs_ptr, stop_tokens_ptr, limits_ptr, step_ptr, tokens_ptr, draws_ptr, lengths_ptr, alive_ptr,
    all_sampled_ptr, all_logprobs_ptr, step_stride, num_rows,
    NUM_STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < num_rows
    token = tl.load(sampled_ptr + row, mask=real, other=0)
    alive = tl.load(alive_ptr + row, mask=real, other=0)
    length = tl.load(lengths_ptr + row, mask=real, other=0) + alive
    draws = tl.load(draws_ptr + row, mask=real, other=0) + alive
    place = (tl.load(step_ptr) - 1) * step_stride + row
    tl.store(all_sampled_ptr + place, token, mask=real)
    tl.store(all_logprobs_ptr + place, tl.load(logprobs_ptr + row, mask=real, other=0.0), mask=real)
    stop = tl.arange(0, NUM_STOPS)
    stops = tl.load(stop_tokens_ptr + row[:, None] * NUM_STOPS + stop[None, :], mask=real[:, None], other=-1)
    stopped = tl.max((stops == token[:, None]).to(tl.int32), 1)
    going = (length < tl.load(limits_ptr + row, mask=real, other=0)).to(tl.int32)
    tl.store(tokens_ptr + row, token, mask=real)
    tl.store(draws_ptr + row, draws, mask=real)
    tl.store(lengths_ptr + row, length, mask=real)
    tl.store(alive_ptr + row, alive * going * (1 - stopped), mask=real)


def end_step(
    sampled_B: Tensor,
    logprobs_B: Tensor,
    stop_tokens_BE: Tensor,
    limits_B: Tensor,
    step: Tensor,
    tokens_B: Tensor,
    draws_B: Tensor,
    lengths_B: Tensor,
    alive_B: Tensor,
    all_sampled_SB: Tensor,
    all_logprobs_SB: Tensor,
) -> None:
    """Take the sampled tokens; rows that reached a stop token or their limit sample no more."""
    num_rows, num_stops = stop_tokens_BE.shape
    assert stop_tokens_BE.is_contiguous() and all_sampled_SB.stride() == all_logprobs_SB.stride()
    _end_kernel[(triton.cdiv(num_rows, _ROW_BLOCK),)](
        sampled_B, logprobs_B, stop_tokens_BE, limits_B, step, tokens_B, draws_B, lengths_B, alive_B, all_sampled_SB,
        all_logprobs_SB, all_sampled_SB.stride(0), num_rows, num_stops, _ROW_BLOCK,
    )  # fmt: skip
