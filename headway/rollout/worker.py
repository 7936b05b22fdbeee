"""The rollout worker: runs workflows with handles to engines and the reward pool. It does not know the controller.

`connect` and `inform` replace what it knows of the engines; `run` makes one group; `episode.py` is one trajectory.

Invariants that live here:
  8. Group identity: a trajectory that failed leaves a `Failure` in its group, with the reason.
 10. Errors are never rewards: a broken verifier or workflow costs its trajectory, and never enters a baseline.
"""

import asyncio
import inspect
import time
from typing import Any

from headway.config import RolloutSection
from headway.engine.protocol import Engine
from headway.errors import CAUSE, KIND, ConfigError, DeadlineExceeded, InvariantBroken, WorkerDied, describe, translated
from headway.model.tokenizer import load_tokenizer
from headway.rollout.episode import Context, RequestFailed, RewardClient, RunningEpisode
from headway.rollout.reward_pool import RewardPool
from headway.rollout.router import Placement, RolloutStats, Router, Waiting
from headway.rollout.workflows import LimitReached, VerifierBroken, Workflow
from headway.runtime.channel import RemoteError
from headway.tasks import imports
from headway.tasks.scoring import takes_two
from headway.types import Admission, Failure, Group, Prompt, Trajectory

_ABORT_S = 5.0
_REFERENCE_CHARACTERS, _SHORT = 2000, 24
_WORKFLOW = "a class with `async def run(self, episode)`"


def reference_of(prompt: Prompt) -> dict[str, str]:
    """What a reader compares a completion with: the fields of the row that the prompt does not show, shortened."""
    shown = {name: str(value) for name, value in prompt.task.items()}
    return {
        name: text[:_REFERENCE_CHARACTERS] for name, text in shown.items() if text and not _is_shown(text, prompt.text)
    }


def _is_shown(text: str, prompt: str) -> bool:
    """Short texts, such as a number, may occur in a prompt by chance."""
    return text == prompt or (len(text) > _SHORT and text in prompt)


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
        """`longest` is the longest sequence that the trainer takes, `context` that of an engine.

        Call `connect` before the first group; `deadline_s` is the longest wait for an engine or a reward pool.
        """
        self._router = Router(deadline_s)
        self._section, self._workflow = section, _make_workflow(section)
        tokenizer, rewards = load_tokenizer(model_path), RewardClient(deadline_s)
        self._context = Context(tokenizer, section, seed, vocab_size, context, longest, rewards)
        self._episodes: set[RunningEpisode] = set()

    async def connect(
        self, engines: dict[str, Engine], incarnations: dict[str, int], leaving: tuple[str, ...], rewards: RewardPool
    ) -> None:
        """Replace the set of engines. Requests on removed engines are retried on others; those that are `leaving`
        return what they have sampled first."""
        self._context.rewards.replace(rewards, incarnations["reward"])
        self._router.set_engines(engines, incarnations, leaving)
        running = [(slot.engine, key) for slot in self._router.leaving for key, _ in slot.attempts.values()]
        if running:
            # One that does not answer, or dies of it, has its requests continued from what was received.
            aborts = {asyncio.ensure_future(engine.abort(key)) for engine, key in running}
            _, late = await asyncio.wait(aborts, timeout=_ABORT_S)
            for abort in late:
                abort.cancel()

    async def inform(self, newest: int, loads: dict[str, int], limits: dict[str, int]) -> None:
        """The newest version engines are sent; each engine's sequences; how many of ours it may hold."""
        self._context.newest = newest
        self._router.set_loads(loads, limits)

    async def stats(self) -> RolloutStats:
        retries, self._context.retries = tuple(self._context.retries), []
        since: dict[str, list[float]] = {}
        for episode in self._episodes:
            since.setdefault(episode.waits_for, []).append(episode.waits_since)
        now = time.monotonic()
        waiting = tuple(Waiting(what, len(times), now - min(times)) for what, times in since.items())
        return RolloutStats(self._router.faults, retries, waiting)

    async def run(self, admission: Admission) -> Group:
        """All trajectories of one group, concurrently and on one engine."""
        placement = Placement(self._router, admission.group, admission.size)
        tasks = [asyncio.create_task(self._trajectory(admission, index, placement)) for index in range(admission.size)]
        for task in tasks:
            task.add_done_callback(lambda _: placement.done())
        results = await asyncio.gather(*tasks)
        return Group(
            id=admission.group,
            prompt_index=admission.prompt.index,
            eta=admission.eta,
            size=admission.size,
            trajectories=tuple(item for item in results if isinstance(item, Trajectory)),
            failures=tuple(item for item in results if isinstance(item, Failure)),
            source=admission.prompt.source,
            reference=reference_of(admission.prompt),
        )

    async def _trajectory(self, admission: Admission, index: int, placement: Placement) -> Trajectory | Failure:
        episode = RunningEpisode(self._context, admission, index, placement)
        self._episodes.add(episode)
        limit_s = self._section.episode_deadline_s
        # User code: any exception of a workflow costs its trajectory. A dead, silent or broken worker is not its fault.
        try:
            async with asyncio.timeout(limit_s or None) as limit:
                made = await self._workflow.run(episode)
            return episode.checked(made)
        except (WorkerDied, DeadlineExceeded, InvariantBroken, RemoteError):
            raise
        except RequestFailed as error:
            return Failure(index, f"engine: {error}", episode.num_sampled)
        except VerifierBroken as error:
            return Failure(index, f"verifier: {error}", episode.num_sampled)
        except LimitReached as error:
            return Failure(index, f"limit: {error}", episode.num_sampled)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                reason = f"limit: the episode ran longer than rollout.episode_deadline_s = {limit_s:g}"
                return Failure(index, reason, episode.num_sampled)
            return Failure(index, f"workflow: {describe(error)}", episode.num_sampled)
        finally:
            self._episodes.discard(episode)


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task, and it is not that a task which it awaited was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def check_workflow(section: RolloutSection) -> None:
    """Refuse, before anything starts, what can never be a workflow; it is made in the rollout worker only."""
    reference = section.workflow
    made = imports.load(reference)
    run = getattr(made, "run", None)
    # A function may make a workflow, which is seen in the rollout worker; a class says what it makes.
    if not callable(made) or asyncio.iscoroutinefunction(made) or (isinstance(made, type) and not _is_run(run)):
        raise ConfigError(f"rollout.workflow {reference} is not {_WORKFLOW}")
    hint = "" if isinstance(made, type) else f" (a workflow is {_WORKFLOW})"
    with translated(TypeError, ConfigError, f"rollout.settings do not fit {reference}: {CAUSE}{hint}"):
        inspect.signature(made).bind(**section.settings)


def check_chat(section: RolloutSection, prompts: list[Prompt]) -> None:
    """Refuse prompts in plain text for a workflow that says `needs_chat = True`."""
    if getattr(imports.load(section.workflow), "needs_chat", False) and any(prompt.chat is None for prompt in prompts):
        raise ConfigError(f"rollout.workflow {section.workflow} needs prompts of chat messages; set task.chat = true")


def _is_run(run: Any) -> bool:
    """Whether `run` of a class can be awaited with one episode."""
    return asyncio.iscoroutinefunction(run) and takes_two(inspect.signature(run).parameters.values())


def _make_workflow(section: RolloutSection) -> Workflow:
    # User code: an exception of its constructor becomes one sentence that names it.
    reference = section.workflow
    with translated(
        Exception,
        ConfigError,
        f"rollout.workflow {reference} cannot be made: {KIND}: {CAUSE}",
    ):
        made = imports.load(reference)(**section.settings)
    if not asyncio.iscoroutinefunction(getattr(made, "run", None)):
        raise ConfigError(f"rollout.workflow {reference} is not {_WORKFLOW}")
    workflow: Workflow = made
    return workflow
