"""Warnings about a run that learns little or nothing, each with its remedy, from its recent training steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.record.steps import Step
from headway.types import EXCEEDED, UNSCORED

WINDOW = 10
"""Training steps that a warning looks back over."""
MIN_TRAJECTORIES = 16
TRUNCATED, ZERO_VARIANCE, FAILED = 0.5, 0.5, 0.1
COLLAPSED_ENTROPY, COLLAPSED_SHARE = 0.02, 0.1
LARGE_WEIGHT = 1000.0
FAR_FROM_ONE = 2.0
_ZEROS = (
    (EXCEEDED, "the verifier computed beyond its deadline", "raise reward.deadline_s, or make the verifier faster"),
    (UNSCORED, "the verifier failed", "repair it, or set reward.on_error = drop"),
)


@dataclass(frozen=True)
class HealthWarning:
    """A problem, the training step since which it exists, and its remedy."""

    kind: str
    since: int
    message: str


def diagnose(steps: Sequence[Step], max_tokens: int | None) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) for every problem in the last steps."""
    recent = steps[-WINDOW:]
    trajectories = sum([step.num_trajectories for step in recent])
    groups = sum([step.num_groups for step in recent])
    if trajectories < MIN_TRAJECTORIES:
        return
    span = f"of the last {len(recent)} steps"
    truncated = sum([step.num_truncated for step in recent]) / trajectories
    if truncated > TRUNCATED:
        limit = "" if max_tokens is None else f" (now {max_tokens})"
        yield (
            "truncation",
            f"{truncated:.0%} of the completions {span} were truncated: raise sampling.max_tokens{limit}, "
            "or use a prompt format in which the model stops",
        )
    flat = sum([step.num_zero_variance for step in recent])
    if flat > ZERO_VARIANCE * groups:
        yield (
            "zero variance",
            f"all rewards were equal in {flat / groups:.0%} of the groups {span}, which teach nothing: check the "
            "verifier, use prompts that the model sometimes solves, or raise rollout.group_size",
        )
    failed = sum([step.num_failed for step in recent])
    if failed > FAILED * (trajectories + failed):
        yield (
            "failures",
            f"{failed / (trajectories + failed):.0%} of the trajectories {span} failed: check the verifier and the "
            "workflow; the log's finished events name the reasons",
        )
    for name, cause, remedy in _ZEROS:
        zeros = sum([(step.event.metrics.get(f"{name}_share") or 0.0) * step.num_trajectories for step in recent])
        if zeros > FAILED * trajectories:
            yield (
                name.replace("_", " "),
                f"{zeros / trajectories:.0%} of the rewards {span} are 0 because {cause}: {remedy}",
            )
    yield from _of_policy(steps, recent, span)


def _of_policy(steps: Sequence[Step], recent: Sequence[Step], span: str) -> Iterator[tuple[str, str]]:
    last = _mean(recent, "entropy")
    first = _mean(steps[:WINDOW], "entropy") if last is not None and last < COLLAPSED_ENTROPY else None
    if last is not None and first is not None and last < COLLAPSED_SHARE * first:
        yield (
            "entropy",
            f"entropy collapsed from {first:.3g} to {last:.3g}: completions hardly differ any more; lower trainer.lr, "
            "or resume from an earlier checkpoint",
        )
    weights = [w for step in recent if (w := step.event.metrics.get("behaviour_weight_max")) is not None]
    mean = _mean(recent, "behaviour_weight_mean")
    far = mean is not None and not 1 / FAR_FROM_ONE < mean < FAR_FROM_ONE
    if (weights and max(weights) > LARGE_WEIGHT) or far:
        about = f"largest {max(weights, default=math.nan):.3g}, mean {math.nan if mean is None else mean:.3g}"
        yield (
            "importance weights",
            f"the importance weights {span} explode ({about}): lower staleness.max_staleness or trainer.lr, or cap "
            "the behaviour weight",
        )


def _mean(steps: Sequence[Step], name: str) -> float | None:
    known = [value for step in steps if (value := step.event.metrics.get(name)) is not None]
    return sum(known) / len(known) if known else None
