"""HTTP client of one vLLM server: every call has a deadline, and every failure becomes a one-sentence error.

Invariant that lives here:
 15. Bounded waits: an unanswered call, and a stream without data, fail at their deadline, by name.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from headway.engine.vllm import messages
from headway.engine.vllm.messages import Message, ServerFailed, StreamPart
from headway.errors import CAUSE, ConfigError, DeadlineExceeded, RequestRefused, translated

QUICK_S = 30.0
"""Deadline of requests that a server answers at once: health, metrics, settings."""


@dataclass(frozen=True)
class Facts:
    """A server's version, model and settings, as its own endpoints report them."""

    version: str
    model: str
    context: int
    logprobs_mode: str
    kv_tokens: int
    has_spans: bool
    adapter_rank: int  # of the largest adapter of layers that can be loaded; 0 where none can

    @property
    def endpoint(self) -> str:
        return messages.GENERATE if self.has_spans else messages.COMPLETIONS


class Client:
    """`address` is http://host:port, or the path of the Unix-domain socket of a server on this machine."""

    def __init__(self, address: str, deadline_s: float):
        self.name = f"the vLLM server at {address}" if address.startswith("http") else "the vLLM server"
        self._deadline_s = deadline_s
        # No limit on connections: the engine limits the requests in flight. None is reused: vLLM closes a connection
        # that is idle for 5 s, perhaps just as the next request is sent on it.
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0, force_close=True)
        if not address.startswith("http"):
            connector, address = aiohttp.UnixConnector(address, limit=0, force_close=True), "http://localhost"
        self._session = aiohttp.ClientSession(address, connector=connector)

    async def close(self) -> None:
        await self._session.close()

    # Calls

    async def get(self, path: str, params: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and body of a request that a server answers at once."""
        async with self._request("GET", path, QUICK_S, params=params) as response:
            return response.status, await response.text()

    async def post(self, path: str, body: Message | None = None, params: dict[str, str] | None = None) -> Any:
        """POST, and return the answer's JSON. 4xx raises RequestRefused, 5xx ServerFailed."""
        text = await self.post_text(path, body, params)
        with translated(ValueError, ServerFailed, f"the answer of {path} is not JSON"):
            return json.loads(text)

    async def post_text(self, path: str, body: Message | None = None, params: dict[str, str] | None = None) -> str:
        async with self._request("POST", path, self._deadline_s, params=params, json=body) as response:
            return await self._text(path, response)

    async def stream(self, path: str, body: Message) -> AsyncGenerator[StreamPart, None]:
        """Yield the parts of a generation as they arrive; the last has a `finish`."""
        async with self._request("POST", path, self._deadline_s, is_stream=True, json=body) as response:
            if response.status != 200:
                await self._text(path, response)
            finished = False
            async for message in _events(response.content):
                part = messages.stream_part(message)
                if part is not None:
                    finished = bool(part.finish)
                    yield part
            if not finished:
                raise ServerFailed("it ended a stream in the middle")

    async def _text(self, path: str, response: aiohttp.ClientResponse) -> str:
        text = await response.text()
        if 400 <= response.status < 500:
            raise RequestRefused(f"{self.name} refused {path}: {messages.text_error(text)}")
        if response.status != 200:
            raise ServerFailed(f"{path} answered {response.status}: {messages.text_error(text)}")
        return text

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, seconds: float, is_stream: bool = False, **kwargs: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request. For a stream the deadline applies to each read instead of the whole."""
        timeout = aiohttp.ClientTimeout(total=None if is_stream else seconds, sock_read=seconds, sock_connect=QUICK_S)
        # The errors of a foreign library become ours here.
        try:
            async with self._session.request(method, path, timeout=timeout, **kwargs) as response:
                yield response
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.name} did not answer {path} within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise ServerFailed(f"{path}: {error or type(error).__name__}") from error

    # Settings of the server

    async def facts(self) -> Facts:
        """Query the server's version, model and settings; raise if it is no vLLM server or lacks an endpoint."""
        version = await self._version()
        if (await self.get("/is_paused"))[0] == 404:
            raise ConfigError(
                f"{self.name} has no endpoints for weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        settings = (await self._get_json("/server_info", {"config_format": "json"}))["vllm_config"]
        model, cache = settings["model_config"], settings["cache_config"]
        # Read from its list of endpoints: calling one would not tell, because one that is disabled refuses every call.
        endpoints: Message = (await self._get_json("/openapi.json"))["paths"]
        adapters = (settings.get("lora_config") or {}) if messages.LOAD_ADAPTER in endpoints else {}
        served = (await self._get_json("/v1/models"))["data"][0]
        return Facts(
            version=version,
            model=served["id"],
            context=int(served["max_model_len"]),
            logprobs_mode=model.get("logprobs_mode", messages.RAW),
            kv_tokens=(cache.get("num_gpu_blocks") or 0) * (cache.get("block_size") or 0),
            # Weight versions per token, and a version for new weights.
            has_spans={messages.GENERATE, "/update_weight_version"} <= endpoints.keys(),
            adapter_rank=int(adapters.get("max_lora_rank", 0)) if adapters.get("target_modules") else 0,
        )

    async def _version(self) -> str:
        what = f"{self.name} does not look like a vLLM server; check engine.urls"
        # Any program may listen there, and answer anything.
        with translated(
            (ServerFailed, ValueError, KeyError, TypeError),
            ConfigError,
            f"{what} ({CAUSE})",
        ):
            status, text = await self.get("/version")
            version = json.loads(text)["version"]
        if status != 200 or not isinstance(version, str):
            raise ConfigError(what)
        return version

    async def _get_json(self, path: str, params: dict[str, str] | None = None) -> Any:
        status, text = await self.get(path, params)
        if status != 200:
            answer = f"{path} with {status} ({messages.text_error(text)})"
            raise ConfigError(f"{self.name} answers {answer}; start it without options that restrict endpoints")
        return json.loads(text)

    async def metrics(self) -> dict[str, float]:
        status, text = await self.get("/metrics")
        if status != 200:
            raise ServerFailed(f"/metrics answered {status}")
        return messages.metrics_of(text)

    async def is_healthy(self) -> bool:
        return (await self.get("/health"))[0] == 200


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Message]:
    """Decode server-sent events as JSON up to `[DONE]`. Reading by line would limit an event's length."""
    pending = b""
    async for piece in content.iter_any():
        *events, pending = (pending + piece).split(b"\n\n")
        for event in events:
            data = event.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            with translated(ValueError, ServerFailed, f"an event of a stream is not JSON: {data[:80]!r}"):
                message = json.loads(data)
            yield message


async def until_healthy(client: Client, seconds: float, poll_s: float = 0.2) -> None:
    """Wait until a server that is starting answers its health check."""
    async with asyncio.timeout(seconds):
        while True:
            with suppress(ServerFailed):  # not listening yet
                if await client.is_healthy():
                    return
            await asyncio.sleep(poll_s)
