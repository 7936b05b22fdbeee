"""Corrections for data of another policy: the weight π_prox/π_behav with its caps, and masks with their reasons.

A mask says which tokens take no part in the policy's loss; the denominator still counts them. All but the
second-moment budget decide by a token or its sequence alone; the budget's limit is that of the whole minibatch, found
before any of it is trained.

Invariants that live here:
  7. The loss is Eq. 5: π_prox/π_behav is applied as it is, unless a cap is asked for by name.
 12. Packing-independent gradient: no mask depends on which sequences share a micro-batch.

Shape suffixes: T trained tokens of one micro-batch, N its sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.training.algorithms.segments import Segments

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before `exp`: e^20 ≈ 5e8 is no ratio to learn from, and a sum of such stays finite.

A token beyond it has no gradient. A NaN stays one, so that the step is seen to be non-finite.
"""


@dataclass(frozen=True, eq=False)
class Weight:
    """π_prox/π_behav: as it is, as it is applied, and where a cap changed it."""

    exact_T: Tensor
    applied_T: Tensor
    over_cap_T: Tensor


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    return (numerator_T - denominator_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def behaviour_weight(
    log_weight_T: Tensor,
    segments: Segments,
    cap: float = 0.0,
    mode: Literal["mask", "truncate"] = "mask",
    level: Literal["token", "sequence"] = "token",
) -> Weight:
    """The weight of each token, or for each token of a sequence the product over the sequence.

    A `cap` above 0 limits it: "mask" gives what lies above no weight, "truncate" the cap (truncated importance
    sampling).
    """
    if level == "sequence":
        log_weight_T = segments.spread(segments.sum(log_weight_T)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    exact_T = log_weight_T.exp()
    over_cap_T = (exact_T > cap) if cap > 0 else torch.zeros_like(exact_T, dtype=torch.bool)
    return Weight(exact_T, exact_T.masked_fill(over_cap_T, 0.0 if mode == "mask" else cap), over_cap_T)


def outside(values_T: Tensor, low: float, high: float) -> Tensor:
    """Where values lie outside the bounds; a bound of 0 is none."""
    above_T = values_T > high if high > 0 else torch.zeros_like(values_T, dtype=torch.bool)
    return (values_T < low) | above_T if low > 0 else above_T


def token_bounds(log_weight_T: Tensor, low: float, high: float) -> Tensor:
    """Tokens whose π_prox/π_behav lies outside the bounds (IcePop)."""
    return outside(log_weight_T.exp(), low, high)


def geometric_rejection(log_weight_T: Tensor, mask_T: Tensor, segments: Segments, low: float, high: float) -> Tensor:
    """All tokens of sequences of which the geometric mean of π_prox/π_behav lies outside the bounds."""
    return outside(segments.mean(log_weight_T, mask_T).exp(), low, high)


def negative_divergence(
    behaviour_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, segments: Segments, limit: float
) -> Tensor:
    """Tokens of negative advantage in sequences with a mean log π_behav/π_θ above the limit.

    What the policy has moved away from already is not pushed away further.
    """
    divergence_T = segments.mean(behaviour_T - logprobs_T.detach(), mask_T)
    return (advantages_T < 0) & (divergence_T > limit)


def second_moment_limit(
    log_weights: list[Tensor], budget: float, total: Callable[[Tensor], Tensor] = lambda figures: figures
) -> float:
    """The largest |log π_prox/π_behav| such that the mean square of all that do not exceed it is within the budget.

    `log_weights` are a minibatch's, in any split; `total` adds a pair of figures up over all ranks. The mean square
    grows with the limit, so halving an interval finds it without gathering tokens.
    """
    sizes_T = torch.cat(
        [torch.zeros(1, dtype=torch.float64), *(part.detach().double().abs().cpu() for part in log_weights)]
    )

    def within(limit: float) -> bool:
        kept_T = sizes_T[sizes_T <= limit]
        # The zero put in front has no square, and is not counted.
        square, count = total(torch.stack([kept_T.square().sum(), kept_T.new_tensor(len(kept_T) - 1.0)])).tolist()
        return bool(square <= budget * count)

    low, high = 0.0, 2 * LOG_RATIO_LIMIT
    if within(high):
        return high
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def beyond(log_weight_T: Tensor, limit: float) -> Tensor:
    """Tokens over a second-moment limit."""
    return log_weight_T.double().abs() > limit
