"""Paged KV cache of the embedded engine on a GPU: pages of 16 tokens, shared between the sequences of a group.

A sequence is a list of pages. Forking a prompt shares its full pages and copies the one that is partly filled, since
the two sequences continue in it differently. A page returns to the pool when its last holder releases it. All
accounting is on the host; the device reads page tables.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import ConfigError
from headway.model.shape import ModelShape

PAGE = 16
"""Tokens of a page."""


@dataclass(eq=False)
class Pages:
    """Where one sequence's keys and values lie: the first `num_pages` of `ids`."""

    ids: NDArray[np.int32]
    num_pages: int

    @property
    def held(self) -> NDArray[np.int32]:
        return self.ids[: self.num_pages]


class PagedMemory:
    def __init__(self, shape: ModelShape, dtype: torch.dtype, num_tokens: int, max_context: int, device: torch.device):
        self.max_pages = _num_pages(max_context)
        self.num_pages = num_tokens // PAGE
        if self.num_pages < 2 * self.max_pages:
            raise ConfigError(
                f"engine.kv_tokens = {num_tokens} cannot hold two sequences of up to {max_context} tokens; "
                "raise it, or lower engine.max_context"
            )
        self._free: NDArray[np.int32] = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_pages
        self._num_holders = np.zeros(self.num_pages, np.int32)
        self._copies: dict[int, int] = {}  # target page: source page
        size = (2 * shape.num_layers, self.num_pages, PAGE, shape.num_kv_heads, shape.head_dim)
        self._kv = torch.zeros(size, dtype=dtype, device=device)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * PAGE

    @property
    def num_used(self) -> int:
        return (self.num_pages - self._num_free) * PAGE

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (pages, tokens of a page, K, D)."""
        return self._kv[2 * index], self._kv[2 * index + 1]

    def allocate(self, num_tokens: int, source: Pages | None = None, num_shared: int = 0) -> Pages | None:
        """Pages for `num_tokens`, those that are whole within the first `num_shared` being the source's."""
        row = Pages(np.zeros(self.max_pages, np.int32), 0)
        return row if self._fill(row, _num_pages(num_tokens), source, num_shared) else None

    def _fill(self, row: Pages, num_pages: int, source: Pages | None, num_shared: int) -> bool:
        num_forked = num_shared // PAGE if source is not None else 0
        if num_pages - num_forked > self._num_free:
            return False
        if source is not None:
            row.ids[:num_forked] = source.ids[:num_forked]
            self._num_holders[row.ids[:num_forked]] += 1
            row.num_pages = num_forked
        self._take(row, num_pages)
        return True

    def _take(self, row: Pages, num_pages: int) -> None:
        """Take free pages until the row has `num_pages`."""
        wanted = num_pages - row.num_pages
        taken = self._free[self._num_free - wanted : self._num_free]
        self._num_free -= wanted
        self._num_holders[taken] = 1
        row.ids[row.num_pages : num_pages] = taken
        row.num_pages = num_pages

    def copy(self, source: Pages, target: Pages, num_tokens: int) -> None:
        """Fork: pages that are not shared are copied before the model runs next."""
        for place in range(_num_pages(num_tokens)):
            page = int(source.ids[place])
            if page != target.ids[place]:
                # A source that is itself still to be copied holds nothing yet.
                self._copies[int(target.ids[place])] = self._copies.get(page, page)

    def flush(self) -> None:
        """Perform the pending copies of forks, all at once."""
        if self._copies:
            pairs = torch.tensor(list(self._copies.items()), device=self._kv.device)
            self._kv[:, pairs[:, 0]] = self._kv[:, pairs[:, 1]]
            self._copies.clear()

    def grow(self, row: Pages, num_tokens: int) -> bool:
        num_pages = _num_pages(num_tokens)
        if num_pages - row.num_pages > self._num_free:
            return False
        if num_pages > row.num_pages:
            self._take(row, num_pages)
        return True

    def shrink(self, row: Pages, num_tokens: int) -> None:
        num_pages = min(row.num_pages, _num_pages(num_tokens))
        self._release(row.ids[num_pages : row.num_pages])
        row.num_pages = num_pages

    def renew(self, row: Pages, source: Pages | None = None, num_shared: int = 0) -> bool:
        """Other pages for the same number of tokens; on False the row holds none and is to be freed."""
        num_pages = row.num_pages
        self.free(row)
        return self._fill(row, num_pages, source, num_shared)

    def clear(self, row: Pages) -> None:
        """Nothing to do: kernels read no token past a sequence's end, and shared pages are others' too."""

    def free(self, row: Pages) -> None:
        self._release(row.held)
        row.num_pages = 0

    def _release(self, pages: NDArray[np.int32]) -> None:
        self._num_holders[pages] -= 1
        unheld = pages[self._num_holders[pages] == 0]
        self._free[self._num_free : self._num_free + len(unheld)] = unheld
        self._num_free += len(unheld)


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)
