"""What takes tokens out of a loss: limits that do not depend on packing, and sums within sequences."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.training.algorithms.corrections import beyond, second_moment_limit
from headway.training.algorithms.segments import Segments

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=100)
log_weights = st.lists(st.floats(-3, 3).map(lambda value: round(value, 3)), min_size=1, max_size=30)


def scalar_kept(values: list[float], budget: float) -> list[float]:
    """Drop the largest squares, equal ones together, until the mean square is within the budget."""
    kept = sorted(values, key=abs)
    while kept and sum(value**2 for value in kept) > budget * len(kept) + 1e-12:
        kept = [value for value in kept if abs(value) < abs(kept[-1])]
    return kept


@repeatable
@given(log_weights, st.sampled_from([0.01, 0.1, 1.0]))
def test_the_second_moment_budget_masks_the_largest_ratios_and_no_more(values: list[float], budget: float) -> None:
    limit = second_moment_limit([torch.tensor(values, dtype=torch.float64)], budget)
    masked = beyond(torch.tensor(values, dtype=torch.float64), limit)
    kept = [value for value, out in zip(values, masked.tolist(), strict=True) if not out]
    assert sorted(kept, key=abs) == pytest.approx(scalar_kept(values, budget))


@repeatable
@given(log_weights, st.integers(0, 30))
def test_the_budgets_limit_is_the_same_in_any_split_over_micro_batches_and_ranks(values: list[float], cut: int) -> None:
    whole = torch.tensor(values)
    halves = [whole[:cut], whole[cut:]]
    assert second_moment_limit(halves, 0.1) == second_moment_limit([whole], 0.1)
    # Two ranks, each with a half, add up what they are asked.
    meeting, given_by = threading.Barrier(2), [torch.zeros(2), torch.zeros(2)]

    def total(rank: int, figures: torch.Tensor) -> torch.Tensor:
        given_by[rank] = figures
        meeting.wait(10)
        added = given_by[0] + given_by[1]
        meeting.wait(10)
        return added

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda rank: second_moment_limit([halves[rank]], 0.1, partial(total, rank)), range(2))
    assert set(found) == {second_moment_limit([whole], 0.1)}


def test_a_minibatch_within_the_budget_loses_nothing() -> None:
    values = torch.tensor([0.1, -0.1, 0.2])
    assert not beyond(values, second_moment_limit([values], 1.0)).any()


@repeatable
@given(st.lists(st.lists(st.floats(-5, 5), max_size=5), min_size=1, max_size=6))
def test_sums_and_means_of_sequences_equal_plain_loops(sequences: list[list[float]]) -> None:
    flat = torch.tensor([value for sequence in sequences for value in sequence], dtype=torch.float64)
    segments = Segments(torch.tensor([len(sequence) for sequence in sequences]), len(flat))
    assert segments.sum(flat).tolist() == pytest.approx([sum(sequence) for sequence in sequences], abs=1e-9)
    inside = flat > 0
    means = []
    for sequence in sequences:
        above = [value for value in sequence if value > 0]
        means += [sum(above) / len(above) if above else 0.0] * len(sequence)
    assert segments.mean(flat, inside).tolist() == pytest.approx(means, abs=1e-9)
