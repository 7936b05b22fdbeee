"""The vLLM engine: real servers, spoken to over their own public endpoints; started here, or running elsewhere.

A request is one or more submissions to the server. What a swap makes of those under way is chosen by what the server
offers. With spans (`--enable-scale-out`) the server is paused, keeps its requests, and says at their end which weights
sampled which tokens; under `recompute` it is told to forget all keys and values, under `keep` only submissions without
a token yet begin anew, because their prompt may have been computed by the old weights. Without spans everything under
way is aborted, stamped with the old version, and submitted again with what it had sampled. Under `drain` all that is
under way ends first, in either case. A salt per version keeps the prefix cache from serving another version's prompts.

Invariants that live here:
  3. The engine stamps versions: see live.py; no submission begins while a swap goes on.
 13. Non-blocking generation: weights are written beside running generation; a swap pauses it for the load alone.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from headway.config import EngineSection
from headway.engine.completion import check_request
from headway.engine.protocol import KvPolicy
from headway.engine.vllm import messages
from headway.engine.vllm.client import LOOK_S
from headway.engine.vllm.connection import Host
from headway.engine.vllm.messages import ServerFailed
from headway.engine.vllm.sequence import ServedSequence, Slots
from headway.errors import (
    DeadlineExceeded,
    HeadwayError,
    InvariantBroken,
    RequestRefused,
    WeightMismatch,
    WorkerDied,
)
from headway.types import (
    Chunk,
    Completion,
    EngineStats,
    Ints,
    Request,
    RequestKey,
    Scores,
    StopReason,
    SwapReport,
    WeightUpdate,
)


class VllmEngine:
    def __init__(
        self,
        model_path: str,
        dtype: str,
        section: EngineSection,
        url: str,
        logprobs_mode: str,
        deadline_s: float,
        kv_share: float = 0.8,
    ):
        """`url` is a server that runs already, or empty; `kv_share` the part of a GPU a server of our own takes."""
        self._path, self._section = model_path, section
        self._deadline_s, self._kv_share = deadline_s, kv_share
        self._host = Host(model_path, dtype, section, url, logprobs_mode, deadline_s)
        self.version = 0
        self._salt = secrets.token_hex(8)
        self._slots = Slots(section.max_num_seqs)
        self._lives: dict[str, ServedSequence] = {}
        self._between = asyncio.Lock()  # whoever holds it finds no swap going on
        self._tokenizer: Any = None
        self._num_generated = self._num_recomputed = 0
        self._busy_s, self._busy_since, self._num_busy = 0.0, 0.0, 0

    async def open(self) -> None:
        try:
            await self._host.open(self._kv_share, self._fail_all)
        except BaseException:
            await self._host.close()
            raise

    async def close(self) -> None:
        self._fail_all(WorkerDied("the engine was closed while requests were being generated"))
        await self._host.close()

    def _fail_all(self, error: HeadwayError) -> None:
        for live in self._lives.values():
            live.fail(type(error)(str(error)))
            if live.task is not None:
                live.task.cancel()

    # Generation

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        self._host.check_alive()
        check_request(request, self._host.context, self._host.served.vocab_size)
        messages.check_mode(request.sampling, self._host.facts.logprobs_mode, f"request {request.key}")
        live = ServedSequence(request, self._host.context, self._decode_text)
        if live.name in self._lives:
            raise RequestRefused(f"request {live.name} is already being generated; give each call a key of its own")
        self._lives[live.name] = live
        live.task = asyncio.create_task(self._serve(live))
        try:
            async for item in live.items():
                yield item
        finally:
            live.task.cancel()
            await asyncio.gather(live.task, return_exceptions=True)
            # Only now: a request that reuses the key must not be handed what was meant for this one.
            del self._lives[live.name]

    def _decode_text(self, tokens: list[int]) -> str:
        from headway.model.tokenizer import decode, load_tokenizer

        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        return decode(self._tokenizer, tokens, special=True)

    async def _serve(self, live: ServedSequence) -> None:
        """Submissions until the completion is whole; whatever goes wrong is told to the caller."""
        try:
            if live.stop is None:
                await self._slots.take(live.request.urgent)
                try:
                    while live.stop is None:
                        await self._slots.opened()
                        await self._submit(live)
                finally:
                    self._slots.give_back()
            assert live.stop is not None
            live.finish(live.stop)
        except ServerFailed as error:
            live.fail(await self._host.obituary(error))
        except Exception as error:
            live.fail(error)

    async def _submit(self, live: ServedSequence) -> None:
        """One submission, to its end or until it is interrupted."""
        submission = live.submit(self.version, f"{self._salt}-{self.version}")
        self._count_busy(1)
        live.reading = asyncio.create_task(self._read(live, submission))
        try:
            await asyncio.wait({live.reading})
            if not live.reading.cancelled():
                live.reading.result()
        finally:
            live.reading.cancel()
            await asyncio.gather(live.reading, return_exceptions=True)
            live.reading = None
            self._count_busy(-1)

    def _count_busy(self, change: int) -> None:
        """The server is busy while it has at least one submission."""
        now = time.perf_counter()
        self._busy_s += now - self._busy_since if self._num_busy else 0.0
        self._busy_since = now
        self._num_busy += change

    async def _read(self, live: ServedSequence, submission: messages.Submission) -> None:
        facts, told = self._host.facts, False
        if facts.has_spans:
            body = messages.generate_body(submission, self._section.tokens_per_chunk)
        else:
            body = messages.completions_body(submission, facts.model)
        async with aclosing(self._host.client.stream(facts.endpoint, body)) as parts:
            async for part in parts:
                num_new = live.take(part)
                if live.request.key.stream == "train":
                    self._num_generated += num_new
                if part.finish or (live.stop is not None and live.stamps):
                    live.end_submission(part.finish, part.spans)
                    return
                if live.stop is not None and not told:
                    await self._abort_submission(live)
                    told = True

    async def _abort_submission(self, live: ServedSequence) -> None:
        """It need not go on, but only the server's last word says which weights sampled what."""
        assert live.submission is not None
        await self._host.client.post("/abort_requests", messages.abort_body(live.submission.name))

    async def abort(self, key: RequestKey) -> None:
        live = self._lives.get(str(key))
        if live is None or live.stop is not None:
            return
        if live.reading is not None and live.has_new and not live.stamps:
            live.stop = StopReason.ABORTED
            await self._abort_submission(live)
        else:
            # Whatever came has its version. A stream nobody reads is closed, and the server aborts what it was for.
            live.finish(StopReason.ABORTED)
            assert live.task is not None
            live.task.cancel()

    @property
    def _under_way(self) -> list[ServedSequence]:
        """Those of which the server has a submission."""
        return [live for live in self._lives.values() if live.reading is not None and not live.reading.done()]

    # Weights

    async def stage_weights(self, update: WeightUpdate) -> None:
        if update.version <= self.version and not (update.version == 0 == self.version):
            raise InvariantBroken(
                f"version {update.version} cannot follow version {self.version}: versions never go back"
            )
        # On a thread: generation goes on while the bytes are written.
        await asyncio.to_thread(self._host.files.stage, update)

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        if self._host.files.staged_version != version:
            raise InvariantBroken(f"version {version} was not staged; staged is {self._host.files.staged_version}")
        async with self._between:
            self._slots.shut()
            if kv == "drain":
                await self._until_ended(self._under_way, self._deadline_s)
            report = await self._exchange(version, kv)
            self._host.files.loaded(version)
            self._slots.open()
        return report

    async def _exchange(self, version: int, kv: KvPolicy) -> SwapReport:
        """Stop the server, load, let it go on. No submission begins meanwhile."""
        under_way, started = self._under_way, time.perf_counter()
        await self._halt(under_way)
        try:
            await self._host.load(str(self._host.files.path_of(version)))
        except ServerFailed as error:
            problem = WeightMismatch(f"{self._host.client.name} could not load version {version}: {error}")
            self._host.failure = problem
            self._fail_all(problem)
            raise problem from error
        if self._host.facts.has_spans:
            await self._host.ask("/update_weight_version", {"new_version": str(version)})
        if kv == "keep":
            num_recomputed = self._begin_anew(under_way)
        else:
            await self._host.ask("/reset_prefix_cache", params={"reset_running_requests": "true"})
            num_recomputed = sum(live.num_tokens for live in under_way)
        self.version = version
        self._num_recomputed += num_recomputed
        await self._host.ask("/resume")
        pause_ms = (time.perf_counter() - started) * 1e3
        num_interrupted = sum(live.has_new for live in under_way)
        # No fingerprints: vLLM repacks what it loads. A score of the probe is the proof.
        return SwapReport(version, {}, pause_ms, num_interrupted, num_recomputed)

    async def _halt(self, under_way: list[ServedSequence]) -> None:
        """Return once no step runs: with spans requests are kept, without them they are aborted, to go on later."""
        if self._host.facts.has_spans:
            for live in under_way:
                live.blur()
            # Asked to keep requests, vLLM 0.32 still forgets their keys and values unless told not to clear its cache.
            await self._host.ask("/pause", params={"mode": "keep", "clear_cache": "false"})
        else:
            for live in under_way:
                live.interrupt()
            # The server may not have heard of these yet, and would not abort what it gets while paused.
            self._begin_anew(under_way)
            await self._host.ask("/pause", params={"mode": "abort", "clear_cache": "false"})
            await self._until_ended(under_way, LOOK_S)

    @staticmethod
    def _begin_anew(under_way: list[ServedSequence]) -> int:
        """Take back submissions that brought nothing yet, to be made again; how many tokens they had to be computed."""
        fresh = [live for live in under_way if not live.has_new and live.reading is not None]
        for live in fresh:
            assert live.reading is not None
            live.reading.cancel()
        return sum(live.num_tokens for live in fresh)

    async def _until_ended(self, lives: list[ServedSequence], seconds: float) -> None:
        reading = {live.reading for live in lives if live.reading is not None}
        if reading:
            _, pending = await asyncio.wait(reading, timeout=seconds)
            if pending:
                raise DeadlineExceeded(
                    f"{len(pending)} requests at {self._host.client.name} did not end within {seconds:g} s"
                )

    # Looking

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        if temperature != 1:
            raise RequestRefused(f"vLLM scores prompts at temperature 1 only, not {temperature:g}")
        async with self._between:
            self._host.check_alive()
            try:
                found = await asyncio.gather(*(self._host.score(tokens) for tokens in sequences))
            except ServerFailed as error:
                raise await self._host.obituary(error) from error
            return Scores(self.version, tuple(found))

    async def stats(self) -> EngineStats:
        self._host.check_alive()
        try:
            metrics = await self._host.client.metrics()
        except ServerFailed as error:
            raise await self._host.obituary(error) from error
        self._count_busy(0)
        num_cached = metrics.get("prefix_cache_hits_total", 0.0)
        return EngineStats(
            version=self.version,
            running=int(metrics.get("num_requests_running", 0)),
            waiting=int(metrics.get("num_requests_waiting", 0)) + self._slots.num_waiting,
            num_generated=self._num_generated,
            num_prefilled=int(metrics.get("prompt_tokens_total", 0) - num_cached),
            num_recomputed=self._num_recomputed,
            num_preempted=int(metrics.get("num_preemptions_total", 0)),
            busy_s=self._busy_s,
            kv_used=int(metrics.get("kv_cache_usage_perc", 0) * self._host.facts.kv_tokens),
            kv_total=self._host.facts.kv_tokens,
        )
