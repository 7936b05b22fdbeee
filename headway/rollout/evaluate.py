"""Held-out measurement through the same path as training: rollout worker, engine, verifier."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headway.types import NOT_SAMPLED, Admission, Group, Prompt, Sampling


@dataclass(frozen=True)
class Evaluation:
    """Accuracy is the mean score over problems with a verdict, if any; the others are counted in `num_failed`.

    `version` and `version_last` are those of the oldest and newest token sampled for it.
    """

    accuracy: float | None
    num: int
    num_failed: int
    mean_tokens: float
    version: int
    version_last: int
    seconds: float


async def evaluate(
    run: Callable[[Admission], Awaitable[Group]],
    prompts: list[Prompt],
    sampling: Sampling,
    version: int,
    concurrency: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """One completion for each prompt, by `run`, at most `concurrency` at a time."""
    started = time.time()
    room = asyncio.Semaphore(concurrency)
    num_done = 0

    async def one(number: int, prompt: Prompt) -> Group:
        nonlocal num_done
        admission = Admission(number, prompt, 1, 0, version, sampling, f"eval@{version}")
        async with room:
            group = await run(admission)
        num_done += 1
        progress(num_done, len(prompts))
        return group

    groups = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sampled = [s.versions[s.versions != NOT_SAMPLED] for t in trajectories for s in t.sequences if s.num_sampled]
    num = len(trajectories)
    return Evaluation(
        accuracy=sum(trajectory.reward for trajectory in trajectories) / num if num else None,
        num=num,
        num_failed=len(prompts) - num,
        mean_tokens=sum(trajectory.num_sampled for trajectory in trajectories) / max(1, num),
        version=min((int(versions.min()) for versions in sampled), default=version),
        version_last=max((int(versions.max()) for versions in sampled), default=version),
        seconds=time.time() - started,
    )
