"""Algorithm 1 and its cost: every sequence once, never over the budget, balanced by FLOPs."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.model.shape import ModelShape, flops
from headway.training.packing import pack

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=200)
SHAPE = ModelShape(
    num_layers=4,
    hidden_size=192,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    vocab_size=64,
)


def counted_flops(length: int, shape: ModelShape) -> float:
    """Matrix product by matrix product, query by query."""
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = [(shape.hidden_size, width), (shape.hidden_size, kv_width), (shape.hidden_size, kv_width)]
    layer += [(width, shape.hidden_size)]
    layer += [(shape.hidden_size, shape.intermediate_size)] * 2 + [(shape.intermediate_size, shape.hidden_size)]
    total = 0
    for position in range(length):
        total += 2 * shape.hidden_size * shape.vocab_size
        total += shape.num_layers * sum(2 * rows * columns for rows, columns in layer)
        num_keys = position + 1
        total += shape.num_layers * shape.num_heads * num_keys * (2 * shape.head_dim + 2 * shape.head_dim)
    return float(total)


def algorithm_1(lengths: list[int], capacity: int, k_min: int) -> list[list[int]]:
    """The paper's text, literally, with ties settled by index."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b in batches if sum(lengths[j] for j in b) + lengths[i] <= capacity]
        if len(batches) < k_min or not fitting:
            batches.append([i])
        else:
            fewest = min(len(b) for b in fitting)
            next(b for b in fitting if len(b) == fewest).append(i)
    return [sorted(b) for b in batches]


def long_tailed(seed: int, num: int, capacity: int) -> list[int]:
    chance = random.Random(seed)
    return [min(capacity, int(40 * chance.paretovariate(1.1))) for _ in range(num)]


def imbalance(lengths: list[int], batches: list[list[int]], shape: ModelShape) -> float:
    loads = [sum(flops(lengths[index], shape) for index in batch) for batch in batches]
    return max(loads) / (sum(loads) / len(loads))


lengths_lists = st.lists(st.one_of(st.integers(1, 20), st.integers(1, 100)), max_size=40)
costs = st.sampled_from([None, lambda length: flops(length, SHAPE), lambda length: 0.0])


@pytest.mark.parametrize("length", [0, 1, 2, 17, 100])
def test_flops_equal_a_count_query_by_query(length: int) -> None:
    assert flops(length, SHAPE) == counted_flops(length, SHAPE)


@repeatable
@given(lengths_lists, st.integers(100, 300), st.integers(1, 12), costs)
def test_every_sequence_is_packed_once_within_the_capacity_and_the_minimum(
    lengths: list[int], capacity: int, min_batches: int, cost: Callable[[int], float] | None
) -> None:
    batches = pack(lengths, capacity, min_batches, cost)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batch == sorted(batch) and batch for batch in batches)
    assert all(sum(lengths[index] for index in batch) <= capacity for batch in batches)
    assert len(batches) >= min(min_batches, len(lengths))


@repeatable
@given(lengths_lists, st.integers(100, 300), st.integers(1, 12))
def test_without_a_cost_it_is_the_papers_algorithm_to_the_letter(
    lengths: list[int], capacity: int, min_batches: int
) -> None:
    assert pack(lengths, capacity, min_batches) == algorithm_1(lengths, capacity, min_batches)


def test_a_worked_example_with_ties() -> None:
    assert pack([3, 9, 3, 5, 1], capacity=10) == [[1, 4], [0, 3], [2]]
    assert pack([5, 5, 5, 5], capacity=10, min_batches=2) == [[0, 2], [1, 3]]
    assert pack([2, 2], capacity=10, min_batches=5) == [[0], [1]]
    assert pack([], capacity=10, min_batches=3) == []


@pytest.mark.parametrize("seed", range(5))
def test_balance_by_flops_beats_the_papers_rule_on_long_tails(seed: int) -> None:
    lengths, capacity = long_tailed(seed, 256, 4096), 8192
    by_count = pack(lengths, capacity, min_batches=8)
    by_flops = pack(lengths, capacity, min_batches=8, cost=lambda length: flops(length, SHAPE))
    assert len(by_flops) <= len(by_count)
    assert imbalance(lengths, by_flops, SHAPE) < imbalance(lengths, by_count, SHAPE)


def test_a_sequence_longer_than_the_budget_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as error:
        pack([10, 300, 20], capacity=128)
    message = "a sequence of 300 tokens does not fit into a micro-batch of 128; raise trainer.token_budget"
    assert str(error.value) == message
