"""Whether what was trained is like what was sampled, in length and in difficulty; and what corrections left of it.

A system that drops or starves some groups trains on other data than it samples, which no accuracy shows at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.record.run import Run

SIGNIFICANCE = 1.63
"""Of the Kolmogorov-Smirnov distance at 1%: two samples of one distribution lie further apart once in a hundred."""
LARGE = 0.1
"""A distance below this is not worth a warning, however many samples say so."""


@dataclass(frozen=True)
class Comparison:
    """One figure's distribution over the sampled groups, and over the trained ones among them."""

    name: str
    sampled_mean: float
    trained_mean: float
    distance: float  # Kolmogorov-Smirnov: the largest difference of the two cumulative distributions
    parted: bool

    def __str__(self) -> str:
        text = f"{self.name}: sampled {self.sampled_mean:.3g}, trained {self.trained_mean:.3g}"
        return f"{text} (distance {self.distance:.2f}{', WARNING: they part' if self.parted else ''})"


@dataclass(frozen=True)
class Corrections:
    """Over all training steps: how many tokens the weights are worth, and which share took no part, by its reason."""

    effective_sample_size: float
    left_out: dict[str, float]

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.left_out.items() if share)
        return f"effective sample size {self.effective_sample_size:.0%}, left out of the loss: {shares or 'nothing'}"


def corrections(run: Run) -> list[Corrections]:
    """What the corrections of stale data did; nothing where no step was trained."""
    events = [step.event for step in run.steps if step.event.metrics.get("effective_sample_size")]
    total = sum(event.tokens for event in events)
    if not total:
        return []

    def mean(of: Callable[[Mapping[str, float | None]], float]) -> float:
        return sum(event.tokens * of(event.metrics) for event in events) / total

    names = sorted({name for event in events for name in event.metrics if name.startswith("masked_")})
    counts = {name: sum(event.metrics.get(name) or 0.0 for event in events) / total for name in names}
    capped = mean(lambda metrics: metrics.get("capped_fraction") or 0.0)
    return [Corrections(mean(lambda metrics: metrics["effective_sample_size"] or 0.0), {"capped": capped, **counts})]


def audit(run: Run) -> list[Comparison]:
    """Lengths of trajectories, and success rates of groups; nothing where a run has trained or dropped nothing.

    Groups that had not left when the log ended are neither: the last of a run are always untrained.
    """
    left = [group for group in run.groups if group.ref and (group.dropped or group.is_trained(run.num_trained))]
    trained = [not group.dropped for group in left]
    lengths = [(yes, float(length)) for yes, group in zip(trained, left, strict=True) for length in group.lengths]
    rates = [(yes, _success_rate(group.rewards)) for yes, group in zip(trained, left, strict=True)]
    compared = [_compare("trajectory length", lengths), _compare("success rate of groups", rates)]
    return [each for each in compared if each is not None]


def _success_rate(rewards: Sequence[float | None]) -> float:
    known = [reward for reward in rewards if reward is not None]
    return sum(reward > 0 for reward in known) / max(1, len(known))


def _compare(name: str, values: list[tuple[bool, float]]) -> Comparison | None:
    sampled, trained = [value for _, value in values], [value for is_trained, value in values if is_trained]
    if not trained:
        return None
    distance = kolmogorov_smirnov(sampled, trained)
    limit = SIGNIFICANCE * (1 / len(sampled) + 1 / len(trained)) ** 0.5
    means = sum(sampled) / len(sampled), sum(trained) / len(trained)
    return Comparison(name, *means, distance, distance > max(limit, LARGE))


def kolmogorov_smirnov(one: list[float], other: list[float]) -> float:
    """The largest difference between two cumulative distributions."""
    # In units of 1 / (len(one) · len(other)), so that equal distributions have a distance of exactly 0.
    steps = sorted([(value, len(other)) for value in one] + [(value, -len(one)) for value in other])
    largest, difference = 0, 0
    for place, (value, step) in enumerate(steps):
        difference += step
        if place + 1 == len(steps) or steps[place + 1][0] != value:  # equal values count together
            largest = max(largest, abs(difference))
    return largest / (len(one) * len(other))
