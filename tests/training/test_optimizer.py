"""Learning rates by step: warm-up, then a schedule that ends where it says."""

import math

import pytest

from headway.config import TrainerSection
from headway.training.optimizer import learning_rate


def rates(schedule: str, **knobs: float) -> list[float]:
    section = TrainerSection.model_validate({"lr": 1.0, "lr_schedule": schedule, "schedule_steps": 12} | knobs)
    return [learning_rate(section, step) for step in range(15)]


def test_a_schedule_rises_over_the_warm_up_and_then_falls_to_its_end() -> None:
    assert rates("constant", warmup_steps=2) == [0.5, *[1.0] * 14]
    linear = rates("linear", warmup_steps=2, lr_end=0.1)
    assert linear[:3] == [0.5, 1.0, 1.0] and linear[7] == pytest.approx(0.55) and linear[12:] == [0.1] * 3
    cosine = rates("cosine", warmup_steps=2)
    expected = [(1 + math.cos(math.pi * done / 10)) / 2 for done in range(11)]
    assert cosine[2:13] == pytest.approx(expected) and cosine[14] == 0
    assert cosine[2:] == sorted(cosine[2:], reverse=True)


def test_a_warm_up_longer_than_the_schedule_divides_by_nothing() -> None:
    assert len(rates("linear", warmup_steps=20)) == 15
