"""Every form a verifier may have comes to one score with named components; whatever is no number is no score."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.config import RewardSection, TaskSection
from headway.errors import ConfigError
from headway.rollout.reward_pool import RewardPool
from headway.tasks.scoring import NotAScore, Scorer, needs_of_task, specification, title
from headway.types import Verdict

FUNCTIONS = """
import asyncio
from headway.tasks.verifiers import verifier

@verifier(needs=("answer",))
def right(task, text):
    return float(text == task["answer"])

def parts(task, text):
    return {"right": text == task["answer"], "short": 1 / len(text), "absent": None}

async def later(task, text):
    await asyncio.sleep(0.01)
    return {"later": 2.0}

def trl(completions, answer, **kwargs):
    assert kwargs["prompts"] == ["1+1"] and kwargs["note"] == ["n"]
    return [float(completion == wanted) for completion, wanted in zip(completions, answer)]

async def trl_messages(prompts, completions):
    return [float(len(completion[0]["content"])) for completion in completions]

def trl_undecided(completions, **kwargs):
    return [None]

def nothing(task, text):
    return None

def empty(task, text):
    return {}

def three(task, text, other):
    return 1.0

def infinite(task, text):
    return {"a": 1e308, "b": 1e308}

def arrays(task, text):
    import numpy, torch
    return {"scalar": numpy.float32(0.5), "array": numpy.array([0.25]), "flag": numpy.bool_(True), "t": torch.tensor(2)}

def two_values(task, text):
    import numpy
    return numpy.zeros(2)
"""
ROW = {"prompt": "1+1", "answer": "2", "note": "n"}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    def task(**settings: Any) -> TaskSection:
        for key in ("verifier", "verifiers"):
            if key in settings:
                settings[key] = json.loads(json.dumps(settings[key]).replace("@", f"{tmp_path}/functions.py:"))
        return TaskSection(train="rows.jsonl", **settings)

    return task


def score(task: TaskSection, text: str = "2", row: dict[str, Any] = ROW) -> tuple[float, dict[str, float]]:
    return Scorer(specification({"": task})).score("", row, text)


def test_one_number_has_no_components(make: Any) -> None:
    assert score(make(verifier="@right")) == (1.0, {})
    assert score(make(verifier="@right"), "3") == (0.0, {})


def test_components_are_weighted_summed_and_reported_unweighted(make: Any) -> None:
    value, components = score(make(verifier="@parts", weights={"short": 0.5}))
    assert value == 1.5 and components == {"right": 1.0, "short": 1.0}


def test_several_verifiers_each_have_their_name_and_weight(make: Any) -> None:
    task = make(verifiers={"correct": "@right", "form": "@parts"}, weights={"correct": 2, "form": 0.5, "form/short": 4})
    value, components = score(task)
    assert components == {"correct": 1.0, "form/right": 1.0, "form/short": 1.0}
    assert value == 2 * 1 + 0.5 * (1 + 4 * 1)


def test_async_verifiers_are_awaited_in_one_loop(make: Any) -> None:
    scorer = Scorer(specification({"": make(verifiers={"a": "@later", "b": "@right"})}))
    assert [scorer.score("", ROW, "2")[0] for _ in range(2)] == [3.0, 3.0]


def test_reward_functions_of_trl_work_unchanged(make: Any) -> None:
    assert score(make(verifier="@trl")) == (1.0, {})
    assert score(make(verifier="@trl"), "3") == (0.0, {})
    messages = ROW | {"prompt": [{"role": "user", "content": "1+1"}]}
    assert score(make(verifier="@trl_messages"), "four", messages) == (4.0, {})
    assert score(make(verifiers={"a": "@trl_undecided", "b": "@right"})) == (1.0, {"b": 1.0})


def test_needed_fields_are_those_verifiers_name_and_trls_parameters(make: Any) -> None:
    assert needs_of_task(make(verifier="@right")).keys() == {"answer"}
    assert needs_of_task(make(verifier="@trl")).keys() == {"answer"}
    assert needs_of_task(make(verifier="@trl_messages")) == {}


def test_numbers_of_numpy_and_torch_are_numbers(make: Any) -> None:
    value, components = score(make(verifier="@arrays"))
    assert value == 3.75 and components == {"scalar": 0.5, "array": 0.25, "flag": 1.0, "t": 2.0}


@pytest.mark.parametrize("name", ["nothing", "empty", "infinite", "trl_undecided", "two_values"])
def test_what_is_no_finite_number_is_no_score(make: Any, name: str) -> None:
    with pytest.raises(NotAScore):
        score(make(verifier=f"@{name}"))


def test_a_weight_of_no_component_is_refused_rather_than_ignored(make: Any) -> None:
    with pytest.raises(NotAScore, match="weights names 'shrot'"):
        score(make(verifier="@parts", weights={"shrot": 1.0}))


def test_a_function_of_other_parameters_is_refused_at_the_start(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"this one takes \(task, text, other\)"):
        Scorer(specification({"": make(verifier="@three")}))


def test_a_plain_task_is_specified_by_its_reference_and_several_by_name(make: Any) -> None:
    task = make(verifier="@right")
    assert specification({"": task}) == task.verifier
    spec = specification({"a": task, "b": make(verifiers={"x": "@later", "y": "@right"})})
    assert title(spec).count("functions.py") == 2
    assert Scorer(spec).score("b", ROW, "2") == (3.0, {"x/later": 2.0, "y": 1.0})


class Judge(BaseHTTPRequestHandler):
    failures: list[int]
    asked: list[Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        status = self.failures.pop() if self.failures else 200
        answer = json.dumps({"components": {"style": 0.5}} if status == 200 else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer) + (status == 299)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def judge() -> Iterator[tuple[str, type[Judge]]]:
    handler = type("Judging", (Judge,), {"failures": [], "asked": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/judge", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_service_is_sent_the_row_and_the_text_and_an_outage_is_waited_out(judge: tuple[str, type[Judge]]) -> None:
    url, handler = judge
    handler.failures = [503, 299]  # an answer that breaks off
    assert score(TaskSection(train="r", verifier=url), "said") == (0.5, {"style": 0.5})
    assert handler.asked == [{"task": ROW, "text": "said"}] * 3


def test_a_service_that_refuses_is_an_error_and_never_a_reward(judge: tuple[str, type[Judge]]) -> None:
    """Invariant 10."""
    url, handler = judge
    handler.failures = [400, 400, 400]

    async def ask() -> Verdict:
        pool = RewardPool(url, RewardSection(workers=1, retries=1))
        await pool.open()
        try:
            return await pool.verify(ROW, "said")
        finally:
            await pool.close()

    verdict = asyncio.run(asyncio.wait_for(ask(), 60))
    assert "HTTP Error 400" in verdict.error and len(handler.asked) == 2


def test_components_come_through_the_pool_and_a_hanging_async_verifier_costs_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import asyncio\n\nasync def verify(task, text):\n"
        "    await asyncio.sleep(3600 if text == 'hang' else 0)\n    return {'right': 1, 'long': len(text)}\n"
    )

    async def ask() -> list[Verdict]:
        pool = RewardPool(f"{tmp_path}/judge.py:verify", RewardSection(workers=1, retries=0, deadline_s=0.5))
        await pool.open()
        try:
            return [await pool.verify(ROW, text) for text in ("ab", "hang", "abc")]
        finally:
            await pool.close()

    first, hung, last = asyncio.run(asyncio.wait_for(ask(), 60))
    assert (first.score, first.components) == (3.0, {"right": 1.0, "long": 2.0})
    assert "reward.deadline_s" in hung.error and not hung.components
    assert last.score == 4.0
