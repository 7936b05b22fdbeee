"""The rollout worker: runs workflows with handles to engines and the reward pool. It does not know the controller.

A group stays on one engine, where its prompt's keys and values are computed once; which one is nobody else's business,
since what a request samples does not depend on who serves it.

Invariants that live here:
  8. Groups know themselves: a trajectory that failed leaves a `Failure` in its group, with what befell it.
 10. An error is never a reward: a broken verifier or workflow costs its trajectory, and never enters a baseline.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from headway import references
from headway.engine import Engine
from headway.errors import ConfigError, DeadlineExceeded, HeadwayError, InvariantBroken, WorkerDied
from headway.reward import RewardPool
from headway.runtime import RemoteError
from headway.tokenizer import decode, load_tokenizer
from headway.types import Admission, Completion, Failure, Group, Ints, Request, RequestKey, StopReason, Trajectory
from headway.workflows import VerifierBroken, Workflow


class RolloutWorker:
    def __init__(self, engines: dict[str, Engine], rewards: RewardPool, tokenizer_path: str, workflow: str, seed: int):
        self._engines, self._rewards = engines, rewards
        self._unfinished = Counter[str]()  # trajectories on each engine
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._workflow: Workflow = _make_workflow(workflow)
        self._seed = seed

    async def run(self, admission: Admission) -> Group:
        """All trajectories of one group, at the same time and on one engine."""
        engine = self._least_loaded(admission.group)
        # Counted now, not when the tasks begin: the next group may be placed before that.
        self._unfinished[engine] += admission.size
        tasks = [asyncio.create_task(self._trajectory(admission, index, engine)) for index in range(admission.size)]
        for task in tasks:
            task.add_done_callback(lambda _: self._unfinished.subtract([engine]))
        made = await asyncio.gather(*tasks)
        return Group(
            id=admission.group,
            prompt_index=admission.prompt.index,
            eta=admission.eta,
            size=admission.size,
            trajectories=tuple(item for item in made if isinstance(item, Trajectory)),
            failures=tuple(item for item in made if isinstance(item, Failure)),
        )

    def _least_loaded(self, group: int) -> str:
        """The engine with the fewest of this worker's trajectories; among equals by turns, as groups are numbered."""
        names = list(self._engines)
        first = group % len(names)
        return min(names[first:] + names[:first], key=lambda name: self._unfinished[name])

    async def _trajectory(self, admission: Admission, index: int, engine: str) -> Trajectory | Failure:
        episode = RunningEpisode(self, admission, index, engine)
        # User code: whatever a workflow raises costs its trajectory. A dead, silent or broken worker is not its fault.
        try:
            return await self._workflow.run(episode)
        except (WorkerDied, DeadlineExceeded, InvariantBroken, RemoteError):
            raise
        except VerifierBroken as error:
            return Failure(index, f"verifier: {error}", episode.num_sampled)
        except Exception as error:
            return Failure(index, f"workflow: {type(error).__name__}: {error}", episode.num_sampled)

    async def complete(self, engine: str, request: Request) -> Completion:
        # What is not written for users is the engine's own trouble: in the same process, too, it must not pass for a
        # workflow's.
        try:
            async for item in self._engines[engine].generate(request):
                if isinstance(item, Completion):
                    return item
        except HeadwayError:
            raise
        except Exception as error:
            raise WorkerDied(f"{engine} broke at request {request.key}: {type(error).__name__}: {error}") from error
        raise WorkerDied(f"{engine} ended request {request.key} without a completion")

    async def verify(self, task: dict[str, Any], text: str) -> float:
        verdict = await self._rewards.verify(task, text)
        if verdict.error:
            raise VerifierBroken(verdict.error)
        return verdict.score


class RunningEpisode:
    """What a workflow holds while it runs; counts its calls and what they sampled."""

    def __init__(self, worker: RolloutWorker, admission: Admission, index: int, engine: str):
        self._worker, self._admission, self._engine = worker, admission, engine
        self.prompt = admission.prompt
        self.index = index
        self.temperature = admission.sampling.temperature
        self.num_sampled = 0
        self._num_calls = 0
        self._urgent = admission.stream != "train"  # an evaluation holds few places, and is over the sooner

    async def generate(self, tokens: Ints, max_tokens: int | None = None) -> Completion:
        key = RequestKey(self._admission.group, self.index, self._num_calls, self._admission.stream)
        self._num_calls += 1
        sampling = self._admission.sampling
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=min(max_tokens, sampling.max_tokens))
        request = Request(key, tokens, sampling, self._worker._seed, self._urgent)
        completion = await self._worker.complete(self._engine, request)
        self.num_sampled += len(completion.tokens)
        if completion.stop == StopReason.ABORTED:
            raise asyncio.CancelledError(f"request {key} was aborted")
        return completion

    async def verify(self, text: str) -> float:
        return await self._worker.verify(self.prompt.task, text)

    def text(self, tokens: Ints) -> str:
        return decode(self._worker._tokenizer, tokens)

    def tokens(self, text: str) -> Ints:
        return np.asarray(self._worker._tokenizer.encode(text, add_special_tokens=False), np.int32)


def check_workflow(reference: str) -> None:
    """Refuse, before anything starts, what can never be a workflow; it is made in the rollout worker only."""
    made = references.load(reference)
    if not callable(made) or (isinstance(made, type) and not asyncio.iscoroutinefunction(getattr(made, "run", None))):
        raise ConfigError(f"rollout.workflow {reference} has no coroutine `run(episode)`")


def _make_workflow(reference: str) -> Workflow:
    # User code: what its constructor raises is told as one sentence that names it.
    try:
        made = references.load(reference)()
    except Exception as error:
        raise ConfigError(f"rollout.workflow {reference} cannot be made: {type(error).__name__}: {error}") from error
    if not asyncio.iscoroutinefunction(getattr(made, "run", None)):
        raise ConfigError(f"rollout.workflow {reference} has no coroutine `run(episode)`")
    workflow: Workflow = made
    return workflow
