"""Groups that are replaced instead of trained; Eq. 3 stays exact, and what filters everything ends the run."""

from itertools import pairwise
from typing import Any

import pytest
from stage import MakeStage, StandInRewards, crash_after
from system import check_finished, check_record
from training import make_group

from headway.algorithm import AlgorithmSection, drop_reason
from headway.control.filters import GroupFilter
from headway.errors import RunFailed
from headway.record.log import read
from headway.record.run import fold
from headway.rollout.reward_pool import Verdict
from headway.types import DropReason


class Constant(StandInRewards):
    """Every trajectory gets the reward of its prompt, for some prompts alike."""

    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Verdict:
        found = await super().verify(task, text, source)
        return Verdict(1.0, "", 0.0) if int(task["answer"]) % 3 == 0 else found


class Same(StandInRewards):
    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Verdict:
        return Verdict(1.0, "", 0.0)


def test_a_group_is_dropped_for_its_spread_or_its_success_rate_and_for_nothing_else() -> None:
    everything = AlgorithmSection()
    spread = AlgorithmSection(drop_zero_variance=True)
    medium = AlgorithmSection(success_low=0.05, success_high=0.95)
    for rewards, by_spread, by_rate in [
        ([1.0, 1.0], DropReason.ZERO_VARIANCE, DropReason.SUCCESS_RATE),
        ([-5.0, -5.0], DropReason.ZERO_VARIANCE, DropReason.SUCCESS_RATE),
        ([5.0, -5.0], None, None),
        ([0.5, 1.0], None, DropReason.SUCCESS_RATE),
    ]:
        assert drop_reason(everything, rewards) is None
        assert drop_reason(spread, rewards) == by_spread
        assert drop_reason(medium, rewards) == by_rate
    assert len({t.reward for t in make_group(0).trajectories}) > 1


def test_invariant_1_and_2_hold_where_groups_without_spread_are_replaced(make_stage: MakeStage) -> None:
    stage = make_stage({"run": {"steps": 6}, "algorithm": {"drop_zero_variance": True}}, rewards=Constant())
    events = stage.run()
    state = check_finished(stage.config, events)
    assert "zero_variance" in state.dropped.values()
    trained = {group for event in events if event.kind == "trained" for group in event.groups}
    spreads = {group for group in trained if group in state.dropped}
    assert not spreads and len(trained) == 6 * stage.config.trainer.batch_groups


def test_a_curriculum_passes_over_the_prompts_of_replaced_groups_and_tries_them_again(make_stage: MakeStage) -> None:
    """A prompt at rest costs no tokens, the stream stays as it is, and the record alone tells what rests."""
    algorithm = {"drop_zero_variance": True, "rest_epochs": 2}
    stage = make_stage({"run": {"steps": 28}, "algorithm": algorithm}, rewards=Constant())
    events = stage.run()
    state = check_finished(stage.config, events)
    fates: dict[int, list[str | None]] = {}
    for group in state.groups:
        fates.setdefault(group.prompt, []).append(group.dropped)
        assert group.dropped != "resting" or (group.ref is None and group.tokens == 0)
    for found in fates.values():
        left = 0
        for fate in found:
            assert (fate == "resting") == (left > 0)
            left = 2 if fate == "zero_variance" else max(0, left - 1)
    assert any(found[:4] == ["zero_variance", "resting", "resting", "zero_variance"] for found in fates.values())
    history = [(group.prompt, group.dropped) for group in state.groups if group.dropped]
    resumed = GroupFilter(stage.config.algorithm, 3)
    resumed.restore(history)
    for prompt, found in fates.items():
        assert resumed.rests(prompt) == ("zero_variance" in found[-2:])


def test_invariant_14_a_group_that_was_to_be_replaced_is_not_trained_because_of_a_crash(make_stage: MakeStage) -> None:
    """The crash comes between the event that a group finished and the one that it was dropped."""
    sections = {
        "run": {"steps": 4},
        "staleness": {"max_staleness": 0},
        "algorithm": {"drop_zero_variance": True},
    }
    whole = make_stage(sections, rewards=Constant())
    events = whole.run()
    pairs = list(enumerate(pairwise(events), 1))
    cuts = [place for place, (one, other) in pairs if (one.kind, other.kind) == ("finished", "dropped")]
    assert len(cuts) > 3
    for num_kept in cuts:
        crashed = make_stage(sections, rewards=Constant())
        crash_after(num_kept, whole, crashed)
        state = check_finished(crashed.config, crashed.run())
        assert state.digests == fold(events).digests


def test_filters_that_leave_nothing_end_the_run_with_a_sentence(make_stage: MakeStage) -> None:
    stage = make_stage({"algorithm": {"drop_zero_variance": True}}, rewards=Same())
    with pytest.raises(RunFailed, match=r"64 groups in a row were replaced \(zero_variance\), so no batch fills up"):
        stage.run()
    check_record(stage.config, read(stage.directory / "events.jsonl"))
