"""What looks at engines tell: how many sequences one should hold, and whether it is far slower than the others."""

from dataclasses import replace

import pytest

from headway.control.health import RATE_WINDOW_S, DecodeRate, far_slower, next_limit
from headway.types import EngineStats


def stats(running: int = 40, preempted: int = 0, kv_used: int = 500, generated: int = 0) -> EngineStats:
    return EngineStats(0, running, 0, generated, 0, 0, preempted, 0.0, kv_used, 1000)


def test_without_pressure_there_is_no_limit() -> None:
    assert next_limit(0, 64, stats(), stats(running=64, kv_used=960)) == 0


@pytest.mark.parametrize("pressed", [stats(preempted=1), stats(kv_used=971)])
def test_under_pressure_a_tenth_fewer_may_run(pressed: EngineStats) -> None:
    assert next_limit(0, 64, stats(), pressed) == 36
    assert next_limit(50, 64, stats(), pressed) == 36
    assert next_limit(20, 64, stats(), pressed) == 20, "never more than before"
    assert next_limit(0, 64, stats(), replace(pressed, running=1)) == 1
    assert next_limit(0, 64, stats(), replace(pressed, running=0)) == 1


def test_when_the_pressure_is_gone_the_limit_rises_until_it_is_none() -> None:
    limit, seen = 36, []
    while limit:
        limit = next_limit(limit, 64, stats(preempted=5), stats(preempted=5))
        seen.append(limit)
    assert seen == [40, 44, 48, 52, 56, 60, 0]
    assert next_limit(1, 4, stats(), stats()) == 2, "by one at least"


def test_a_pace_is_per_running_sequence_over_a_whole_window() -> None:
    pace = DecodeRate()
    for second in range(int(RATE_WINDOW_S)):
        pace.sample(second, stats(running=10, generated=50 * second))
        assert pace.tokens_per_s is None
    pace.sample(RATE_WINDOW_S, stats(running=10, generated=int(50 * RATE_WINDOW_S)))
    assert pace.tokens_per_s == pytest.approx(5.0)
    for second in range(int(RATE_WINDOW_S), int(3 * RATE_WINDOW_S)):
        pace.sample(second, stats(running=10, generated=int(50 * RATE_WINDOW_S)))
    assert pace.tokens_per_s == 0.0, "only the last window counts"


def test_time_in_which_nothing_ran_does_not_slow_an_engine() -> None:
    pace, generated = DecodeRate(), 0
    for second in range(int(2 * RATE_WINDOW_S)):
        generated += 50 * ((second - 1) % 2 == 0)
        pace.sample(second, stats(running=10 * (second % 2 == 0), generated=generated))
    assert pace.tokens_per_s == pytest.approx(5.0, rel=0.05)
    for second in range(int(2 * RATE_WINDOW_S), int(4 * RATE_WINDOW_S)):
        pace.sample(second, stats(running=0, generated=generated))
    assert pace.tokens_per_s is None, "an idle engine has none"


def test_far_slower_is_far_behind_the_others_middle_and_needs_others() -> None:
    assert far_slower({"a": 10.0, "b": 12.0, "c": 2.0}) == {"c": 11.0}
    assert far_slower({"a": 10.0, "b": 12.0, "c": 3.0}) == {}
    assert far_slower({"a": 0.0}) == {} and far_slower({}) == {}
    assert far_slower({"a": 0.0, "b": 8.0}) == {"a": 8.0}
    assert far_slower({"a": 0.0, "b": 0.0}) == {}
