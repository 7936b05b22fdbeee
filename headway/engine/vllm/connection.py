"""The connection to a vLLM server, our own or one at a URL: checked before use, health-checked until closed.

Invariant that lives here:
 11. Verified weight sync at every load: when the engine opens, the server scores a probe as transformers does.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headway.config import EngineSection
from headway.engine.vllm import messages
from headway.engine.vllm.client import Client, Facts, until_healthy
from headway.engine.vllm.messages import Message, ServerFailed
from headway.engine.vllm.model_copy import ModelCopyFiles, ServedModel
from headway.engine.vllm.process import SCALE_OUT, Server, arguments, check_interpreter, lora_arguments
from headway.errors import CAUSE, ConfigError, DeadlineExceeded, HeadwayError, RequestRefused, WorkerDied, translated
from headway.types import Floats, Ints
from headway.weights import probe

_HEALTH_EVERY_S = 2.0
_EXIT_S = 2.0  # a server that failed a call waits this long for the operating system to say how it ended


class ServerConnection:
    client: Client
    facts: Facts
    served: ServedModel
    context: int

    def __init__(
        self,
        model_path: str,
        dtype: str,
        section: EngineSection,
        url: str,
        logprobs_mode: str,
        deadline_s: float,
        lora_rank: int = 0,
    ):
        self._path, self._dtype, self._section, self._url = model_path, dtype, section, url
        self._mode, self._deadline_s, self._lora_rank = logprobs_mode, deadline_s, lora_rank
        self._adapter, self._staged, self._num_adapters = "", "", 0
        self._name = f"headway-{secrets.token_hex(4)}"
        self.files = ModelCopyFiles(section.weights_dir)
        self.failure: HeadwayError | None = None
        self._server: Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, kv_share: float, on_failure: Callable[[HeadwayError], None]) -> None:
        """Connect and check; afterwards `on_failure` is called once if the server dies or fails a health check."""
        async with self.explained():
            await self._connect(kv_share)
            await self._check()
        if self._server is not None:
            self._server.forget()
        self._watching = asyncio.create_task(self._watch(on_failure))

    async def _connect(self, kv_share: float) -> None:
        section = self._section
        version = () if self._url else await asyncio.to_thread(check_interpreter, section.vllm_python)
        if version and version < SCALE_OUT:
            self._check_swap(f"vLLM {'.'.join(map(str, version))}")
        self.served = await asyncio.to_thread(self.files.write_model, self._path, self._dtype)
        if self._url:
            self.client = Client(self._url, self._deadline_s)
            return
        words = arguments(section, version, self.served, self._dtype, self._mode, kv_share, self._lora_rank)
        self._server = await Server.start(section.vllm_python, self.files.served, words, section.device)
        self.client = Client(self._server.socket, self._deadline_s)
        await self._until_ready(self._server)

    async def _until_ready(self, server: Server) -> None:
        ready = asyncio.ensure_future(until_healthy(self.client, self._deadline_s))
        await asyncio.wait({ready, server.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            if server.was_killed:  # which another start may not be
                raise server.ended.result()
            raise ConfigError(f"{server.ended.result()}; it was not ready yet: check engine.vllm_args and the log")
        try:
            ready.result()
        except TimeoutError as error:
            sentence = f"the vLLM server was not ready within {self._deadline_s:g} s"
            raise DeadlineExceeded(f"{sentence}; raise run.deadline_s, or see the engine's log") from error

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if hasattr(self, "client"):
            await self.client.close()
        if self._server is not None:
            await self._server.close()
        self.files.close()

    @property
    def has_spans(self) -> bool:
        """Whether only the server knows which weights sampled a token; with adapters, each submission names its own."""
        return self.facts.has_spans and not self._lora_rank

    @property
    def model(self) -> str:
        """What requests ask for: the live adapter, or the served model."""
        return self._adapter or self.facts.model

    # Checks

    async def _check(self) -> None:
        self.facts = await self.client.facts()
        self.context = self._section.max_context or self.served.context
        self._check_facts()
        if self._url:
            await self._load_served()
        if self.facts.has_spans:
            await self.ask("/update_weight_version", {"new_version": "0"})
        await self._check_model()

    def _check_facts(self) -> None:
        facts, name = self.facts, self.client.name
        if facts.context < self.context:
            raise ConfigError(
                f"{name} takes sequences of up to {facts.context} tokens, and {self.context} are needed; "
                f"start it with --max-model-len {self.context}, or set engine.max_context = {facts.context}"
            )
        if facts.logprobs_mode != self._mode:
            raise ConfigError(f"{name} gives {facts.logprobs_mode}; start it with --logprobs-mode {self._mode}")
        if not facts.has_spans:
            self._check_swap(name)
        if facts.adapter_rank < self._lora_rank:
            raise ConfigError(
                f"{name} loads no adapters of rank {self._lora_rank} for the layers alone; start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and " + " ".join(lora_arguments(self._lora_rank))
            )

    def _check_swap(self, what: str) -> None:
        """A server without version spans cannot keep KV across a swap: refuse that setting."""
        if self._section.kv_on_swap == "keep":
            raise ConfigError(
                f"{what} does not report which weights sampled a token, and engine.kv_on_swap = keep needs that; "
                "serve with --enable-scale-out (vLLM 0.32), or set engine.kv_on_swap = recompute"
            )

    async def _load_served(self) -> None:
        """Load the model of this run into a server that may still hold another run's weights."""
        with translated(
            ServerFailed,
            ConfigError,
            f"{self.client.name} cannot load {self._path} from {self.files.served} ({CAUSE}); start it on a copy "
            "of that model (docs/vllm.md), and set engine.weights_dir to a directory that both can see",
        ):
            await self._reload(self.files.served)
        await self.ask("/reset_prefix_cache", params={"reset_running_requests": "true"})

    async def _check_model(self) -> None:
        found = await self.score(self.served.probe)
        off, bound = probe.distance((found,), (self.served.reference,)), probe.BOUND[self._dtype]
        if not off <= bound:
            raise ConfigError(
                f"{self.client.name} serves another model than {self._path}: a probe is off by {off:.3g} nats a "
                f"token, and {bound:g} is the bound; start it on a copy of that model (docs/vllm.md)"
            )

    # Watching

    async def _watch(self, on_failure: Callable[[HeadwayError], None]) -> None:
        """Wait until the server exits or fails a health check; then fail every request in flight."""
        if self._server is not None:
            self.failure = WorkerDied(str(await asyncio.shield(self._server.ended)))
        else:
            self.failure = await self._until_unhealthy()
        on_failure(self.failure)

    async def _until_unhealthy(self) -> HeadwayError:
        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            try:
                if not await self.client.is_healthy():
                    return WorkerDied(f"{self.client.name} reports that its engine is dead; see its log")
            except ServerFailed as error:
                return WorkerDied(f"{self.client.name} cannot be reached ({error})")
            except DeadlineExceeded as error:
                return error

    def check_alive(self) -> None:
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    @asynccontextmanager
    async def explained(self) -> AsyncIterator[None]:
        """Report a failed call as the server's exit, with its cause, if the server has exited."""
        try:
            yield
        except ServerFailed as error:
            raise await self.exit_error(error) from error

    async def exit_error(self, error: ServerFailed) -> HeadwayError:
        """The error of a failed call: the server's exit if it has exited, otherwise the answer."""
        if self._server is None:
            return WorkerDied(f"{self.client.name} failed: {error}")
        await asyncio.wait({self._server.ended}, timeout=_EXIT_S)
        if self._server.ended.done():
            return WorkerDied(str(self._server.ended.result()))
        said = self._server.cause()
        return WorkerDied(f"{self.client.name} failed: {error}" + (f"; it said: {said}" if said else ""))

    # Calls

    async def ask(self, path: str, body: Message | None = None, params: dict[str, str] | None = None) -> Any:
        """POST a call that must succeed; if the server has exited, raise that."""
        self.check_alive()
        async with self.explained():
            return await self.client.post(path, body, params)

    async def load(self, version: int) -> None:
        """Make a staged version the one that is served from now on."""
        if self._staged:
            await self._swap_adapter()
        else:
            await self._reload(self.files.path_of(version))

    async def _reload(self, weights: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        await self.client.post("/collective_rpc", body)

    async def stage_adapter(self, directory: str) -> None:
        """Load an adapter next to the live one, under a name that no other has, of this run or another."""
        # Loaded in place of the live one, vLLM 0.32 would read its files again at every step, and for requests in
        # flight those of the version before.
        self._num_adapters += 1
        name = f"{self._name}-{self._num_adapters}"
        await self.client.post_text(messages.LOAD_ADAPTER, {"lora_name": name, "lora_path": directory})
        unused, self._staged = self._staged, name
        await self._unload(unused)

    async def _swap_adapter(self) -> None:
        """From now on submissions name the staged adapter; none is left that names the one before."""
        before, self._adapter, self._staged = self._adapter, self._staged, ""
        await self._unload(before)

    async def _unload(self, name: str) -> None:
        if name:
            await self.client.post_text(messages.UNLOAD_ADAPTER, {"lora_name": name})

    async def score(self, tokens: Ints) -> Floats:
        if len(tokens) < 2:
            return np.zeros(len(tokens), np.float32)
        if len(tokens) >= self.facts.context:
            longest = self.facts.context - 1
            raise RequestRefused(f"a sequence to score has {len(tokens)} tokens, and vLLM scores up to {longest}")
        endpoint = self.facts.endpoint
        answer = await self.client.post(endpoint, messages.score_body(tokens, self.model, endpoint))
        return messages.scores_of(answer, tokens)
