"""Trained against sampled lengths and difficulties: a warning when they part, and none when they do not."""

import pytest
from synthetic import blank

from headway.monitor.audit import audit, corrections, kolmogorov_smirnov
from headway.record.run import Run


def history(groups: list[tuple[bool | None, list[int], list[float]]]) -> Run:
    """A run with these groups, as (trained, or dropped, or None: still in flight; lengths; rewards)."""
    run = Run()
    for number in range(len(groups)):
        run.on_event(blank("admitted", group=number))
    for number, (_, lengths, rewards) in enumerate(groups):
        run.on_event(blank("finished", group=number, lengths=tuple(lengths), rewards=tuple(rewards)))
    trained, dropped = (
        tuple(number for number, (fate, _, _) in enumerate(groups) if fate is wanted) for wanted in (True, False)
    )
    run.on_event(blank("dropped", groups=dropped, reason="failed"))
    run.on_event(blank("taken", version=0, groups=trained))
    run.on_event(blank("trained", version=1, groups=trained))
    return run


def test_runs_that_train_what_they_sample_have_no_warning() -> None:
    found = audit(history([(True, [n % 10, n % 7], [1.0, 0.0]) for n in range(100)]))
    assert [each.distance for each in found] == [0, 0] and not any(each.parted for each in found)


def test_long_groups_that_are_dropped_are_a_warning() -> None:
    groups = [(n % 2 == 0, [10 if n % 2 == 0 else 500], [1.0]) for n in range(200)]
    lengths, rates = audit(history(groups))
    assert lengths.parted and "WARNING" in str(lengths) and lengths.distance == pytest.approx(0.5)
    assert not rates.parted and lengths.sampled_mean == 255 and lengths.trained_mean == 10


def test_hard_groups_that_are_dropped_are_a_warning() -> None:
    groups = [(n % 3 > 0, [10], [0.0 if n % 3 == 0 else 1.0]) for n in range(300)]
    lengths, rates = audit(history(groups))
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


def test_corrections_say_how_much_of_the_tokens_counted_and_why_others_did_not() -> None:
    run = history([])
    steps = [(100, 0.5, {"masked_token": 20.0, "capped_fraction": 0.1}), (300, 0.9, {"masked_token": 0.0})]
    for version, (tokens, size, metrics) in enumerate(steps, 2):
        run.on_event(blank("taken", version=version - 1, groups=()))
        metrics |= {"effective_sample_size": size}
        run.on_event(blank("trained", version=version, groups=(), tokens=tokens, metrics=metrics))
    (found,) = corrections(run)
    assert str(found) == "effective sample size 80%, left out of the loss: capped 2.5%, masked_token 5.0%"
    assert corrections(history([])) == []
