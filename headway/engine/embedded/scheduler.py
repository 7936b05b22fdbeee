"""The embedded engine's scheduler: continuous batching over one model, one `step` at a time. No asyncio in here.

Each step admits waiting requests while sequences and memory allow, computes prompt keys and values (about
`prefill_chunk` tokens), then decodes every sequence whose keys and values are complete. A sequence always decodes from
its last token, so a fresh prompt, a forked prompt, an interrupted and a preempted sequence are all handled alike:
missing keys and values are prefilled, the rest is decode. Which device does the arithmetic is the executor's business.

Urgent requests are admitted before all others and preempt training sequences, the youngest first, up to the whole
engine. Preempted sequences wait ahead of those that were never admitted, in their old order.

Invariants that live here:
  3. The engine stamps versions: a token is stamped with the version whose weights sampled it, as it is sampled.
  5. Interruption is transparent when the weights did not change: under `keep` nothing about a running sequence
     changes at a swap.
  9. Explicit stop reasons travel with the completion.
"""

import time
from collections import deque
from itertools import chain

import numpy as np
import torch
from transformers import PreTrainedModel

from headway.config import EngineSection
from headway.engine.completion import DecodeText, check_request, check_tokens
from headway.engine.embedded.cpu import CpuExecutor
from headway.engine.embedded.prompt_cache import PromptCache
from headway.engine.embedded.sequence import Executor, RunningSequence
from headway.engine.embedded.step_interval import StepInterval
from headway.engine.protocol import KvPolicy, check_follows, check_staged
from headway.errors import HeadwayError, RequestRefused
from headway.types import (
    Chunk,
    Completion,
    EngineStats,
    Floats,
    Ints,
    Request,
    RequestKey,
    Scores,
    StopReason,
    SwapReport,
    WeightUpdate,
)

Output = tuple[str, Chunk | Completion | HeadwayError]
"""A request's name, and the next item of its stream; an error ends that request alone."""

_SHORT_INTERVAL = 8
"""Steps between two chunks of prompts: running sequences go on, and a batch still fills up fast."""
_INTERVALS_AHEAD = 2
"""Admission leaves room for the tokens of this many intervals: memory filled to the brim preempts at each one."""


def make_executor(
    model: PreTrainedModel, section: EngineSection, max_context: int, deterministic: bool, kv_share: float
) -> Executor:
    if model.device.type == "cuda":
        from headway.engine.embedded.cuda import CudaExecutor

        return CudaExecutor(model, section, max_context, kv_share)
    return CpuExecutor(model, section, max_context, deterministic)


class EngineCore:
    def __init__(
        self,
        model: PreTrainedModel,
        section: EngineSection,
        max_context: int,
        deterministic: bool,
        decode_text: DecodeText,
        kv_share: float = 0.8,
    ):
        self.model = model.eval().requires_grad_(False)
        self.section = section
        self.max_context = max_context
        self.deterministic = deterministic
        self.version = 0
        self._draining = False
        self._decode_text = decode_text
        self._executor = make_executor(self.model, section, max_context, deterministic, kv_share)
        self._memory = self._executor.memory
        self._prompts = PromptCache(self._memory, self.version)
        self._urgent: deque[RunningSequence] = deque()  # waiting, as are those in `_waiting`
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self._outbox: list[Output] = []
        self._num_generated = self._num_prefilled = self._num_recomputed = self._num_preempted = 0
        self._busy_s = 0.0
        self._interval = StepInterval(max_context, measures=not deterministic)
        self._expects_score = False

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._outbox) or self._next_waiting() is not None

    @property
    def is_idle(self) -> bool:
        """No request is in flight: no sequence runs, and none that was preempted waits to go on."""
        return not self._running and all(sequence.fresh for sequence in chain(self._urgent, self._waiting))

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            running=len(self._running),
            waiting=len(self._urgent) + len(self._waiting),
            num_generated=self._num_generated,
            num_prefilled=self._num_prefilled,
            num_recomputed=self._num_recomputed,
            num_preempted=self._num_preempted,
            busy_s=self._busy_s,
            kv_used=self._memory.num_used,
            kv_total=self._memory.num_tokens,
        )

    def submit(self, request: Request) -> None:
        check_request(request, self.max_context, self.model.config.vocab_size)
        sequence = RunningSequence(request, self.max_context, self._decode_text)
        if sequence.stop is not None:
            self._outbox.append((sequence.name, sequence.completion()))
        else:
            self._wait(sequence, first=not sequence.fresh)

    def abort(self, key: RequestKey) -> None:
        name = str(key)
        for queue in (self._running, self._urgent, self._waiting):
            for sequence in [sequence for sequence in queue if sequence.name == name]:
                queue.remove(sequence)
                if queue is not self._running:
                    self._prompts.release(sequence)
                self._finish(sequence, StopReason.ABORTED)

    def drop(self, key: RequestKey) -> None:
        """End a request without output, because its caller has disconnected."""
        self.abort(key)
        self._outbox = [(name, item) for name, item in self._outbox if name != str(key)]

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Admit, prefill, fork and decode once; returns the requests' outputs."""
        started = time.perf_counter()
        self._admit()
        self._prefill()
        self._fork()
        self._decode()
        self._busy_s += time.perf_counter() - started
        return self.take_outputs()

    def take_outputs(self) -> list[Output]:
        outputs, self._outbox = self._outbox, []
        return outputs

    # Admission and memory

    def _wait(self, sequence: RunningSequence, first: bool) -> None:
        queue = self._urgent if sequence.request.urgent else self._waiting
        if first:
            queue.appendleft(sequence)
        else:
            queue.append(sequence)
        self._prompts.acquire(sequence)

    def _next_waiting(self) -> RunningSequence | None:
        """The sequence to admit next; while draining, only one that has begun."""
        queues = (self._urgent, self._waiting)
        return next((queue[0] for queue in queues if queue and not (self._draining and queue[0].fresh)), None)

    def _admit(self) -> None:
        while (sequence := self._next_waiting()) is not None:
            if self._place(sequence):
                (self._urgent if sequence.request.urgent else self._waiting).popleft()
                self._running.append(sequence)
            elif not (sequence.request.urgent and self._preempt_training()):
                return

    def _place(self, sequence: RunningSequence) -> bool:
        """Give the sequence a row, if there is room in batch and memory."""
        # Prefilling sampled tokens would give them other last bits; a replay repeats the same decode steps.
        sequence.replays = self.deterministic and not sequence.fresh
        num_tokens = (sequence.num_prompt if sequence.replays else sequence.num_tokens) + 1
        if len(self._running) >= self.section.max_num_seqs or not self._has_room(num_tokens):
            return False
        while not self._prompts.allocate(sequence, num_tokens):
            if not self._prompts.release_retained():
                return False
        return True

    def _has_room(self, num_tokens: int) -> bool:
        """Whether the running sequences' next tokens fit too, so that none is preempted at once."""
        coming = len(self._running) * self._num_steps(len(self._running) + 1) * _INTERVALS_AHEAD
        return not self._running or self._memory.num_used + num_tokens + coming <= self._memory.num_tokens

    def _make_room(self, sequence: RunningSequence, num_steps: int) -> None:
        """Room for the coming tokens; while memory is full the youngest is preempted, perhaps `sequence` itself."""
        wanted = sequence.num_cached + min(num_steps, sequence.limit - sequence.num_tokens + 1)
        while sequence.row is not None and not self._memory.grow(sequence.row, wanted):
            self._free_some()

    def _free_some(self) -> None:
        if not (self._prompts.release_retained() or self._preempt_training()):
            self._preempt(self._running[-1])

    def _preempt_training(self) -> bool:
        """Preempt the youngest sequence that is not urgent; False if there is none."""
        victim = next((sequence for sequence in reversed(self._running) if not sequence.request.urgent), None)
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _preempt(self, sequence: RunningSequence) -> None:
        """Free the sequence's memory and put it, with its tokens, at the front of the queue."""
        self._running.remove(sequence)
        self._num_preempted += 1
        self._num_recomputed += sequence.num_cached
        self._prompts.free(sequence)
        self._wait(sequence, first=True)

    # Prefill

    def _prefill(self) -> None:
        budget = self.section.prefill_chunk
        chosen: list[tuple[RunningSequence, int]] = []
        for sequence in self._running:
            if budget <= 0:
                break
            if not sequence.awaits_prompt and not sequence.decodable:
                chosen.append((sequence, self._chunk_length(sequence, budget)))
                budget -= chosen[-1][1]
        if not chosen:
            return
        self._executor.prefill(chosen)
        for sequence, length in chosen:
            sequence.num_cached += length
            self._num_prefilled += length
            self._prompts.computed(sequence)

    def _chunk_length(self, sequence: RunningSequence, budget: int) -> int:
        """Fixed chunks of the prompt alone in deterministic mode, so that every fork of it gets the same numbers."""
        stop = sequence.num_tokens - 1
        if not self.deterministic:
            return min(budget, stop - sequence.num_cached)
        if sequence.num_cached < sequence.num_prompt - 1:
            stop = sequence.num_prompt - 1
        return min(self.section.prefill_chunk, stop - sequence.num_cached)

    def _fork(self) -> None:
        for sequence in self._running:
            if sequence.awaits_prompt:
                self._prompts.advance(sequence)

    # Decode

    def _decode(self) -> None:
        started = time.perf_counter()
        ready = [sequence for sequence in self._running if not sequence.awaits_prompt and sequence.decodable]
        num_steps = self._num_steps(len(ready))
        # Other sequences wait for the next chunk of their prompt, or the score that follows a swap is due.
        if len(ready) < len(self._running) or self._expects_score:
            num_steps = min(num_steps, _SHORT_INTERVAL)
        for sequence in ready:
            self._make_room(sequence, num_steps)
        ready = [sequence for sequence in ready if sequence.row is not None]
        if not ready:
            return
        self._expects_score = False
        decoded = self._executor.decode(ready, num_steps)
        # One check for the batch: a call for every row would cost as much as all else that a token does on the host.
        all_finite = bool(np.isfinite(np.concatenate([logprobs for _, logprobs in decoded])).all())
        for sequence, (tokens, logprobs) in zip(ready, decoded, strict=True):
            if sequence.up_to_date and not (all_finite or np.isfinite(logprobs).all()):
                self._fail(sequence)
            elif sequence.up_to_date:
                self._take_tokens(sequence, tokens, logprobs)
            else:
                sequence.num_cached += 1
        self._running = [sequence for sequence in self._running if sequence.row is not None]
        self._interval.decoded(time.perf_counter() - started, self._executor.device_s, num_steps)

    def _num_steps(self, num_rows: int) -> int:
        """Tokens between two host synchronisations."""
        return self._interval.num_steps(self._executor.num_steps(num_rows))

    def _take_tokens(self, sequence: RunningSequence, tokens: Ints, logprobs: Floats) -> None:
        num_new = sequence.extend(tokens, logprobs, self.version)
        sequence.num_cached = sequence.num_tokens - 1
        if sequence.request.key.stream == "train":
            self._num_generated += num_new
        if sequence.stop is not None:
            self._finish(sequence, sequence.stop)
        elif sequence.num_tokens - sequence.num_sent >= self.section.tokens_per_chunk:
            self._outbox.append((sequence.name, sequence.take_chunk()))

    def _fail(self, sequence: RunningSequence) -> None:
        """End one request with an error because its logits are not finite."""
        problem = f"the logits after its {sequence.num_tokens} tokens are not finite under version {self.version}"
        sentence = f"request {sequence.name} cannot be generated: {problem}; check the model, or use a wider dtype"
        self._outbox.append((sequence.name, RequestRefused(sentence)))
        self._prompts.free(sequence, is_poisoned=True)

    def _finish(self, sequence: RunningSequence, stop: StopReason) -> None:
        if sequence.num_tokens > sequence.num_sent:
            self._outbox.append((sequence.name, sequence.take_chunk()))
        self._outbox.append((sequence.name, sequence.completion(stop)))
        if stop != StopReason.ABORTED:
            self._interval.ended(sequence.num_sampled)
        if sequence.row is not None:
            self._prompts.free(sequence)

    # Weights

    def stage(self, update: WeightUpdate) -> None:
        check_follows(update, self.version)
        self._executor.weights.stage(update)

    def drain(self) -> None:
        """Until the next swap, start no new sequence; those in flight, preempted ones too, continue."""
        self._draining = True
        for queue in (self._urgent, self._waiting):
            begun_first = sorted(queue, key=lambda sequence: sequence.fresh)
            queue.clear()
            queue.extend(begun_first)

    def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        """Make the staged weights live. Runs between two steps, so that no token straddles two versions."""
        check_staged(version, self._executor.weights.staged_version)
        started = time.perf_counter()
        prints = self._executor.weights.swap()
        self.version, self._draining, self._expects_score = version, False, True
        num_recomputed = self._renew_kv(kv)
        return SwapReport(
            version=version,
            fingerprints=prints,
            pause_ms=(time.perf_counter() - started) * 1e3,
            num_interrupted=sum(not sequence.fresh for sequence in self._running),
            num_recomputed=num_recomputed,
        )

    def _renew_kv(self, kv: KvPolicy) -> int:
        """Discard the KV cache that the new weights must not use: all of it, or only prompts still being computed."""
        self._prompts.set_version(self.version)
        num_forgotten = 0
        for sequence in list(self._running):
            if kv == "recompute" or sequence.fresh or not sequence.decodable:
                num_forgotten += sequence.num_cached
                if not self._prompts.renew(sequence):
                    self._running.remove(sequence)
                    self._prompts.free(sequence)
                    self._wait(sequence, first=True)
        self._num_recomputed += num_forgotten
        return num_forgotten

    # Scoring

    @torch.inference_mode()
    def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return Scores(self.version, tuple(self._score_one(tokens, temperature) for tokens in sequences))

    def _score_one(self, tokens: Ints, temperature: float) -> Floats:
        """Teacher forcing through the same memory and the same prefill that generation uses."""
        check_tokens("a sequence to score", tokens, self.max_context, self.model.config.vocab_size)
        if len(tokens) < 2:
            return np.zeros(len(tokens), np.float32)
        while (row := self._memory.allocate(len(tokens))) is None:
            self._free_some()
        scores = self._executor.score(tokens, row, temperature)
        if not np.isfinite(scores).all():
            self._memory.clear(row)
        self._memory.free(row)
        return scores
