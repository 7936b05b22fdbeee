"""The embedded engine's core: continuous batching over one model, one `step` at a time. No asyncio in here.

Each step admits waiting requests while sequences and memory allow, computes prompt keys and values (about
`prefill_chunk` tokens), then decodes one token for every sequence whose keys and values are complete. A sequence
always decodes from its last token, so a fresh prompt, a forked prompt, an interrupted and a preempted sequence all
look alike: what is missing is prefilled, the rest is decode.

Invariants that live here:
  3. Versions are the engine's: a token is stamped with the version whose weights sampled it, as it is sampled.
  5. Interruption is invisible when the weights did not change: under `keep` nothing about a running sequence
     changes at a swap; in deterministic mode its arithmetic does not depend on who shares its batch.
  9. Stop reasons travel with the completion.
"""

import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headway.config import EngineSection
from headway.engine import KvPolicy
from headway.engine.embedded import native
from headway.engine.embedded.decoder import CachedAttention, Decoder, Operations, TorchOperations
from headway.engine.embedded.kv import DecodeAttention, KvMemory, PrefillAttention, Row, decode_order
from headway.engine.embedded.live_weights import LiveWeights
from headway.engine.embedded.sampler import request_counter, sample, uniforms
from headway.errors import InvariantBroken, RequestRefused
from headway.models import model_shape
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

Output = tuple[str, Chunk | Completion]


class Live:
    """A request the engine has taken in, with everything sampled for it so far."""

    def __init__(self, request: Request, max_context: int):
        self.request = request
        self.num_prompt = len(request.tokens)
        self.limit = min(self.num_prompt + request.sampling.max_tokens, max_context)
        self.tokens = np.empty(max(self.limit, self.num_prompt), np.int32)
        self.tokens[: self.num_prompt] = request.tokens
        self.num_tokens = self.num_prompt
        self.logprobs = np.empty(len(self.tokens), np.float32)
        self.versions = np.empty(len(self.tokens), np.int32)
        self.counter = request_counter(request)
        self.prefix = request.tokens[:-1].tobytes()
        self.row: Row | None = None
        self.num_cached = 0
        self.kv_version = -1
        self.donor: Live | None = None  # the sequence whose prompt this one is going to fork
        self.replays = False  # after a preemption in deterministic mode: decodes again what it had sampled
        self.num_sent = self.num_prompt

    @property
    def fresh(self) -> bool:
        return self.num_tokens == self.num_prompt

    @property
    def up_to_date(self) -> bool:
        return self.num_cached == self.num_tokens - 1

    @property
    def decodable(self) -> bool:
        return self.up_to_date or (self.replays and self.num_cached >= self.num_prompt - 1)

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens[self.num_tokens] = token
        self.logprobs[self.num_tokens] = logprob
        self.versions[self.num_tokens] = version
        self.num_cached = self.num_tokens
        self.num_tokens += 1

    def chunk(self) -> Chunk:
        part = slice(self.num_sent, self.num_tokens)
        self.num_sent = self.num_tokens
        return Chunk(self.tokens[part].copy(), self.logprobs[part].copy(), self.versions[part].copy())

    def completion(self, stop: StopReason) -> Completion:
        part = slice(self.num_prompt, self.num_tokens)
        return Completion(self.tokens[part].copy(), self.logprobs[part].copy(), self.versions[part].copy(), stop)


class EngineCore:
    def __init__(
        self,
        model: PreTrainedModel,
        section: EngineSection,
        max_context: int,
        deterministic: bool,
        decode_text: Callable[[list[int]], str],
    ):
        self.model = model.eval().requires_grad_(False)
        self.section = section
        self.max_context = max_context
        self.deterministic = deterministic
        self.version = 0
        self._decode_text = decode_text
        self._kv = KvMemory(model_shape(model.config), model.dtype, section.kv_tokens, max_context)
        self._operations: Operations = TorchOperations()
        if native.supports(self._kv) and model.config.hidden_act == "silu":
            self._operations = native.NativeOperations(model.dtype)
        self._decoder = Decoder(self.model, self._operations, section.max_num_seqs)
        self._weights = LiveWeights(self.model, [*self._decoder.matrices, self._decoder.head])
        self._waiting: deque[Live] = deque()
        self._waiting_prefixes: Counter[bytes] = Counter()
        self._running: list[Live] = []
        self._donors: dict[bytes, Live] = {}
        self._retained: dict[bytes, Live] = {}
        self._outbox: list[Output] = []
        self._num_generated = self._num_prefilled = self._num_recomputed = self._num_preempted = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._outbox)

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            num_generated=self._num_generated,
            num_prefilled=self._num_prefilled,
            num_recomputed=self._num_recomputed,
            num_preempted=self._num_preempted,
            busy_s=self._busy_s,
            kv_used=self._kv.num_used,
            kv_total=self._kv.num_tokens,
        )

    def _check(self, what: str, tokens: Ints) -> None:
        if len(tokens) > self.max_context:
            raise RequestRefused(f"{what} has {len(tokens)} tokens, more than the context of {self.max_context}")
        vocab_size = self.model.config.vocab_size
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise RequestRefused(f"{what} holds a token outside the model's vocabulary of {vocab_size}")

    def submit(self, request: Request) -> None:
        self._check(f"request {request.key}", request.tokens)
        live = Live(request, self.max_context)
        if live.num_tokens >= self.max_context:
            self._outbox.append((str(request.key), live.completion(StopReason.CONTEXT)))
            return
        if request.urgent:
            self._waiting.appendleft(live)
        else:
            self._waiting.append(live)
        self._waiting_prefixes[live.prefix] += 1

    def abort(self, key: RequestKey) -> None:
        name = str(key)
        for live in [*self._running, *self._waiting]:
            if str(live.request.key) == name:
                if live in self._running:
                    self._running.remove(live)
                else:
                    self._waiting.remove(live)
                    self._forget_waiting(live)
                self._finish(live, StopReason.ABORTED)
        self._drop_unwanted()

    def drop(self, key: RequestKey) -> None:
        """End a request nobody listens to any more, and say nothing."""
        self.abort(key)
        self._outbox = [(name, item) for name, item in self._outbox if name != str(key)]

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Admit, prefill, decode; what the requests have to be told."""
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

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.section.max_num_seqs:
            live = self._waiting[0]
            # Prefilled, what was sampled would differ in its last bits; a replay takes the very steps it took before.
            replays = self.deterministic and not live.fresh
            row = self._kv.allocate((live.num_prompt if replays else live.num_tokens) + 1)
            if row is None:
                if not self._release_retained():
                    return
                continue
            self._waiting.popleft()
            live.row, live.num_cached, live.kv_version, live.replays = row, 0, self.version, replays
            if live.fresh:
                self._find_donor(live)
                self._forget_waiting(live)
            self._running.append(live)

    def _find_donor(self, live: Live) -> None:
        """Fork the prompt of a sequence that has it under the live version, or become the one others fork."""
        donor = self._donors.get(live.prefix)
        if donor is not None and donor.row is not None and donor.kv_version == self.version:
            live.donor = donor
        else:
            self._donors[live.prefix] = live

    def _forget_waiting(self, live: Live) -> None:
        if live.fresh:
            self._waiting_prefixes[live.prefix] -= 1
            if not self._waiting_prefixes[live.prefix]:
                del self._waiting_prefixes[live.prefix]

    def _drop_unwanted(self) -> None:
        """Nobody about to fork a retained prompt any more: its keys and values go."""
        for prefix, retained in list(self._retained.items()):
            if not self._is_wanted(retained):
                self._free(self._retained.pop(prefix))

    def _release_retained(self) -> bool:
        for prefix, live in list(self._retained.items()):
            if not any(running.donor is live for running in self._running):
                del self._retained[prefix]
                self._free(live)
                return True
        return False

    def _free(self, live: Live) -> None:
        if live.row is not None:
            self._kv.free(live.row)
        live.row, live.num_cached = None, 0
        if self._donors.get(live.prefix) is live:
            del self._donors[live.prefix]
            if (heir := self._heir(live)) is not None:
                self._donors[live.prefix] = heir

    def _make_room(self, live: Live) -> None:
        """Grow `live` by a token; while memory is full the youngest is preempted, which may be `live` itself."""
        while live.row is not None and not self._kv.grow(live.row, live.num_cached + 1):
            if not self._release_retained():
                self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        """Take the youngest sequence's memory; it waits at the front, keeping every token it has."""
        victim = self._running.pop()
        self._num_preempted += 1
        self._num_recomputed += victim.num_cached
        self._free(victim)
        victim.donor = None
        self._waiting.appendleft(victim)
        if victim.fresh:
            self._waiting_prefixes[victim.prefix] += 1

    # Prefill

    def _prefill(self) -> None:
        budget = self.section.prefill_chunk
        pending = [live for live in self._running if live.donor is None and not live.decodable]
        chosen: list[tuple[Live, int]] = []
        for live in pending:
            if budget <= 0:
                break
            length = self._chunk_length(live, budget)
            budget -= length
            chosen.append((live, length))
        # Alone, a chunk's arithmetic depends on nothing but itself; packed, it is faster.
        batches = [[item] for item in chosen] if self.deterministic else [chosen] if chosen else []
        for batch in batches:
            self._prefill_batch(batch)

    def _chunk_length(self, live: Live, budget: int) -> int:
        """Fixed chunks of the prompt alone in deterministic mode, so that whoever forks it gets the same numbers."""
        stop = live.num_tokens - 1
        if not self.deterministic:
            return min(budget, stop - live.num_cached)
        if live.num_cached < live.num_prompt - 1:
            stop = live.num_prompt - 1
        return min(self.section.prefill_chunk, stop - live.num_cached)

    def _prefill_batch(self, batch: list[tuple[Live, int]]) -> None:
        rows = [live.row for live, _ in batch if live.row is not None]
        starts, lengths = [live.num_cached for live, _ in batch], [length for _, length in batch]
        tokens = np.concatenate([live.tokens[live.num_cached : live.num_cached + length] for live, length in batch])
        self._forward_chunk(tokens, rows, starts, lengths)
        for live, length in batch:
            live.num_cached += length
            self._num_prefilled += length

    def _forward_chunk(self, tokens: Ints, rows: list[Row], starts: list[int], lengths: list[int]) -> Tensor:
        positions = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        attention = PrefillAttention(self._kv, rows, starts, lengths, self._operations)
        return self._decoder.hidden_states(torch.from_numpy(tokens).long(), torch.cat(positions), attention)

    def _fork(self) -> None:
        for live in self._running:
            if live.donor is None:
                continue
            if live.donor.row is None or live.donor.kv_version != self.version:
                live.donor = None
                self._find_donor(live)
            wanted = live.num_prompt - 1
            if live.donor is not None and live.donor.row is not None and live.donor.num_cached >= wanted:
                assert live.row is not None
                self._kv.copy(live.donor.row, live.row, wanted)
                live.num_cached, live.donor = wanted, None
        self._drop_unwanted()

    # Decode

    def _decode(self) -> None:
        ready = [live for live in self._running if live.donor is None and live.decodable]
        for live in ready:
            self._make_room(live)
        ready = [live for live in ready if live.row is not None]
        if not ready:
            return
        rows = [live.row for live in ready if live.row is not None]
        ready = [ready[i] for i in decode_order(rows)]
        tokens, logprobs = self._decode_batch(ready)
        for live, token, logprob in zip(ready, tokens, logprobs, strict=True):
            if live.up_to_date:
                self._take_token(live, token, logprob)
            else:
                live.num_cached += 1
        self._running = [live for live in self._running if live.row is not None]

    def _decode_batch(self, ready: list[Live]) -> tuple[list[int], list[float]]:
        positions = [live.num_cached for live in ready]
        # Padded to a fixed number of rows, matrix products give a row the same result whoever shares the batch.
        num_rows = self.section.max_num_seqs if self.deterministic else len(ready)
        padding = [0] * (num_rows - len(ready))
        rows = [live.row for live in ready if live.row is not None]
        attention = self._decode_attention(rows, positions)
        last = [int(live.tokens[position]) for live, position in zip(ready, positions, strict=True)]
        hidden = self._decoder.hidden_states(torch.tensor(last + padding), torch.tensor(positions + padding), attention)
        logits = self._decoder.head.logits(hidden)[: len(ready)]
        draws = uniforms(
            np.array([live.counter for live in ready], np.uint64),
            np.array([live.num_tokens - live.num_prompt for live in ready], np.uint64),
        )
        tokens, logprobs = sample(logits, [live.request.sampling for live in ready], draws)
        return tokens.tolist(), logprobs.tolist()

    def _decode_attention(self, rows: list[Row], positions: list[int]) -> CachedAttention:
        if isinstance(self._operations, native.NativeOperations):
            return native.NativeDecodeAttention(self._kv, rows, positions, self._operations)
        return DecodeAttention(self._kv, rows, positions, self._operations, fixed_shapes=self.deterministic)

    def _take_token(self, live: Live, token: int, logprob: float) -> None:
        live.append(token, logprob, self.version)
        if live.request.key.stream == "train":
            self._num_generated += 1
        stop = self._stop_reason(live, token)
        if stop is not None:
            self._finish(live, stop)
        elif live.num_tokens - live.num_sent >= self.section.chunk_tokens:
            self._outbox.append((str(live.request.key), live.chunk()))

    def _stop_reason(self, live: Live, token: int) -> StopReason | None:
        sampling = live.request.sampling
        if token in sampling.stop_tokens:
            return StopReason.STOP
        if sampling.stop_strings and self._ends_with_stop_string(live):
            return StopReason.STOP
        if live.num_tokens - live.num_prompt >= sampling.max_tokens:
            return StopReason.LENGTH
        return StopReason.CONTEXT if live.num_tokens >= self.max_context else None

    def _ends_with_stop_string(self, live: Live) -> bool:
        # A stop string of n characters lies within the last n tokens plus a few that share its first character.
        longest = max(len(text) for text in live.request.sampling.stop_strings)
        first = max(live.num_prompt, live.num_tokens - longest - 4)
        tail = self._decode_text(live.tokens[first : live.num_tokens].tolist())
        return any(text in tail for text in live.request.sampling.stop_strings)

    def _finish(self, live: Live, stop: StopReason) -> None:
        """Release the sequence, leaving its prompt's keys and values behind while others wait to fork them."""
        name = str(live.request.key)
        if live.num_tokens > live.num_sent:
            self._outbox.append((name, live.chunk()))
        self._outbox.append((name, live.completion(stop)))
        if self._donors.get(live.prefix) is live and self._is_wanted(live) and self._heir(live) is None:
            self._retain(live)
        self._free(live)

    def _retain(self, live: Live) -> None:
        retained = Live(live.request, self.max_context)
        retained.row, live.row = live.row, None
        retained.kv_version, retained.num_cached = live.kv_version, live.num_prompt - 1
        self._donors[live.prefix] = self._retained[live.prefix] = retained
        for running in self._running:
            if running.donor is live:
                running.donor = retained

    def _is_wanted(self, live: Live) -> bool:
        waited_for = bool(self._waiting_prefixes[live.prefix]) or any(r.donor is live for r in self._running)
        return waited_for and live.kv_version == self.version and live.num_cached >= live.num_prompt - 1

    def _heir(self, live: Live) -> "Live | None":
        """Another running sequence that has the same prompt under the live version."""
        wanted = live.num_prompt - 1
        for other in self._running:
            settled = other.row is not None and other.donor is None and other.kv_version == self.version
            if settled and other is not live and other.prefix == live.prefix and other.num_cached >= wanted:
                return other
        return None

    # Weights

    def stage(self, update: WeightUpdate) -> None:
        if update.version <= self.version and not (update.version == 0 == self.version):
            raise InvariantBroken(
                f"version {update.version} cannot follow version {self.version}: versions never go back"
            )
        self._weights.stage(update)

    def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        """Make the staged weights live. Runs between two steps, so that no token straddles two versions."""
        if self._weights.staged_version != version:
            raise InvariantBroken(f"version {version} was not staged; staged is {self._weights.staged_version}")
        started = time.perf_counter()
        prints = self._weights.swap()
        self.version = version
        num_recomputed = self._renew_kv(kv)
        return SwapReport(
            version=version,
            fingerprints=prints,
            pause_ms=(time.perf_counter() - started) * 1e3,
            num_interrupted=sum(not live.fresh for live in self._running),
            num_recomputed=num_recomputed,
        )

    def _renew_kv(self, kv: KvPolicy) -> int:
        """Forget keys and values the new weights may not use: all of them, or only those still being computed."""
        for prefix in list(self._retained):
            self._free(self._retained.pop(prefix))
        self._donors.clear()
        num_forgotten = 0
        for live in self._running:
            if kv == "recompute" or live.fresh or not live.decodable:
                num_forgotten += live.num_cached
                live.num_cached, live.kv_version = 0, self.version
                live.donor = None
                self._find_donor(live)
        self._num_recomputed += num_forgotten
        return num_forgotten

    # Scoring

    @torch.inference_mode()
    def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return Scores(self.version, tuple(self._score_one(tokens, temperature) for tokens in sequences))

    def _score_one(self, tokens: Ints, temperature: float) -> Floats:
        """Teacher forcing through the same memory and the same prefill that generation uses."""
        self._check("a sequence to score", tokens)
        if len(tokens) < 2:
            return np.zeros(len(tokens), np.float32)
        row = self._kv.allocate(len(tokens))
        while row is None:
            if not self._release_retained():
                self._preempt_youngest()
            row = self._kv.allocate(len(tokens))
        size = self.section.prefill_chunk
        parts = [(start, tokens[start : start + size]) for start in range(0, len(tokens), size)]
        found = [np.zeros(1, np.float32)]
        for start, part in parts:
            hidden = self._forward_chunk(part, [row], [start], [len(part)])
            targets = torch.from_numpy(tokens[start + 1 : start + len(part) + 1]).long()
            logprobs = (self._decoder.head.logits(hidden[: len(targets)]) / temperature).log_softmax(-1)
            found.append(logprobs.gather(-1, targets[:, None]).squeeze(-1).numpy())
        self._kv.free(row)
        return np.concatenate(found)
