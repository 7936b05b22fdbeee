"""Environments of the package `verifiers`, as it is: their episodes are trained token for token."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, admission, make_worker

from headway.errors import ConfigError
from headway.model.tokenizer import load_tokenizer
from headway.rollout.workflows.environment import Environment
from headway.tasks.datasets import load_rows
from headway.types import Group

ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset

DATA = Dataset.from_list([{"question": "6*7", "answer": "42"}, {"question": "1+1", "answer": "2"}])


def right(completion, answer, **kwargs):
    return float(completion[-1].content == answer) if completion else 0.0


def short(completion, **kwargs):
    return 1.0


def rubric():
    return vf.Rubric(funcs=[right, short], weights=[1.0, 0.25])


def single():
    return vf.SingleTurnEnv(dataset=DATA, eval_dataset=DATA.select([1]), rubric=rubric())


class Retry(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]

    @vf.stop
    async def is_right(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]


def several():
    return Retry(dataset=DATA, rubric=rubric(), max_turns=4)


def multiply(a: int, b: int) -> int:
    """The product."""
    return a * b


def tools():
    return vf.ToolEnv(tools=[multiply], dataset=DATA, rubric=rubric(), max_turns=3)


def breaks():
    class Broken(Retry):
        async def env_response(self, messages, state, **kwargs):
            raise ValueError("out of order")
    return Broken(dataset=DATA, rubric=rubric())


def compared():
    async def best(completions, **kwargs):
        return [1.0 for _ in completions]
    return vf.SingleTurnEnv(dataset=DATA, rubric=vf.Rubric(funcs=[best]))


def rows():
    return [{"prompt": "6*7"}]


def nothing():
    return 3
'''


@pytest.fixture
def run(tiny_model: str, tmp_path: Path) -> Callable[[str, Callable[[str], str]], Group]:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)

    def go(name: str, say: Callable[[str], str]) -> Group:
        async def scenario() -> Group:
            reference = f"{tmp_path}/envs.py:{name}"
            worker, _ = await make_worker(
                tiny_model, Scripted(say), lambda task, text: 0.0,
                workflow="headway.rollout.workflows.environment:Environment", settings={"environment": reference},
            )  # fmt: skip
            asked = admission(worker, "6*7")
            asked.prompt.task.clear()
            asked.prompt.task.update(load_rows(reference)[0])
            try:
                return await worker.run(asked)
            finally:
                await worker._workflow._endpoint.close()

        return asyncio.run(asyncio.wait_for(scenario(), 60))

    return go


def trained(model: str, group: Group) -> list[str]:
    (trajectory,) = group.trajectories
    tokenizer = load_tokenizer(model)
    return [str(tokenizer.decode(s.tokens[s.loss_mask == 1].tolist())) for s in trajectory.sequences]


def test_a_single_turn_is_rewarded_by_the_rubric_and_its_metrics_are_the_components(tiny_model: str, run: Any) -> None:
    group = run("single", lambda prompt: "42")
    (trajectory,) = group.trajectories
    assert trajectory.reward == 1.25
    assert (trajectory.components["right"], trajectory.components["short"]) == (1.0, 1.0)
    assert trained(tiny_model, group) == ["42<eos>"]
    assert run("single", lambda prompt: "41").trajectories[0].reward == 0.25


def test_the_turns_of_an_environment_are_one_sequence_token_for_token(tiny_model: str, run: Any) -> None:
    group = run("several", lambda prompt: "42" if "again" in prompt else "41")
    assert trained(tiny_model, group) == ["41<eos>42<eos>"]
    assert group.trajectories[0].reward == 1.25 and group.trajectories[0].components["num_turns"] == 2


def test_an_empty_answer_is_a_wrong_answer_and_a_broken_environment_is_a_failure(run: Any) -> None:
    (trajectory,) = run("single", lambda prompt: "").trajectories
    assert trajectory.reward == 0.25
    group = run("breaks", lambda prompt: "41")
    assert not group.trajectories and "out of order" in group.failures[0].reason


def test_an_environments_tools_are_called_with_what_the_model_wrote(
    tiny_model: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.rollout import endpoint
    from headway.rollout.tool_calls import ToolCall, parse

    # The character tokenizer knows no braces: the call is read where it is decoded.
    call = "", [ToolCall("multiply", {"a": 6, "b": 7})]
    monkeypatch.setattr(endpoint, "parse", lambda text: call if text == "call" else parse(text))
    group = run("tools", lambda prompt: "42" if "tool: 42" in prompt else "call")
    assert group.trajectories[0].reward == 1.25 and group.trajectories[0].components["multiply_calls"] == 1
    assert trained(tiny_model, group) == ["call<eos>42<eos>"]


def test_an_environment_gives_both_kinds_of_rows_and_leaves_signals_alone(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    before = signal.getsignal(signal.SIGTERM)
    train, held_out = (load_rows(f"{tmp_path}/envs.py:single{split}") for split in ("", "@eval"))
    assert [row["answer"] for row in train] == ["42", "2"] and [row["answer"] for row in held_out] == ["2"]
    assert train[0]["prompt"] == [{"role": "user", "content": "6*7"}]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ConfigError, match="there is no @test"):
        load_rows(f"{tmp_path}/envs.py:single@test")
    with pytest.raises(ConfigError, match="returns rows and no environment"):
        load_rows(f"{tmp_path}/envs.py:rows@eval")


@pytest.mark.parametrize(("name", "sentence"), [("compared", "scores several"), ("nothing", "which is no environment")])
def test_what_cannot_be_trained_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    with pytest.raises(ConfigError, match=sentence):
        Environment(f"{tmp_path}/envs.py:{name}")
