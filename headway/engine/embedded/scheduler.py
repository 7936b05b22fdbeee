"""The embedded engine's core: continuous batching over one model, one `step` at a time. No asyncio in here.

Each step admits waiting requests while sequences and memory allow, computes prompt keys and values (about
`prefill_chunk` tokens), then decodes every sequence whose keys and values are complete. A sequence always decodes from
its last token, so a fresh prompt, a forked prompt, an interrupted and a preempted sequence all look alike: what is
missing is prefilled, the rest is decode. Which device does the arithmetic is the executor's business.

Invariants that live here:
  3. The engine stamps versions: a token is stamped with the version whose weights sampled it, as it is sampled.
  5. Interruption is transparent when the weights did not change: under `keep` nothing about a running sequence
     changes at a swap.
  9. Explicit stop reasons travel with the completion.
"""

import time
from collections import Counter, defaultdict, deque

import numpy as np
import torch
from transformers import PreTrainedModel

from headway.config import EngineSection
from headway.engine.completion import DecodeText, check_request, check_tokens
from headway.engine.embedded.cpu import CpuExecutor
from headway.engine.embedded.sequence import Executor, Row, RunningSequence
from headway.engine.embedded.step_interval import Pace
from headway.engine.protocol import KvPolicy
from headway.errors import InvariantBroken
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

_FEW_STEPS = 8
"""Tokens sampled between two chunks of prompts: running sequences go on, and a batch still fills up fast."""
_LOOKS_AHEAD = 2
"""What is begun leaves room for the tokens of so many looks to come: memory filled to the brim preempts at each."""


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
        self._waiting: deque[RunningSequence] = deque()
        self._waiting_prefixes: Counter[bytes] = Counter()
        self._running: list[RunningSequence] = []
        self._families: defaultdict[bytes, list[RunningSequence]] = defaultdict(list)  # those running, by their prompt
        self._donors: dict[bytes, RunningSequence] = {}
        self._retained: dict[bytes, RunningSequence] = {}
        self._outbox: list[Output] = []
        self._num_generated = self._num_prefilled = self._num_recomputed = self._num_preempted = 0
        self._busy_s = 0.0
        self._pace = Pace(max_context, measures=not deterministic)
        self._proof_is_due = False

    @property
    def has_work(self) -> bool:
        admits = bool(self._waiting) and not (self._draining and self._waiting[0].fresh)
        return bool(self._running or self._outbox) or admits

    @property
    def is_idle(self) -> bool:
        """Nothing is under way: no sequence runs, and none that was preempted waits to go on."""
        return not self._running and all(live.fresh for live in self._waiting)

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
            kv_used=self._memory.num_used,
            kv_total=self._memory.num_tokens,
        )

    def submit(self, request: Request) -> None:
        check_request(request, self.max_context, self.model.config.vocab_size)
        live = RunningSequence(request, self.max_context, self._decode_text)
        if live.stop is not None:
            self._outbox.append((live.name, live.completion()))
            return
        if not live.fresh or (request.urgent and not self._draining):
            self._waiting.appendleft(live)
        else:
            self._waiting.append(live)
        if live.fresh:
            self._waiting_prefixes[live.prefix] += 1

    def abort(self, key: RequestKey) -> None:
        name = str(key)
        for live in [*self._running, *self._waiting]:
            if live.name == name:
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
            if self._draining and live.fresh:
                return
            # Prefilled, what was sampled would differ in its last bits; a replay takes the very steps it took before.
            replays = self.deterministic and not live.fresh
            live.donor = self._donor(live) if live.fresh else None
            num_tokens = (live.num_prompt if replays else live.num_tokens) + 1
            if not self._has_room(num_tokens):
                return
            row = self._memory.allocate(num_tokens, *self._forked(live))
            if row is None:
                if not self._release_retained():
                    return
                continue
            self._waiting.popleft()
            live.row, live.num_cached, live.kv_version, live.replays = row, 0, self.version, replays
            if live.fresh:
                self._donors.setdefault(live.prefix, live)
                self._forget_waiting(live)
            self._running.append(live)
            self._families[live.prefix].append(live)

    def _has_room(self, num_tokens: int) -> bool:
        """That none of those running has to go again at once to make room for the others' next tokens."""
        coming = len(self._running) * self._num_steps(len(self._running) + 1) * _LOOKS_AHEAD
        return not self._running or self._memory.num_used + num_tokens + coming <= self._memory.num_tokens

    def _donor(self, live: RunningSequence) -> RunningSequence | None:
        """The sequence whose prompt can be forked: the same prompt, under the live version."""
        donor = self._donors.get(live.prefix)
        if donor is not None and donor.row is not None and donor.kv_version == self.version:
            return donor
        self._donors.pop(live.prefix, None)
        return None

    @staticmethod
    def _forked(live: RunningSequence) -> tuple[Row, int]:
        """What of another row this one is going to share: its donor's, up to the prompt's last token."""
        return (live.donor.row, live.num_prompt - 1) if live.donor else (None, 0)

    def _forget_waiting(self, live: RunningSequence) -> None:
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
            if not self._is_awaited(live):
                del self._retained[prefix]
                self._free(live)
                return True
        return False

    def _is_awaited(self, donor: RunningSequence) -> bool:
        return any(live.donor is donor for live in self._families.get(donor.prefix, ()))

    def _free(self, live: RunningSequence) -> None:
        if live.row is not None:
            self._memory.free(live.row)
        live.row, live.num_cached = None, 0
        family = self._families.get(live.prefix, [])
        if live in family:
            family.remove(live)
        if not family:
            self._families.pop(live.prefix, None)
        if self._donors.get(live.prefix) is live:
            del self._donors[live.prefix]
            if (heir := self._heir(live)) is not None:
                self._donors[live.prefix] = heir

    def _make_room(self, live: RunningSequence, num_steps: int) -> None:
        """Room for the coming tokens; while memory is full the youngest is preempted, which may be `live` itself."""
        wanted = live.num_cached + min(num_steps, live.limit - live.num_tokens + 1)
        while live.row is not None and not self._memory.grow(live.row, wanted):
            if not self._release_retained():
                self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        """Take the youngest sequence's memory; it waits at the front, keeping every token it has."""
        victim = self._running.pop()
        self._num_preempted += 1
        self._num_recomputed += victim.num_cached
        self._wait_again(victim)

    def _wait_again(self, live: RunningSequence) -> None:
        self._free(live)
        live.donor = None
        self._waiting.appendleft(live)
        if live.fresh:
            self._waiting_prefixes[live.prefix] += 1

    # Prefill

    def _prefill(self) -> None:
        budget = self.section.prefill_chunk
        pending = [live for live in self._running if live.donor is None and not live.decodable]
        chosen: list[tuple[RunningSequence, int]] = []
        for live in pending:
            if budget <= 0:
                break
            length = self._chunk_length(live, budget)
            budget -= length
            chosen.append((live, length))
        if not chosen:
            return
        self._executor.prefill(chosen)
        for live, length in chosen:
            live.num_cached += length
            self._num_prefilled += length

    def _chunk_length(self, live: RunningSequence, budget: int) -> int:
        """Fixed chunks of the prompt alone in deterministic mode, so that whoever forks it gets the same numbers."""
        stop = live.num_tokens - 1
        if not self.deterministic:
            return min(budget, stop - live.num_cached)
        if live.num_cached < live.num_prompt - 1:
            stop = live.num_prompt - 1
        return min(self.section.prefill_chunk, stop - live.num_cached)

    def _fork(self) -> None:
        for live in self._running:
            donor, wanted = live.donor, live.num_prompt - 1
            if donor is None:
                continue
            if donor.row is None or donor.kv_version != self.version:
                # Gone before it could be forked: fork another, or be the one that computes the prompt.
                live.donor = self._donor(live)
                self._donors.setdefault(live.prefix, live)
            elif donor.num_cached >= wanted:
                self._memory.copy(donor.row, live.row, wanted)
                live.num_cached, live.donor = wanted, None
        self._drop_unwanted()

    # Decode

    def _decode(self) -> None:
        started = time.perf_counter()
        ready = [live for live in self._running if live.donor is None and live.decodable]
        num_steps = self._num_steps(len(ready))
        # Others wait for their prompt's next chunk, or whoever swapped is about to ask for a score.
        if len(ready) < len(self._running) or self._proof_is_due:
            num_steps = min(num_steps, _FEW_STEPS)
        for live in ready:
            self._make_room(live, num_steps)
        ready = [live for live in ready if live.row is not None]
        if not ready:
            return
        self._proof_is_due = False
        for live, (tokens, logprobs) in zip(ready, self._executor.decode(ready, num_steps), strict=True):
            if live.up_to_date:
                self._take_tokens(live, tokens, logprobs)
            else:
                live.num_cached += 1
        self._running = [live for live in self._running if live.row is not None]
        self._pace.looked(time.perf_counter() - started, self._executor.device_s, num_steps)

    def _num_steps(self, num_rows: int) -> int:
        """Tokens between two looks."""
        return self._pace.num_steps(self._executor.num_steps(num_rows))

    def _take_tokens(self, live: RunningSequence, tokens: Ints, logprobs: Floats) -> None:
        num_new = live.extend(tokens, logprobs, self.version)
        live.num_cached = live.num_tokens - 1
        if live.request.key.stream == "train":
            self._num_generated += num_new
        if live.stop is not None:
            self._finish(live, live.stop)
        elif live.num_tokens - live.num_sent >= self.section.tokens_per_chunk:
            self._outbox.append((live.name, live.take_chunk()))

    def _finish(self, live: RunningSequence, stop: StopReason) -> None:
        """Release the sequence, leaving its prompt's keys and values behind while others wait to fork them."""
        if live.num_tokens > live.num_sent:
            self._outbox.append((live.name, live.take_chunk()))
        self._outbox.append((live.name, live.completion(stop)))
        if stop != StopReason.ABORTED:
            self._pace.ended(live.num_sampled)
        if self._donors.get(live.prefix) is live and self._is_wanted(live) and self._heir(live) is None:
            self._retain(live)
        self._free(live)

    def _retain(self, live: RunningSequence) -> None:
        retained = RunningSequence(live.request, self.max_context)
        retained.row, live.row = live.row, None
        self._memory.shrink(retained.row, live.num_prompt - 1)
        retained.kv_version, retained.num_cached = live.kv_version, live.num_prompt - 1
        self._donors[live.prefix] = self._retained[live.prefix] = retained
        for other in self._families[live.prefix]:
            if other.donor is live:
                other.donor = retained

    def _is_wanted(self, live: RunningSequence) -> bool:
        waited_for = self._waiting_prefixes.get(live.prefix) or self._is_awaited(live)
        return bool(waited_for) and live.kv_version == self.version and live.num_cached >= live.num_prompt - 1

    def _heir(self, live: RunningSequence) -> "RunningSequence | None":
        """Another running sequence that has the same prompt under the live version."""
        wanted = live.num_prompt - 1
        for other in self._families.get(live.prefix, ()):
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
        self._executor.stage(update)

    def drain(self) -> None:
        """Until the next swap, begin nothing new; what is under way, preempted sequences too, goes on."""
        self._draining = True
        self._waiting = deque(sorted(self._waiting, key=lambda live: live.fresh))

    def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        """Make the staged weights live. Runs between two steps, so that no token straddles two versions."""
        if self._executor.staged_version != version:
            raise InvariantBroken(f"version {version} was not staged; staged is {self._executor.staged_version}")
        started = time.perf_counter()
        prints = self._executor.swap()
        self.version, self._draining, self._proof_is_due = version, False, True
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
        for live in list(self._running):
            if kv == "recompute" or live.fresh or not live.decodable:
                num_forgotten += live.num_cached
                live.num_cached, live.kv_version, live.donor = 0, self.version, self._donor(live)
                if self._memory.renew(live.row, *self._forked(live)):
                    self._donors.setdefault(live.prefix, live)
                else:
                    self._running.remove(live)
                    self._wait_again(live)
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
        row = self._memory.allocate(len(tokens))
        while row is None:
            if not self._release_retained():
                self._preempt_youngest()
            row = self._memory.allocate(len(tokens))
        scores = self._executor.score(tokens, row, temperature)
        self._memory.free(row)
        return scores
