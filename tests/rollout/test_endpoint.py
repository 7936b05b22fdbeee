"""The OpenAI endpoint: its official client and raw HTTP get what the engine recorded; what is wrong gets its status."""

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from scripted import EOS, Scripted, admission, make_worker

from headway.config import EngineSection
from headway.engine.embedded.service import EmbeddedEngine
from headway.engine.fake import FakeEngine
from headway.model.tokenizer import load_tokenizer
from headway.rollout import endpoint as endpoint_module
from headway.rollout.endpoint import Endpoint
from headway.rollout.endpoint_requests import parse_call
from headway.rollout.endpoint_serve import ServeSession, serve
from headway.rollout.tool_calls import ToolCall
from headway.types import NOT_SAMPLED, Group

KEY = "sk-test"
HI = [{"role": "user", "content": "1+1"}]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@asynccontextmanager
async def serving(model: str, engine: Any, context: int = 512) -> Any:
    endpoint, session = Endpoint("tiny"), ServeSession(engine, model, context, {EOS}, 60)
    session.tokenizer.chat_template = CHAT_TEMPLATE
    endpoint.sessions[KEY] = session
    await endpoint.open()
    try:
        yield endpoint
    finally:
        await endpoint.close()


def run(scenario: Callable[[], Awaitable[Any]], seconds: float = 60) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), seconds))


def embedded(model: str, **section: Any) -> EmbeddedEngine:
    settings = {"max_num_seqs": 16, "kv_tokens": 8192, "max_context": 512, "chunk_tokens": 4} | section
    return EmbeddedEngine(model, "float32", EngineSection(**settings), True)


@asynccontextmanager
async def client_of(model: str, **section: Any) -> Any:
    engine = embedded(model, **section)
    await engine.open()
    async with serving(model, engine) as endpoint:
        client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0)
        yield client, endpoint, engine
        await client.close()
    await engine.close()


def test_the_official_client_gets_the_engines_tokens_log_probs_and_versions(tiny_model: str) -> None:
    """Invariant 3 through the endpoint: teacher forcing the returned tokens gives the returned log-probs."""

    async def scenario() -> None:
        async with client_of(tiny_model) as (client, _, engine):
            answer = await client.chat.completions.create(
                model="tiny", messages=HI, max_tokens=12, n=3, logprobs=True, temperature=1.0,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
            for choice in answer.choices:
                extra = choice.model_extra
                tokens = extra["prompt_token_ids"] + extra["token_ids"]
                values = [item.logprob for item in choice.logprobs.content]
                assert len(values) == len(extra["token_ids"]) == len(extra["versions"])
                scores = await engine.score((np.array(tokens, np.int32),), 1.0)
                assert scores.logprobs[0][len(extra["prompt_token_ids"]) :].tolist() == pytest.approx(values, abs=1e-4)
                assert set(extra["versions"]) == {0}

    run(scenario)


def test_streams_are_the_same_text_piece_by_piece_with_usage_and_an_end(tiny_model: str) -> None:
    async def scenario() -> None:
        async with client_of(tiny_model) as (client, _, _):
            settings: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 24, "seed": 5}
            whole = await client.chat.completions.create(**settings)
            pieces, reasons, usage = [], [], None
            stream = await client.chat.completions.create(
                **settings, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    pieces.append(choice.delta.content or "")
                    reasons += [choice.finish_reason] * (choice.finish_reason is not None)
            assert "".join(pieces) == whole.choices[0].message.content
            assert len([piece for piece in pieces if piece]) > 1, "it comes in pieces"
            assert reasons == [whole.choices[0].finish_reason]
            assert usage.completion_tokens == whole.usage.completion_tokens

    run(scenario)


def test_a_seed_repeats_a_request_and_none_does_not(tiny_model: str) -> None:
    async def scenario() -> None:
        async with client_of(tiny_model) as (client, endpoint, _):

            async def text(**settings: Any) -> str:
                prompt = {"model": "tiny", "prompt": "1+1=", "max_tokens": 20}
                return str((await client.completions.create(**prompt, **settings)).choices[0].text)

            one, two, other = await asyncio.gather(text(seed=7), text(seed=7), text(seed=8))
            assert one == two != other
            assert await text() != await text()
            session: Any = endpoint.sessions[KEY]
            assert not session._turns, "nothing is kept of a seed whose requests are answered"

    run(scenario)


def test_a_stop_string_ends_the_text_and_is_not_in_it(tiny_model: str) -> None:
    async def scenario() -> None:
        engine = Scripted(lambda prompt: "one two three")
        async with serving(tiny_model, engine) as endpoint:
            engine.tokenizer = endpoint.sessions[KEY].tokenizer
            client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=KEY)
            settings: dict[str, Any] = {"model": "tiny", "messages": HI, "stop": [" th", "zzz"]}
            whole = await client.chat.completions.create(**settings)
            assert whole.choices[0].message.content == "one two"
            stream = await client.chat.completions.create(**settings, stream=True)
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "one two"
            assert engine.requests[0].sampling.stop_strings == (" th", "zzz")
            await client.close()

    run(scenario)


BAD: list[tuple[str, Any, int, str]] = [
    ("chat/completions", b"{oops", 400, "not valid JSON"),
    ("chat/completions", [], 400, "JSON object"),
    ("chat/completions", {"model": "tiny"}, 400, "messages must be a list"),
    ("chat/completions", {"model": "tiny", "messages": [{"content": "x"}]}, 400, "object with a role"),
    ("chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": 3}]}, 400, "must be text"),
    ("chat/completions", {"model": "tiny", "messages": HI, "n": 0}, 400, "n = 0"),
    ("chat/completions", {"model": "tiny", "messages": HI, "n": "many"}, 400, "n must be a whole number"),
    ("chat/completions", {"model": "tiny", "messages": HI, "max_tokens": -1}, 400, "max_tokens = -1"),
    ("chat/completions", {"model": "tiny", "messages": HI, "temperature": "hot"}, 400, "temperature"),
    ("chat/completions", {"model": "tiny", "messages": HI, "temperature": 9}, 400, "temperature = 9"),
    ("chat/completions", {"model": "tiny", "messages": HI, "top_logprobs": 5}, 400, "sampled tokens only"),
    ("chat/completions", {"model": "tiny", "messages": HI, "stop": [""]}, 400, "stop"),
    ("chat/completions", {"model": "tiny", "messages": HI, "tools": "all"}, 400, "tools"),
    ("chat/completions", {"model": "tiny", "messages": HI, "tools": [{"function": {}}]}, 400, "each with a name"),
    ("chat/completions", {"messages": HI, "chat_template_kwargs": {"chat_template": "x"}}, 400, "client's own"),
    (
        "chat/completions",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        400,
        "not valid JSON",
    ),
    ("chat/completions", {"model": "tiny", "messages": HI, "response_format": {"type": "json"}}, 400, "not supported"),
    ("chat/completions", {"model": "tiny", "messages": [{"role": "user", "tool_calls": 3}]}, 400, "list of calls"),
    ("completions", {"model": "tiny", "prompt": "1", "echo": True}, 400, "echo = True is not supported"),
    ("completions", {"model": "tiny", "prompt": "1", "temperature": 10**400}, 400, "temperature = 1000"),
    ("completions", {"model": "tiny", "prompt": "1", "top_k": 5}, 400, "top_k = 5 is not supported"),
    ("completions", {"model": "tiny", "prompt": [2**40]}, 400, "outside the vocabulary"),
    ("chat/completions", {"model": "other", "messages": HI}, 404, "'other' is not served"),
    ("completions", {"model": "tiny"}, 400, "prompt must be"),
    ("completions", {"model": "tiny", "prompt": ""}, 400, "empty"),
    ("completions", {"model": "tiny", "prompt": [4, 99]}, 400, "outside the vocabulary"),
    ("completions", {"model": "tiny", "prompt": "1" * 600}, 400, "context of 512"),
    ("completions", {"model": "tiny", "prompt": "1" * 600, "stream": True}, 400, "context of 512"),
    ("reward", {"reward": 1}, 400, "inside a run only"),
    ("reward", {"reward": "much"}, 400, "one finite number"),
    ("nowhere", {}, 404, "Not Found"),
]


def test_every_malformed_request_gets_its_status_and_a_sentence(tiny_model: str) -> None:
    async def scenario() -> None:
        async with serving(tiny_model, FakeEngine()) as endpoint, aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {KEY}"}
            for path, body, status, sentence in BAD:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with http.post(f"{endpoint.url}/{path}", data=data, headers=headers) as response:
                    answer = await response.json()
                    assert (response.status, sentence in answer["error"]["message"]) == (status, True), (body, answer)
            for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
                async with http.post(f"{endpoint.url}/completions", json={}, headers=headers) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["code"] == "invalid_api_key"

    run(scenario)


def test_the_client_raises_its_own_errors(tiny_model: str) -> None:
    async def scenario() -> None:
        async with serving(tiny_model, FakeEngine()) as endpoint:
            good = openai.AsyncOpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0)
            wrong = openai.AsyncOpenAI(base_url=endpoint.url, api_key="sk-wrong", max_retries=0)
            assert [model.id async for model in good.models.list()] == ["tiny"]
            with pytest.raises(openai.AuthenticationError):
                await wrong.chat.completions.create(model="tiny", messages=HI)
            with pytest.raises(openai.NotFoundError):
                await good.chat.completions.create(model="huge", messages=HI)
            with pytest.raises(openai.BadRequestError, match="context"):
                await good.completions.create(model="tiny", prompt="1" * 600)
            await good.close()
            await wrong.close()

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_has_its_request_aborted_in_the_engine(tiny_model: str, stream: bool) -> None:
    async def scenario() -> None:
        async with client_of(tiny_model) as (_, endpoint, engine):
            body = {"model": "tiny", "prompt": "1+1=", "max_tokens": 500, "n": 2, "stream": stream}
            body["stop"] = ["\n\n\n\n\n"]
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
                asking = asyncio.create_task(http.post(f"{endpoint.url}/completions", json=body))
                while (await engine.stats()).running < 1:
                    if asking.done():  # both samples drew their ends before anybody looked
                        asking = asyncio.create_task(http.post(f"{endpoint.url}/completions", json=body))
                    await asyncio.sleep(0.005)
                if stream:
                    response = await asking
                    await response.content.readline()
                    response.close()
                else:
                    asking.cancel()
            for _ in range(400):
                stats = await engine.stats()
                if not stats.running and not stats.waiting and not engine._streams:
                    break
                await asyncio.sleep(0.01)
            assert stats.running == stats.waiting == 0
            assert stats.num_generated < 1000, "it was ended, and not run to its end"
            assert not engine._streams

    run(scenario)


def test_a_thousand_concurrent_requests_are_all_answered(tiny_model: str) -> None:
    async def scenario() -> None:
        engine = FakeEngine(mean_tokens=4.0, vocab_size=40)
        async with serving(tiny_model, engine) as endpoint:
            before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
            connector = aiohttp.TCPConnector(limit=0)
            headers = {"Authorization": f"Bearer {KEY}"}
            async with aiohttp.ClientSession(connector=connector, headers=headers) as http:

                async def one(number: int) -> int:
                    body = {"model": "tiny", "prompt": f"{number}=", "stream": number % 2 == 0, "max_tokens": 8}
                    async with http.post(f"{endpoint.url}/completions", json=body) as response:
                        text = await response.text()
                        assert response.status == 200 and ("[DONE]" in text) == (number % 2 == 0)
                        return response.status

                statuses = await asyncio.gather(*map(one, range(1000)))
            assert statuses == [200] * 1000
            assert engine.num_running == 0
            async with asyncio.timeout(20):
                while (len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))) > before:
                    await asyncio.sleep(0.01)

    run(scenario)


def test_a_served_model_stops_at_every_end_token_that_its_files_name(tiny_model: str, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    opened = asyncio.Queue[tuple[str, str]]()
    section = EngineSection(max_num_seqs=16, kv_tokens=8192, max_context=300)

    async def scenario() -> None:
        serving = asyncio.create_task(
            serve(str(model), section, "float32", "127.0.0.1", 0, on_open=lambda *place: opened.put_nowait(place))
        )
        url, key = await opened.get()
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            answer = await client.completions.create(
                model=str(model), prompt="1+1=", n=16, seed=1, extra_body={"return_token_ids": True}
            )
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        ends = {0, EOS, 7}
        all_tokens = [choice.model_dump()["token_ids"] for choice in answer.choices]
        assert not any(ends.intersection(tokens[:-1]) for tokens in all_tokens)
        assert {tokens[-1] for tokens in all_tokens} >= ends

    run(scenario)


def test_curl_streams_line_by_line(tiny_model: str) -> None:
    async def scenario() -> None:
        engine = Scripted(lambda prompt: "two words")
        async with serving(tiny_model, engine) as endpoint:
            engine.tokenizer = endpoint.sessions[KEY].tokenizer
            body = json.dumps({"model": "tiny", "messages": HI, "stream": True})
            words = ["curl", "-sSN", f"{endpoint.url}/chat/completions", "-H", f"Authorization: Bearer {KEY}"]
            made = await asyncio.create_subprocess_exec(*words, "-d", body, stdout=asyncio.subprocess.PIPE)
            said, _ = await made.communicate()
            assert made.returncode == 0
            lines = [line for line in said.decode().split("\n") if line]
            assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
            deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-1]]
            assert "".join(delta.get("content", "") for delta in deltas) == "two words"

    run(scenario)


# Inside a run


AGENT = '''
import asyncio
import json
import openai

async def solve(task, base_url, api_key):
    """Two turns and a branch from the first, with the official client."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": task["prompt"]}]
    first = await client.chat.completions.create(model="policy", messages=messages)
    messages.append(first.choices[0].message.model_dump())
    for word in ("again", "branch"):
        more = [*messages, {"role": "user", "content": word}]
        await client.chat.completions.create(model="policy", messages=more)
    await client.close()
    return 0.5

def plain(task, base_url, api_key):
    """Synchronous, over raw HTTP; rewards itself twice."""
    import json, urllib.request
    def post(path, body):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/{path}", json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))
    for value in (0.25, 1):
        post("chat/completions", {"model": "m", "messages": [{"role": "user", "content": task["prompt"]}]})
        post("reward", {"reward": value})

async def with_tools(task, base_url, api_key):
    """The loop of every tool-calling agent: ask, run what was called, tell the results, ask again."""
    tool = {"type": "function", "function": {"name": "product", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": task["prompt"]}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[tool])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(message.content == "42")
            for call in message.tool_calls:
                assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "product"
                given = json.loads(call.function.arguments)
                result = {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] * given["b"])}
                messages.append(result)

def endless(task, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    while True:
        client.completions.create(model="m", prompt="1+1=")

def silent(task, base_url, api_key):
    return 1.0

def verified(task, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    client.completions.create(model="m", prompt="1+1=")
'''


@pytest.fixture
def run_agent(tiny_model: str, tmp_path: Any) -> Iterator[Callable[[str], tuple[Group, Scripted]]]:
    (tmp_path / "agents.py").write_text(AGENT)

    def go(name: str, **limits: Any) -> tuple[Group, Scripted]:
        answers = {"again": "yes", "branch": "no", "tool: 42": "42", "tools product": "call"}
        engine = Scripted(lambda prompt: next((a for word, a in answers.items() if word in prompt), "41"))

        async def scenario() -> Group:
            worker, _ = await make_worker(
                tiny_model, engine, lambda task, text: float(text == "41"),
                workflow="headway.rollout.workflows.agent:Agent", settings={"agent": f"{tmp_path}/agents.py:{name}"},
                **limits,
            )  # fmt: skip
            try:
                return await worker.run(admission(worker, "6*7"))
            finally:
                await worker._workflow._endpoint.close()

        group: Group = run(scenario)
        return group, engine

    yield go


def test_an_agents_calls_become_sequences_that_share_what_they_share(
    tiny_model: str, run_agent: Callable[[str], tuple[Group, Scripted]]
) -> None:
    group, engine = run_agent("solve")
    (trajectory,) = group.trajectories
    tokenizer = load_tokenizer(tiny_model)
    assert trajectory.reward == 0.5 and len(trajectory.stops) == 3
    trained = [tokenizer.decode(s.tokens[s.loss_mask == 1].tolist()) for s in trajectory.sequences]
    assert trained == ["41<eos>yes<eos>", "no<eos>"], "what both branches share is trained once"
    for sequence, request in zip(trajectory.sequences, engine.requests[1:], strict=True):
        assert sequence.tokens[: len(request.tokens)].tolist() == request.tokens.tolist()
        assert "41<eos>" in tokenizer.decode(request.tokens.tolist())
    sampled = [s.logprobs[s.loss_mask == 1] for s in trajectory.sequences]
    recorded = [float(value) for part in sampled for value in part]
    assert recorded == pytest.approx([-n / 100 for n in range(engine.num_sampled)]), "as the engine sampled them"
    assert all((s.versions[s.loss_mask == 1] != NOT_SAMPLED).all() for s in trajectory.sequences)
    assert trajectory.num_sampled == engine.num_sampled, "what branches share is counted once"
    said = [list(sequence.roles.values()) for sequence in trajectory.sequences]
    assert said == [["user"], ["policy, trained in an earlier sequence", "user"]]


def test_an_agents_tool_calls_are_one_sequence_token_for_token(
    tiny_model: str, run_agent: Callable[[str], tuple[Group, Scripted]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The character tokenizer knows no braces: the call is read where it is decoded.
    call = "", [ToolCall("product", {"a": 6, "b": 7})]
    monkeypatch.setattr(endpoint_module, "parse", lambda text: call if text == "call" else (text, []))
    group, engine = run_agent("with_tools")
    (trajectory,) = group.trajectories
    (sequence,) = trajectory.sequences
    tokenizer = load_tokenizer(tiny_model)
    assert trajectory.reward == 1.0 and len(trajectory.stops) == 2
    assert tokenizer.decode(sequence.tokens[sequence.loss_mask == 1].tolist()) == "call<eos>42<eos>"
    assert sequence.tokens[: len(engine.requests[1].tokens)].tolist() == engine.requests[1].tokens.tolist()
    assert list(sequence.roles.values()) == ["tool"]


def test_one_call_an_answer_where_a_client_wants_no_parallel_ones(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [ToolCall("f", {"x": 1}), ToolCall("f", {"x": 2})]
    monkeypatch.setattr(endpoint_module, "parse", lambda text: ("", calls))
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    async def scenario() -> None:
        async with client_of(tiny_model) as (client, _, _):
            for parallel, wanted in ((True, [1, 2]), (False, [1])):
                settings = {"model": "tiny", "messages": HI, "tools": tools, "max_tokens": 2}
                answer = await client.chat.completions.create(**settings, parallel_tool_calls=parallel)
                called = answer.choices[0].message.tool_calls
                assert [json.loads(call.function.arguments)["x"] for call in called] == wanted

    run(scenario)


def test_calls_in_a_history_reach_the_template_as_objects() -> None:
    """Clients send arguments as text, and a template that writes them as JSON would quote them twice."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    body = {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]}
    message = (parse_call(body, chat=True).messages or [])[1]
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1} and message["content"] == ""


def test_rewards_over_http_stand_where_they_were_given(run_agent: Callable[[str], tuple[Group, Scripted]]) -> None:
    (trajectory,) = run_agent("plain")[0].trajectories
    assert [(reward.sequence, reward.value) for reward in trajectory.rewards] == [(0, 0.25), (1, 1.0)]


def test_without_a_reward_the_verifier_judges_the_last_answer(
    run_agent: Callable[[str], tuple[Group, Scripted]],
) -> None:
    (trajectory,) = run_agent("verified")[0].trajectories
    assert trajectory.reward == 1.0 and len(trajectory.sequences) == 1


@pytest.mark.parametrize(("limits", "num_calls"), [({"max_turns": 3}, 3), ({"max_episode_tokens": 4}, 2)])
def test_an_agent_that_breaks_at_a_limit_of_its_episode_ends_there(
    run_agent: Any, limits: dict[str, int], num_calls: int
) -> None:
    (trajectory,) = run_agent("endless", **limits)[0].trajectories
    assert len(trajectory.stops) == num_calls
    assert trajectory.reward == float(num_calls == 3), "the verifier's score of the last answer, which may be cut off"


def test_an_agent_that_calls_nothing_is_a_failure_and_no_reward(
    run_agent: Callable[[str], tuple[Group, Scripted]],
) -> None:
    """Invariant 10."""
    (failure,) = run_agent("silent")[0].failures
    assert "the agent made no call" in failure.reason
