"""The wire of the OpenAI API: request bodies checked into calls, completions into answers, errors into sentences.

Whatever is wrong with a request is an `ApiError` with the status and the code that a client of that API expects.
"""

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import CAUSE, ConfigError, translated
from headway.model.tokenizer import Messages, encode_prompt, render_chat
from headway.rollout.tool_calls import ToolCall
from headway.types import Completion, Ints, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHOICES = 128

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # and the values that ask for nothing
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "audio": (),
}
_NO_TEMPLATE = "chat_template_kwargs are a template's arguments; a template of the client's own is not run here"


class ApiError(Exception):
    """A request that is refused, with its HTTP status."""

    def __init__(self, status: int, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Call:
    """One request for completions: of chat messages, or of prompts that are texts or token ids."""

    model: str
    messages: Messages | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    parallel: bool = True  # whether one answer may hold several calls of tools
    template: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False


def parse_call(body: Any, chat: bool) -> Call:
    """The call that a request body asks for."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON object, not {_kind(body)}")
    for name, harmless in _UNSUPPORTED.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise ApiError(400, f"{name} = {str(body[name])[:80]} is not supported here; leave it out", param=name)
    take = _Fields(body)
    options = take.of("stream_options", dict, {})
    logprobs = take.of("logprobs", bool, False) if chat else take.of("logprobs", int, None) is not None
    most = 0 if chat else 1
    top = take.number("top_logprobs" if chat else "logprobs", int, 0, 0)
    if top > most:
        raise ApiError(400, "log-probs are given of sampled tokens only; leave the number of others out")
    template = take.of("chat_template_kwargs", dict, {})
    if "chat_template" in template:
        raise ApiError(400, _NO_TEMPLATE, param="chat_template_kwargs")
    return Call(
        model=take.of("model", str, ""),
        messages=_messages(body) if chat else None,
        prompts=[] if chat else _prompts(body),
        tools=_tools(body) if chat else None,
        parallel=take.of("parallel_tool_calls", bool, True),
        template=template,
        n=take.number("n", int, 1, 1, MOST_CHOICES) or 1,
        max_tokens=take.number("max_completion_tokens", int, None, 1) or take.number("max_tokens", int, None, 1),
        temperature=take.number("temperature", float, None, 0, 2),
        top_p=take.number("top_p", float, None, 0, 1),
        stop=_stops(body),
        seed=take.of("seed", int, None),
        stream=take.of("stream", bool, False),
        stream_usage=bool(options.get("include_usage")),
        logprobs=bool(logprobs),
        token_ids=take.of("return_token_ids", bool, False),
    )


class _Fields:
    """Reads typed fields; one that is null is absent."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def of(self, name: str, kind: type, default: Any) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise ApiError(400, f"{name} must be {_named(kind)}, not {_kind(value)}", param=name)
        return value

    def number(
        self, name: str, kind: type[int] | type[float], default: Any, low: float, high: float = float("inf")
    ) -> Any:
        value = self.of(name, kind, None)
        if value is None:
            return default
        if not low <= value <= high:  # before any conversion: a whole number may be too large for a float
            raise ApiError(400, f"{name} = {str(value)[:40]} is not between {low:g} and {high:g}", param=name)
        return kind(value)


def _messages(body: dict[str, Any]) -> Messages:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must be an object with a role", param=where)
    made = {name: value for name, value in message.items() if value is not None}
    content = made.get("content", "")
    if isinstance(content, list):  # content parts: their texts
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) < len(content):
            raise ApiError(400, f"{where}.content has a part that is no text", param=where)
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be text, not {_kind(content)}", param=where)
    if "tool_calls" in made:
        made["tool_calls"] = _calls(made["tool_calls"], where)
    return made | {"content": content}


def _calls(calls: Any, where: str) -> list[Any]:
    """Calls of tools with their arguments as an object, which chat templates write; clients send them as text."""
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    ):
        raise ApiError(400, f"{where}.tool_calls must be a list of calls, each with a function", param=where)
    return [call | {"function": call["function"] | {"arguments": _arguments(call["function"])}} for call in calls]


def _arguments(function: dict[str, Any]) -> Any:
    arguments = function.get("arguments", {})
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if tools is None or body.get("tool_choice") == "none":
        return None
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise ApiError(400, "tools must be a list of functions, each with a name", param="tools")
    return tools or None


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _prompts(body: dict[str, Any]) -> list[str | list[int]]:
    prompt = body.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        return [prompt]  # type: ignore[list-item]
    if isinstance(prompt, list) and prompt and all(isinstance(item, str) or _is_tokens(item) for item in prompt):
        return prompt
    raise ApiError(400, "prompt must be a text, token ids, or a list of these", param="prompt")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise ApiError(400, "stop must be a text or a list of texts, none of them empty", param="stop")
    return tuple(stops)


def _named(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object"}[kind]


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


@contextmanager
def refusing_messages(tokenizer: "PreTrainedTokenizerBase") -> Iterator[None]:
    """What a chat template does not accept becomes the caller's error."""
    if not tokenizer.chat_template:
        raise ApiError(400, "the model has no chat template; send plain prompts to /v1/completions", param="messages")
    with translated(ConfigError, partial(ApiError, 400, param="messages"), CAUSE):
        yield


def chat_tokens(tokenizer: "PreTrainedTokenizerBase", call: Call) -> Ints:
    """The tokens of a call's messages."""
    with refusing_messages(tokenizer):
        text = render_chat(tokenizer, call.messages or [], call.template, call.tools)
        return encode_prompt(tokenizer, text, chat=False)


def prompt_tokens(tokenizer: "PreTrainedTokenizerBase", prompt: str | list[int], vocab_size: int) -> Ints:
    """The tokens of a plain prompt."""
    tokens = encode_prompt(tokenizer, prompt, chat=False) if isinstance(prompt, str) else prompt
    if not len(tokens):
        raise ApiError(400, "the prompt is empty", param="prompt")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ApiError(400, f"the prompt has a token outside the vocabulary of {vocab_size}", param="prompt")
    return np.array(tokens, np.int32)


# Answers


@dataclass
class Choice:
    """One completion as a client sees it: its text without what ended it, and its calls of tools."""

    index: int
    prompt: list[int]
    completion: Completion
    text: str
    calls: list[ToolCall]
    pieces: list[str]  # the text of each token

    @property
    def finish_reason(self) -> str:
        if self.calls:
            return "tool_calls"
        return "stop" if self.completion.stop == StopReason.STOP else "length"

    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            made |= {"content": self.text or None, "tool_calls": [_call_body(call) for call in self.calls]}
        return made


def _call_body(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def logprobs_body(choice: Choice, chat: bool) -> dict[str, Any]:
    """The log-probs of all sampled tokens, the one that ended the text included."""
    values = [float(value) for value in choice.completion.logprobs]
    if not chat:
        return {"tokens": choice.pieces, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
    content = [
        {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, value in zip(choice.pieces, values, strict=True)
    ]
    return {"content": content, "refusal": None}


def choice_body(choice: Choice, call: Call) -> dict[str, Any]:
    chat = call.messages is not None
    made: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
    made |= {"message": choice.message()} if chat else {"text": choice.text}
    made["logprobs"] = logprobs_body(choice, chat) if call.logprobs else None
    return made | record_body(choice, call)


def record_body(choice: Choice, call: Call) -> dict[str, Any]:
    """Token ids, and the version that sampled each, for a client that asks."""
    if not call.token_ids:
        return {}
    completion = choice.completion
    return {
        "prompt_token_ids": choice.prompt,
        "token_ids": completion.tokens.tolist(),
        "versions": completion.versions.tolist(),
    }


def usage_body(choices: list[Choice], num_prompts_tokens: int) -> dict[str, int]:
    num = sum(len(choice.completion.tokens) for choice in choices)
    return {
        "prompt_tokens": num_prompts_tokens,
        "completion_tokens": num,
        "total_tokens": num + num_prompts_tokens,
    }


def head(call: Call, chunk: bool) -> dict[str, Any]:
    """What every answer begins with."""
    chat = call.messages is not None
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
    name = "chatcmpl" if chat else "cmpl"
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": call.model}
