"""The rollout worker: runs workflows with handles to engines and the reward pool. It does not know the controller.

Which engine serves a request is nobody else's business, since what it samples does not depend on that. The worker keeps
every token it received: when an engine dies, falls silent or answers nonsense, the request goes on at another one.

Invariants that live here:
  2. Conservation: a request that an engine lost is continued from the tokens received, each with its own version.
  8. Group identity: a trajectory that failed leaves a `Failure` in its group, with what befell it.
 10. Errors are never rewards: a broken verifier or workflow costs its trajectory, and never enters a baseline.
 15. Bounded waits: while no engine or no reward pool is there, what needs one waits for it no longer than a deadline.
"""

import asyncio
import inspect
import sysconfig
import time
import traceback
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.config import RolloutSection
from headway.engine.protocol import Engine
from headway.errors import ConfigError, DeadlineExceeded, InvariantBroken, RequestRefused, WorkerDied
from headway.model.tokenizer import decode, load_tokenizer
from headway.rollout.response_check import Known, nonsense, rest_of
from headway.rollout.reward_pool import RewardPool
from headway.rollout.router import Continued, Placement, Post, RolloutStats, Router
from headway.rollout.workflows import LimitReached, VerifierBroken, Workflow
from headway.runtime.channel import RemoteError
from headway.tasks import imports
from headway.types import (
    Admission,
    Chunk,
    Completion,
    Failure,
    Group,
    Ints,
    Prompt,
    Request,
    RequestKey,
    StopReason,
    Trajectory,
    Verdict,
)

_NUM_POOLS_TRIED = 3
"""Reward pools that may die over one text before it has no verdict: a text can be what kills them."""

_ABORT_S = 5.0
_PACKAGE, _STANDARD_LIBRARY = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")


class RolloutWorker:
    def __init__(
        self,
        model_path: str,
        section: RolloutSection,
        seed: int,
        vocab_size: int,
        context: int,
        longest: int,
        deadline_s: float,
    ):
        """`longest` is the longest sequence that the trainer takes, `context` that of an engine. `connect` has to come
        before the first group; `deadline_s` is the longest wait for an engine or a pool."""
        self._router = Router(deadline_s)
        self._rewards: RewardPool | None = None
        self._rewards_life = -1
        self._reconnected = asyncio.Event()
        self._section, self.context, self.longest = section, context, longest
        self.tokenizer = load_tokenizer(model_path)
        self._workflow: Workflow = _make_workflow(section)
        self._seed, self._vocab_size, self._deadline_s = seed, vocab_size, deadline_s
        self._newest = 0
        self._continued: list[Continued] = []

    # What the controller tells

    async def connect(
        self, engines: dict[str, Engine], lives: dict[str, int], leaving: tuple[str, ...], rewards: RewardPool
    ) -> None:
        """Who is there from now on, and which life of each. What runs on an engine that is not goes on elsewhere;
        `leaving` ones give back what they have sampled first."""
        self._rewards, self._rewards_life = rewards, lives["reward"]
        self._router.set_engines(engines, lives, leaving)
        self._reconnected.set()
        self._reconnected = asyncio.Event()
        running = [(post.engine, key) for post in self._router.leaving for key, _ in post.attempts.values()]
        if running:
            # One that does not answer, or dies of it, has its requests continued from what was received.
            aborts = {asyncio.ensure_future(engine.abort(key)) for engine, key in running}
            _, late = await asyncio.wait(aborts, timeout=_ABORT_S)
            for abort in late:
                abort.cancel()

    async def inform(self, newest: int, loads: dict[str, int], limits: dict[str, int]) -> None:
        """The newest version engines are being given; every engine's sequences; how many of ours it may hold."""
        self._newest = newest
        self._router.set_loads(loads, limits)

    async def stats(self) -> RolloutStats:
        continued, self._continued = tuple(self._continued), []
        return RolloutStats(self._router.shunned, continued)

    # Groups

    async def run(self, admission: Admission) -> Group:
        """All trajectories of one group, at the same time and on one engine."""
        placement = Placement(self._router, admission.group, admission.size)
        tasks = [asyncio.create_task(self._trajectory(admission, index, placement)) for index in range(admission.size)]
        for task in tasks:
            task.add_done_callback(lambda _: placement.done())
        made = await asyncio.gather(*tasks)
        return Group(
            id=admission.group,
            prompt_index=admission.prompt.index,
            eta=admission.eta,
            size=admission.size,
            trajectories=tuple(item for item in made if isinstance(item, Trajectory)),
            failures=tuple(item for item in made if isinstance(item, Failure)),
            source=admission.prompt.source,
        )

    async def _trajectory(self, admission: Admission, index: int, placement: Placement) -> Trajectory | Failure:
        episode = RunningEpisode(self, admission, index, placement)
        # User code: whatever a workflow raises costs its trajectory. A dead, silent or broken worker is not its fault.
        limit_s = self._section.episode_deadline_s
        try:
            async with asyncio.timeout(limit_s or None) as limit:
                made = await self._workflow.run(episode)
            return episode.checked(made)
        except (WorkerDied, DeadlineExceeded, InvariantBroken, RemoteError):
            raise
        except VerifierBroken as error:
            return Failure(index, f"verifier: {error}", episode.num_sampled)
        except LimitReached as error:
            return Failure(index, f"limit: {error}", episode.num_sampled)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                reason = f"limit: the episode ran longer than rollout.episode_deadline_s = {limit_s:g}"
                return Failure(index, reason, episode.num_sampled)
            return Failure(index, f"workflow: {_describe(error)}", episode.num_sampled)

    async def complete(self, placement: Placement, request: Request) -> Completion:
        """The whole completion, from as many engines as it takes."""
        asking = Asking(request, self._vocab_size)
        lost: tuple[Post, float] | None = None
        while True:
            post = await placement.post()
            async with post.gate.passed(request.urgent):
                if not post.serves:
                    continue
                if lost is not None:
                    self._continued.append(Continued(lost[0].name, asking.num_tokens, time.monotonic() - lost[1]))
                completion = await self._attempt(post, asking)
            if completion is not None:
                return completion
            lost = post, time.monotonic()

    async def _attempt(self, post: Post, asking: "Asking") -> Completion | None:
        """One engine's part; None when the request has to go on elsewhere. A task: the engine may be withdrawn."""
        attempt = asyncio.create_task(self._ask(post, asking))
        name = str(asking.request.key)
        post.attempts[name] = asking.request.key, attempt
        try:
            await asyncio.wait({attempt})
        finally:
            attempt.cancel()
            del post.attempts[name]
        if attempt.cancelled():
            asking.give_up(post.distrusted)
            return None
        completion = attempt.result()
        if completion is None or (completion.stop == StopReason.ABORTED and not post.serves):
            asking.give_up(post.distrusted)
            return None
        return completion

    async def _ask(self, post: Post, asking: "Asking") -> Completion | None:
        # What an engine raises is its own trouble, unless it refuses this very request.
        try:
            items: Any = post.engine.generate(asking.begin())
            async with aclosing(items):
                async for item in items:
                    if wrong := asking.take(item, self._newest):
                        key = asking.request.key
                        post.withdraw(f"{post.name} answered nonsense at request {key}: {wrong}", distrusted=True)
                        return None
                    if isinstance(item, Completion):
                        return item
            post.withdraw(f"{post.name} ended request {asking.request.key} without a completion")
        except (RequestRefused, InvariantBroken):
            raise
        except (WorkerDied, DeadlineExceeded, RemoteError) as error:
            post.withdraw(str(error))
        except Exception as error:
            sentence = f"{post.name} broke at request {asking.request.key}: {type(error).__name__}: {error}"
            post.withdraw(sentence)
        return None

    # Verdicts

    async def verify(self, prompt: Prompt, text: str) -> Verdict:
        """A pool that dies, or a connection to it that breaks, costs this text another try."""
        for _ in range(_NUM_POOLS_TRIED):
            pool, life = self._rewards, self._rewards_life
            assert pool is not None
            try:
                verdict = await pool.verify(prompt.task, text, prompt.source)
            except WorkerDied:
                await self._next_pool(pool, life)
                continue
            if verdict.error:
                raise VerifierBroken(verdict.error)
            return verdict
        raise VerifierBroken(f"{_NUM_POOLS_TRIED} reward pools ended while they judged one text")

    async def _next_pool(self, pool: RewardPool, dead_life: int) -> None:
        """Returns when there is a pool: the same one, if only the connection to it broke."""
        try:
            async with asyncio.timeout(self._deadline_s):
                with suppress(WorkerDied):
                    await pool.stats()
                    return
                while self._rewards_life == dead_life:
                    await self._reconnected.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"no reward pool was there for {self._deadline_s:g} s") from None


class Asking:
    """A request on its way through engines: what was received of it, and which part came from the present one."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.request, self._vocab_size = request, vocab_size
        self._before = Chunk.join([])
        self._here: list[Chunk] = []
        self.num_tokens = 0

    def begin(self) -> Request:
        """The request as the next engine is to get it."""
        return replace(self.request, sampled=self._before) if len(self._before.tokens) else self.request

    def take(self, item: Chunk | Completion, newest: int) -> str:
        """Keep what an engine sent; or say why it cannot be true, and keep nothing."""
        last_version = int(self._here[-1].versions[-1]) if self._here else 0
        known = Known([self._before, *self._here], self.num_tokens, last_version)
        if wrong := nonsense(self.request, known, item, self._vocab_size, newest):
            return wrong
        new = rest_of(item, self.num_tokens) if isinstance(item, Completion) else item
        if len(new.tokens):
            self._here.append(new)
            self.num_tokens += len(new.tokens)
        return ""

    def give_up(self, distrusted: bool) -> None:
        """The present engine is lost: what it sampled is kept, unless it cannot be trusted."""
        if not distrusted:
            self._before = Chunk.join([self._before, *self._here])
        self._here, self.num_tokens = [], len(self._before.tokens)


class RunningEpisode:
    """What a workflow holds while it runs; counts its calls and what they sampled, and holds them to the limits."""

    def __init__(self, worker: RolloutWorker, admission: Admission, index: int, placement: Placement):
        self._worker, self._admission, self._placement = worker, admission, placement
        self.prompt = admission.prompt
        self.index = index
        self.temperature = admission.sampling.temperature
        self.stop_tokens = admission.sampling.stop_tokens
        self.tokenizer, self.context = worker.tokenizer, worker.context
        self.components: dict[str, float] = {}
        self.num_sampled = 0
        self._num_calls = 0
        self._urgent = admission.stream != "train"  # an evaluation holds few places, and is over the sooner

    def room(self, num_tokens: int) -> int:
        """How many tokens may be sampled after so many; `LimitReached` where that is none."""
        section, sampling = self._worker._section, self._admission.sampling
        if section.max_turns and self._num_calls >= section.max_turns:
            raise LimitReached(f"rollout.max_turns = {section.max_turns} completions")
        room = min(sampling.max_tokens, self._worker.longest - num_tokens)
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
        room = self.room(len(tokens))
        key = RequestKey(self._admission.group, self.index, self._num_calls, self._admission.stream)
        self._num_calls += 1
        sampling = self._admission.sampling
        limit = room if max_tokens is None else min(room, max_tokens)
        if limit != sampling.max_tokens or stop_strings:
            stops = (*sampling.stop_strings, *stop_strings)
            sampling = replace(sampling, max_tokens=limit, stop_strings=stops)
        request = Request(key, tokens, sampling, self._worker._seed, self._urgent)
        completion = await self._worker.complete(self._placement, request)
        self.num_sampled += len(completion.tokens)
        if completion.stop == StopReason.ABORTED:
            raise asyncio.CancelledError(f"request {key} was aborted")
        return completion

    async def verify(self, text: str) -> float:
        verdict = await self._worker.verify(self.prompt, text)
        self.components = verdict.components
        return verdict.score

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


def _describe(error: Exception) -> str:
    """What was raised, and the last line of the user's own code on the way there."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_PACKAGE) and not frame.filename.startswith(_STANDARD_LIBRARY)
    ]
    where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{where}: {error}"


def check_workflow(section: RolloutSection) -> None:
    """Refuse, before anything starts, what can never be a workflow; it is made in the rollout worker only."""
    reference = section.workflow
    made = imports.load(reference)
    if not callable(made) or (isinstance(made, type) and not asyncio.iscoroutinefunction(getattr(made, "run", None))):
        raise ConfigError(f"rollout.workflow {reference} has no coroutine `run(episode)`")
    try:
        inspect.signature(made).bind(**section.settings)
    except TypeError as error:
        raise ConfigError(f"rollout.settings do not fit {reference}: {error}") from None


def _make_workflow(section: RolloutSection) -> Workflow:
    # User code: what its constructor raises is told as one sentence that names it.
    reference = section.workflow
    try:
        made = imports.load(reference)(**section.settings)
    except Exception as error:
        raise ConfigError(f"rollout.workflow {reference} cannot be made: {type(error).__name__}: {error}") from error
    if not asyncio.iscoroutinefunction(getattr(made, "run", None)):
        raise ConfigError(f"rollout.workflow {reference} has no coroutine `run(episode)`")
    workflow: Workflow = made
    return workflow
