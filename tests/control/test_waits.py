"""A verifier or a workflow that hangs or blocks is named within seconds. Invariant 15: bounded waits."""

from pathlib import Path
from typing import Any

import pytest
from system import make_config, run_inline

from headway.control import waits
from headway.control.waits import QUIET_S, WaitWatch
from headway.rollout.router import Waiting


def watch(tmp_path: Path, **sections: Any) -> WaitWatch:
    made = WaitWatch(make_config(tmp_path, "model", **sections), 0.0)
    made.begin(100.0)
    return made


def test_a_hanging_verifier_is_named_after_ten_seconds_and_then_ever_more_seldom(tmp_path: Path) -> None:
    made, told = watch(tmp_path, reward={"workers": 3}), []
    for now in range(100, 300):
        made.waiting["rollout-0"] = now - 0.5, (Waiting("verifier", 6, now - 100.5), Waiting("engine-0", 2, now - 101))
        if sentence := made.due(now):
            told.append((now - 100, sentence))
    assert [after for after, _ in told] == [10, 20, 40, 80, 160]
    assert told[0][1] == (
        f"no group has finished for 10 s: 6 trajectories wait for the verifier {tmp_path}/task.py:verify, the longest "
        "for 10 s; a call longer than reward.deadline_s = 10 s is killed; raise reward.workers (now 3) if it is slow "
        "and does not hang"
    )


def test_a_hanging_workflow_is_named_with_the_knob_that_bounds_it(tmp_path: Path) -> None:
    made = watch(tmp_path, rollout={"workflow": "a.b:Workflow"})
    made.waiting["rollout-0"] = 111.5, (Waiting("workflow", 1, 11.5),)
    sentence = made.due(112.0)
    assert sentence == (
        "no group has finished for 12 s: 1 trajectory waits for the workflow a.b:Workflow between its calls, for 12 s; "
        "an episode is given up after rollout.episode_deadline_s (now no limit)"
    )


def test_a_workflow_that_blocks_its_event_loop_is_named(tmp_path: Path) -> None:
    made = watch(tmp_path)
    made.waiting["rollout-1"] = 100.0, ()
    assert "rollout-1 has not answered for 12 s, as when the workflow" in (made.due(112.0) or "")


def test_groups_that_finish_engines_that_compute_and_an_empty_run_are_no_news(tmp_path: Path) -> None:
    made = watch(tmp_path)
    made.waiting["rollout-0"] = 149.9, (Waiting("engine-0", 64, 49.0), Waiting("verifier", 1, 0.4))
    assert made.due(150.0) is None, "long completions are no stall"
    made.waiting["rollout-0"] = 149.9, (Waiting("verifier", 6, 49.0),)
    made.begin(149.0)
    made.end(149.0, is_whole_failure=False)
    assert made.due(150.0) is None, "a group has just finished"
    made.end(149.5, is_whole_failure=True)
    assert made.due(190.0) is None, "nothing runs"


def test_a_run_says_whom_it_waits_for(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "QUIET_S", 0.3)
    monkeypatch.setattr(waits, "CHECK_S", 0.05)
    (tmp_path / "slow.py").write_text("import time\ndef verify(task, text):\n    time.sleep(0.1)\n    return 1.0\n")
    sections = {"task": {"verifier": f"{tmp_path}/slow.py:verify", "eval": ""}, "run": {"steps": 1}}
    _, seen = run_inline(make_config(tmp_path, tiny_model, **sections, rollout={"group_size": 8}))
    assert f"trajectories wait for the verifier {tmp_path}/slow.py:verify" in seen
    assert QUIET_S == 10.0
