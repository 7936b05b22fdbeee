"""One trajectory while it is made: generates on engines, with retries, and asks the reward pool for verdicts.

The episode owns its partial completion: when an engine dies, hangs or answers invalidly, it continues on another one
from the tokens received. A new sampling parameter needs nothing here: it is a field of `types.Sampling`, which travels
with the request to `engine/`.

Invariants that live here:
  2. Conservation: a request whose engine failed continues from the tokens received, each with its own version.
 10. Errors are never rewards: a verifier that fails costs the trajectory, unless `reward.on_error` says otherwise.
 15. Bounded waits: a wait for an engine or for the reward pool has a deadline, and one request tries a bounded number
     of engines and pools.
"""

import asyncio
import time
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.config import RolloutSection
from headway.engine.completion import PartialCompletion
from headway.errors import DeadlineExceeded, HeadwayError, InvariantBroken, RequestRefused, WorkerDied, translated
from headway.model.tokenizer import decode
from headway.rollout.response_check import NonFinite, find_violation, rest_of
from headway.rollout.reward_pool import RewardPool
from headway.rollout.router import EngineSlot, Placement, Retry
from headway.rollout.workflows import LimitReached, VerifierBroken
from headway.runtime.channel import RemoteError
from headway.types import Admission, Completion, Ints, Prompt, Request, RequestKey, StopReason, Trajectory, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_FAULTS, MAX_LOST = 3, 5
"""How often engines may answer one request wrongly, or fail at requests of its group, and how often they may die or be
withdrawn under it, before its trajectory fails: a request can be what makes them fail. A group shares its prompt, so
its trajectories share the blame; other groups that were on those engines go on."""

_MAX_POOLS_TRIED = 3
"""Reward pools that may die over one text before it has no verdict: a text can be what kills them."""


class RequestFailed(HeadwayError):
    """Too many engines failed at one request."""


class RewardClient:
    """The reward pool of the moment, and the wait for the next one when it dies."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._pool: RewardPool | None = None
        self._incarnation = -1
        self._replaced = asyncio.Event()

    def replace(self, pool: RewardPool, incarnation: int) -> None:
        self._pool, self._incarnation = pool, incarnation
        self._replaced.set()
        self._replaced = asyncio.Event()

    async def verify(self, prompt: Prompt, text: str) -> Verdict:
        """The verdict on a text; it is judged again when its pool dies or the connection breaks."""
        for _ in range(_MAX_POOLS_TRIED):
            pool, incarnation = self._pool, self._incarnation
            assert pool is not None
            try:
                verdict = await pool.verify(prompt.task, text, prompt.source)
            except WorkerDied:
                await self._next_pool(pool, incarnation)
                continue
            if verdict.error:
                raise VerifierBroken(verdict.error)
            return verdict
        raise VerifierBroken(f"{_MAX_POOLS_TRIED} reward pools died while they judged one text")

    async def _next_pool(self, pool: RewardPool, dead: int) -> None:
        """Returns when a pool answers: the same one, if only the connection to it broke."""
        with translated(TimeoutError, DeadlineExceeded, f"no reward pool answered for {self._deadline_s:g} s"):
            async with asyncio.timeout(self._deadline_s):
                with suppress(WorkerDied):
                    await pool.stats()
                    return
                while self._incarnation == dead:
                    await self._replaced.wait()


@dataclass
class Context:
    """What all episodes of one rollout worker share."""

    tokenizer: "PreTrainedTokenizerBase"
    section: RolloutSection
    seed: int
    vocab_size: int
    context: int  # the longest sequence of an engine
    longest: int  # the longest sequence of the trainer
    rewards: RewardClient
    newest: int = 0  # the newest version that engines were sent
    retries: list[Retry] = field(default_factory=list)


class RunningEpisode:
    """Implements `workflows.Episode` for one trajectory; counts its calls and tokens and holds them to the limits."""

    def __init__(self, context: Context, admission: Admission, index: int, placement: Placement):
        self._context, self._admission, self._placement = context, admission, placement
        self.prompt = admission.prompt
        self.index = index
        self.temperature = admission.sampling.temperature
        self.stop_tokens = admission.sampling.stop_tokens
        self.tokenizer, self.context = context.tokenizer, context.context
        self.components: dict[str, float] = {}
        self.num_sampled = 0
        self._num_calls = self._num_faults = 0
        self._urgent = admission.stream != "train"
        self.waits_for, self.waits_since = "workflow", time.monotonic()

    def room(self, num_tokens: int) -> int:
        """How many tokens may be sampled after `num_tokens`; `LimitReached` where that is none."""
        section, sampling = self._context.section, self._admission.sampling
        if section.max_turns and self._num_calls >= section.max_turns:
            raise LimitReached(f"rollout.max_turns = {section.max_turns} completions")
        room = min(sampling.max_tokens, self._context.longest - num_tokens)
        # A context that is just full is the engine's to answer: no token, stop reason context.
        if num_tokens > self.context or room < 1:
            raise LimitReached(f"{num_tokens} tokens leave no room in engine.max_context or trainer.token_budget")
        left = section.max_episode_tokens - self.num_sampled
        if section.max_episode_tokens and left < 1:
            raise LimitReached(f"rollout.max_episode_tokens = {section.max_episode_tokens} are sampled")
        return min(room, left) if section.max_episode_tokens else room

    async def generate(
        self, tokens: Ints, max_tokens: int | None = None, stop_strings: tuple[str, ...] = ()
    ) -> Completion:
        """The whole completion, from as many engines as it takes."""
        partial = PartialCompletion(self._request(tokens, max_tokens, stop_strings))
        completion: Completion | None = None
        left: tuple[EngineSlot, float] | None = None
        num_lost, self._num_faults = 0, 0
        try:
            while completion is None:
                self._wait_for("an engine")
                slot = await self._placement.slot()
                self._check_faults(num_lost, next(reversed(self._placement.faulted), slot))
                # The limit is for training, which an evaluation preempts at the engine.
                turn: AbstractAsyncContextManager[None] = nullcontext() if self._urgent else slot.semaphore.slot()
                async with turn:
                    if not slot.serves:
                        continue
                    self._wait_for(slot.name)
                    if left is not None:
                        seconds = time.monotonic() - left[1]
                        self._context.retries.append(Retry(left[0].name, partial.num_sampled, seconds))
                    completion = await self._attempt(slot, partial)
                if completion is None:
                    left = slot, time.monotonic()
                    num_lost += not slot.leaving
                    self._check_faults(num_lost, slot)
        finally:
            self._wait_for("workflow")
        self.num_sampled += len(completion.tokens)
        if completion.stop == StopReason.ABORTED:
            raise asyncio.CancelledError(f"request {partial.request.key} was aborted")
        return completion

    def _check_faults(self, num_lost: int, last: EngineSlot) -> None:
        """Raise when enough engines have failed at this request or its group; also before it tries another one."""
        num_faults = max(self._num_faults, len(self._placement.faulted))
        if num_faults >= MAX_FAULTS or num_lost >= MAX_LOST:
            num, cause = max(num_faults, num_lost), last.fault or f"{last.name} sent a log-prob that is not finite"
            raise RequestFailed(f"engines failed {num} times at this request or its group; the last: {cause}")

    def _request(self, tokens: Ints, max_tokens: int | None, stop_strings: tuple[str, ...]) -> Request:
        room, sampling = self.room(len(tokens)), self._admission.sampling
        key = RequestKey(self._admission.group, self.index, self._num_calls, self._admission.stream)
        self._num_calls += 1
        limit = room if max_tokens is None else min(room, max_tokens)
        if limit != sampling.max_tokens or stop_strings:
            stops = (*sampling.stop_strings, *stop_strings)
            sampling = replace(sampling, max_tokens=limit, stop_strings=stops)
        return Request(key, tokens, sampling, self._context.seed, self._urgent)

    async def _attempt(self, slot: EngineSlot, partial: PartialCompletion) -> Completion | None:
        """One engine's share; None when the request has to continue elsewhere. A task: the engine may be withdrawn."""
        num_before, key = partial.num_tokens, partial.request.key
        receiving = asyncio.create_task(self._receive(slot, partial, num_before))
        slot.attempts[str(key)] = key, receiving
        try:
            await asyncio.wait({receiving})
        finally:
            receiving.cancel()
            del slot.attempts[str(key)]
        completion = None if receiving.cancelled() else receiving.result()
        if completion is None or (completion.stop == StopReason.ABORTED and not slot.serves):
            if slot.distrusted:
                partial.truncate(num_before)
            return None
        slot.nonfinite_groups.clear()
        return completion

    async def _receive(self, slot: EngineSlot, partial: PartialCompletion, num_before: int) -> Completion | None:
        key, context = partial.request.key, self._context
        # What an engine raises is the engine's fault, unless it refuses this very request.
        try:
            items: Any = slot.engine.generate(partial.remaining_request())
            async with aclosing(items):
                async for item in items:
                    violation = find_violation(partial, item, num_before, context.vocab_size, context.newest)
                    if violation:
                        self._reject(slot, partial, violation)
                        return None
                    new = rest_of(item, partial.num_sampled) if isinstance(item, Completion) else item
                    partial.extend(new.tokens, new.logprobs, new.versions)
                    if isinstance(item, Completion):
                        return item
            self._blame(slot)
            slot.withdraw(f"{slot.name} ended request {key} without a completion")
        except (RequestRefused, InvariantBroken):
            raise
        except (WorkerDied, DeadlineExceeded, RemoteError) as error:
            if isinstance(error, RemoteError):
                self._blame(slot)
            slot.withdraw(str(error))
        except Exception as error:
            self._blame(slot)
            slot.withdraw(f"{slot.name} broke at request {key}: {type(error).__name__}: {error}")
        return None

    def _blame(self, slot: EngineSlot) -> None:
        """The engine failed at this very request, not at another that it had."""
        self._num_faults += 1
        self._placement.faulted[slot] = None

    def _reject(self, slot: EngineSlot, partial: PartialCompletion, violation: str) -> None:
        self._blame(slot)
        key = partial.request.key
        reason = f"{slot.name} sent an invalid answer to request {key}: {violation}"
        if isinstance(violation, NonFinite):
            slot.nonfinite(key.group, reason)
        else:
            slot.withdraw(reason, distrusted=True)

    async def verify(self, text: str) -> float:
        self._wait_for("verifier")
        try:
            verdict = await self._context.rewards.verify(self.prompt, text)
        finally:
            self._wait_for("workflow")
        self.components = verdict.components
        return verdict.score

    def _wait_for(self, what: str) -> None:
        self.waits_for, self.waits_since = what, time.monotonic()

    def text(self, tokens: Ints) -> str:
        return decode(self.tokenizer, tokens)

    def tokens(self, text: str) -> Ints:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def checked(self, made: Any) -> Trajectory:
        """What the workflow returned, with the components of the last verdict where it names none of its own."""
        if not isinstance(made, Trajectory):
            what = "None (is a `return` missing?)" if made is None else f"a {type(made).__name__}"
            raise TypeError(f"run(episode) returned {what}, not a Trajectory")
        return made if made.components else replace(made, components=self.components)
