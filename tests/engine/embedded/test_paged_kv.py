"""Pages of the GPU engine's memory: none is ever lost, given to two, or freed while somebody holds it."""

import random
from collections import Counter

import pytest
import torch

from headway.engine.embedded.paged_kv import PAGE, PagedMemory, Pages
from headway.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=2, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=10
)
CONTEXT = 10 * PAGE


def make_memory(num_pages: int = 40) -> PagedMemory:
    return PagedMemory(SHAPE, torch.float32, num_pages * PAGE, CONTEXT, torch.device("cpu"))


def check(memory: PagedMemory, rows: list[Pages]) -> None:
    held = Counter(int(page) for row in rows for page in row.held)
    assert memory.num_used == PAGE * len(held)
    free = {int(page) for page in memory._free[: memory._num_free]}
    assert len(free) == memory._num_free and not free & held.keys()
    assert all(memory._num_holders[page] == count for page, count in held.items())


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_to_rows_every_page_is_free_or_held(seed: int) -> None:
    draws, memory = random.Random(seed), make_memory()
    rows: list[Pages] = []
    for _ in range(200):
        row = draws.choice(rows) if rows else None
        action = draws.choice(["allocate", "fork", "grow", "shrink", "renew", "free"])
        if action == "allocate" or row is None:
            made = memory.allocate(draws.randrange(1, CONTEXT))
        elif action == "fork":
            num_shared = draws.randrange(1, row.num_pages * PAGE + 1)
            made = memory.allocate(draws.randrange(num_shared, CONTEXT + 1), row, num_shared)
            assert made is None or (made.ids[: num_shared // PAGE] == row.ids[: num_shared // PAGE]).all()
        else:
            made = None
            if action == "grow":
                memory.grow(row, draws.randrange(1, CONTEXT))
            elif action == "shrink":
                memory.shrink(row, draws.randrange(1, CONTEXT))
            elif action == "free" or not memory.renew(row):
                memory.free(row)
                rows.remove(row)
        rows += [made] if made is not None else []
        check(memory, rows)
    for row in rows:
        memory.free(row)
    assert memory.num_used == 0


def test_what_does_not_fit_is_refused_and_takes_nothing() -> None:
    memory = make_memory(20)
    first = memory.allocate(CONTEXT)
    assert first is not None
    second = memory.allocate(CONTEXT - PAGE)
    assert second is not None and memory.num_used == 19 * PAGE
    assert memory.allocate(2 * PAGE) is None and not memory.grow(second, CONTEXT + PAGE)
    assert memory.num_used == 19 * PAGE and memory.grow(second, CONTEXT) and memory.num_used == memory.num_tokens
    assert memory.allocate(3 * PAGE, first, 3 * PAGE) is not None, "shared pages cost none"


def test_a_fork_copies_the_page_that_is_partly_filled_and_no_other() -> None:
    memory = make_memory()
    source = memory.allocate(3 * PAGE)
    assert source is not None
    memory.layer(1)[0][torch.from_numpy(source.held).long()] = torch.arange(3.0)[:, None, None, None]
    num_shared = 2 * PAGE + 5
    target = memory.allocate(num_shared + 1, source, num_shared)
    assert target is not None
    memory.copy(source, target, num_shared)
    memory.flush()
    assert list(target.held[:2]) == list(source.held[:2]) and target.held[2] != source.held[2]
    copied = memory.layer(1)[0][torch.from_numpy(target.held).long()]
    assert copied[:, 0, 0, 0].tolist() == [0.0, 1.0, 2.0]
    memory.layer(1)[0][int(target.held[2])] = 7.0
    assert float(memory.layer(1)[0][int(source.held[2]), 0, 0, 0]) == 2.0
