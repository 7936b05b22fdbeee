"""How often the host looks at what a GPU samples: as often as loses the least."""

import numpy as np
import pytest

from headway.engine.embedded.step_interval import StepInterval


def lost(num_steps: int, lengths: list[int], cost: float) -> float:
    """What a place in the batch spends on looks and on waiting for one, for each token that it samples."""
    spent = sampled = 0.0
    for length in lengths:
        looks = -(-length // num_steps)
        spent += looks * (num_steps + cost) - length
        sampled += length
    return spent / sampled


@pytest.mark.parametrize("cost", [1.0, 4.0, 12.0])
@pytest.mark.parametrize("mean", [60, 400, 3000])
def test_the_number_of_steps_that_loses_the_least_is_chosen(mean: int, cost: float) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(mean), 0.5, 2000).astype(int).clip(1).tolist()
    pace = StepInterval(8192.0, measures=True)
    for length in lengths:
        pace.ended(length)
    for _ in range(200):
        pace.decoded(wall_s=0.02 * (32 + cost), device_s=0.02 * 32, num_steps=32)
    chosen = pace.num_steps(most=1000)
    assert lost(chosen, lengths, cost) < 1.03 * min(lost(n, lengths, cost) for n in range(8, 1000))


def test_nothing_known_yet_long_sequences_are_expected() -> None:
    pace = StepInterval(8192.0, measures=True)
    assert pace.num_steps(most=64) == 64 and pace.num_steps(most=1) == 1
    pace.ended(6)
    assert pace.num_steps(most=64) == 8, "and no fewer"


def test_an_interval_that_compiled_counts_no_more_than_a_very_slow_one() -> None:
    once, slow = StepInterval(100.0, measures=True), StepInterval(100.0, measures=True)
    once.decoded(wall_s=60.0, device_s=0.1, num_steps=32)
    slow.decoded(wall_s=0.15, device_s=0.1, num_steps=32)
    assert once.num_steps(64) == slow.num_steps(64)


def test_what_is_to_be_repeated_exactly_does_not_depend_on_time() -> None:
    timed, blind = StepInterval(400.0, measures=True), StepInterval(400.0, measures=False)
    for pace in (timed, blind):
        for _ in range(50):
            pace.decoded(wall_s=0.2, device_s=0.1, num_steps=8)
    assert blind.num_steps(1000) == StepInterval(400.0, measures=False).num_steps(1000) != timed.num_steps(1000)


def test_without_a_device_of_its_own_the_assumed_cost_stays() -> None:
    pace = StepInterval(400.0, measures=True)
    before = pace.num_steps(1000)
    pace.decoded(wall_s=0.2, device_s=0.0, num_steps=8)
    assert pace.num_steps(1000) == before
