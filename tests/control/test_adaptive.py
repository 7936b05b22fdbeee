"""Adaptive staleness: the law by itself, then a run whose η falls and rises, and what a resume makes of it."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from stage import MakeStage, Stage, StandInTrainer, kinds
from system import check_finished

from headway.config import StalenessSection
from headway.control.adaptive import AdaptiveStaleness
from headway.monitor.report import write_report
from headway.record.run import Run
from headway.types import Batch, StepReport

GOOD = {"effective_sample_size": 0.99, "behaviour_kl": 0.001}
FAIR = {"effective_sample_size": 0.96, "behaviour_kl": 0.001}
SMALL = {"effective_sample_size": 0.9, "behaviour_kl": 0.001}
FAR = {"effective_sample_size": 0.99, "behaviour_kl": 0.03}


def adaptive(lowest: int = 1, largest: int = 8) -> AdaptiveStaleness:
    return AdaptiveStaleness(StalenessSection(min_staleness=lowest, max_staleness=largest))


def after(control: AdaptiveStaleness, metrics: dict[str, float], num_steps: int = 4) -> int:
    for _ in range(num_steps):
        control.observe(0, metrics, [control.eta])
    return control.eta


def test_eta_is_halved_where_data_is_too_old_and_rises_by_half_where_it_could_be_older() -> None:
    control = adaptive()
    assert [after(control, metrics) for metrics in (SMALL, FAR, FAR, FAR)] == [4, 2, 1, 1]
    assert [after(control, GOOD) for _ in range(6)] == [2, 3, 4, 6, 8, 8]


def test_between_the_two_limits_eta_stays() -> None:
    control = adaptive()
    after(control, SMALL)
    assert [after(control, FAIR) for _ in range(5)] == [4] * 5
    assert after(control, FAR | {"behaviour_kl": 0.015}) == 4


def test_a_decision_is_judged_by_steps_whose_groups_were_all_admitted_under_it() -> None:
    control = adaptive()
    assert after(control, SMALL) == 4
    for _ in range(10):
        assert control.observe(0, SMALL, [8, 8]) is None and control.observe(0, SMALL, [4, 8]) is None
    assert after(control, SMALL, 3) == 4 and after(control, SMALL, 1) == 2


def test_a_step_without_figures_decides_nothing_and_equal_bounds_never_move() -> None:
    control = adaptive()
    for metrics in ({}, {"effective_sample_size": 0.0, "behaviour_kl": 0.0}, SMALL | {"behaviour_kl": None}):
        assert after(control, metrics, 8) == 8  # type: ignore[arg-type]
    for fixed in (adaptive(8), adaptive(-1)):
        assert after(fixed, SMALL, 20) == 8


@dataclass
class Drifting(StandInTrainer):
    """Finds data of a large η too old in its first part, and all data good from there on."""

    until: int = 0

    async def train(self, batch: Batch) -> StepReport:
        report = await super().train(batch)
        is_old = max(group.eta for group in batch.groups) > 1 and batch.version < self.until
        return replace(report, metrics=SMALL if is_old else GOOD)


def drifting(make_stage: MakeStage, steps: int, until: int) -> Stage:
    sections = {"run": {"steps": steps}, "staleness": {"max_staleness": 4, "min_staleness": 1}}
    stage = make_stage(sections | {"checkpoint": {"every": 1000}})
    stage.trainer = Drifting(stage.trainer.worst_staleness, until=until)
    return stage


def test_a_run_lowers_and_raises_eta_and_says_so(make_stage: MakeStage) -> None:
    stage = drifting(make_stage, 70, 30)
    events = stage.run()
    check_finished(stage.config, events)
    moved = [(event.before, event.after) for event in kinds(events, "eta_changed")]
    assert moved[:3] == [(4, 2), (2, 1), (1, 2)] and moved[-1] == (3, 4)
    admitted = kinds(events, "admitted")
    assert {event.eta for event in admitted} == {1, 2, 3, 4}
    # A group carries the η of its admission into the batch.
    carried = {group.id: group.eta for batch in stage.trainer.batches for group in batch.groups}
    assert carried == {event.group: event.eta for event in admitted if event.group in carried}
    summary = write_report(stage.directory)
    assert summary.eta == (4, *(pair[1] for pair in moved)) and Run.read(stage.directory).eta == 4


@pytest.mark.parametrize("lost", [False, True])
def test_a_killed_run_resumes_with_its_eta_and_a_decision_that_was_not_written_is_made_again(
    make_stage: MakeStage, lost: bool
) -> None:
    stage = drifting(make_stage, 40, 100)
    events = stage.run()
    last = kinds(events, "eta_changed")[0].seq
    lines = Path(stage.directory, "events.jsonl").read_text().splitlines(keepends=True)
    resumed = drifting(make_stage, 40, 100)
    shutil.copytree(stage.directory / "record", resumed.directory / "record")
    Path(resumed.directory, "events.jsonl").write_text("".join(lines[: last + (not lost)]))
    again = resumed.run()
    check_finished(resumed.config, again)
    assert kinds(again, "eta_changed")[0].version == events[last].version
    # What was admitted and not finished keeps its η.
    carried = {group.id: group.eta for batch in resumed.trainer.batches for group in batch.groups}
    assert carried.items() <= {event.group: event.eta for event in kinds(again, "admitted")}.items()
