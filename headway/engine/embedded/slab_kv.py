"""KV cache of the embedded engine on a CPU: slabs cut into rows of one size class.

The memory is a fixed number of slabs. A slab in use belongs to one size class and holds rows of equal capacity (64,
128, 256, … tokens); a sequence has one row, contiguous, and moves to the next class when it outgrows its row.
Decode attention then reads each slab as a dense batch in place: nothing is gathered, and padding stays below a factor
of two. Freeing a row moves the class's last row into the hole, so at most one slab per class is partly filled.
Running out is an answer (`None`, `False`), not a failure: the scheduler waits or preempts.

Shape suffixes: R rows, K key/value heads, S row capacity, D head dimension, L twice the layers (keys, values).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.engine.embedded.decoder import Layer, RotatingOperations, Rotation
from headway.errors import ConfigError
from headway.model.attention import capped_attention, causal_attention
from headway.model.shape import ModelShape

SMALLEST_ROW = 64
SLAB_TOKENS = 2048


@dataclass(eq=False)
class Row:
    """Where one sequence's keys and values lie. The memory moves rows and updates this object."""

    size_class: int
    slab: int
    index: int


@dataclass(eq=False)
class _SizeClass:
    capacity: int
    rows_per_slab: int
    slabs: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def _capacities(max_context: int) -> list[int]:
    capacities = [SMALLEST_ROW]
    while capacities[-1] < max_context:
        capacities.append(2 * capacities[-1])
    return capacities


def least_tokens(max_context: int) -> int:
    """The smallest memory in which one sequence can fill the context."""
    return 2 * _capacities(max_context)[-1]


class KvMemory:
    def __init__(self, shape: ModelShape, dtype: torch.dtype, num_tokens: int, max_context: int):
        self.shape = shape
        capacities = _capacities(max_context)
        half = 1 << (max(num_tokens // 2, 1).bit_length() - 1)  # less memory than two large slabs is two small ones
        self.slab_tokens = max(min(SLAB_TOKENS, half), capacities[-1])
        self.num_slabs = num_tokens // self.slab_tokens
        if self.num_slabs < 2:
            raise ConfigError(
                f"engine.kv_tokens = {num_tokens} cannot hold two sequences of up to {max_context} tokens, which take "
                f"{least_tokens(max_context)} on a CPU; raise it, or lower engine.max_context"
            )
        self._classes = [_SizeClass(capacity, self.slab_tokens // capacity) for capacity in capacities]
        self._free_slabs = list(range(self.num_slabs - 1, -1, -1))
        # Zeros, not empty: masked positions meet a weight of 0, and 0 × NaN would poison the row.
        elements = self.slab_tokens * shape.num_kv_heads * shape.head_dim
        self._slabs = torch.zeros(self.num_slabs, 2 * shape.num_layers, elements, dtype=dtype)
        self.dtype, self.device = dtype, self._slabs.device
        self.layer_elements = elements

    @property
    def num_tokens(self) -> int:
        return self.num_slabs * self.slab_tokens

    @property
    def num_used(self) -> int:
        return sum(size_class.capacity * len(size_class.rows) for size_class in self._classes)

    def capacity(self, row: Row) -> int:
        return self._classes[row.size_class].capacity

    def allocate(self, num_tokens: int, source: Row | None = None, num_shared: int = 0) -> Row | None:
        """A row that holds `num_tokens`, or None when the memory is full. Rows share nothing: forking is copying."""
        number = next(i for i, size_class in enumerate(self._classes) if size_class.capacity >= num_tokens)
        size_class = self._classes[number]
        if len(size_class.rows) == len(size_class.slabs) * size_class.rows_per_slab:
            if not self._free_slabs:
                return None
            size_class.slabs.append(self._free_slabs.pop())
        slab, index = divmod(len(size_class.rows), size_class.rows_per_slab)
        row = Row(number, slab, index)
        size_class.rows.append(row)
        return row

    def free(self, row: Row) -> None:
        size_class = self._classes[row.size_class]
        last = size_class.rows.pop()
        if last is not row:
            self._view_LKSD(row).copy_(self._view_LKSD(last))
            size_class.rows[row.slab * size_class.rows_per_slab + row.index] = last
            last.slab, last.index = row.slab, row.index
        if len(size_class.rows) <= (len(size_class.slabs) - 1) * size_class.rows_per_slab:
            self._free_slabs.append(size_class.slabs.pop())

    def copy(self, source: Row, target: Row, num_tokens: int) -> None:
        """Fork: the first `num_tokens` of `source` become those of `target`."""
        self._view_LKSD(target)[:, :, :num_tokens].copy_(self._view_LKSD(source)[:, :, :num_tokens])

    def grow(self, row: Row, num_tokens: int) -> bool:
        """Make `row` hold `num_tokens`, moving it to a larger class; False when the memory is full."""
        old_capacity = self.capacity(row)
        if num_tokens <= old_capacity:
            return True
        larger = self.allocate(num_tokens)
        if larger is None:
            return False
        self.copy(row, larger, old_capacity)
        # `row` stays its holder's object: the two exchange places, and the old place is freed.
        self._classes[larger.size_class].rows[self._position(larger)] = row
        self._classes[row.size_class].rows[self._position(row)] = larger
        old_place = row.size_class, row.slab, row.index
        row.size_class, row.slab, row.index = larger.size_class, larger.slab, larger.index
        larger.size_class, larger.slab, larger.index = old_place
        self.free(larger)
        return True

    def shrink(self, row: Row, num_tokens: int) -> None:
        """A row has a fixed capacity: nothing to release."""

    def clear(self, row: Row) -> None:
        self._view_LKSD(row).zero_()

    def renew(self, row: Row, source: Row | None = None, num_shared: int = 0) -> bool:
        return True

    def _position(self, row: Row) -> int:
        return row.slab * self._classes[row.size_class].rows_per_slab + row.index

    def _view_LKSD(self, row: Row) -> Tensor:
        return self.slab_view(row.size_class, row.slab)[:, row.index]

    def place(self, row: Row) -> tuple[int, int]:
        """Where a row's keys start, in elements from a layer's address, and how far apart its heads lie."""
        described = self._classes[row.size_class]
        head_elements = described.capacity * self.shape.head_dim
        first = described.slabs[row.slab] * 2 * self.shape.num_layers * self.layer_elements
        return first + row.index * self.shape.num_kv_heads * head_elements, head_elements

    def layer_address(self, layer: int) -> int:
        return self._slabs.data_ptr() + 2 * layer * self.layer_elements * self._slabs.element_size()

    def slab_view(self, size_class: int, slab: int) -> Tensor:
        """All rows of one slab: (L, R, K, S, D), keys of layer i at 2i, values at 2i + 1."""
        described = self._classes[size_class]
        storage = self._slabs[described.slabs[slab]]
        num_heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        return storage.view(-1, described.rows_per_slab, num_heads, described.capacity, head_dim)


@dataclass(frozen=True)
class _SlabBatch:
    """The decoded rows of one slab: queries [start, stop) of the batch, in row order."""

    start: int
    stop: int
    view_LRKSD: Tensor
    rows_R: Tensor
    positions_R: Tensor
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, window: int) -> Tensor:
        """The additive mask: -inf for keys after a row's query or before its window, else 0."""
        if window not in self._masks:
            positions_R1, keys_S = self.positions_R[:, None], torch.arange(self.view_LRKSD.shape[3])
            hidden = keys_S[None, :] > positions_R1
            if window:
                hidden |= keys_S[None, :] <= positions_R1 - window
            mask = torch.zeros(hidden.shape, dtype=self.view_LRKSD.dtype).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]


def decode_order(rows: Sequence[Row]) -> list[int]:
    """The order in which a decode batch must present its rows: slab by slab."""
    return sorted(range(len(rows)), key=lambda i: (rows[i].size_class, rows[i].slab, rows[i].index))


class DecodeAttention:
    """One new token for each of many rows, given in `decode_order`. Queries beyond the rows are padding."""

    def __init__(
        self,
        memory: KvMemory,
        rows: list[Row],
        positions: list[int],
        operations: RotatingOperations,
        fixed_shapes: bool,
    ):
        self._operations = operations
        self._batches: list[_SlabBatch] = []
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and _same_slab(rows[stop], rows[start]):
                stop += 1
            self._batches.append(self._slab_batch(memory, rows, positions, start, stop, fixed_shapes))
            start = stop

    @staticmethod
    def _slab_batch(
        memory: KvMemory, rows: list[Row], positions: list[int], start: int, stop: int, fixed_shapes: bool
    ) -> _SlabBatch:
        first = rows[start]
        positions_R = torch.tensor(positions[start:stop])
        # A fixed extent makes a row's arithmetic independent of its neighbours' lengths.
        extent = memory.capacity(first) if fixed_shapes else int(positions_R.max()) + 1
        view = memory.slab_view(first.size_class, first.slab)[:, :, :, :extent]
        rows_R = torch.tensor([row.index for row in rows[start:stop]])
        return _SlabBatch(start, stop, view, rows_R, positions_R)

    def attend(self, index: int, layer: Layer, qkv_TXD: Tensor, rotation: Rotation) -> Tensor:
        self._operations.rotate(qkv_TXD, layer, rotation)
        query_TKGD = qkv_TXD[:, : layer.num_heads].unflatten(1, (layer.num_kv_heads, -1))
        new_T2KD = qkv_TXD[:, layer.num_heads :].unflatten(1, (2, -1))
        outs = [self._attend_slab(batch, index, layer, query_TKGD, new_T2KD) for batch in self._batches]
        num_padding = len(qkv_TXD) - self._batches[-1].stop
        if num_padding:
            outs.append(query_TKGD.new_zeros(num_padding, *query_TKGD.shape[1:]))
        return (torch.cat(outs) if len(outs) > 1 else outs[0]).flatten(1)

    @staticmethod
    def _attend_slab(batch: _SlabBatch, index: int, layer: Layer, query_TKGD: Tensor, new_T2KD: Tensor) -> Tensor:
        stored_2RKSD = batch.view_LRKSD[2 * index : 2 * index + 2]
        stored_2RKSD[:, batch.rows_R, :, batch.positions_R] = new_T2KD[batch.start : batch.stop]
        if len(batch.rows_R) < stored_2RKSD.shape[1]:
            stored_2RKSD = _take_rows(stored_2RKSD, batch.rows_R)
        # The queries that share a key/value head stand in for a sequence dimension: no head is repeated.
        query = query_TKGD[batch.start : batch.stop]
        keys, values = stored_2RKSD.unbind(0)
        mask = batch.mask(layer.window)
        if layer.softcap:
            return capped_attention(query, keys, values, mask == 0, layer.scaling, layer.softcap)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=layer.scaling)


def _same_slab(one: Row, other: Row) -> bool:
    return one.size_class == other.size_class and one.slab == other.slab


def _take_rows(stored_2RKSD: Tensor, rows_R: Tensor) -> Tensor:
    """Select rows; consecutive ones are a view, not a copy."""
    first, last = int(rows_R[0]), int(rows_R[-1])
    if last - first + 1 == len(rows_R):
        return stored_2RKSD[:, first : last + 1]
    return stored_2RKSD[:, rows_R]


class PrefillAttention:
    """Chunks of several sequences, packed: each is written to its row and attends to all that row holds before it."""

    def __init__(
        self, memory: KvMemory, rows: list[Row], starts: list[int], lengths: list[int], operations: RotatingOperations
    ):
        self._operations = operations
        self._views = [memory._view_LKSD(row) for row in rows]
        self._starts, self._lengths = starts, lengths

    def attend(self, index: int, layer: Layer, qkv_TXD: Tensor, rotation: Rotation) -> Tensor:
        self._operations.rotate(qkv_TXD, layer, rotation)
        query_THD, new_T2KD = qkv_TXD[:, : layer.num_heads], qkv_TXD[:, layer.num_heads :].unflatten(1, (2, -1))
        outs_HTD = []
        offset = 0
        for view_LKSD, start, length in zip(self._views, self._starts, self._lengths, strict=True):
            part, stop = slice(offset, offset + length), start + length
            stored_2KSD = view_LKSD[2 * index : 2 * index + 2]
            stored_2KSD[:, :, start:stop] = new_T2KD[part].permute(1, 2, 0, 3)
            keys, values = stored_2KSD[:, :, :stop].unbind(0)
            query_HTD, how = query_THD[part].transpose(0, 1), (layer.scaling, layer.window, layer.softcap)
            outs_HTD.append(causal_attention(query_HTD, keys, values, *how))
            offset += length
        return torch.cat(outs_HTD, dim=1).transpose(0, 1).flatten(1)
