"""What one engine more or fewer would bring: an estimate that is right where the answer is plain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.monitor.scaling import estimate

shares = st.floats(0, 1)


def test_where_generation_decides_an_engine_counts_in_full_until_training_does() -> None:
    found = estimate(1, trainer_waited=0.9, engine_busy=1.0)
    assert found.one_more == pytest.approx(1.0), "half the time" and found.one_fewer is None
    assert estimate(2, 0.4, 1.0).one_more == pytest.approx(0.5), "from 3 units each to 2"
    assert estimate(2, 0.1, 1.0).one_more == pytest.approx(1 / 0.9 - 1), "no more than the trainer waited"
    assert estimate(2, 0.4, 1.0).one_fewer == pytest.approx(0.5), "twice the time"


def test_where_training_decides_an_engine_more_brings_nothing_and_idle_ones_are_to_spare() -> None:
    found = estimate(2, trainer_waited=0.0, engine_busy=0.4)
    assert found.one_more == 0 and found.one_fewer == 0
    assert estimate(2, 0.0, 0.8).one_fewer == pytest.approx(1 - 1 / 1.6)


def test_where_they_take_turns_generation_is_the_part_that_changes() -> None:
    found = estimate(2, trainer_waited=0.6, engine_busy=0.6)
    assert found.one_more == pytest.approx(1 / (1 - 0.2) - 1)
    assert found.one_fewer == pytest.approx(1 - 1 / 1.6)


@given(st.integers(1, 100), shares, shares)
def test_more_never_costs_and_fewer_never_brings(num_engines: int, waited: float, busy: float) -> None:
    found = estimate(num_engines, waited, busy)
    assert 0 <= found.one_more <= 1.0 + 1e-9
    assert found.one_fewer is None or 0 <= found.one_fewer < 1


def test_it_says_that_it_is_an_estimate() -> None:
    assert str(estimate(2, 0.4, 1.0)) == (
        "trainer waited 40%, 2 engines idle 0%: one engine more would bring about 50% more steps a second, "
        "one fewer would cost about 50% (estimates)"
    )
    assert str(estimate(1, 0.0, 0.25)).startswith("trainer waited 0%, the engine idle 75%: one engine more")
