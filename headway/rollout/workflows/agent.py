"""Any agent, unchanged: it talks to an OpenAI endpoint in front of the policy, and its calls become the trajectory.

    [rollout]
    workflow = "headway.rollout.workflows.agent:Agent"
    settings = {agent = "my_agent.py:solve"}

`solve(task, base_url, api_key)` is a function, async or not, that runs the agent on one row and returns the reward;
where it returns None, rewards are those posted to `/v1/reward`, or else the verifier's score of the last answer. So it
is, too, where a call exceeds a limit of the episode (status 400) and the agent does not catch that.

A call whose messages continue an earlier call's, answer included, continues that call's tokens, whatever tokens its
text would have now; calls that part ways are sequences of their own, and no sampled token is trained twice.
"""

import asyncio
import inspect
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.errors import ConfigError
from headway.rollout.endpoint import Endpoint
from headway.rollout.endpoint_requests import ApiError, Call, Choice, chat_tokens, prompt_tokens, refusing_messages
from headway.rollout.workflows import Episode, LimitReached, in_thread
from headway.rollout.workflows.conversation import Growing, roles_of, tokens_between
from headway.tasks import imports
from headway.types import Chat, Chunk, Completion, Ints, Reward, Sequence, Trajectory


@dataclass(eq=False)
class _Node:
    """One completion of the episode, and the one that it continues."""

    parent: "_Node | None"
    history: list[Any]  # the messages up to and with its own, in a form that compares
    tools: Any
    between: Ints  # what precedes the completion, after the parent's tokens
    roles: str  # who said that; empty of a first call's prompt
    completion: Completion
    tokens: Ints  # all up to its end


class EpisodeSession:
    """What the key of one episode opens."""

    def __init__(self, episode: Episode) -> None:
        self.tokenizer, self.context = episode.tokenizer, episode.context
        self._episode = episode
        self._nodes: list[_Node] = []
        self._rewards: list[tuple[_Node, float]] = []
        self._closed = self.reached_limit = False
        self.last_text = ""

    def prompt(self, call: Call) -> list[Ints]:
        prompts = self._prompts(call)
        try:
            for tokens in prompts:
                self._episode.room(len(tokens))
        except LimitReached:
            self.reached_limit = True
            raise
        return prompts

    def _prompts(self, call: Call) -> list[Ints]:
        if call.messages is None:
            return [prompt_tokens(self.tokenizer, prompt, len(self.tokenizer)) for prompt in call.prompts]
        parent = self._parent_of(call)
        if parent is None:
            return [chat_tokens(self.tokenizer, call)]
        chat, new = Chat([], call.template), call.messages[len(parent.history) :]
        with refusing_messages(self.tokenizer):
            between = tokens_between(self.tokenizer, chat, parent.completion, new, call.tools)
            return [np.concatenate([parent.tokens, between])]

    def _parent_of(self, call: Call) -> _Node | None:
        """The call whose messages and answer the new messages continue by most."""
        history, tools = [_comparable(message) for message in call.messages or []], call.tools
        found = [
            node
            for node in self._nodes
            if node.tools == tools and node.history and history[: len(node.history)] == node.history
            and len(history) > len(node.history)
        ]  # fmt: skip
        return max(reversed(found), key=lambda node: len(node.history), default=None)

    async def generate(self, call: Call, tokens: Ints, index: int) -> AsyncIterator[Chunk | Completion]:
        if self._closed:
            raise ApiError(410, "the episode of this key has ended", "episode_ended")
        yield await self._episode.generate(tokens, call.max_tokens, call.stop)

    def finished(self, call: Call, choice: Choice) -> None:
        tokens = np.array(choice.prompt, np.int32)
        candidates = [node for node in self._nodes if _starts_with(tokens, node.tokens)]
        parent = max(candidates, key=lambda node: len(node.tokens), default=None)
        history = [_comparable(message) for message in call.messages or []]
        if call.messages is not None:
            history.append(_comparable(choice.message()))
        between = tokens[len(parent.tokens) :] if parent else tokens
        roles = roles_of((call.messages or [])[len(parent.history) :]) if parent else ""
        whole = np.concatenate([tokens, choice.completion.tokens])
        self._nodes.append(_Node(parent, history, call.tools, between, roles, choice.completion, whole))
        self.last_text = choice.text

    def reward(self, value: float) -> None:
        if not self._nodes:
            raise ApiError(400, "there is nothing to reward: this key has made no call yet")
        self._rewards.append((self._nodes[-1], value))

    @property
    def has_rewards(self) -> bool:
        return bool(self._rewards)

    @property
    def is_empty(self) -> bool:
        return not self._nodes

    def close(self) -> None:
        self._closed = True

    def trajectory(self) -> Trajectory:
        """A sequence for each path from a first call to one that nothing continues."""
        parents = {id(node.parent) for node in self._nodes}
        places: dict[int, tuple[int, int]] = {}  # where each completion is trained: its sequence and its last token
        sequences: list[Sequence] = []
        for leaf in (node for node in self._nodes if id(node) not in parents):
            growing = Growing.begin(np.empty(0, np.int32))
            for node in _path_to(leaf):
                growing = growing.with_text(node.between, node.roles)
                if id(node) in places:  # sampled, trained and counted in an earlier sequence; here it is context
                    growing = growing.with_text(node.completion.tokens, "policy, trained in an earlier sequence")
                    continue
                growing = growing.with_completion(node.completion)
                places[id(node)] = len(sequences), max(0, len(growing.tokens) - 1)
            sequences.append(growing.sequence())
        rewards = tuple(Reward(*places[id(node)], value) for node, value in self._rewards)
        stops = tuple(node.completion.stop for node in self._nodes)
        return Trajectory(self._episode.index, tuple(sequences), rewards, self._episode.temperature, stops)


def _path_to(node: _Node) -> list[_Node]:
    return [*(_path_to(node.parent) if node.parent else []), node]


def _starts_with(tokens: Ints, start: Ints) -> bool:
    return len(tokens) > len(start) and bool(np.array_equal(tokens[: len(start)], start))


def _comparable(message: dict[str, Any]) -> Any:
    """What makes two messages the same, whatever a client adds to them on the way: role, text, and calls."""
    calls = [call.get("function", {}) for call in message.get("tool_calls") or []]
    named = [(call.get("name"), _parsed(call.get("arguments"))) for call in calls]
    return message["role"], message.get("content") or "", named


def _parsed(arguments: Any) -> Any:
    with suppress(TypeError, ValueError):
        return json.loads(arguments)
    return arguments


class Agent:
    def __init__(self, agent: str) -> None:
        """`agent` is file.py:function, (task, base_url, api_key) -> reward or None."""
        self._function = imports.load(agent)
        if not callable(self._function):
            raise ConfigError(f"{agent} is not a function (task, base_url, api_key)")
        self._endpoint: Endpoint | None = None
        self._opening = asyncio.Lock()

    async def run(self, episode: Episode) -> Trajectory:
        endpoint = await self._open()
        session, key = EpisodeSession(episode), f"ep-{secrets.token_urlsafe(24)}"
        endpoint.sessions[key] = session
        reward, components = None, dict[str, float]()
        # User code: an agent that breaks at a limit of its episode ends there, with what it has.
        try:
            reward, components = await self._call(episode.prompt.task, endpoint.url, key)
        except Exception:
            if not session.reached_limit or session.is_empty:
                raise
        finally:
            session.close()
            del endpoint.sessions[key]
        if session.is_empty:
            raise ConfigError("the agent made no call to its endpoint")
        if reward is not None:
            session.reward(float(reward))
        elif not session.has_rewards:
            session.reward(await episode.verify(session.last_text))
        return replace(session.trajectory(), components=components)

    async def _call(self, task: dict[str, Any], url: str, key: str) -> tuple[float | None, dict[str, float]]:
        """The episode's reward, if the agent gives one, and its components."""
        if inspect.iscoroutinefunction(self._function):
            return await self._function(task, url, key), {}
        return await in_thread(self._function, task, url, key), {}

    async def _open(self) -> Endpoint:
        """The endpoint of this process, which serves all its episodes."""
        async with self._opening:
            if self._endpoint is None:
                endpoint = Endpoint("")
                await endpoint.open()
                self._endpoint = endpoint
        return self._endpoint
