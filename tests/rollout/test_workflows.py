"""Episodes of several turns: what was sampled is trained, as it was sampled, and nothing else is."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from scripted import EOS, Scripted, admission, make_worker

from headway.config import EngineSection
from headway.engine.embedded.service import EmbeddedEngine
from headway.rollout.tool_calls import ToolCall, parse, schema_of
from headway.tasks.sandbox.pool import SandboxError
from headway.types import NOT_SAMPLED, Group, Trajectory

MULTI = "headway.rollout.workflows.multi_turn:RetryUntilCorrect"
TOOLS = "headway.rollout.workflows.tools:ToolUse"


def run_group(model: str, say: Callable[[str], str], score: Callable[[str], float], **rollout: Any) -> Group:
    async def scenario() -> Group:
        worker, _ = await make_worker(model, Scripted(say), lambda task, text: score(text), **rollout)
        return await worker.run(admission(worker, "6*7"))

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def text_of(model: str, trajectory: Trajectory, trained: bool) -> str:
    from headway.model.tokenizer import load_tokenizer

    (sequence,) = trajectory.sequences
    tokens = sequence.tokens[(sequence.loss_mask == 1) == trained]
    return str(load_tokenizer(model).decode(tokens.tolist()))


def test_turns_until_it_is_right_are_one_sequence_in_which_feedback_is_not_trained(tiny_model: str) -> None:
    def say(prompt: str) -> str:
        return "42" if "again" in prompt else "41"

    settings = {"turns": 3, "discount": 0.5, "feedback": "wrong, try again"}
    group = run_group(tiny_model, say, lambda text: float(text == "42"), workflow=MULTI, settings=settings)
    (trajectory,) = group.trajectories
    assert trajectory.reward == 0.5 and len(trajectory.stops) == 2
    assert trajectory.components == {"chars": 2.0}, "those of the last verdict"
    assert text_of(tiny_model, trajectory, True) == "41<eos>42<eos>"
    told = text_of(tiny_model, trajectory, False)
    assert told == "user: 6*7\nassistant: \nuser: wrong, try again\nassistant: "
    (sequence,) = trajectory.sequences
    assert (sequence.tokens == EOS).sum() == 2, "the token that ends a turn is there once, as it was sampled"
    sampled = sequence.versions != NOT_SAMPLED
    assert (sampled == (sequence.loss_mask == 1)).all()
    assert sequence.logprobs[sampled].tolist() == pytest.approx([-n / 100 for n in range(6)])
    (place,) = sequence.roles
    assert sequence.roles[place] == "user" and sampled[place - 1] and not sampled[place], "who said the feedback"


def test_a_turn_cut_short_gets_its_end_from_the_template(tiny_model: str) -> None:
    group = run_group(
        tiny_model, lambda prompt: "41…" if "wrong" not in prompt else "42", lambda text: float(text == "42"),
        workflow=MULTI, settings={"feedback": "wrong"},
    )  # fmt: skip
    (trajectory,) = group.trajectories
    assert text_of(tiny_model, trajectory, True) == "4142<eos>"
    assert "<eos>\nuser: wrong" in text_of(tiny_model, trajectory, False)


@pytest.mark.parametrize(
    ("limits", "num_turns"),
    [({"max_turns": 2}, 2), ({"max_episode_tokens": 8}, 3), ({"longest": 60}, 1), ({}, 5)],
)
def test_an_episode_ends_at_its_limits_with_what_it_has(
    tiny_model: str, limits: dict[str, Any], num_turns: int
) -> None:
    settings = {"turns": 5, "feedback": "wrong, wrong, wrong, wrong"}
    group = run_group(tiny_model, lambda prompt: "41", lambda text: 0.25, workflow=MULTI, settings=settings, **limits)
    (trajectory,) = group.trajectories
    assert len(trajectory.stops) == num_turns
    if "longest" in limits:
        assert len(trajectory.sequences[0].tokens) <= 60


SLOW = """
import asyncio

class Sleeps:
    async def run(self, episode):
        await asyncio.sleep(3600)

class Forgets:
    async def run(self, episode):
        await episode.verify("x")

class Breaks:
    async def run(self, episode):
        return {}["tool"]
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Sleeps", "limit: the episode ran longer than rollout.episode_deadline_s = 0.2"),
        ("Forgets", "workflow: TypeError: run(episode) returned None (is a `return` missing?), not a Trajectory"),
        ("Breaks", "workflow: KeyError at flows.py:14: 'tool'"),
    ],
)
def test_a_workflow_that_breaks_says_why_and_where(tiny_model: str, tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "flows.py").write_text(SLOW)
    workflow = f"{tmp_path}/flows.py:{name}"
    group = run_group(tiny_model, lambda _: "1", lambda _: 1.0, workflow=workflow, episode_deadline_s=0.2)
    assert [failure.reason for failure in group.failures] == [reason]


def multiply(a: int, b: int = 1) -> int:
    """The product of two numbers."""
    return a * b


TOOL = '''
async def multiply(a: int, b: int = 1) -> int:
    """The product of two numbers."""
    return a * b

def breaks(a: int) -> int:
    return a // 0
'''


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ('{"name": "multiply", "arguments": {"a": 6, "b": 7}}', "42"),
        ('{"name": "breaks", "arguments": {"a": 1}}', "error: ZeroDivisionError: integer division or modulo by zero"),
        ('{"name": "multiply", "arguments": {"c": 1}}', "error: TypeError: multiply"),
        ('{"name": "absent", "arguments": {}}', "error: there is no tool absent; there are multiply, breaks"),
    ],
)
def test_tools_are_called_and_their_results_are_read_and_not_trained(
    tiny_model: str, tmp_path: Path, call: str, result: str
) -> None:
    (tmp_path / "tool.py").write_text(TOOL)
    prompts: list[str] = []

    class Reading(Scripted):
        """The character tokenizer knows no braces: the call is read where it is decoded."""

    def say(prompt: str) -> str:
        prompts.append(prompt)
        return "42" if "tool:" in prompt else "call"

    async def scenario() -> Group:
        from headway.rollout.workflows import tools

        worker, _ = await make_worker(
            tiny_model, Reading(say), lambda task, text: float(text == task["answer"]), workflow=TOOLS,
            settings={"tools": [f"{tmp_path}/tool.py:multiply", f"{tmp_path}/tool.py:breaks"]},
        )  # fmt: skip
        results = [await worker._workflow.call(made) for made in parse(f"<tool_call>{call}</tool_call>")[1]]
        assert len(results) == 1 and results[0].startswith(result)
        original = tools.parse
        tools.parse = lambda text: ("", parse(call)[1]) if text == "call" else original(text)
        try:
            return await worker.run(admission(worker, "6*7"))
        finally:
            tools.parse = original

    group = asyncio.run(asyncio.wait_for(scenario(), 30))
    (trajectory,) = group.trajectories
    assert prompts[0].startswith("tools multiply\nuser: 6*7")
    assert text_of(tiny_model, trajectory, True) == "call<eos>42<eos>"
    assert list(trajectory.sequences[0].roles.values()) == ["tool"]
    assert trajectory.reward == 1.0


def test_what_a_model_writes_is_split_into_text_and_calls() -> None:
    text = 'Let me see. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert parse(text) == ("Let me see.", [ToolCall("f", {"a": 1})])
    assert parse('{"name": "f", "parameters": {}}') == ("", [ToolCall("f", {})])
    for broken in ("<tool_call>{oops}</tool_call>", "<tool_call>[]</tool_call>", '{"name": 3}', "[" * 9999, "{}"):
        assert parse(broken) == (broken, [])


def test_a_functions_signature_becomes_its_schema() -> None:
    def find(name: str, num: int = 3, exact: bool | None = None, kinds: list[str] = [], mode: Literal["a", "b"] = "a"):  # noqa: B006
        """Find things."""

    function = schema_of(find)["function"]
    assert (function["name"], function["description"]) == ("find", "Find things.")
    assert function["parameters"]["required"] == ["name"]
    assert function["parameters"]["properties"] == {
        "name": {"type": "string"},
        "num": {"type": "integer"},
        "exact": {"type": "boolean"},
        "kinds": {"type": "array", "items": {"type": "string"}},
        "mode": {"type": "string", "enum": ["a", "b"]},
    }


def test_log_probs_of_all_turns_are_those_of_the_very_tokens_that_are_trained(tiny_model: str) -> None:
    """Invariant 3 over turns: teacher forcing the merged sequence gives what was recorded turn by turn."""

    async def scenario() -> None:
        section = EngineSection(max_num_seqs=4, kv_tokens=4096, max_context=512)
        engine = EmbeddedEngine(tiny_model, "float32", section, True)
        await engine.open()
        settings = {"turns": 3, "feedback": "no"}
        worker, _ = await make_worker(tiny_model, engine, lambda task, text: 0.0, workflow=MULTI, settings=settings)
        group = await worker.run(admission(worker, "6*7", size=2, max_tokens=12))
        for trajectory in group.trajectories:
            (sequence,) = trajectory.sequences
            assert sequence.loss_mask.sum() == 36 or len(trajectory.stops) == 3
            scores = await engine.score((sequence.tokens,), 1.0)
            trained = sequence.loss_mask == 1
            assert np.abs(scores.logprobs[0][trained] - sequence.logprobs[trained]).max() < 1e-4
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_machine_that_cannot_isolate_refuses_the_python_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.rollout.workflows import tools

    def no_isolation() -> None:
        raise SandboxError("this machine offers no isolation")

    monkeypatch.setattr(tools, "_sandboxes", no_isolation)
    with pytest.raises(SandboxError):
        tools.ToolUse(["python"])
    made = tools.ToolUse([])
    made.functions["python"] = tools.python
    with pytest.raises(SandboxError):
        asyncio.run(made.call(ToolCall("python", {"code": "print(1)"})))


def test_a_hundred_blocking_functions_run_side_by_side_and_one_that_hangs_ends_with_the_process() -> None:
    program = """if True:
        import asyncio, threading, time
        from headway.rollout.workflows import in_thread

        async def scenario():
            gate = threading.Barrier(100)
            waiting = [in_thread(gate.wait, 20) for _ in range(100)]
            assert sorted(await asyncio.gather(*waiting)) == list(range(100))
            try:
                async with asyncio.timeout(0.1):
                    await in_thread(time.sleep, 3600)
            except TimeoutError:
                print("ended")

        asyncio.run(scenario())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
