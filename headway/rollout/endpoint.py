"""The OpenAI API in front of an engine: chat completions and completions, streamed or whole, for any client of it.

A key belongs to a `Session`, which turns messages into tokens and samples from an engine; what a session remembers is
its own affair. `POST /v1/reward` with {"reward": number} rewards the session's episode, where it is one.

Invariant that lives here:
 15. Bounded waits: a request whose client is gone is aborted in the engine, and an answer waits for the engine alone.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from aiohttp import web

from headway.errors import CAUSE, HeadwayError, RequestRefused, translated
from headway.model.tokenizer import decode
from headway.rollout.endpoint_requests import (
    ApiError,
    Call,
    Choice,
    choice_body,
    head,
    logprobs_body,
    parse_call,
    record_body,
    usage_body,
)
from headway.rollout.tool_calls import parse
from headway.rollout.workflows import LimitReached
from headway.runtime.gather import together
from headway.types import Chunk, Completion, Ints, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LARGEST_BODY = 64 * 2**20
_BACKLOG = 4096


class Session(Protocol):
    """What a key opens."""

    tokenizer: "PreTrainedTokenizerBase"
    context: int

    def prompt(self, call: Call) -> list[Ints]:
        """The tokens of the call's messages, or of each of its prompts; raises `ApiError`."""
        ...

    def generate(self, call: Call, tokens: Ints, index: int) -> AsyncIterator[Chunk | Completion]: ...

    def finished(self, call: Call, choice: Choice) -> None:
        """A choice is complete and about to be answered."""
        ...

    def reward(self, value: float) -> None: ...


class Endpoint:
    """Serves sessions by their keys."""

    def __init__(self, model: str) -> None:
        """`model` is the one name that is served; empty serves the same model under any name."""
        self.model = model
        self.sessions: dict[str, Session] = {}
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[_errors])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", partial(self._complete, True)),
                web.post("/v1/completions", partial(self._complete, False)),
                web.post("/v1/reward", self._reward),
            ]
        )
        # A handler is cancelled when its client is gone, which aborts what it generates.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=_BACKLOG)
        with translated(OSError, HeadwayError, f"cannot listen on {host}:{port}: {CAUSE}; choose another port"):
            await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "headway"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await _json(request)
        value = body.get("reward") if isinstance(body, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ApiError(400, "reward must be one finite number", param="reward")
        session.reward(float(value))
        return web.json_response({"reward": value})

    def _session(self, request: web.Request) -> Session:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if key not in self.sessions:
            raise ApiError(401, "this key opens nothing here", "invalid_api_key")
        return self.sessions[key]

    async def _complete(self, chat: bool, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        call = parse_call(await _json(request), chat)
        if self.model and call.model != self.model:
            raise ApiError(404, f"the model {call.model!r} is not served here; {self.model!r} is", "model_not_found")
        prompts = session.prompt(call)
        for tokens in prompts:
            if len(tokens) >= session.context:
                raise ApiError(
                    400,
                    f"the prompt has {len(tokens)} tokens, and the context of {session.context} leaves room for fewer",
                    "context_length_exceeded",
                )
        if call.stream:
            return await self._stream(request, session, call, prompts)
        choices = await together(*(_choose(session, call, *numbered) for numbered in _numbered(call, prompts)))
        answer = head(call, chunk=False) | {"choices": [choice_body(choice, call) for choice in choices]}
        num_prompt = sum(map(len, prompts))
        return web.json_response(answer | {"usage": usage_body(choices, num_prompt)})

    async def _stream(
        self, request: web.Request, session: Session, call: Call, prompts: list[Ints]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        opening, queue = head(call, chunk=True), asyncio.Queue[dict[str, Any] | None]()

        async def one(index: int, tokens: Ints) -> Choice:
            def put(text: str) -> None:
                delta = {"delta": {"content": text}} if call.messages is not None else {"text": text}
                queue.put_nowait({"index": index, **delta, "finish_reason": None})

            if call.messages is not None:
                queue.put_nowait({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            choice = await _choose(session, call, index, tokens, None if call.tools else put)
            queue.put_nowait(_last_delta(choice, call))
            return choice

        async def all_of_them() -> list[Choice]:
            try:
                return await together(*(one(*numbered) for numbered in _numbered(call, prompts)))
            finally:
                queue.put_nowait(None)

        generating = asyncio.create_task(all_of_them())
        try:
            first = await queue.get()
            if first is None:
                generating.result()  # nothing was sent yet: its error gets its own status
            await response.prepare(request)
            item = first
            while item is not None:
                await response.write(_event(opening | {"choices": [item]}))
                item = await queue.get()
            # The status is long sent: an error from here on is an event of its own.
            try:
                choices = generating.result()
                if call.stream_usage:
                    usage = usage_body(choices, sum(map(len, prompts)))
                    await response.write(_event(opening | {"choices": [], "usage": usage}))
            except Exception as error:
                await response.write(_event(_to_api_error(error).body()))
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)


def _numbered(call: Call, prompts: list[Ints]) -> list[tuple[int, Ints]]:
    return list(enumerate(tokens for tokens in prompts for _ in range(call.n)))


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _last_delta(choice: Choice, call: Call) -> dict[str, Any]:
    """The end of a streamed choice: its stop reason, and what is sent only at the end."""
    chat = call.messages is not None
    made: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
    if not chat:
        made["text"] = ""
    elif not call.tools:
        made["delta"] = {}
    else:
        message = choice.message()
        calls = [{"index": index, **body} for index, body in enumerate(message.get("tool_calls", []))]
        made["delta"] = {"content": message["content"]} | ({"tool_calls": calls} if calls else {})
    if call.logprobs:
        made["logprobs"] = logprobs_body(choice, chat)
    return made | record_body(choice, call)


async def _choose(
    session: Session, call: Call, index: int, tokens: Ints, put: Callable[[str], None] | None = None
) -> Choice:
    """One completion; `put` gets its text as it grows."""
    text = _GrowingText(session.tokenizer, call.stop)
    completion: Completion | None = None
    items: Any = session.generate(call, tokens, index)
    async with aclosing(items):
        async for item in items:
            if isinstance(item, Completion):
                completion = item
            elif put is not None and (more := text.add(item.tokens)):
                put(more)
    if completion is None or completion.stop == StopReason.ABORTED:
        raise ApiError(503, "the request was aborted in the engine; send it again", "aborted")
    if put is not None and (more := text.finish(completion.tokens)):
        put(more)
    whole = _cut(decode(session.tokenizer, completion.tokens), call.stop)
    rest, calls = parse(whole) if call.tools else (whole, [])
    calls = calls if call.parallel else calls[:1]
    pieces = [str(session.tokenizer.decode([int(token)])) for token in completion.tokens] if call.logprobs else []
    choice = Choice(index, tokens.tolist(), completion, rest, calls, pieces)
    session.finished(call, choice)
    return choice


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class _GrowingText:
    """Text of tokens that arrive in pieces; what may yet change, or be the start of a stop string, is held back."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stops: tuple[str, ...]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._sent = ""
        self._held = max((len(stop) for stop in stops), default=1) - 1

    def add(self, tokens: Ints) -> str:
        self._tokens += tokens.tolist()
        text = decode(self._tokenizer, self._tokens)
        cut = _cut(text, self._stops)
        safe = cut if len(cut) < len(text) else text[: len(text) - self._held].rstrip("\ufffd")
        return self._send(safe)

    def finish(self, tokens: Ints) -> str:
        return self._send(_cut(decode(self._tokenizer, tokens), self._stops))

    def _send(self, text: str) -> str:
        if not text.startswith(self._sent):
            return ""
        more, self._sent = text[len(self._sent) :], text
        return more


async def _json(request: web.Request) -> Any:
    body = await request.read()
    with translated((ValueError, RecursionError), partial(ApiError, 400), f"the body is not valid JSON: {CAUSE}"):
        value = json.loads(body)
        if b"\\u" in body:  # an escape may be half a character, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
        return value


def _to_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused | LimitReached):
        return ApiError(400, str(error), "context_length_exceeded")
    if isinstance(error, HeadwayError):
        return ApiError(503, str(error), "engine_unavailable")
    return ApiError(500, f"{type(error).__name__}: {error}", "internal_error")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error is answered in the API's own form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = ApiError(error.status, error.reason, "http_error").body()
        return web.json_response(body, status=error.status)
    except Exception as error:
        refused = _to_api_error(error)
        return web.json_response(refused.body(), status=refused.status)


def with_sampling(call: Call, sampling: Any) -> Any:
    """A sampling with what the call says on top of it."""
    changes: dict[str, Any] = {"stop_strings": (*sampling.stop_strings, *call.stop)}
    if call.max_tokens is not None:
        changes["max_tokens"] = call.max_tokens
    if call.temperature is not None:
        changes["temperature"] = call.temperature
    if call.top_p is not None:
        changes["top_p"] = max(call.top_p, 1e-6)
    return replace(sampling, **changes)
