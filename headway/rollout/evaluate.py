"""Held-out measurement through the same path as training: rollout worker, engine, verifier.

A problem is solved by a completion that scores 1 or more. pass@k is the unbiased estimate 1 − C(n−c, k)/C(n, k) of the
chance that one of k completions solves it, from n completions of which c do; accuracy is the mean score. Intervals
are 95%: Wilson's where every problem's mean is 0 or 1 or all are the same, otherwise normal over problems.
"""

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from headway.model.tokenizer import decode
from headway.types import EXCEEDED, UNSCORED, Admission, Group, Prompt, Sampling

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

_Z = 1.959964
SOLVED = 1.0
_UNGIVEN = {EXCEEDED, UNSCORED}


@dataclass(frozen=True)
class Evaluation:
    """One task's figures: accuracy is the mean score over problems with a verdict, if any; the others are counted in
    `num_failed`. `interval` is that of the accuracy, `pass_at` has an estimate for each k."""

    accuracy: float | None
    num: int
    num_failed: int
    mean_tokens: float
    version: int
    version_last: int
    seconds: float
    source: str = ""
    interval: tuple[float, float] | None = None
    pass_at: tuple[tuple[int, float], ...] = ()
    truncated: float = 0.0  # the share of completions cut off by a limit
    tasks: "tuple[Evaluation, ...]" = ()  # of several tasks: each one's

    def summary(self) -> dict[str, Any]:
        """What an event tells of it beyond the first figures."""
        return {
            "interval": self.interval,
            "pass_at": {str(k): value for k, value in self.pass_at},
            "tasks": {task.source: task.accuracy for task in self.tasks},
            "intervals": {task.source: task.interval for task in self.tasks},
        }


def pass_at_k(num: int, num_solved: int, k: int) -> float:
    """The unbiased estimate for one problem of `num` completions, of which `num_solved` are right."""
    if k > num:
        raise ValueError(f"pass@{k} cannot be estimated from {num} completions")
    return 1.0 - math.prod((num - num_solved - i) / (num - i) for i in range(k)) if num_solved else 0.0


def wilson(share: float, num: int) -> tuple[float, float]:
    """The 95% interval of a share of `num` trials; it stays within 0 and 1 and is not empty at them."""
    centre = (share + _Z**2 / (2 * num)) / (1 + _Z**2 / num)
    half = _Z / (1 + _Z**2 / num) * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def interval_of(scores: list[list[float]]) -> tuple[float, float] | None:
    """The 95% interval of the mean score, problems being drawn and each one's completions with them."""
    means = [fmean(of_one) for of_one in scores]
    if not means:
        return None
    are_shares = min(means) >= 0.0 and max(means) <= 1.0
    alike = are_shares and len({*means}) == 1
    if alike or {*means} <= {0.0, 1.0}:  # also of several completions each: all alike, they would seem certain
        return wilson(fmean(means), len(means))
    half = _Z * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    low, high = fmean(means) - half, fmean(means) + half
    return (max(0.0, low), min(1.0, high)) if are_shares else (low, high)


async def evaluate(
    run: Callable[[Admission], Awaitable[Group]],
    prompts: list[Prompt],
    sampling: Sampling,
    version: int,
    concurrency: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    samples: int = 1,
    pass_at: Iterable[int] = (1,),
    on_group: Callable[[Prompt, Group], None] = lambda prompt, group: None,
) -> Evaluation:
    """`samples` completions of each prompt, by `run`, at most `concurrency` at a time."""
    started = time.monotonic()
    room = asyncio.Semaphore(max(1, concurrency // samples))
    num_done = 0

    async def one(number: int, prompt: Prompt) -> Group:
        nonlocal num_done
        admission = Admission(number, prompt, samples, 0, version, sampling, f"eval@{version}")
        async with room:
            group = await run(admission)
        num_done += 1
        on_group(prompt, group)
        progress(num_done, len(prompts))
        return group

    groups = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    settled = version, tuple(pass_at), time.monotonic() - started
    sources = dict.fromkeys(prompt.source for prompt in prompts)
    by_source = {source: [group for group in groups if group.source == source] for source in sources}
    tasks = [_figures(own, source, *settled) for source, own in by_source.items()] if len(sources) > 1 else []
    return replace(_figures(list(groups), "", *settled), tasks=tuple(tasks))


def _figures(groups: list[Group], source: str, version: int, ks: tuple[int, ...], seconds: float) -> Evaluation:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [[t.reward for t in group.trajectories] for group in groups if group.trajectories]
    versions = [int(s.versions.max()) for t in trajectories for s in t.sequences if s.num_sampled]
    stops = [stop for trajectory in trajectories for stop in trajectory.stops]
    return Evaluation(
        accuracy=fmean(map(fmean, scores)) if scores else None,
        num=len(scores),
        num_failed=len(groups) - len(scores),
        mean_tokens=sum(trajectory.num_sampled for trajectory in trajectories) / max(1, len(trajectories)),
        version=version,
        version_last=max(versions, default=version),
        seconds=seconds,
        source=source,
        interval=interval_of(scores),
        pass_at=tuple((k, mean) for k in ks if (mean := _mean_pass_at(scores, k)) is not None),
        truncated=sum(stop.value != "stop" for stop in stops) / max(1, len(stops)),
    )


def _mean_pass_at(scores: list[list[float]], k: int) -> float | None:
    """Over the problems with at least k verdicts."""
    estimates = [pass_at_k(len(s), sum(score >= SOLVED for score in s), k) for s in scores if len(s) >= k]
    return fmean(estimates) if estimates else None


def reward_parts(groups: Iterable[Group]) -> dict[str, float]:
    """The mean reward of each task and of each named component, as metrics of a training step; and the shares of
    trajectories whose reward is 0 because the verifier gave none."""
    values = defaultdict[str, list[float]](list)
    for group in groups:
        for trajectory in group.trajectories:
            for name in _UNGIVEN:
                values[f"{name}_share"].append(float(name in trajectory.components))
            if group.source:
                values[f"reward_of/{group.source}"].append(trajectory.reward)
            for name, value in () if _UNGIVEN & trajectory.components.keys() else trajectory.components.items():
                values["/".join(filter(None, ("component", group.source, name)))].append(value)
    return {name: fmean(of_one) for name, of_one in values.items()}


def table(found: Evaluation, samples: int) -> "Table":
    """One line for each task: mean@k with its interval, pass@k, completions cut off, problems without a verdict."""
    from rich.table import Table

    listing = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    ks = [k for k, _ in found.pass_at]
    names = ("rows", f"mean@{samples}, %\n(95%)", *(f"pass@{k}" for k in ks), "tokens", "cut\noff", "no\nverdict")
    for name in ("task", *names):
        listing.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
    for row in (*found.tasks, found):
        estimates = dict(row.pass_at)
        low, high = row.interval or (math.nan, math.nan)
        mean = "unknown" if row.accuracy is None else f"{100 * row.accuracy:.1f} ({100 * low:.1f}–{100 * high:.1f})"
        listing.add_row(
            row.source or "all" if found.tasks else "held out",
            str(row.num),
            mean,
            *(f"{estimates[k]:.1%}" if k in estimates else "–" for k in ks),
            *(f"{row.mean_tokens:.0f}", f"{row.truncated:.1%}", str(row.num_failed)),
        )
    return listing


class ProblemRecords:
    """Writes a line for every problem: its row and prompt, and each completion's text, tokens, score and components."""

    def __init__(self, path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open until `close`
        self._tokenizer = tokenizer

    def write(self, prompt: Prompt, group: Group) -> None:
        completions = [
            {
                "text": "".join(decode(self._tokenizer, s.tokens[s.loss_mask == 1]) for s in trajectory.sequences),
                "tokens": [int(token) for s in trajectory.sequences for token in s.tokens[s.loss_mask == 1]],
                "score": trajectory.reward,
                "components": trajectory.components,
                "stops": [stop.value for stop in trajectory.stops],
            }
            for trajectory in group.trajectories
        ]
        failures = [failure.reason for failure in group.failures]
        line = {"task": prompt.source, "row": prompt.index, "prompt": prompt.text}
        json.dump(line | {"completions": completions, "failures": failures}, self._file, ensure_ascii=True)
        self._file.write("\n")

    def close(self) -> None:
        self._file.close()
