"""What the viewer answers about a run: rows, groups, tokens and questions, equal to what the record holds."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from recorded import RecordedRun, write_tokenizer

from headway.errors import HeadwayError
from headway.monitor.viewer.queries import Queries, merged, names
from headway.monitor.viewer.questions import DROPPED_BECAUSE
from headway.monitor.viewer.tokens import _headings
from headway.record.events import Phase, Stats, Warned
from headway.types import DropReason

HOSTILE = "<script>fetch('/')</script> \x1b[2J \u202eabc"


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    made = RecordedRun(tmp_path / "run")
    write_tokenizer(tmp_path / "run" / "model")
    for _ in range(5):
        made.step()
    return made


def asked(recorded: RecordedRun, query: str, **parameters: object) -> dict:
    recorded.flush()
    return Queries([recorded.directory]).handlers[query]({name: str(value) for name, value in parameters.items()})


def test_trajectories_are_filtered_by_step_reward_and_state(run: RecordedRun) -> None:
    run.finish_group()
    assert asked(run, "trajectories")["total"] == 21 * 4
    assert {row["step"] for row in asked(run, "trajectories", step=2)["rows"]} == {2}
    assert asked(run, "trajectories", reward_min=1, step=1)["total"] == 0
    waiting = asked(run, "trajectories", state="waiting")
    assert waiting["total"] == 4 and {row["group"] for row in waiting["rows"]} == {20}
    assert asked(run, "trajectories", stop="length")["total"] == 0


def test_trajectories_are_sorted_by_any_column_in_both_directions(run: RecordedRun) -> None:
    up = [row["step"] for row in asked(run, "trajectories", sort="step", down=0)["rows"]]
    down = [row["step"] for row in asked(run, "trajectories", sort="step")["rows"]]
    assert up == sorted(up) and down == sorted(down, reverse=True)
    assert [row["group"] for row in asked(run, "trajectories", limit=1)["rows"]] == [19]


def test_a_search_finds_the_text_of_prompts_completions_and_failures(run: RecordedRun) -> None:
    run.train([run.finish_group(["a needle in hay", "hay"], failure="ZeroDivisionError in rows.py:3")])
    found = asked(run, "trajectories", search="NEEDLE")
    assert [(row["group"], row["trajectory"]) for row in found["rows"]] == [(20, 0)]
    assert "needle" in found["rows"][0]["preview"]
    failed = asked(run, "trajectories", search="zerodivision")
    assert [(row["trajectory"], row["state"]) for row in failed["rows"]] == [(2, "failed")]
    asked_for = asked(run, "trajectories", search="What is 7?")["rows"]
    assert {row["prompt"] for row in asked_for} == {7} and len(asked_for) == 2 * 4


def test_tokens_carry_the_versions_and_log_probs_of_the_record(run: RecordedRun) -> None:
    run.train([run.finish_group(["0123456789"])])
    tokens = asked(run, "tokens", group=20, trajectory=0)
    sampled = [place for place, known in enumerate(tokens["sampled"]) if known]
    assert "".join(tokens["text"][place] for place in sampled) == "0123456789"
    assert [tokens["version"][place] for place in sampled] == [4] * 5 + [5] * 5
    assert tokens["behaviour"][sampled[0]] == pytest.approx(-0.1) and tokens["behaviour"][0] is None
    assert tokens["turns"][0] == "prompt" and tokens["turns"][sampled[0]] == "policy"
    assert tokens["reward"][sampled[-1]] == 1.0


def test_turns_are_headed_by_the_roles_that_the_record_names() -> None:
    sampled, roles = np.array([0, 0, 1, 1, 0, 0, 0, 1, 0], bool), {4: "tool", 6: "user"}
    headings = _headings(0, sampled, roles, several=False)
    shown = {place: heading for place, heading in enumerate(headings) if heading}
    assert shown == {
        0: "prompt", 2: "policy, turn 1", 4: "tool", 6: "user", 7: "policy, turn 2", 8: "environment or tool",
    }  # fmt: skip


def test_of_a_very_long_trajectory_the_first_tokens_are_sent_with_their_number(run: RecordedRun) -> None:
    tokens = asked(run, "tokens", group=run.finish_group(["a" * 60_000]), trajectory=0)
    assert len(tokens["text"]) == len(tokens["version"]) == 50_000 and tokens["total"] > 60_000


def test_tokens_carry_what_the_loss_saw_as_the_step_recorded_it(run: RecordedRun) -> None:
    run.train([run.finish_group(["0123456789", "xyz"]), run.finish_group(["ab"])])
    tokens = asked(run, "tokens", group=20, trajectory=0)
    sampled = [place for place, known in enumerate(tokens["sampled"]) if known]
    for place in sampled:
        assert tokens["proximal"][place] == pytest.approx(0.9 * tokens["behaviour"][place])
        assert tokens["current"][place] == pytest.approx(tokens["proximal"][place] - 0.25)
        assert tokens["weight"][place] == pytest.approx(math.exp(-0.1 * tokens["behaviour"][place]))
        assert tokens["advantage"][place] == 0.0
    assert [place for place in sampled if tokens["mask"][place]] == [sampled[2]]
    assert "behaviour_cap" in tokens["mask"][sampled[2]] and tokens["recorded"]
    assert tokens["proximal"][0] is None and tokens["mask"][0] == ""


def test_tokens_of_a_group_that_was_not_trained_have_no_figures_of_a_loss(run: RecordedRun) -> None:
    tokens = asked(run, "tokens", group=run.finish_group(["ab"]), trajectory=0)
    assert not tokens["recorded"] and set(tokens["weight"]) == {None}


def test_a_group_shows_its_prompt_completions_failures_and_the_same_prompt_at_other_steps(run: RecordedRun) -> None:
    group = asked(run, "group", group=12)
    assert group["text"] == "what is 2?" and group["step"] == 4
    assert [one.text for one in group["trajectories"]] == ["the answer is 2"] * 4
    assert group["same_prompt"] == [{"group": 2, "step": 1}]
    number = run.finish_group(["x"], failure="it hung")
    assert asked(run, "group", group=number)["failures"] == [{"trajectory": 1, "reason": "it hung"}]


def test_the_prompt_that_went_from_wrong_to_right_is_found(run: RecordedRun) -> None:
    rows = asked(run, "questions", ask="wrong_to_right")["rows"]
    assert rows and all(row["cells"][3] == 0 < row["cells"][5] for row in rows)


def test_the_held_out_problem_that_went_from_wrong_to_right_is_found_with_both_of_its_texts(run: RecordedRun) -> None:
    run.evaluate([False, False, True])
    run.step()
    run.evaluate([False, True, True])
    rows = [row for row in asked(run, "questions", ask="wrong_to_right")["rows"] if row["cells"][0] == "held out"]
    assert [row["cells"] for row in rows] == [["held out", 1, "held out 1?", 5, "it is 0", 6, "it is 1"]]
    link = {name: value for name, value in rows[0].items() if name != "cells"}
    problem = asked(run, "group", **link)
    assert problem["text"] == "held out 1?" and problem["reference"] == {"answer": "1"}
    assert [(other["evaluation"], other["reward"]) for other in problem["same_prompt"]] == [(0, 0.0)]
    tokens = asked(run, "tokens", **link, trajectory=0)
    assert "".join(tokens["text"]).endswith("it is 1") and set(tokens["version"][11:]) == {5, 6}


def test_a_swap_is_found_with_the_token_that_came_first_after_it(run: RecordedRun) -> None:
    run.train([run.finish_group(["0123456789"])])
    row = asked(run, "questions", ask="swaps")["rows"][0]
    assert row["group"] == 20 and row["cells"][2:] == ["4 → 5", 5, "01234", "56789"]
    tokens = asked(run, "tokens", group=20, trajectory=0)
    assert tokens["text"][row["token"]] == "5" and tokens["version"][row["token"]] == 5


def test_the_most_down_weighted_tokens_are_those_of_the_smallest_weights(run: RecordedRun) -> None:
    rows = asked(run, "questions", ask="down_weighted")["rows"]
    weights = [row["cells"][0] for row in rows]
    assert weights == sorted(weights)
    tokens = asked(run, "tokens", group=rows[0]["group"], trajectory=rows[0]["trajectory"])
    assert tokens["weight"][rows[0]["token"]] == weights[0] == min(filter(None, tokens["weight"]))
    assert tokens["text"][rows[0]["token"]] == rows[0]["cells"][1]


@pytest.mark.parametrize(
    "question",
    ["then_and_now", "swaps", "down_weighted", "never_solved", "always_solved", "longest", "stalest", "why_dropped"],
)
def test_every_question_is_answered_with_rows_as_wide_as_its_headings(run: RecordedRun, question: str) -> None:
    answer = asked(run, "questions", ask=question)
    assert all(len(row["cells"]) == len(answer["headings"]) for row in answer["rows"])


def test_extreme_and_unsolved_completions_are_shown_with_their_prompts(run: RecordedRun) -> None:
    number = run.finish_group(["0" * 40])
    headings, (longest, *_) = (asked(run, "questions", ask="longest")[name] for name in ("headings", "rows"))
    assert longest["group"] == number
    told = dict(zip(headings, longest["cells"], strict=True))
    assert told["tokens"] == 40 and told["prompt"] == "what is 0?" and told["completion"] == "0" * 40
    answer = asked(run, "questions", ask="always_solved")
    row = dict(zip(answer["headings"], answer["rows"][0]["cells"], strict=True))
    assert row["prompt"] == f"what is {row['row']}?" and "the answer" in row["one of the last completions"]


def test_series_have_one_value_for_each_step_and_the_metrics_are_described(run: RecordedRun) -> None:
    series = asked(run, "series")
    assert series["columns"]["step"] == [1, 2, 3, 4, 5]
    assert all(len(column) == 5 for column in series["columns"].values())
    assert series["columns"]["zero_variance_share"] == [1.0] * 5
    assert {metric["name"] for metric in series["metrics"]} >= series["columns"].keys() - {"step", "wall_s"}
    units = {metric["title"]: metric["unit"] for metric in series["metrics"]}
    assert units["Step time"] == "s" and units["Truncated"] == "%" and units["KL(proximal‖current)"] == "nats"


def test_a_live_run_is_followed_without_reading_it_again(run: RecordedRun) -> None:
    run.flush()
    queries = Queries([run.directory])
    assert queries.trajectories({"run": "0"})["total"] == 80
    run.step()
    run.flush()
    with (run.directory / "events.jsonl").open("ab") as log:
        log.write(b'{"kind":"admitted","seq":')  # still being written
    assert queries.trajectories({"run": "0"})["total"] == 96
    assert [len(queries.series({"run": "0"})["columns"]["step"])] == [6]


def test_a_run_without_a_tokenizer_shows_token_numbers(tmp_path: Path) -> None:
    bare = RecordedRun(tmp_path / "bare")
    bare.train([bare.finish_group(["ab"])])
    assert "⟨3⟩" in asked(bare, "group", group=0)["trajectories"][0].text


@pytest.mark.parametrize(
    ("query", "parameters"),
    [
        ("group", {"group": 99}), ("group", {"group": -1}), ("tokens", {"group": 0, "trajectory": 9}),
        ("trajectories", {"run": 3}), ("trajectories", {"sort": "__class__"}), ("trajectories", {"reward_min": "nan"}),
        ("trajectories", {"state": "x"}), ("trajectories", {"step": "x"}), ("questions", {"ask": "x"}),
    ],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_refused(run: RecordedRun, query: str, parameters: dict) -> None:
    with pytest.raises((ValueError, HeadwayError)):
        asked(run, query, **parameters)


def test_hostile_text_passes_through_as_text(run: RecordedRun) -> None:
    run.train([run.finish_group([HOSTILE])])
    assert asked(run, "group", group=20)["trajectories"][0].text == HOSTILE


def test_the_timeline_begins_with_the_start_of_engine_and_trainer(run: RecordedRun) -> None:
    for worker in ("engine", "reward"):
        run.add(Phase(name=f"starting {worker}", state="finished", seconds=2.0))
    rows = {row["name"]: row["spans"] for row in asked(run, "timeline")["rows"]}
    assert list(rows) == ["engine", "trainer"], "in one order, whichever was heard of first"
    assert rows["engine"][0][3] == "start-up"


def test_groups_that_failed_altogether_are_rows_with_their_reasons_and_answer_why(run: RecordedRun) -> None:
    number = run.drop_group("the verifier is down")
    found = asked(run, "trajectories", state="failed")
    assert {(row["group"], row["preview"]) for row in found["rows"]} == {(number, "the verifier is down")}
    assert asked(run, "questions", ask="why_dropped")["rows"][0]["cells"][-1] == "the verifier is down"
    assert asked(run, "group", group=number)["failures"][0]["reason"] == "the verifier is down"


def test_every_reason_for_a_drop_is_explained() -> None:
    assert set(DROPPED_BECAUSE) == set(DropReason)


def test_spans_that_share_a_pixel_are_drawn_as_one_with_their_common_share() -> None:
    spans = [(0.0, 1.0, 1.0, "a"), (1.0, 2.0, 0.0, "b"), (50.0, 60.0, 0.5, "c")]
    assert merged(spans, 5.0) == [(0.0, 2.0, 0.5, "several; zoom in"), (50.0, 60.0, 0.5, "c")]
    assert merged(spans, 0.1) == spans


def test_runs_of_one_directory_name_are_named_by_the_path_that_they_do_not_share(tmp_path: Path) -> None:
    one, two = tmp_path / "grpo" / "run", tmp_path / "deeper" / "dapo" / "run"
    assert names([one, two]) == ["grpo/run", "deeper/dapo/run"]
    assert names([one, tmp_path / "deeper"]) == ["run", "deeper"]


def test_generation_throughput_does_not_jump_where_steps_are_shorter_than_an_engines_reports(run: RecordedRun) -> None:
    counts = dict.fromkeys(
        ("prefilled", "recomputed", "preempted", "running", "waiting", "kv_used", "kv_total", "inflight", "ready"), 0
    )
    for number in range(40):
        run.step()
        if number % 3 == 2:
            run.add(
                Stats(
                    engine="engine", version=number, seconds=3.0, generated=300, busy_s=3.0, admission_wait_s=0.0,
                    trainer_wait_s=0.0, **counts,
                )
            )  # fmt: skip
    rates = asked(run, "series")["columns"]["generated_per_s"]
    assert rates[0] is None and all(70 < rate < 130 for rate in rates[15:]), rates


def test_a_warning_stands_at_the_head_until_a_step_follows_and_among_the_events_for_good(run: RecordedRun) -> None:
    run.add(Warned(message="no group has finished for 10 s"))
    flat, said = asked(run, "series")["warnings"]
    assert "all rewards were equal" in flat and said == "no group has finished for 10 s"
    run.step()
    answer = asked(run, "series")
    assert not [text for text in answer["warnings"] if "no group" in text]
    assert [(one["kind"], one["text"]) for one in answer["markers"]] == [("warned", "no group has finished for 10 s")]


def test_a_run_that_is_trained_again_from_nothing_is_read_again_from_its_beginning(tmp_path: Path) -> None:
    first = RecordedRun(tmp_path / "run")
    for _ in range(3):
        first.step()
    first.flush()
    handlers = Queries([tmp_path / "run"]).handlers
    assert handlers["trajectories"]({"limit": "1"})["total"] == 3 * 16
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(HeadwayError, match="cannot read the event log"):
        handlers["runs"]({})
    second = RecordedRun(tmp_path / "run", started=1_800_000_000.0)
    second.step()
    second.flush()
    assert handlers["trajectories"]({"limit": "1"})["total"] == 16
    assert handlers["series"]({})["columns"]["step"] == [1]
