"""Choices, strings, JSON, form, reasoning-gym, the judge: right, wrong, refused rows, and outages that are errors."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from headway.errors import ConfigError
from headway.tasks.verifiers import choice, form, gym, judge, match, schema

CHOICES = {"answer": "B", "choices": ["3 km", "4 km", "5 km"]}


@pytest.mark.parametrize(
    "text",
    [
        *[
            "The answer is (B).",
            "\\boxed{B}",
            "\\boxed{\\text{(B)}}",
            "answer: b",
            "So **B**",
            "A? No. (B)",
            "I choose B.",
        ],
        *["#### B) 4 km", "The answer is 4 km", "Answer: **B. 4 km**", "4 km", "Answer: Option B"],
        *["<answer>B</answer>", 'Answer: "B"', "Answer: B\n\nC and A are wrong.", "Answer:\n(B)"],
        *["\\boxed{\\textbf{(B)}\\ 12}", "Answer: b because", "Answer: B. A triangle is it"],
    ],
)
def test_the_right_choice_is_seen(text: str) -> None:
    assert choice.verify(CHOICES, text) == 1.0
    assert choice.verify({**CHOICES, "answer": 1}, text) == choice.verify({**CHOICES, "answer": "4 km"}, text) == 1.0


@pytest.mark.parametrize(
    "text",
    ["", "(A)", "\\boxed{A}", "answer: B or C", "answer: B, C", "(B) is wrong, so (C)", "Because it is so", "A B C D"]
    + [f"answer: {said}" for said in ("B C D", "B; C", "B. C. D.", "B or maybe C", "A triangle, which is (B)")],
)
def test_a_wrong_or_several_choices_score_nothing(text: str) -> None:
    assert choice.verify(CHOICES, text) == 0.0


def test_an_article_is_no_choice() -> None:
    assert choice.verify({"answer": "A"}, "The answer is a triangle, which is (C).") == 0.0
    assert choice.verify({"answer": "A"}, "The answer is a.") == 1.0


@pytest.mark.parametrize("row", [{"answer": "seven"}, {"answer": 1}, {"answer": None}, {"answer": 5, "choices": ["a"]}])
def test_a_row_without_a_choice_is_refused(row: dict[str, Any]) -> None:
    assert "neither a letter" in choice.check_row(row)


def test_strings_are_matched_exactly_or_by_pattern() -> None:
    paris = {"answer": ["Paris", "the city of Paris"]}
    assert match.verify(paris, "After some thought.\nAnswer:  paris.") == 1.0
    assert match.verify(paris, "The  City of Paris") == 1.0
    assert match.verify(paris, "Answer: Paris, or London") == 0.0
    assert match.verify_text({"answer": "ab"}, "ab") == 1.0 and match.verify_text({"answer": "ab"}, "ab ") == 0.0
    assert match.verify_regex({"pattern": r"\b\d{3}\b"}, "room 101") == 1.0
    assert match.verify_regex({"pattern": r"\b\d{3}\b"}, "room 11") == 0.0
    assert "no regular expression" in match.check_pattern({"pattern": "("})
    assert match.check_row({"answer": ""}) and not match.check_row(paris)


def test_a_pattern_that_never_ends_is_a_wrong_answer_soon() -> None:
    started = time.process_time()
    assert match.verify_regex({"pattern": "(a+)+$"}, "a" * 40 + "b") == 0.0
    assert match.verify_regex({"pattern": "(a+)+$"}, "aaa") == 1.0
    assert form.Format("(a+)+b")({}, "a" * 40) == 0.0
    assert time.process_time() - started < 2


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("given", [SCHEMA, json.dumps(SCHEMA)])
def test_json_is_judged_by_its_schema(given: Any) -> None:
    row = {"schema": given}
    for text in ('{"n": 3}', 'So:\n```json\n{"n": 3}\n```\nDone.', 'It is {"n": 3}, I think.'):
        assert schema.verify(row, text) == 1.0
    for text in ('{"n": "3"}', "{}", "n: 3", "", '{"n": 3', "[" * 100_000):
        assert schema.verify(row, text) == 0.0
    assert schema.verify_parses({}, "[1, 2]") == 1.0 and schema.verify_parses({}, "no") == 0.0
    assert schema.check_row(row) == ""


@pytest.mark.parametrize("bad", [3, "{", {"type": "nothing"}, None])
def test_a_row_whose_schema_is_none_is_refused(bad: Any) -> None:
    assert "no JSON schema" in schema.check_row({"schema": bad})


def test_form_and_length_are_rewards_of_their_own() -> None:
    good = "<think>hm</think>\n<answer>3</answer>"
    assert form.verify_tags({}, good) == 1.0
    assert [form.verify_tags({}, text) for text in ("", good + good, "<answer>3</answer>", "x" + good)] == [0.0] * 4
    assert (
        form.verify_boxed({}, "\\boxed{3}") == 1.0
        and form.verify_boxed({}, "3") == form.verify_boxed({}, "####") == 0.0
    )
    assert form.Format("a.*z")({}, " a\nz ") == 1.0 and form.Format("a.*z")({}, "az!") == 0.0
    length = form.Length(10, least=4)
    assert [length({}, "x" * n) for n in (0, 3, 4, 10, 15, 20, 99)] == [0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert form.Length(2, unit="words")({}, "one two") == 1.0
    with pytest.raises(ConfigError, match="no regular expression"):
        form.Format("(")
    with pytest.raises(ConfigError, match="cannot be as long"):
        form.Length(0)


def test_gym_rows_are_scored_by_their_own_rules() -> None:
    assert len(gym.names()) > 90
    rows = gym.rows("chain_sum", size=3, seed=7)
    assert rows == gym.rows("chain_sum", size=3, seed=7) and json.dumps(rows)
    for row in rows:
        assert gym.check_row(row) == ""
        assert gym.verify(row, f"Thinking.\n<answer>{row['answer']}</answer>") == 1.0
        assert gym.verify(row, f"It is {row['answer']}0") < 1.0 and gym.verify(row, "") == 0.0
    assert "no task" in gym.check_row({"gym": {**rows[0]["gym"], "task": "nothing"}})
    with pytest.raises(ConfigError, match="no task"):
        gym.rows("nothing")


@pytest.mark.parametrize(
    "task", ["spiral_matrix", "binary_matrix", "n_queens", "string_insertion", "countdown", "polynomial_multiplication"]
)
def test_no_text_runs_code_where_a_task_of_the_gym_evaluates_it(task: str) -> None:
    (row,) = gym.rows(task, size=1, seed=5)
    always = f"setattr(__import__('reasoning_gym').factory.DATASETS['{task}'][0], 'score_answer', lambda *_: 1.0)"
    assert gym.verify(row, f"<answer>{always}</answer>") < 0.5
    assert gym.verify(row, f"<answer>['1', {always}]</answer>") < 0.5
    assert gym.verify(row, "<answer>wrong</answer>") < 0.5, "a text has changed the verifier for those after it"
    assert gym.verify(row, f"<answer>{row['answer']}</answer>") == 1.0


@pytest.mark.slow
def test_every_task_of_the_gym_scores_its_own_answers() -> None:
    unscored = []
    for name in gym.names():
        for row in gym.rows(name, size=2, seed=3):
            if gym.verify(row, f"<answer>{row['answer']}</answer>") < 0.99:
                unscored.append(name)
    assert len(set(unscored)) <= 5, unscored  # tasks whose published answer is no text their scorer accepts


class Service(BaseHTTPRequestHandler):
    """A judge that answers from a list: a text, or a status."""

    answers: ClassVar[list[Any]] = []
    seen: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((body, self.headers.get("Authorization")))
        answer = self.answers.pop(0)
        if answer == "hang":
            time.sleep(1.5)
        status = answer if isinstance(answer, int) else 200
        content = answer if isinstance(answer, str) else ""
        said = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(judge, "_PAUSE_S", 0.01)
    Service.answers, Service.seen = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def ask(url: str, text: str = "Four.", **settings: Any) -> float:
    asked = judge.Judge(url, "m", **{"deadline_s": 5.0, "retries": 2, **settings})
    return asyncio.run(asked({"prompt": "2 + 2?", "answer": "4"}, text))


def test_a_judges_score_is_a_share_of_the_best(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    Service.answers = ["It is right. SCORE: 10", "SCORE: 1\nNo: SCORE: 2.5"]
    assert ask(service, key_variable="JUDGE_KEY") == 1.0
    assert ask(service, "SCORE: 10 ]") == 0.25
    (body, key), (other, _) = Service.seen
    assert (
        key == "Bearer k" and "2 + 2?" in body["messages"][1]["content"] and "Four." in body["messages"][1]["content"]
    )
    assert body["messages"][0] != other["messages"][0], "the fence is new each time, so that no text can close it"


def test_a_judge_that_stumbles_is_asked_again(service: str) -> None:
    Service.answers = [503, "no number", "SCORE: 5"]
    assert ask(service) == 0.5


@pytest.mark.parametrize("answers", [[503] * 3, ["nothing"] * 3, ["SCORE: 11"] * 3, [401], [429] * 3])
def test_a_judge_that_fails_is_an_error_and_never_a_reward(service: str, answers: list[Any]) -> None:
    Service.answers = list(answers)
    with pytest.raises(judge.JudgeError, match="the judge at"):
        ask(service)
    assert not Service.answers


def test_a_judge_that_hangs_or_is_absent_is_an_error(service: str) -> None:
    Service.answers = ["hang"]
    with pytest.raises(judge.JudgeError, match="did not answer within"):
        ask(service, deadline_s=0.2, retries=0)
    with pytest.raises(judge.JudgeError, match="could not be asked"):
        ask("http://127.0.0.1:9/v1", retries=0)
    with pytest.raises(ConfigError, match="begins with http"):
        judge.Judge("judge:8000", "m")
