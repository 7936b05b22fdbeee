"""The vLLM engine: drives a vLLM server over its public HTTP endpoints; started here, or running elsewhere.

A request is one or more submissions to the server. What a swap does to those in flight is chosen by what the server
offers. With spans (`--enable-scale-out`) the server is paused, keeps its requests, and says at their end which weights
sampled which tokens; under `recompute` it has to forget all keys and values, under `keep` only submissions without
a token yet begin anew, because their prompt may have been computed by the old weights. Without spans everything in
flight is aborted, stamped with the old version, and submitted again with what it had sampled. Under `drain` all that is
in flight ends first, in either case. A salt per version keeps the prefix cache from serving another version's prompts.

Invariants that live here:
  3. The engine stamps versions: see sequence.py; no submission begins while a swap goes on.
 13. Non-blocking generation: weights are written while generation runs; a swap pauses it for the load alone.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from headway.config import EngineSection
from headway.engine.completion import check_request
from headway.engine.protocol import KvPolicy, check_follows, check_staged
from headway.engine.vllm import messages
from headway.engine.vllm.client import QUICK_S
from headway.engine.vllm.connection import ServerConnection
from headway.engine.vllm.messages import ServerFailed
from headway.engine.vllm.sequence import ServedSequence
from headway.errors import (
    DeadlineExceeded,
    HeadwayError,
    RequestRefused,
    WeightMismatch,
    WorkerDied,
)
from headway.runtime.semaphore import PrioritySemaphore
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
        lora_rank: int = 0,
    ):
        """`url` is a running server, or empty; `kv_share` is the share of a GPU that a server of our own takes.

        With a `lora_rank`, what is published are adapters of that rank.
        """
        self._path, self._section = model_path, section
        self._deadline_s, self._kv_share = deadline_s, kv_share
        self._connection = ServerConnection(model_path, dtype, section, url, logprobs_mode, deadline_s, lora_rank)
        self.version = 0
        self._salt = secrets.token_hex(8)
        self._slots = PrioritySemaphore(section.max_num_seqs)
        self._may_submit = asyncio.Event()  # not during a swap
        self._may_submit.set()
        self._sequences: dict[str, ServedSequence] = {}
        self._no_swap = asyncio.Lock()  # held during a swap, and by calls that must not overlap one
        self._tokenizer: Any = None
        self._num_generated = self._num_recomputed = 0
        self._busy_s, self._busy_since, self._num_busy = 0.0, 0.0, 0

    async def open(self) -> None:
        try:
            await self._connection.open(self._kv_share, self._fail_all)
        except BaseException:
            await self._connection.close()
            raise

    async def close(self) -> None:
        self._fail_all(WorkerDied("the engine was closed while requests were being generated"))
        await self._connection.close()

    def _fail_all(self, error: HeadwayError) -> None:
        for sequence in self._sequences.values():
            sequence.fail(type(error)(str(error)))
            if sequence.task is not None:
                sequence.task.cancel()

    # Generation

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        self._connection.check_alive()
        check_request(request, self._connection.context, self._connection.served.vocab_size)
        messages.check_mode(request.sampling, self._connection.facts.logprobs_mode, f"request {request.key}")
        sequence = ServedSequence(request, self._connection.context, self._decode_text)
        if sequence.name in self._sequences:
            raise RequestRefused(f"request {sequence.name} is already being generated; give each call a key of its own")
        self._sequences[sequence.name] = sequence
        sequence.task = asyncio.create_task(self._serve(sequence))
        try:
            async for item in sequence.items():
                yield item
        finally:
            sequence.task.cancel()
            await asyncio.gather(sequence.task, return_exceptions=True)
            # Last, because a request that reuses the key must not receive the items of this one.
            del self._sequences[sequence.name]

    def _decode_text(self, tokens: list[int]) -> str:
        from headway.model.tokenizer import decode, load_tokenizer

        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        return decode(self._tokenizer, tokens, special=True)

    async def _serve(self, sequence: ServedSequence) -> None:
        """Submit until the completion is complete; errors go to the caller of `generate`."""
        try:
            if sequence.stop is None:
                async with self._slots.slot(sequence.request.urgent):
                    while sequence.stop is None:
                        await self._may_submit.wait()
                        if self._may_submit.is_set():  # another swap may have begun before this task runs
                            await self._submit(sequence)
            assert sequence.stop is not None
            sequence.finish(sequence.stop)
        except ServerFailed as error:
            sequence.fail(await self._connection.exit_error(error))
        except Exception as error:
            sequence.fail(error)

    async def _submit(self, sequence: ServedSequence) -> None:
        """One submission, to its end or until it is interrupted."""
        submission = sequence.submit(self.version, f"{self._salt}-{self.version}", self._connection.model)
        self._count_busy(1)
        sequence.reading = asyncio.create_task(self._read(sequence, submission))
        try:
            await asyncio.wait({sequence.reading})
            if not sequence.reading.cancelled():
                sequence.reading.result()
        finally:
            sequence.reading.cancel()
            await asyncio.gather(sequence.reading, return_exceptions=True)
            sequence.reading = None
            self._count_busy(-1)

    def _count_busy(self, change: int) -> None:
        """The server is busy while it has at least one submission."""
        now = time.perf_counter()
        self._busy_s += now - self._busy_since if self._num_busy else 0.0
        self._busy_since = now
        self._num_busy += change

    async def _read(self, sequence: ServedSequence, submission: messages.Submission) -> None:
        endpoint, is_aborted = self._connection.facts.endpoint, False
        if endpoint == messages.GENERATE:
            body = messages.generate_body(submission, self._section.tokens_per_chunk)
        else:
            body = messages.completions_body(submission)
        async with aclosing(self._connection.client.stream(endpoint, body)) as parts:
            async for part in parts:
                num_new = sequence.take(part)
                if sequence.request.key.stream == "train":
                    self._num_generated += num_new
                if part.finish or (sequence.stop is not None and sequence.stamps):
                    sequence.end_submission(part.finish, part.spans if self._connection.has_spans else None)
                    return
                if sequence.stop is not None and not is_aborted:
                    await self._abort_submission(sequence)
                    is_aborted = True

    async def _abort_submission(self, sequence: ServedSequence) -> None:
        """Ask the server to abort; keep reading, because only the stream's last part has the version spans."""
        assert sequence.submission is not None
        await self._connection.client.post("/abort_requests", messages.abort_body(sequence.submission.name))

    async def abort(self, key: RequestKey) -> None:
        sequence = self._sequences.get(str(key))
        if sequence is None or sequence.stop is not None:
            return
        if sequence.reading is not None and sequence.has_new and not sequence.stamps:
            sequence.stop = StopReason.ABORTED
            await self._abort_submission(sequence)
        else:
            # All tokens received have their version. Closing the stream makes the server abort the submission.
            sequence.finish(StopReason.ABORTED)
            assert sequence.task is not None
            sequence.task.cancel()

    @property
    def _in_flight(self) -> list[ServedSequence]:
        """Sequences with a submission at the server."""
        return [
            sequence
            for sequence in self._sequences.values()
            if sequence.reading is not None and not sequence.reading.done()
        ]

    # Weights

    async def stage_weights(self, update: WeightUpdate) -> None:
        check_follows(update, self.version)
        # On a thread: generation goes on while the bytes are written.
        files = self._connection.files
        await asyncio.to_thread(files.stage, update)
        if update.kind == "adapter":
            with self._loading(update.version):
                await self._connection.stage_adapter(str(files.path_of(update.version)))

    @contextmanager
    def _loading(self, version: int) -> Iterator[None]:
        """A server that cannot load a version is of no more use."""
        try:
            yield
        except (ServerFailed, RequestRefused) as error:
            problem = WeightMismatch(f"{self._connection.client.name} could not load version {version}: {error}")
            self._connection.failure = problem
            self._fail_all(problem)
            raise problem from error

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        check_staged(version, self._connection.files.staged_version)
        async with self._no_swap:
            self._slots.set_limit(0)
            self._may_submit.clear()
            if kv == "drain":
                await self._until_ended(self._in_flight, self._deadline_s)
            report = await self._exchange(version, kv)
            self._connection.files.loaded(version)
            self._slots.set_limit(self._section.max_num_seqs)
            self._may_submit.set()
        return report

    async def _exchange(self, version: int, kv: KvPolicy) -> SwapReport:
        """Pause the server, load the weights, resume. No submission begins meanwhile."""
        in_flight, started = self._in_flight, time.perf_counter()
        await self._halt(in_flight)
        with self._loading(version):
            await self._connection.load(version)
        if self._connection.has_spans:
            await self._connection.ask("/update_weight_version", {"new_version": str(version)})
        if kv == "keep":
            num_recomputed = self._begin_anew(in_flight)
        else:
            await self._connection.ask("/reset_prefix_cache", params={"reset_running_requests": "true"})
            num_recomputed = sum(sequence.num_tokens for sequence in in_flight)
        self.version = version
        self._num_recomputed += num_recomputed
        await self._connection.ask("/resume")
        pause_ms = (time.perf_counter() - started) * 1e3
        num_interrupted = sum(sequence.has_new for sequence in in_flight)
        # No fingerprints: vLLM repacks what it loads. The score of the probe verifies it.
        return SwapReport(version, {}, pause_ms, num_interrupted, num_recomputed)

    async def _halt(self, in_flight: list[ServedSequence]) -> None:
        """Pause the server: with version spans its requests stay, otherwise they are aborted and submitted again."""
        if self._connection.has_spans:
            for sequence in in_flight:
                sequence.forget_version()
            # Asked to keep requests, vLLM 0.32 forgets their keys and values unless `clear_cache` is false.
            await self._connection.ask("/pause", params={"mode": "keep", "clear_cache": "false"})
        else:
            for sequence in in_flight:
                sequence.interrupt()
            # The server may not have received these yet, and would not abort what it gets while paused.
            self._begin_anew(in_flight)
            await self._connection.ask("/pause", params={"mode": "abort", "clear_cache": "false"})
            await self._until_ended(in_flight, QUICK_S)

    @staticmethod
    def _begin_anew(in_flight: list[ServedSequence]) -> int:
        """Cancel submissions without a token yet, to submit them again; returns the tokens to be recomputed."""
        fresh = [sequence for sequence in in_flight if not sequence.has_new and sequence.reading is not None]
        for sequence in fresh:
            assert sequence.reading is not None
            sequence.reading.cancel()
        return sum(sequence.num_tokens for sequence in fresh)

    async def _until_ended(self, sequences: list[ServedSequence], seconds: float) -> None:
        reading = {sequence.reading for sequence in sequences if sequence.reading is not None}
        if reading:
            _, pending = await asyncio.wait(reading, timeout=seconds)
            if pending:
                raise DeadlineExceeded(
                    f"{len(pending)} requests at {self._connection.client.name} did not end within {seconds:g} s"
                )

    # Scores and statistics

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        if temperature != 1:
            raise RequestRefused(f"vLLM scores prompts at temperature 1 only, not {temperature:g}")
        async with self._no_swap:
            self._connection.check_alive()
            async with self._connection.explained():
                found = await asyncio.gather(*(self._connection.score(tokens) for tokens in sequences))
            return Scores(self.version, tuple(found))

    async def stats(self) -> EngineStats:
        self._connection.check_alive()
        async with self._connection.explained():
            metrics = await self._connection.client.metrics()
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
            kv_used=int(metrics.get("kv_cache_usage_perc", 0) * self._connection.facts.kv_tokens),
            kv_total=self._connection.facts.kv_tokens,
        )
