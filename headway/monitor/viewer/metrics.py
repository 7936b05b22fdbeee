"""The curves of the run page: each metric's title, what it is, and its value at every training step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from headway.monitor.viewer.index import RunIndex
from headway.record.events import Finished, Trained
from headway.types import StopReason

_LIMITS = (StopReason.LENGTH, StopReason.CONTEXT)

FROM_EVENT: dict[str, tuple[str, str, Callable[[Trained], float | None]]] = {
    "reward": ("Reward", "mean over the step's trajectories", lambda event: event.reward),
    "staleness_mean": ("Staleness, mean", "versions between sampling and training", lambda event: event.staleness_mean),
    "staleness_max": ("Staleness, max", "of the step's oldest token", lambda event: float(event.staleness_max)),
    "tokens_per_s": (
        "Training throughput",
        "trained tokens per second of the step",
        lambda event: event.tokens / event.seconds if event.seconds else None,
    ),
    "seconds": ("Step time", "seconds in the trainer", lambda event: event.seconds),
    "wait_s": ("Trainer wait", "seconds it waited for the batch", lambda event: event.wait_s),
}

FROM_METRICS: dict[str, tuple[str, str]] = {
    "entropy": ("Entropy", "nats per token of the current policy"),
    "kl": ("KL(proximal‖current)", "nats per token, estimated on trained tokens"),
    "behaviour_kl": ("KL(behaviour‖proximal)", "nats per token: how far staleness and engine differ"),
    "effective_sample_size": ("Effective sample size", "share of the tokens, after importance weights"),
    "capped_fraction": ("Capped tokens", "share whose importance weight was capped"),
    "clip_fraction": ("Clipped tokens", "share at the PPO clip"),
    "masked_fraction": ("Masked tokens", "share that a correction removed"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "loss": ("Loss", "of the policy"),
    "lr": ("Learning rate", ""),
    "logprob_gap_max": ("Largest log-prob gap", "engine against trainer, tokens of the same version"),
}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _length(events: list[Finished]) -> float | None:
    return _mean([length for event in events for length in event.lengths])


def _truncated(events: list[Finished]) -> float | None:
    return _mean([stop in _LIMITS for event in events for stop in event.stops if stop is not None])


def _zero_variance(events: list[Finished]) -> float | None:
    return _mean([len(set(event.rewards)) <= 1 for event in events])


def _failures(events: list[Finished]) -> float | None:
    return float(sum(len(event.failures) for event in events))


FROM_GROUPS: dict[str, tuple[str, str, Callable[[list[Finished]], float | None]]] = {
    "length": ("Completion length", "mean tokens per trajectory", _length),
    "truncated": ("Truncated", "share of completions that ended at a limit", _truncated),
    "zero_variance": ("Groups without spread", "share whose rewards are all equal: nothing to learn", _zero_variance),
    "failures": ("Failures", "trajectories without a verdict", _failures),
}

METRICS: list[dict[str, str]] = [
    *({"name": name, "title": title, "description": about} for name, (title, about, _) in FROM_EVENT.items()),
    *({"name": name, "title": title, "description": about} for name, (title, about, _) in FROM_GROUPS.items()),
    *({"name": name, "title": title, "description": about} for name, (title, about) in FROM_METRICS.items()),
]

MOST_POINTS = 4_000
"""More steps than this are thinned out: a screen has no more pixels."""


def series_of(index: RunIndex) -> dict[str, list[Any]]:
    """Columns over the training steps: step, wall_s, and every metric."""
    every = max(1, math.ceil(len(index.steps) / MOST_POINTS))
    places = range(0, len(index.steps), every)
    steps = [index.steps[place] for place in places]
    columns: dict[str, list[Any]] = {
        "step": [event.version for event in steps],
        "wall_s": [index.step_wall_s[place] for place in places],
    }
    for name, (_, _, value) in FROM_EVENT.items():
        columns[name] = [_finite(value(event)) for event in steps]
    for name in FROM_METRICS:
        if any(name in event.metrics for event in steps):
            columns[name] = [_finite(event.metrics.get(name)) for event in steps]
    groups = [[facts.finished for g in event.groups if (facts := index.groups[g]).finished] for event in steps]
    for name, (_, _, of_groups) in FROM_GROUPS.items():
        columns[name] = [_finite(of_groups([event for event in events if event])) for events in groups]
    return columns
