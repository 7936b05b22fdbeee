"""The curves of the run page: each metric's section, title, unit and meaning, and its value at every training step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from headway.monitor.viewer.index import RunIndex
from headway.record.events import Finished, Trained
from headway.types import StopReason

_LIMITS = (StopReason.LENGTH, StopReason.CONTEXT)

METRICS: list[dict[str, str]] = [
    {"name": name, "section": section, "title": title, "unit": unit, "description": about}
    for section, metrics in {
        "Learning": [
            ("reward", "Reward", "", "mean over the step's trajectories"),
            ("zero_variance", "Groups without spread", "%", "all rewards equal: nothing to learn"),
            ("length", "Completion length", "", "mean tokens per trajectory"),
            ("truncated", "Truncated", "%", "completions that ended at a limit"),
            ("entropy", "Entropy", "", "nats per token of the current policy"),
            ("loss", "Loss", "", "of the policy"),
            ("grad_norm", "Gradient norm", "", "before clipping"),
            ("lr", "Learning rate", "", ""),
        ],
        "Off-policy": [
            ("staleness_mean", "Staleness, mean", "", "versions from oldest token to training"),
            ("staleness_max", "Staleness, max", "", "of the step's oldest token"),
            ("kl", "KL(proximal‖current)", "", "nats per trained token, estimated"),
            ("behaviour_kl", "KL(behaviour‖proximal)", "", "nats per token, by staleness and engine"),
            ("effective_sample_size", "Effective sample size", "%", "of the tokens, after importance weights"),
            ("capped_fraction", "Capped tokens", "%", "importance weight over the cap"),
            ("clip_fraction", "Clipped tokens", "%", "at the PPO clip"),
            ("masked", "Masked tokens", "%", "removed by the algorithm's masks"),
            ("logprob_gap_max", "Largest log-prob gap", "", "engine to trainer, same version"),
        ],
        "Speed and failures": [
            ("tokens_per_s", "Training throughput", "", "trained tokens per second of the step"),
            ("generated_per_s", "Generation throughput", "", "sampled tokens per second, all engines"),
            ("seconds", "Step time", "", "seconds in the trainer"),
            ("wait_s", "Trainer wait", "", "seconds it waited for the batch"),
            ("failures", "Failures", "", "trajectories without a verdict"),
            ("restarts", "Restarts", "", "of workers and of the run, so far"),
        ],
    }.items()
    for name, title, unit, about in metrics
]

FROM_EVENT: dict[str, Callable[[Trained], float | None]] = {
    "reward": lambda event: event.reward,
    "staleness_mean": lambda event: event.staleness_mean,
    "staleness_max": lambda event: float(event.staleness_max),
    "tokens_per_s": lambda event: event.tokens / event.seconds if event.seconds else None,
    "seconds": lambda event: event.seconds,
    "wait_s": lambda event: event.wait_s,
    "masked": lambda event: _masked(event.metrics) / max(1, event.tokens),
}


def _masked(metrics: dict[str, float | None]) -> float:
    return sum(value or 0.0 for name, value in metrics.items() if name.startswith("masked_"))


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


FROM_GROUPS: dict[str, Callable[[list[Finished]], float | None]] = {
    "length": _length,
    "truncated": _truncated,
    "zero_variance": _zero_variance,
    "failures": _failures,
}

MOST_POINTS = 2_000
"""More steps than this are thinned out: a screen has no more pixels."""


def series_of(index: RunIndex) -> dict[str, list[Any]]:
    """Columns over the training steps: step, wall_s, and every metric that the run has."""
    every = max(1, math.ceil(len(index.steps) / MOST_POINTS))
    places = range(0, len(index.steps), every)
    with index.lock:
        for place in places:
            if place not in index.step_values:
                index.step_values[place] = _values(index, index.steps[place])
    walls = [index.step_wall_s[place] for place in places]
    columns: dict[str, list[Any]] = {"step": [index.steps[place].version for place in places], "wall_s": walls}
    values = [index.step_values[place] for place in places]
    for metric in METRICS:
        if any(metric["name"] in of_step for of_step in values):
            columns[metric["name"]] = [of_step.get(metric["name"]) for of_step in values]
    generated = [index.step_generated[place] for place in places]
    columns["generated_per_s"] = [None, *map(_rate, generated, generated[1:], walls, walls[1:])][: len(places)]
    columns["restarts"] = [index.step_restarts[place] for place in places]
    return columns


def _values(index: RunIndex, event: Trained) -> dict[str, float | None]:
    """Every metric of one step; worked out once, as a live run is followed."""
    groups = [finished for group in event.groups if (finished := index.groups[group].finished) is not None]
    found = {name: value(event) for name, value in FROM_EVENT.items()}
    found |= {name: of_groups(groups) for name, of_groups in FROM_GROUPS.items()}
    found |= {metric["name"]: event.metrics[metric["name"]] for metric in METRICS if metric["name"] in event.metrics}
    return {name: _finite(value) for name, value in found.items()}


def _rate(before: int, after: int, start_s: float, end_s: float) -> float | None:
    return (after - before) / (end_s - start_s) if end_s > start_s else None
