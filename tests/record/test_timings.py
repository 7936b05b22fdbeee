"""Where time went, from the log: start-up by phase, and steps far slower than the others with their causes."""

import pytest
from synthetic import SyntheticRun

from headway.record.run import fold
from headway.record.timings import slow_steps, startup


def made(slow: int, seconds: float = 7.0, wait_s: float = 0.25, stall_s: float = 0.0) -> SyntheticRun:
    run = SyntheticRun(20)
    for version in range(1, 21):
        run.step(seconds=seconds if version == slow else 1.0, wait_s=wait_s if version == slow else 0.25)
        if version == slow - 1 and stall_s:
            run.add("checkpointed", version=version, slot="a", seconds=9.0, stall_s=stall_s)
    return run


@pytest.mark.parametrize("slow", [8, 20])
def test_4_a_step_far_above_the_median_is_named_and_no_other(slow: int) -> None:
    (found,) = slow_steps(fold(made(slow).events))
    assert found.version == slow and found.seconds > 3 * found.median_s
    assert found.causes == ("training itself took 7.0 s",)
    assert str(found).startswith(f"step {slow} took ")
    assert [each.version for each in slow_steps(fold(made(slow).events), since=slow - 1)] == [slow]
    assert not list(slow_steps(fold(made(slow).events), since=slow))


def test_4_the_cause_of_a_slow_step_is_what_the_log_says_went_on() -> None:
    (waited,) = slow_steps(fold(made(9, seconds=1.0, wait_s=8.0).events))
    assert waited.causes == ("waited 8.0 s for finished groups",)
    (stalled,) = slow_steps(fold(made(9, stall_s=5.0).events))
    assert "a checkpoint's snapshot (5.0 s)" in stalled.causes


def test_4_steps_of_the_usual_length_and_the_first_of_a_process_are_not_slow() -> None:
    assert not list(slow_steps(fold(made(slow=0).events)))
    run = made(slow=0)
    run.crash(downtime_s=500.0)
    run.step()
    assert not list(slow_steps(fold(run.events)))


def test_4_start_up_is_reported_by_phase() -> None:
    run = SyntheticRun(3)
    run.change(0, startup_s=4.0)
    run.add("phase", name="starting trainer", state="finished", seconds=6.0)
    run.add("phase", name="starting workers", state="progress", seconds=1.0)
    run.step(seconds=2.0, wait_s=0.5)
    run.add("phase", name="later", state="finished", seconds=1.0)
    found = startup(fold(run.events))
    assert found["imports, model and prompts"] == 4.0 and found["starting trainer"] == 6.0
    assert found["first training step"] == 2.0 and found["waiting for the first batch"] == 0.5
    assert not {"starting workers", "later"} & set(found) and found["in all"] > 4.0
