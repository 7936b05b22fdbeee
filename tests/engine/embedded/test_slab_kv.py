"""Key/value memory: rows keep what was written to them whatever moves, slabs are never lost, full is an answer."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.engine.embedded import native
from headway.engine.embedded.decoder import Rotation, TorchOperations
from headway.engine.embedded.slab_kv import DecodeAttention, KvMemory, PrefillAttention, Row, decode_order, least_tokens
from headway.errors import ConfigError
from headway.model.shape import ModelShape

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=60)
SHAPE = ModelShape(
    num_layers=1, hidden_size=4, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=8
)
WIDE = ModelShape(
    num_layers=2, hidden_size=32, intermediate_size=8, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=8
)
LOOKS = [(0, 0.0), (50, 0.0), (0, 0.7), (50, 0.7)]
"""Windows and soft caps."""
CAPACITIES = (64, 128, 256, 512)
SLAB = 2048


def heads(window: int, softcap: float) -> Any:
    """What attention asks of a layer."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scaling": 0.5}
    return SimpleNamespace(**shape, window=window, softcap=softcap, query_norm=None, key_norm=None)


def make_memory(num_slabs: int, shape: ModelShape = SHAPE) -> KvMemory:
    return KvMemory(shape, torch.float32, num_slabs * SLAB, CAPACITIES[-1])


def place(row: Row) -> tuple[int, int, int]:
    return row.size_class, row.slab, row.index


def contents_LKSD(memory: KvMemory, row: Row) -> Tensor:
    return memory.slab_view(row.size_class, row.slab)[:, row.index]


class Ledger:
    """What should be in the memory: for each row its capacity and, position by position, the number written there."""

    def __init__(self, memory: KvMemory):
        self.memory = memory
        self.expected: dict[Row, list[float]] = {}
        self.num_written = 0

    def write(self, row: Row) -> None:
        capacity = self.memory.capacity(row)
        self.num_written += 1
        numbers = [self.num_written * 1024.0 + position for position in range(capacity)]
        contents_LKSD(self.memory, row).copy_(torch.tensor(numbers)[None, None, :, None])
        self.expected[row] = numbers

    def num_slabs(self, extra: int | None = None) -> int:
        """Slabs that the rows, and one more of capacity `extra`, need when each class packs its own densely."""
        capacities = [self.memory.capacity(row) for row in self.expected] + ([extra] if extra else [])
        return sum(math.ceil(capacities.count(c) / (SLAB // c)) for c in CAPACITIES)

    def check(self) -> None:
        assert self.memory.num_used == sum(self.memory.capacity(row) for row in self.expected)
        assert len({place(row) for row in self.expected}) == len(self.expected), "two rows share a place"
        for row, numbers in self.expected.items():
            found = contents_LKSD(self.memory, row)[:, :, : len(numbers)]
            assert (found == torch.tensor(numbers)[None, None, :, None]).all(), f"{place(row)} lost its contents"


def smallest_capacity(num_tokens: int) -> int:
    return next(capacity for capacity in CAPACITIES if capacity >= num_tokens)


def operate(ledger: Ledger, draw: random.Random) -> None:
    """One random operation; whether it must succeed is known from the slabs it needs."""
    memory, rows = ledger.memory, list(ledger.expected)
    kind = draw.choice(["allocate", "allocate", "free", "grow", "copy"])
    if kind == "allocate" or not rows:
        num_tokens = draw.choice([draw.randint(1, 70), draw.randint(1, 512)])
        row = memory.allocate(num_tokens)
        assert (row is not None) == (ledger.num_slabs(smallest_capacity(num_tokens)) <= memory.num_slabs)
        if row is not None:
            assert memory.capacity(row) == smallest_capacity(num_tokens)
            ledger.write(row)
    elif kind == "free":
        row = draw.choice(rows)
        del ledger.expected[row]
        memory.free(row)
    elif kind == "grow":
        row, num_tokens = draw.choice(rows), draw.randint(1, 512)
        before = memory.capacity(row)
        wanted = max(before, smallest_capacity(num_tokens))
        fits = wanted == before or ledger.num_slabs(wanted) <= memory.num_slabs
        assert memory.grow(row, num_tokens) is fits
        assert memory.capacity(row) == (wanted if fits else before)
    elif len(rows) > 1:
        source, target = draw.sample(rows, 2)
        num_tokens = draw.randint(0, min(len(ledger.expected[source]), len(ledger.expected[target])))
        memory.copy(source, target, num_tokens)
        ledger.expected[target][:num_tokens] = ledger.expected[source][:num_tokens]


@given(seed=st.integers(0, 10**9), num_slabs=st.integers(2, 4))
@repeatable
def test_any_history_of_operations_keeps_contents_counts_and_slabs(seed: int, num_slabs: int) -> None:
    draw = random.Random(seed)
    ledger = Ledger(make_memory(num_slabs))
    for number in range(60):
        operate(ledger, draw)
        if number % 6 == 0:
            ledger.check()
    ledger.check()
    for row in list(ledger.expected):
        del ledger.expected[row]
        ledger.memory.free(row)
    assert ledger.memory.num_used == 0
    rows = [ledger.memory.allocate(512) for _ in range(num_slabs * 4)]
    assert None not in rows, "a slab was lost"
    assert ledger.memory.allocate(1) is None
    assert ledger.memory.num_used == ledger.memory.num_tokens


def test_a_full_memory_answers_and_recovers_when_one_row_goes() -> None:
    memory = make_memory(2)
    rows = [memory.allocate(512) for _ in range(8)]
    assert memory.allocate(1) is None
    assert rows[0] is not None and rows[-1] is not None
    for row in rows[4:]:
        assert row is not None
        memory.free(row)
    small = memory.allocate(64)
    assert small is not None
    assert memory.grow(small, 65) is False, "the small class holds the last slab, there is none for a larger one"
    assert memory.capacity(small) == 64
    memory.free(rows[0])
    assert memory.grow(small, 400) is True
    assert memory.num_used == 4 * 512


def test_memory_is_never_so_small_that_one_sequence_cannot_grow_to_the_whole_context() -> None:
    memory = KvMemory(SHAPE, torch.float32, least_tokens(3000), max_context=3000)
    row = memory.allocate(1)
    assert row is not None
    assert all(memory.grow(row, num_tokens) for num_tokens in range(1, 3001))
    assert memory.capacity(row) == 4096


def reference_attention(
    query_HD: Tensor, key_SKD: Tensor, value_SKD: Tensor, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """The last query over all the keys it may see, head by head."""
    key_SKD, value_SKD = key_SKD[-window:], value_SKD[-window:]
    num_heads, num_kv_heads = query_HD.shape[0], key_SKD.shape[1]
    outs = []
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = key_SKD[:, kv_head].double() @ query_HD[head].double() * 0.5
        weights = (softcap * torch.tanh(scores / softcap) if softcap else scores).softmax(0)
        outs.append((weights[:, None] * value_SKD[:, kv_head].double()).sum(0))
    return torch.stack(outs).float()


def random_rows(memory: KvMemory, lengths: list[int], generator: torch.Generator) -> tuple[list[Row], list[Tensor]]:
    """Rows filled with `length` random keys and values, with freed neighbours between them and rubbish after them."""
    rows, holes, contents = [], [], []
    for length in lengths:
        row, hole = memory.allocate(length + 1), memory.allocate(length + 1)
        assert row is not None and hole is not None
        rows.append(row)
        holes.append(hole)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        view = contents_LKSD(memory, row)
        view.copy_(torch.randn(view.shape, generator=generator))
        contents.append(view[:, :, :length].clone())
        if number % 2:
            memory.free(holes[number])
    return rows, contents


def unrotated(num_tokens: int) -> Rotation:
    return Rotation(torch.ones(num_tokens, 8), torch.zeros(num_tokens, 8))


@pytest.mark.parametrize(("window", "softcap"), LOOKS)
@pytest.mark.parametrize("kind", ["fixed", "varying", "native"])
def test_decode_attention_of_rows_in_many_slabs_equals_one_query_at_a_time(
    kind: str, window: int, softcap: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    memory = make_memory(8, WIDE)
    lengths = [0, 63, 64, 5, 200, 127, 300, 1, 130, 64, 20, 500, 44, 63]
    rows, contents_LKSD_of = random_rows(memory, lengths, generator)
    order = decode_order(rows)
    assert sorted(order) == list(range(len(rows)))
    num_queries = len(rows) + 3
    query_THD = torch.randn(num_queries, 4, 8, generator=generator)
    key_TKD, value_TKD = torch.randn(2, num_queries, 2, 8, generator=generator)
    given_rows, positions = [rows[i] for i in order], [lengths[i] for i in order]
    attention: DecodeAttention | native.NativeDecodeAttention
    if kind == "native":
        if not native.supports(memory, "silu"):
            pytest.skip("no C++ compiler here")
        operations = native.NativeOperations(torch.float32, "silu")
        attention = native.NativeDecodeAttention(memory, given_rows, positions, operations)
    else:
        attention = DecodeAttention(memory, given_rows, positions, TorchOperations(), kind == "fixed")
    for layer in range(2):
        qkv = torch.cat([query_THD, key_TKD, value_TKD], dim=1)
        out_THD = attention.attend(layer, heads(window, softcap), qkv, unrotated(num_queries)).view(-1, 4, 8)
        for query, i in enumerate(order):
            before_KSD = contents_LKSD_of[i][2 * layer : 2 * layer + 2].transpose(1, 2)
            keys, values = torch.cat([before_KSD, torch.stack([key_TKD, value_TKD])[:, query : query + 1]], dim=1)
            expected = reference_attention(query_THD[query], keys, values, window, softcap)
            torch.testing.assert_close(out_THD[query], expected, atol=2e-6, rtol=1e-5)
            assert torch.equal(contents_LKSD(memory, rows[i])[2 * layer, :, lengths[i]], key_TKD[query])
            assert torch.equal(contents_LKSD(memory, rows[i])[2 * layer + 1, :, lengths[i]], value_TKD[query])
        assert (out_THD[len(rows) :] == 0).all(), "padding must stay finite and take part in nothing"


@pytest.mark.parametrize(("window", "softcap"), LOOKS)
def test_prefill_attention_in_packed_chunks_equals_one_query_at_a_time(window: int, softcap: float) -> None:
    generator = torch.Generator().manual_seed(1)
    memory = make_memory(4, WIDE)
    lengths = [70, 3, 129]
    rows = [row for length in lengths if (row := memory.allocate(length)) is not None]
    query, key, value = ([torch.randn(n, size, 8, generator=generator) for n in lengths] for size in (4, 2, 2))
    qkv = [torch.cat(parts, dim=1) for parts in zip(query, key, value, strict=True)]
    outs: list[list[Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for chunk in (1, 40, 64, 64):
        steps = [min(chunk, length - start) for length, start in zip(lengths, done, strict=True)]
        chosen = [i for i in range(3) if steps[i]]
        parts = [slice(done[i], done[i] + steps[i]) for i in chosen]
        packed = torch.cat([qkv[i][p] for i, p in zip(chosen, parts, strict=True)])
        starts, sizes = [done[i] for i in chosen], [steps[i] for i in chosen]
        attention = PrefillAttention(memory, [rows[i] for i in chosen], starts, sizes, TorchOperations())
        out = attention.attend(1, heads(window, softcap), packed, unrotated(len(packed))).view(-1, 4, 8)
        for i, piece in zip(chosen, out.split(sizes), strict=True):
            outs[i].append(piece)
            done[i] += steps[i]
    assert done == lengths
    for i, length in enumerate(lengths):
        whole = torch.cat(outs[i])
        for position in range(length):
            seen = slice(0, position + 1)
            expected = reference_attention(query[i][position], key[i][seen], value[i][seen], window, softcap)
            torch.testing.assert_close(whole[position], expected, atol=2e-6, rtol=1e-5)
        assert torch.equal(contents_LKSD(memory, rows[i])[2, :, :length], key[i].transpose(0, 1))
        assert (contents_LKSD(memory, rows[i])[0] == 0).all(), "another layer was written to"


def test_little_memory_is_given_as_asked_and_too_little_refused() -> None:
    """4,096 tokens is not the least there is: two sequences of the longest context are."""
    for num_tokens, context in [(512, 256), (1000, 256), (4096, 64), (4095, 100), (100_000, 512)]:
        memory = KvMemory(SHAPE, torch.float32, num_tokens, context)
        assert num_tokens / 2 < memory.num_tokens <= num_tokens
        rows = [memory.allocate(context) for _ in range(2)]
        assert None not in rows
    with pytest.raises(ConfigError, match=r"engine\.kv_tokens = 700 cannot hold two sequences of up to 300 tokens"):
        KvMemory(SHAPE, torch.float32, 700, 300)
