"""A small server that speaks vLLM's wire format, for tests that need no vLLM: the format of 0.32 as it was observed.

Behind it is a transformers model, stepped one token a request at a time, so that log-probs are those of the weights it
was asked to load. What makes swaps hard is kept as vLLM has it: a prefix cache by salt that a load does not clear,
requests that queue while it is paused, spans in the last chunk alone, chunks of several tokens that a pause does not
flush. `budget` is how many steps it may still take; None is no limit.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from aiohttp import web
from driving import plain_model
from peft import PeftModel
from safetensors.torch import load_file

from headway.engine.vllm.messages import LOAD_ADAPTER, PROCESSED, UNLOAD_ADAPTER
from headway.model.tokenizer import decode, load_tokenizer

Message = dict[str, Any]
T = TypeVar("T")


@dataclass
class Job:
    """A request the server works on."""

    name: str
    prompt: list[int]
    params: Message
    salt: str
    interval: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Message] = field(default_factory=list)
    num_sent: int = 0
    finish: str = ""
    model: str = "policy"
    stop_reason: Any = None
    events: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)

    @property
    def wants_out(self) -> bool:
        return bool(self.finish) or self.num_sent == 0 or len(self.tokens) - self.num_sent >= self.interval


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


class WireServer:
    def __init__(
        self,
        path: str,
        scale_out: bool = True,
        dev_mode: bool = True,
        mode: str = PROCESSED,
        context: int = 512,
        adapter_rank: int = 0,
    ) -> None:
        self.path, self.model = path, plain_model(path)
        self.adapter_rank, self.adapters = adapter_rank, dict[str, Any]()
        self.tokenizer = load_tokenizer(path)
        self.scale_out, self.dev_mode, self.mode, self.context = scale_out, dev_mode, mode, context
        self.version = "default"
        self.paused = False
        self.healthy = True
        self.deaf: set[str] = set()  # paths that never answer
        self.broken: dict[str, int] = {}  # paths that answer an error
        self.stale_loads = False  # answer 200 and load nothing
        self.budget: int | None = None
        self.jobs: list[Job] = []
        self.bodies: list[Message] = []
        self.calls: list[str] = []
        self.cache: dict[tuple[str, tuple[int, ...]], str] = {}
        self.num_stale_prompts = 0
        self.num_cached = self.num_prompt_tokens = 0
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["WireServer"]:
        app = web.Application(middlewares=[self._middleware])
        app.add_routes(
            [
                web.get("/version", self._version),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/openapi.json", self._openapi),
                web.post("/v1/completions", self._completions),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        if self.dev_mode:
            app.add_routes(
                [
                    web.get("/is_paused", self._is_paused),
                    web.get("/weight_info", self._weight_info),
                    web.get("/server_info", self._info),
                    web.post("/pause", self._pause),
                    web.post("/resume", self._resume),
                    web.post("/collective_rpc", self._rpc),
                    web.post("/update_weight_version", self._update_version),
                    web.post("/reset_prefix_cache", self._reset),
                    web.post("/abort_requests", self._abort),
                    web.post(LOAD_ADAPTER, self._load_adapter),
                    web.post(UNLOAD_ADAPTER, self._unload_adapter),
                ]
            )
        # A client that goes away takes its request with it, as at uvicorn.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        stepping = asyncio.create_task(self._step_forever())
        try:
            yield self
            if stepping.done():
                stepping.result()
        finally:
            stepping.cancel()
            await runner.cleanup()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        if request.path in self.deaf:
            await asyncio.Event().wait()
        if request.path in self.broken:
            return await answer(refusal("out of order"), self.broken[request.path])
        found: web.StreamResponse = await handler(request)
        return found

    # Steps

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            if self.paused or self.budget == 0 or not self.jobs:
                continue
            for job in list(self.jobs):
                self._advance(job)
            if self.budget is not None:
                self.budget -= 1

    def _advance(self, job: Job) -> None:
        if not job.tokens:
            self._read_prompt(job)
        temperature = job.params["temperature"]
        logits = self._logits(job.model, job.prompt + job.tokens)[-1] / (temperature or 1.0)
        logprobs = logits.log_softmax(-1)
        draw = torch.Generator().manual_seed((job.params["seed"] + len(job.tokens)) % 2**63)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=draw) if temperature else logprobs.argmax())
        if not job.spans or job.spans[-1]["version"] != self.version:
            job.spans.append({"version": self.version, "start": len(job.tokens), "end": 0})
        job.tokens.append(token)
        job.logprobs.append(float(logprobs[token]))
        job.spans[-1]["end"] = len(job.tokens)
        self._look_for_stop(job, token)
        self._send(job)

    def _read_prompt(self, job: Job) -> None:
        key = job.salt, tuple(job.prompt)
        self.num_prompt_tokens += len(job.prompt)
        if key in self.cache:
            self.num_cached += len(job.prompt)
        self.num_stale_prompts += self.cache.setdefault(key, self.version) != self.version

    def _logits(self, name: str, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = (
                (self.model if name == "policy" else self.adapters[name])(torch.tensor([tokens])).logits[0].float()
            )
        return found

    def _look_for_stop(self, job: Job, token: int) -> None:
        text = decode(self.tokenizer, job.tokens)
        strings = [string for string in job.params.get("stop", []) if string in text]
        if token in job.params["stop_token_ids"]:
            job.finish, job.stop_reason = "stop", token
        elif strings:
            job.finish, job.stop_reason = "stop", strings[0]
        elif len(job.tokens) >= job.params["max_tokens"] or len(job.prompt + job.tokens) >= self.context:
            job.finish = "length"

    def _send(self, job: Job) -> None:
        if job.wants_out:
            job.events.put_nowait({"part": slice(job.num_sent, len(job.tokens)), "finish": job.finish or None})
            job.num_sent = len(job.tokens)
        if job.finish:
            self.jobs.remove(job)

    # Generating

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return await answer(refusal("Scale-out endpoints are disabled.", 403), 403)
        body = await request.json()
        params = body["sampling_params"]
        if "prompt_logprobs" in params:
            return await self._score(body["model"], body["token_ids"])
        name = f"generate-tokens-{body['request_id']}"
        job = Job(name, body["token_ids"], params, body["cache_salt"], params.get("stream_interval", 1))
        return await self._stream(request, body, job, self._generate_event)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "prompt_logprobs" in body:
            return await self._score(body["model"], body["prompt"])
        job = Job("cmpl", body["prompt"], body, body["cache_salt"], 1)
        return await self._stream(request, body, job, self._completions_event)

    async def _stream(self, request: web.Request, body: Message, job: Job, event: Any) -> web.StreamResponse:
        if len(job.prompt) >= self.context:
            return await answer(refusal(f"The decoder prompt (length {len(job.prompt)}) is too long"), 400)
        self.bodies.append(body)
        job.model = body["model"]
        self.jobs.append(job)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            finished = False
            while not finished:
                sent = await job.events.get()
                if "error" in sent:
                    await response.write(f"data: {json.dumps(sent)}\n\ndata: [DONE]\n\n".encode())
                    break
                finished = bool(sent["finish"])
                await response.write(f"data: {json.dumps(event(job, **sent))}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        finally:
            with suppress(ValueError):
                self.jobs.remove(job)
        return response

    @staticmethod
    def _generate_event(job: Job, part: slice, finish: str | None) -> Message:
        entries = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(job.tokens[part], job.logprobs[part], strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": job.stop_reason,
            "token_ids": job.tokens[part],
            "weight_versions": job.spans if finish else None,
            "logprobs": {"content": entries},
        }
        return {"request_id": job.name, "usage": None, "output_mode": "tokens", "choices": [choice]}

    @staticmethod
    def _completions_event(job: Job, part: slice, finish: str | None) -> Message:
        choice = {
            "index": 0,
            "text": "",
            "logprobs": {"token_logprobs": job.logprobs[part], "tokens": [], "top_logprobs": []},
            "finish_reason": finish,
            "stop_reason": job.stop_reason,
            "token_ids": job.tokens[part],
        }
        return {"id": "cmpl", "object": "text_completion", "model": "policy", "choices": [choice]}

    async def _score(self, model: str, tokens: list[int]) -> web.Response:
        # vLLM does not always refuse a token outside the vocabulary: 0.26 takes one that is just outside, and dies.
        logprobs = self._logits(model, tokens).log_softmax(-1)
        values = [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]
        found = [{str(token): {"logprob": value}} for token, value in zip(tokens[1:], values, strict=True)]
        return await answer({"choices": [{"prompt_logprobs": [None, *found]}], "prompt_logprobs": None})

    # Looking and ruling

    async def _version(self, request: web.Request) -> web.Response:
        return await answer({"version": "0.32.0"})

    async def _health(self, request: web.Request) -> web.Response:
        return await answer({}, 200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return await answer({"data": [{"id": "policy", "max_model_len": self.context}]})

    async def _openapi(self, request: web.Request) -> web.Response:
        """An endpoint that is switched off is not listed, and answers 403."""
        switched = {"/inference/v1/generate": self.scale_out, "/update_weight_version": self.dev_mode}
        switched[LOAD_ADAPTER] = self.adapter_rank > 0
        return await answer({"paths": {"/v1/completions": {}} | {path: {} for path, on in switched.items() if on}})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return await answer({"is_paused": self.paused})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return await answer({"weight_version": self.version})

    async def _info(self, request: web.Request) -> web.Response:
        settings = {
            "model_config": {"logprobs_mode": self.mode},
            "cache_config": {"num_gpu_blocks": 64, "block_size": 32, "enable_prefix_caching": True},
            "lora_config": {"max_lora_rank": self.adapter_rank, "target_modules": ["q_proj"]},
        }
        return await answer({"vllm_config": settings})

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        if request.query.get("mode") == "abort":
            for job in list(self.jobs):
                job.finish = "abort"
                self._send(job)
        if request.query.get("clear_cache", "true") == "true":
            self.cache.clear()
        return await answer({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return await answer({"status": "resumed"})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """An answer that is no JSON, as vLLM gives it; what the files hold is read by peft."""
        body = await request.json()
        if body["lora_name"] in self.adapters:
            return await answer(refusal("has already been loaded", 400), 400)
        if not Path(body["lora_path"]).is_dir():
            return await answer(refusal("No adapter found", 404), 404)
        adapted = PeftModel.from_pretrained(plain_model(self.path), body["lora_path"])
        merged = adapted.merge_and_unload() if not self.stale_loads else plain_model(self.path)
        self.adapters[body["lora_name"]] = merged
        return web.Response(body=b"Success: LoRA adapter added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.Response(body=b"Success: LoRA adapter removed successfully.")

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        path = Path(body["kwargs"]["weights_path"]) / "model.safetensors"
        if not path.is_file():
            return await answer(refusal(f"Worker failed with error 'Repo id must be in the form: {path}'", 500), 500)
        if not self.stale_loads:
            try:
                self.model.load_state_dict(load_file(path))
            except RuntimeError as error:
                return await answer(refusal(f"Worker failed with error '{error}'", 500), 500)
        return await answer({"results": [None]})

    async def _update_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return await answer({"success": True, "new_version": self.version})

    async def _reset(self, request: web.Request) -> web.Response:
        success = not self.jobs or request.query.get("reset_running_requests") == "true"
        if success:
            self.cache.clear()
        return await answer({"success": success})

    async def _abort(self, request: web.Request) -> web.Response:
        names = (await request.json())["request_ids"]
        for job in [job for job in self.jobs if job.name in names]:
            job.finish = "abort"
            self._send(job)
        return await answer({"status": "aborted", "aborted": len(names)})

    async def _metrics(self, request: web.Request) -> web.Response:
        values = {
            "num_requests_running": len(self.jobs),
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.25,
            "prompt_tokens_total": self.num_prompt_tokens,
            "prefix_cache_hits_total": self.num_cached,
            "num_preemptions_total": 0,
        }
        lines = [f'vllm:{name}{{engine="0",model_name="policy"}} {float(value)}' for name, value in values.items()]
        return web.Response(text="\n".join(["# HELP vllm:num_requests_running requests", *lines]) + "\n")

    # What tests do to it

    def fail(self, sentence: str) -> None:
        """What an engine core's death looks like to those who stream."""
        for job in self.jobs:
            job.events.put_nowait(refusal(sentence, 500))
        self.healthy = False


def refusal(message: str, code: int = 400) -> Message:
    return {"error": {"message": message, "type": "Error", "param": None, "code": code}}


async def answer(body: Message, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)
