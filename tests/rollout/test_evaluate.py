"""Held-out figures: estimators against their definitions, several tasks apart, every problem on record."""

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headway.model.tokenizer import build_character_tokenizer
from headway.rollout.evaluate import (
    Evaluation,
    ProblemRecords,
    evaluate,
    interval_of,
    pass_at_k,
    reward_parts,
    table,
    wilson,
)
from headway.types import (
    Admission,
    Completion,
    Failure,
    Group,
    Prompt,
    Reward,
    Sampling,
    Sequence,
    StopReason,
    Trajectory,
)


@pytest.mark.parametrize(("num", "solved"), [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_right_one(num: int, solved: int) -> None:
    right = [index < solved for index in range(num)]
    for k in range(1, num + 1):
        choices = list(itertools.combinations(right, k))
        assert pass_at_k(num, solved, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_more_than_there_are_completions_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 cannot be estimated from 4"):
        pass_at_k(4, 1, 5)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    draw, held = random.Random(3), {"binary": 0, "several": 0}
    for _ in range(400):
        binary = [[float(draw.random() < 0.3)] for _ in range(80)]
        low, high = interval_of(binary) or (1.0, 0.0)
        held["binary"] += low <= 0.3 <= high
        chances = [draw.random() for _ in range(80)]
        several = [[float(draw.random() < chance) for _ in range(4)] for chance in chances]
        low, high = interval_of(several) or (1.0, 0.0)
        held["several"] += low <= 0.5 <= high
    assert all(0.92 * 400 <= count <= 0.99 * 400 for count in held.values()), held
    low, high = wilson(1.0, 20)
    assert high == 1.0 and 0.8 < low < 0.9, "all right is not certain"


def trajectory(index: int, score: float, components: dict[str, float] | None = None) -> Trajectory:
    tokens = np.array([3, 4], np.int32)
    completion = Completion(tokens, np.zeros(2, np.float32), np.array([2, 5], np.int32), StopReason.STOP)
    sequence = Sequence.single_turn(np.array([5], np.int32), completion)
    return Trajectory(index, (sequence,), (Reward(0, 2, score),), 1.0, (StopReason.STOP,), components or {})


def prompts(**nums: int) -> list[Prompt]:
    names = [name.strip("_") for name, num in nums.items() for _ in range(num)]
    return [Prompt(index, np.array([5], np.int32), "0", {}, name) for index, name in enumerate(names)]


def run_on(held_out: list[Prompt], scores: list[list[float | None]], **settings: Any) -> Evaluation:
    async def run(admission: Admission) -> Group:
        of_one = scores[admission.group]
        assert admission.size == len(of_one)
        right = [trajectory(index, score) for index, score in enumerate(of_one) if score is not None]
        failed = tuple(Failure(index, "verifier: away", 0) for index, score in enumerate(of_one) if score is None)
        source = admission.prompt.source
        return Group(admission.group, admission.prompt.index, 0, admission.size, tuple(right), failed, source)

    return asyncio.run(evaluate(run, held_out, Sampling(), 1, 4, **settings))


def test_problems_that_are_all_alike_are_no_certainty() -> None:
    for score in (0.0, 0.1, 1.0):
        low, high = interval_of([[score] * 4] * 2) or (0.0, 0.0)
        assert high - low > 0.5 and low <= score <= high


def test_the_interval_of_partial_scores_stays_within_them() -> None:
    assert interval_of([[0.0], [0.0], [0.7]])[0] == 0.0
    assert interval_of([[1.0], [0.9], [0.1]])[1] == 1.0
    assert interval_of([[-1.0], [5.0]])[0] < -1.0, "other scores have no bounds that are known"


def test_figures_of_several_completions_a_problem() -> None:
    found = run_on(prompts(_=3), [[1.0, 0.0], [0.5, 1.0], [None, None]], samples=2, pass_at=[1, 2])
    assert (found.accuracy, found.num, found.num_failed) == (0.625, 2, 1)
    assert dict(found.pass_at) == {1: 0.5, 2: 1.0}
    assert (found.version, found.version_last, found.mean_tokens) == (1, 5, 2.0)
    assert found.interval is not None and not found.tasks


def test_several_tasks_have_figures_of_their_own_and_a_line_each() -> None:
    found = run_on(prompts(math=2, code=1), [[1.0], [0.0], [1.0]])
    assert {task.source: (task.accuracy, task.num) for task in found.tasks} == {"math": (0.5, 2), "code": (1.0, 1)}
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.summary()["tasks"] == {"math": 0.5, "code": 1.0}
    assert table(found, 1).row_count == 3


def test_the_table_is_whole_on_eighty_columns() -> None:
    names = {"gsm8k_platinum": 1, "math500": 1, "humaneval": 1}
    found = run_on(prompts(**names), [[1.0, 0.0, 0.5, 1.0]] * 3, samples=4, pass_at=[1, 2, 4])
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(found, 4))
    text = captured.get()
    assert "…" not in text and "gsm8k_platinum" in text and "62.5 (" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_evaluation_without_a_single_verdict_has_no_accuracy() -> None:
    found = run_on(prompts(_=1), [[None]])
    assert (found.accuracy, found.interval, found.num_failed, found.pass_at) == (None, None, 1, ())


def test_every_problem_is_on_record_with_text_score_and_parts(tmp_path: Path) -> None:
    records = ProblemRecords(tmp_path / "deep" / "problems.jsonl", build_character_tokenizer("0123"))
    held_out = prompts(math=1)
    group = Group(0, 0, 0, 2, (trajectory(0, 0.5, {"right": 1.0}),), (Failure(1, "verifier: away", 3),), "math")
    records.write(held_out[0], group)
    records.close()
    (line,) = (tmp_path / "deep" / "problems.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "task": "math",
        "row": 0,
        "prompt": "0",
        "completions": [
            {"text": "01", "tokens": [3, 4], "score": 0.5, "components": {"right": 1.0}, "stops": ["stop"]}
        ],
        "failures": ["verifier: away"],
    }


def test_parts_of_rewards_are_means_by_task_and_component() -> None:
    one = Group(0, 0, 0, 2, (trajectory(0, 1.0, {"right": 1.0}), trajectory(1, 0.0, {"right": 0.0})), (), "math")
    two = Group(1, 0, 0, 1, (trajectory(0, 0.25),), (), "code")
    assert reward_parts([one, two]) == {
        "reward_of/math": 0.5,
        "component/math/right": 0.5,
        "reward_of/code": 0.25,
        "verifier_failed_share": 0.0,
        "verifier_exceeded_share": 0.0,
    }
