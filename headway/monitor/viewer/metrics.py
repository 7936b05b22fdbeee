"""The curves of the run page: each metric's section, title, unit and meaning, and its value at every training step.

Names, values and meanings are those of TensorBoard, W&B and `run.metrics()`; here is only what the page shows of them.
"""

import math
from bisect import bisect_right
from typing import Any

from headway.monitor.metric_names import meaning
from headway.monitor.metrics import step_point
from headway.monitor.viewer.index import OpenRun

_CURVES = {
    "Learning": {
        "reward": "Reward",
        "zero_variance_share": "Groups without spread (%)",
        "completion_length_mean": "Completion length (tokens)",
        "truncated_share": "Truncated (%)",
        "entropy": "Entropy (nats)",
        "loss": "Loss",
        "grad_norm": "Gradient norm",
        "lr": "Learning rate",
    },
    "Off-policy": {
        "staleness_mean": "Mean staleness (versions)",
        "staleness_max": "Largest staleness (versions)",
        "kl": "KL(proximal‖current) (nats)",
        "behaviour_kl": "KL(behaviour‖proximal) (nats)",
        "reference_kl": "KL(current‖reference) (nats)",
        "effective_sample_size": "Effective sample size (%)",
        "capped_fraction": "Capped tokens (%)",
        "clip_fraction": "Clipped tokens (%)",
        "masked_share": "Masked tokens (%)",
        "logprob_gap_max": "Largest log-prob gap (nats)",
    },
    "Speed and failures": {
        "tokens_per_s": "Training throughput (tokens/s)",
        "generated_per_s": "Generation throughput (tokens/s)",
        "seconds": "Step time (s)",
        "wait_s": "Trainer wait (s)",
        "failed_share": "Failed trajectories (%)",
        "restarts": "Restarts",
    },
}
RATE_S = 10.0
_OWN = {
    "masked_share": "tokens that a correction or a filter left out of the loss",
    "generated_per_s": f"tokens sampled per second, by all engines, over the step or the last {RATE_S:.0f} s",
    "restarts": "of workers and of the run, so far",
}


def _metric(section: str, name: str, title: str) -> dict[str, str]:
    title, _, unit = title.removesuffix(")").partition(" (")
    about = _OWN.get(name) or meaning(f"train/{name}") or ""
    return {"name": name, "section": section, "title": title, "unit": unit, "description": about}


METRICS = [_metric(section, name, title) for section, curves in _CURVES.items() for name, title in curves.items()]

MOST_POINTS = 2_000
"""More steps than this are thinned out: a screen has no more pixels."""


def series_of(run: OpenRun) -> dict[str, list[Any]]:
    """Columns over the training steps: step, wall_s, and every metric that the run has."""
    steps, at = run.run.steps, run.run.clock.at
    places = range(0, len(steps), max(1, math.ceil(len(steps) / MOST_POINTS)))
    with run.lock:
        for place in places:
            if place not in run.step_values:
                run.step_values[place] = _values(run, place)
    walls = [at(steps[place].event.time) for place in places]
    values = [run.step_values[place] for place in places]
    generated = [run.step_generated[place] for place in places]
    rates = [_rate(generated, walls, end) for end in range(len(places))]
    columns: dict[str, list[Any]] = {"step": [steps[place].event.version for place in places], "wall_s": walls}
    for name in (metric["name"] for metric in METRICS):
        if any(name in of_step for of_step in values):
            columns[name] = [of_step.get(name) for of_step in values]
    return columns | {"generated_per_s": rates}


def _values(run: OpenRun, place: int) -> dict[str, float]:
    """Every metric of one step, finite ones only; worked out once, as a live run is followed."""
    step = run.run.steps[place]
    found = {name.removeprefix("train/"): value for name, value in step_point(step).scalars.items()}
    masked = sum(value for name, value in found.items() if name.startswith("masked_"))
    return found | {"masked_share": masked / max(1, step.event.tokens), "restarts": run.step_restarts[place]}


def _rate(generated: list[int], walls: list[float], end: int) -> float | None:
    """Over the step, or RATE_S where steps are shorter: engines report once a second, whatever a step takes."""
    start = min(end - 1, bisect_right(walls, walls[end] - RATE_S) - 1) if walls[end] - walls[0] > RATE_S else 0
    span_s = walls[end] - walls[start]
    return (generated[end] - generated[start]) / span_s if span_s > 0 else None
