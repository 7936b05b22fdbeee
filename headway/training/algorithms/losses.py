"""The policy objectives: a dataclass of packed tokens in, a dataclass with the loss out. Pure functions.

Invariants that live here:
  7. The loss is Eq. 5. π_prox/π_behav is applied always; capping or masking it is a separate, named choice.
 12. Packing-independent gradient: a loss is a sum over tokens divided by a denominator that is the
     minibatch's, so the losses, gradients and metrics of any micro-batch split add up to those of the whole.

Array suffix: T packed tokens of one micro-batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before `exp`: e^20 ≈ 5e8 is no ratio to learn from, and a sum of such stays finite.

A token beyond it has no gradient. A NaN stays one, so that the step is seen to be non-finite.
"""


@dataclass(frozen=True, eq=False)
class PolicyLossInput:
    """Log-probs of the sampled tokens under three policies. What lies outside the mask is never read."""

    logprobs_T: Tensor  # current, the only one with a gradient
    proximal_T: Tensor
    behaviour_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor  # 1 or True where the token is trained

    def __post_init__(self) -> None:
        others = (self.proximal_T, self.behaviour_T, self.advantages_T, self.mask_T)
        if any(other.shape != self.logprobs_T.shape for other in others):
            raise ValueError(f"shapes differ: {[tuple(tensor.shape) for tensor in (self.logprobs_T, *others)]}")
        if any(other.requires_grad for other in others):
            raise ValueError("only the current log-probs may carry a gradient; detach the others")


@dataclass(frozen=True, eq=False)
class PolicyLossOutput:
    """`loss` carries the gradient; `metrics` are detached sums over the masked tokens, except maxima (`…_max`)."""

    loss: Tensor
    metrics: dict[str, Tensor]


def decoupled_ppo(
    inputs: PolicyLossInput,
    denominator: float,
    clip_eps: float,
    behaviour_cap: float = 0.0,
    behaviour_cap_mode: Literal["mask", "truncate"] = "mask",
) -> PolicyLossOutput:
    """Eq. 5: −Σ (π_prox/π_behav) · min(u·A, clip(u, 1−ε, 1+ε)·A) / denominator, with u = π_θ/π_prox.

    A `behaviour_cap` above 0 limits π_prox/π_behav: "mask" gives a token over the cap no part in the loss, though the
    denominator still counts it; "truncate" clamps its weight to the cap.
    """
    tokens = _only_masked(inputs)
    weight_T = _log_ratio(tokens.proximal_T, tokens.behaviour_T).exp()
    over_cap_T = (weight_T > behaviour_cap) if behaviour_cap > 0 else torch.zeros_like(weight_T, dtype=torch.bool)
    applied_T = weight_T.masked_fill(over_cap_T, 0.0 if behaviour_cap_mode == "mask" else behaviour_cap)
    log_ratio_T = _log_ratio(tokens.logprobs_T, tokens.proximal_T)
    objective_T, clipped_T = _clipped_objective(log_ratio_T, tokens.advantages_T, clip_eps)
    loss = _sum_over_denominator(applied_T * objective_T, denominator)
    return PolicyLossOutput(loss, _metrics(tokens, clipped_T, over_cap_T))


def naive_ppo(inputs: PolicyLossInput, denominator: float, clip_eps: float) -> PolicyLossOutput:
    """Plain PPO, −Σ min(u·A, clip(u, 1−ε, 1+ε)·A) / denominator, with u = π_θ/π_behav; π_prox feeds metrics only."""
    tokens = _only_masked(inputs)
    log_ratio_T = _log_ratio(tokens.logprobs_T, tokens.behaviour_T)
    objective_T, clipped_T = _clipped_objective(log_ratio_T, tokens.advantages_T, clip_eps)
    loss = _sum_over_denominator(objective_T, denominator)
    return PolicyLossOutput(loss, _metrics(tokens, clipped_T, torch.zeros_like(clipped_T)))


def merge_metrics(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of several micro-batches as those of one: sums add up, maxima compare."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            combine = torch.maximum if name.endswith("_max") else torch.add
            merged[name] = combine(merged[name], value) if name in merged else value
    return merged


def _only_masked(inputs: PolicyLossInput) -> PolicyLossInput:
    """Zeros outside the mask, where three equal log-probs and no advantage add nothing to loss or gradient.

    Multiplying the loss by the mask instead would let a NaN outside it through: 0 · NaN is NaN.
    """
    mask_T = inputs.mask_T.bool()
    return PolicyLossInput(
        logprobs_T=torch.where(mask_T, inputs.logprobs_T, 0.0),
        proximal_T=torch.where(mask_T, inputs.proximal_T, 0.0),
        behaviour_T=torch.where(mask_T, inputs.behaviour_T, 0.0),
        advantages_T=torch.where(mask_T, inputs.advantages_T, 0.0),
        mask_T=mask_T,
    )


def _log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    return (numerator_T - denominator_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clipped_objective(log_ratio_T: Tensor, advantages_T: Tensor, clip_eps: float) -> tuple[Tensor, Tensor]:
    """min(u·A, clip(u, 1−ε, 1+ε)·A), and where the clipped side is the smaller one: there the gradient is 0."""
    ratio_T = log_ratio_T.exp()
    unclipped_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1 - clip_eps, 1 + clip_eps) * advantages_T
    return torch.minimum(unclipped_T, clipped_T), (clipped_T < unclipped_T).detach()


def _sum_over_denominator(objective_T: Tensor, denominator: float) -> Tensor:
    if not denominator > 0:
        raise ValueError(f"the denominator is the minibatch's number of trained tokens, not {denominator}")
    return -objective_T.sum() / denominator


@torch.no_grad()
def _metrics(tokens: PolicyLossInput, clipped_T: Tensor, over_cap_T: Tensor) -> dict[str, Tensor]:
    """Both divergences by the estimator r − 1 − log r, which is never negative; weights as they are before any cap."""
    log_ratio_T = _log_ratio(tokens.logprobs_T, tokens.proximal_T)
    log_weight_T = _log_ratio(tokens.proximal_T, tokens.behaviour_T)
    weight_T = torch.where(tokens.mask_T, log_weight_T.exp(), 0.0)
    return {
        "tokens": tokens.mask_T.sum().to(weight_T.dtype),
        "clip_count": clipped_T.sum().to(weight_T.dtype),
        "capped_count": (over_cap_T & tokens.mask_T).sum().to(weight_T.dtype),
        "behaviour_weight_sum": weight_T.sum(),
        "behaviour_weight_max": torch.cat([weight_T.flatten(), weight_T.new_zeros(1)]).max(),
        "kl_sum": (torch.expm1(log_ratio_T) - log_ratio_T).sum(),
        "behaviour_kl_sum": (torch.expm1(log_weight_T) - log_weight_T).sum(),
    }
