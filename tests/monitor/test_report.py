import io
import json
import math
from itertools import pairwise

import pytest
from rich.console import Console
from synthetic import SyntheticRun, finished_run, write_log

from headway.errors import HeadwayError
from headway.monitor.report import Summary, summarise, table, write_report, write_summary
from headway.record.run import fold

HOSTILE = "$\\frac{ [bold]x[/] \x1b[2J\n日本 \u202e {0} %s"
REQUIRED = {
    "steps",
    "wall_s",
    "total_s",
    "wall_s_sync",
    "eval_before",
    "eval_after",
    "eval_num",
    "tokens_generated",
    "tokens_trained",
    "goodput",
    "staleness_mean",
    "staleness_max",
    "staleness_bound",
    "parity_max_abs",
    "pause_ms_mean",
    "pause_ms_max",
    "dropped",
    "num_dropped",
    "recomputed_tokens",
    "reward_first",
    "reward_last",
    "trainer_busy_share",
    "engine_busy_share",
    "trainer_wait_s",
    "admission_wait_s",
    "status",
    "resumed",
    "tokens",
    "failures",
    "truncated_share",
    "zero_variance_share",
    "stops",
    "warnings",
    "lengths",
    "audit",
}


def printed(summary: Summary, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False)
    console.print(table(summary))
    return console.file.getvalue()


def picture_of(run_dir):
    """The picture's pixels, as shares of 0 to 1."""
    from matplotlib.image import imread

    return imread(run_dir / "report.png")


def test_the_summary_of_a_finished_run_is_what_its_events_say():
    events = finished_run(steps=20)
    summary = summarise(fold(events))
    trained = [event for event in events if event.kind == "trained"]
    assert (summary.steps, summary.status, summary.resumed) == (20, "finished", 0)
    assert (summary.eval_before, summary.eval_after, summary.eval_num) == (0.4, 0.9, 500)
    assert summary.tokens_trained == sum(event.tokens for event in trained)
    assert summary.tokens_generated >= summary.tokens_trained
    assert summary.goodput == summary.tokens_trained / summary.tokens_generated
    assert summary.staleness_max == 2 and summary.staleness_bound == 3
    assert summary.staleness_mean == pytest.approx(sum(event.staleness_mean for event in trained) / 20)
    assert (summary.pause_ms_max, summary.parity_max_abs) == (4.0, 4e-6)
    assert (summary.num_dropped, summary.dropped) == (1, {"failed": 1})
    assert summary.reward_first == pytest.approx((trained[0].reward + trained[1].reward) / 2)
    assert summary.reward_last == pytest.approx((trained[-1].reward + trained[-2].reward) / 2)
    assert summary.trainer_wait_s == pytest.approx(20 * 0.25)
    assert summary.admission_wait_s == pytest.approx(20 * 0.02)
    assert summary.recomputed_tokens == 300 * 20


def test_wall_time_is_that_of_training_alone():
    events = finished_run(steps=20)
    summary = summarise(fold(events))
    admitted = next(event.time for event in events if event.kind == "admitted")
    trained = [event.time for event in events if event.kind == "trained"]
    assert summary.wall_s == pytest.approx(trained[-1] - admitted)
    assert summary.total_s == pytest.approx(events[-1].time - events[0].time)
    assert summary.trainer_busy_share == pytest.approx(20 / summary.wall_s)
    assert 0.7 <= summary.engine_busy_share <= 1.0


def resumed_run() -> SyntheticRun:
    run = SyntheticRun(steps=8)
    run.evaluate("before", 0.3)
    for _ in range(4):
        run.step()
    run.crash(downtime_s=5000.0, lost_tokens=77)
    for _ in range(4):
        run.step()
    run.evaluate("after", 0.7)
    run.end()
    return run


def test_a_resumed_run_counts_both_incarnations_and_none_of_the_time_between():
    whole, resumed = summarise(fold(finished_run(steps=8))), summarise(fold(resumed_run().events))
    assert (resumed.steps, resumed.resumed, resumed.status) == (8, 1, "finished")
    assert resumed.wall_s == pytest.approx(8 * 1.25 + 6 * 0.05)
    assert resumed.total_s < 20 and whole.total_s < 20
    assert resumed.admission_wait_s == pytest.approx(8 * 0.02)
    assert resumed.tokens_generated > resumed.tokens_trained
    assert resumed.lost_tokens >= 77
    assert 0.7 <= resumed.engine_busy_share <= 1.0


def test_the_clock_of_a_resumed_run_has_no_gap_and_never_goes_back():
    events = resumed_run().events
    clock = fold(events).clock
    times = [clock.at(event.time) for event in events]
    assert times == sorted(times) and times[0] == 0 and times[-1] == pytest.approx(clock.total_s)
    assert max(b - a for a, b in pairwise(times)) < 3
    assert len(clock.resumes) == 1 and 0 < clock.resumes[0] < clock.total_s


def test_a_run_killed_midway_is_unfinished_and_a_failed_one_says_why():
    run = SyntheticRun(steps=8)
    run.evaluate("before", 0.3)
    run.step()
    run.step()
    killed = summarise(fold(run.events))
    assert (killed.status, killed.steps, killed.eval_before, killed.eval_after) == ("unfinished", 2, 0.3, None)
    run.end("failed", "engine engine-0 died")
    failed = summarise(fold(run.events))
    assert (failed.status, failed.cause) == ("failed", "engine engine-0 died")
    run.crash()
    run.step()
    assert (summarise(fold(run.events)).status, summarise(fold(run.events)).cause) == ("unfinished", "")


def test_an_evaluation_after_training_is_not_that_of_later_steps():
    run = SyntheticRun(steps=8)
    run.step()
    run.evaluate("after", 0.5)
    run.end()
    assert summarise(fold(run.events)).eval_after == 0.5
    run.crash()
    run.step()
    assert summarise(fold(run.events)).eval_after is None and summarise(fold(run.events)).eval_latest == 0.5


def test_groups_of_a_skipped_step_are_counted_once_even_if_the_crash_came_before_their_drop():
    run = SyntheticRun(steps=4)
    run.admit()
    ids = [run.finish()[0] for _ in range(4)]
    run.add("taken", version=0, groups=tuple(ids))
    run.add("skipped", version=0, groups=tuple(ids), reason="the gradient is not finite")
    assert summarise(fold(run.events)).dropped == {"skipped": 4}
    run.add("dropped", groups=tuple(ids), reason="skipped", tokens=0)
    assert summarise(fold(run.events)).dropped == {"skipped": 4}


def test_long_completions_that_starve_show_in_the_lengths():
    run = SyntheticRun(steps=4)
    run.step()
    for _ in range(2):
        run.finish()
    for place in [n for n, event in enumerate(run.events) if event.kind == "finished"][-2:]:
        run.change(place, lengths=(1000,) * 4)
    lengths = summarise(fold(run.events)).lengths
    assert lengths.untrained_mean == 1000 and lengths.num_untrained == 8
    assert lengths.trained_mean < 100 < lengths.sampled_mean


def test_write_report_makes_every_file_and_every_key_and_a_picture_with_ink_in_every_panel(tmp_path):
    write_log(tmp_path, finished_run(steps=20))
    summary = write_report(tmp_path, extra={"wall_s_sync": 41.5, "sync_steps": 20})
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == json.loads(json.dumps(summary.to_json()))
    assert set(written) >= REQUIRED
    assert (written["wall_s_sync"], written["sync_steps"]) == (41.5, 20)
    assert not list(tmp_path.glob("*.new"))
    pixels = picture_of(tmp_path)
    height, width = pixels.shape[:2]
    assert width >= 1200 and height >= 1200
    ink = (pixels[:, :, :3].max(axis=2) - pixels[:, :, :3].min(axis=2)) > 0.2
    for row in range(5):
        for column in range(2):
            panel = ink[row * height // 5 : (row + 1) * height // 5, column * width // 2 : (column + 1) * width // 2]
            assert panel.mean() > 0.002, (row, column)


def test_a_second_summary_retains_the_extra_of_the_first_unless_the_run_is_another(tmp_path):
    run = fold(finished_run(steps=3))
    assert write_summary(tmp_path, run).to_json()["wall_s_sync"] is None
    write_summary(tmp_path, run, extra={"wall_s_sync": 41.5})
    assert write_summary(tmp_path, run).to_json()["wall_s_sync"] == 41.5
    run.config_hash = "another"
    assert write_summary(tmp_path, run).to_json()["wall_s_sync"] is None
    (tmp_path / "summary.json").write_text("{torn")
    assert write_summary(tmp_path, run).steps == 3


@pytest.mark.parametrize("steps", [1, 300])
def test_the_picture_can_be_drawn_for_short_and_long_resumed_runs(tmp_path, steps):
    run = SyntheticRun(steps=steps + 1, batch=2)
    for _ in range(steps):
        run.step()
    run.crash()
    run.step()
    write_log(tmp_path, run.events)
    write_report(tmp_path)
    assert picture_of(tmp_path).std() > 0.05


def test_a_run_that_did_nothing_yet_has_a_report(tmp_path):
    events = SyntheticRun(steps=5).events
    write_log(tmp_path, events)
    summary = write_report(tmp_path)
    assert (summary.steps, summary.status, summary.goodput, summary.wall_s) == (0, "unfinished", None, 0)
    assert "nothing" not in printed(summary) and "unfinished" in printed(summary)
    assert picture_of(tmp_path).std() > 0.01
    assert summarise(fold([])).steps == 0


def test_training_without_evaluation_and_evaluation_without_training_can_be_drawn(tmp_path):
    without_evaluation = SyntheticRun(steps=2)
    without_evaluation.step()
    without_training = SyntheticRun(steps=2)
    without_training.evaluate("before", 0.5)
    rewards_outside = SyntheticRun(steps=2)
    rewards_outside.evaluate("before", 0.5)
    rewards_outside.step()
    rewards_outside.change(-2, reward=-7.5)
    for number, run in enumerate((without_evaluation, without_training, rewards_outside)):
        write_log(tmp_path / str(number), run.events)
        write_report(tmp_path / str(number))
        assert picture_of(tmp_path / str(number)).std() > 0.01


def test_a_missing_or_empty_log_is_one_sentence(tmp_path):
    with pytest.raises(HeadwayError, match="is this a run directory"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(HeadwayError, match="holds no events yet"):
        write_report(tmp_path)


def test_hostile_text_in_the_log_is_drawn_and_printed_as_text(tmp_path):
    run = SyntheticRun(steps=2, run_dir=HOSTILE)
    run.evaluate("before", 0.5)
    run.step()
    run.add("dropped", groups=(run.finish()[0],), reason=HOSTILE, tokens=3)
    run.look(1.0, 0.1, engine=HOSTILE)
    run.end(HOSTILE, HOSTILE)
    write_log(tmp_path, run.events)
    summary = write_report(tmp_path, extra={HOSTILE: HOSTILE})
    text = printed(summary)
    assert "[bold]x[/]" in text and "\x1b" not in text and "\u202e" not in text
    assert json.loads((tmp_path / "summary.json").read_text())["cause"] == HOSTILE
    assert picture_of(tmp_path).std() > 0.01


def test_nulls_in_the_log_are_left_out_of_means_and_curves(tmp_path):
    run = SyntheticRun(steps=3)
    run.evaluate("before", None)
    run.step(loss=None)
    run.step()
    for place, event in enumerate(run.events):
        if event.kind == "swapped" and event.version == 1:
            run.change(place, parity_max_abs=None)
        if event.kind == "trained" and event.version == 1:
            run.change(place, reward=None)
    write_log(tmp_path, run.events)
    summary = write_report(tmp_path)
    assert summary.parity_max_abs == 3e-6
    assert summary.eval_before is None and math.isfinite(summary.reward_first or math.nan)


def test_the_table_fits_eighty_columns_and_holds_the_result():
    text = printed(summarise(fold(finished_run(steps=20)), extra={"wall_s_sync": 41.5}), width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    for expected in ("40.0% → 90.0%", "bound 3", "1 failed", "wall_s_sync", "41.5", "tokens by fate"):
        assert expected in text
