"""Splits a decode step's attention into items of equal work, on the device, from the rows' actual lengths.

Lengths are long-tailed and change with every step, while a CUDA graph's grid is fixed. So the grid has a fixed number
of items, and one small kernel hands them out: item after item to row after row, long rows getting several. Nothing
waits for the device. The plan depends on no layer's data and serves every layer that has the same window.

Shape suffixes: B rows, G groups of rows, W items.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGN = tl.constexpr(64)
"""Items are whole multiples of this many tokens, but for the last of a row, so that tiles of keys are full."""
ONLY_ITEM, FIRST_ITEM = tl.constexpr(1), tl.constexpr(2)
"""Flags of an item: its row has no other; it is its row's first."""
_PROGRAMS_PER_SM = 4
_PLAN_BLOCK = 1024
_NO_WINDOW = 2**31 - 1


@dataclass(frozen=True)
class SharedPrefix:
    """Prompts that adjacent rows of the batch share, as whole pages: group g is rows first..first+count-1.

    All tensors are int32. Groups that do not exist have count 0. `start_B` is the length of the prompt a row shares, 0
    where it shares none. No count exceeds `max_count`.
    """

    first_G: Tensor
    count_G: Tensor
    length_G: Tensor
    start_B: Tensor
    max_count: int

    @property
    def num_groups_max(self) -> int:
        return self.first_G.shape[0]


@dataclass(frozen=True)
class DecodePlan:
    """Items (row, begin, end, flags) in the order of rows; row -1 means no work. Row b has `counts_B[b]` of them, from
    `offsets_B[b]` on; none if it is empty."""

    items_W4: Tensor
    offsets_B: Tensor
    counts_B: Tensor


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; few on a CPU, where Triton's interpreter runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit(do_not_specialize=["num_rows", "num_items", "smallest", "window"])
def _plan_kernel(
    lengths_ptr, starts_ptr, items_ptr, offsets_ptr, counts_ptr, num_rows, num_items, smallest, window,
    HAS_STARTS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_B)
    real = row < num_rows
    length = tl.load(lengths_ptr + row, mask=real, other=0).to(tl.int32)
    start = tl.maximum(length - window, 0)
    if HAS_STARTS:
        start = tl.load(starts_ptr + row, mask=real, other=0).to(tl.int32)
    span = tl.maximum(length - start, 0)
    # A row may leave its last item partly filled; when all others are this large, num_items are enough.
    share = (tl.sum(span.to(tl.int64), 0) // (num_items - num_rows) + 1).to(tl.int32)
    largest = tl.maximum(tl.cdiv(share, ALIGN) * ALIGN, smallest)
    count = tl.where(length > 0, tl.maximum(tl.cdiv(span, largest), 1), 0)
    size = tl.cdiv(tl.cdiv(span, tl.maximum(count, 1)), ALIGN) * ALIGN
    offset = tl.cumsum(count, 0) - count
    tl.store(counts_ptr + row, count, mask=real)
    tl.store(offsets_ptr + row, offset, mask=real)
    for split in range(tl.max(count, 0)):
        item_ptr = items_ptr + (offset + split) * 4
        here = split < count
        begin = start + split * size
        flags = tl.where(count == 1, ONLY_ITEM, 0) + tl.where(begin == start, FIRST_ITEM, 0)
        tl.store(item_ptr, row, mask=here)
        tl.store(item_ptr + 1, begin, mask=here)
        tl.store(item_ptr + 2, tl.minimum(begin + size, length), mask=here)
        tl.store(item_ptr + 3, flags, mask=here)
    num_used = tl.sum(count, 0)
    for first in range(0, num_items, BLOCK_W):
        item = first + tl.arange(0, BLOCK_W)
        tl.store(items_ptr + item * 4, -1, mask=(item >= num_used) & (item < num_items))


def plan_decode(
    lengths_B: Tensor, num_kv_heads: int, *, window: int = 0, prefix: SharedPrefix | None = None
) -> DecodePlan:
    """The plan of one decode step, for every layer with this window."""
    if window and prefix is not None:
        raise ValueError("a shared prefix and a sliding window cannot be combined; pass one of them")
    num_rows = lengths_B.shape[0]
    num_programs, sms = num_rows * num_kv_heads, num_sms(lengths_B.device)
    num_items = num_rows + max(num_rows, triton.cdiv(_PROGRAMS_PER_SM * sms, num_kv_heads))
    # Short items fill the GPU when rows are few; when rows are many, they would only make more results to merge.
    smallest = 128 if num_programs <= 2 * sms else 256 if num_programs <= 8 * sms else 512
    block = max(_PLAN_BLOCK, triton.next_power_of_2(num_rows))
    items_W4 = lengths_B.new_empty(num_items, 4, dtype=torch.int32)
    offsets_B = lengths_B.new_empty(num_rows, dtype=torch.int32)
    counts_B = lengths_B.new_empty(num_rows, dtype=torch.int32)
    _plan_kernel[(1,)](
        lengths_B, lengths_B if prefix is None else prefix.start_B, items_W4, offsets_B, counts_B, num_rows,
        num_items, smallest, window or _NO_WINDOW, prefix is not None, block, _PLAN_BLOCK,
        num_warps=min(16, block // 256),
    )  # fmt: skip
    return DecodePlan(items_W4, offsets_B, counts_B)
