"""Trained against sampled lengths and difficulties: a warning when they part, and none when they do not."""

from dataclasses import dataclass
from typing import Any

import pytest

from headway.monitor.audit import audit, kolmogorov_smirnov


def history(groups: list[tuple[bool | None, list[int], list[float]]]) -> Any:
    """Groups as (trained, or dropped, or None: still in flight; lengths; rewards)."""

    @dataclass
    class Log:
        kinds: dict[str, list[dict[str, Any]]]

        def __getitem__(self, kind: str) -> list[dict[str, Any]]:
            return self.kinds.get(kind, [])

    numbered = list(enumerate(groups))
    return Log(
        {
            "finished": [{"group": n, "lengths": lengths, "rewards": r} for n, (_, lengths, r) in numbered],
            "trained": [{"groups": [n for n, (trained, _, _) in numbered if trained]}],
            "dropped": [{"groups": [n for n, (trained, _, _) in numbered if trained is False]}],
        }
    )


def test_runs_that_train_what_they_sample_have_no_warning() -> None:
    found = audit(history([(True, [n % 10, n % 7], [1.0, 0.0]) for n in range(100)]))
    assert [each.distance for each in found] == [0, 0] and not any(each.parted for each in found)


def test_long_groups_that_are_dropped_are_a_warning() -> None:
    groups = [(n % 2 == 0, [10 if n % 2 == 0 else 500], [1.0]) for n in range(200)]
    lengths, rates = audit(history(groups))  # type: ignore[arg-type]
    assert lengths.parted and "WARNING" in str(lengths) and lengths.distance == pytest.approx(0.5)
    assert not rates.parted and lengths.sampled_mean == 255 and lengths.trained_mean == 10


def test_hard_groups_that_are_dropped_are_a_warning() -> None:
    groups = [(n % 3 > 0, [10], [0.0 if n % 3 == 0 else 1.0]) for n in range(300)]
    lengths, rates = audit(history(groups))  # type: ignore[arg-type]
    assert rates.parted and not lengths.parted


def test_a_few_groups_prove_nothing_and_groups_in_flight_are_neither() -> None:
    found = audit(history([(True, [10], [1.0]), (False, [500], [0.0])]))
    assert not any(each.parted for each in found)
    in_flight = audit(history([(True, [10], [1.0])] * 50 + [(None, [500], [0.0])] * 50))
    assert [each.sampled_mean for each in in_flight] == [10, 1]
    assert audit(history([])) == []


def test_the_distance_is_that_of_two_staircases() -> None:
    assert kolmogorov_smirnov([1, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert kolmogorov_smirnov([1, 2], [3, 4]) == 1
    assert kolmogorov_smirnov([1, 1, 2, 2], [1, 2, 2, 2]) == pytest.approx(0.25)
