"""The policy objectives: a dataclass of packed tokens in, a dataclass with the loss out. Pure functions.

A loss is put together from parts: a surrogate (PPO's clip, CISPO, SAPO, REINFORCE) of the ratio u = π_θ/π_prox of a
token or a sequence; the weight π_prox/π_behav and the masks (corrections.py); KL and entropy terms; and how tokens add
up. All of it is a sum over tokens divided by a denominator.

Invariants that live here:
  7. The loss is Eq. 5. π_prox/π_behav is applied always; capping or masking it is a separate, named choice.
 12. Packing-independent gradient: the denominator is the minibatch's, so the losses, gradients and metrics of any
     micro-batch split add up to those of the whole.

Shape suffixes: T packed tokens of one micro-batch, N its sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.algorithm import AlgorithmSection
from headway.trained_tokens import TOKEN_FATES
from headway.training.algorithms import corrections
from headway.training.algorithms.corrections import Weight, log_ratio
from headway.training.algorithms.segments import Segments

MASKS = ("masked_token", "masked_sequence", "masked_moment", "masked_negative")
"""Why a token took no part in the loss, besides the cap: metrics count the tokens of each, under one reason only."""


@dataclass(frozen=True, eq=False)
class PolicyLossInput:
    """Log-probs of the sampled tokens under three policies. What lies outside the mask is never read."""

    logprobs_T: Tensor  # current, the only one with a gradient besides the entropy
    proximal_T: Tensor
    behaviour_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor  # 1 or True where the token is trained
    counts_N: Tensor | None = None  # how many of the tokens, in order, each sequence has; None: all are one sequence's
    reference_T: Tensor | None = None  # for a KL term
    entropy_T: Tensor | None = None  # for a bonus

    def __post_init__(self) -> None:
        detached = (self.proximal_T, self.behaviour_T, self.advantages_T, self.mask_T, self.reference_T)
        others = [tensor for tensor in (*detached, self.entropy_T) if tensor is not None]
        if any(other.shape != self.logprobs_T.shape for other in others):
            raise ValueError(f"shapes differ: {[tuple(tensor.shape) for tensor in (self.logprobs_T, *others)]}")
        if any(other.requires_grad for other in detached if other is not None):
            raise ValueError("only the current log-probs and the entropy may carry a gradient; detach the others")

    @property
    def segments(self) -> Segments:
        num_tokens = len(self.logprobs_T)
        counts_N = self.counts_N
        if counts_N is None:
            counts_N = torch.tensor([num_tokens], device=self.logprobs_T.device)
        return Segments(counts_N, num_tokens)


@dataclass(frozen=True, eq=False)
class PolicyLossOutput:
    """`loss` carries the gradient; `metrics` are detached sums over the masked tokens, except maxima (`…_max`)."""

    loss: Tensor
    metrics: dict[str, Tensor]
    weight_T: Tensor  # π_prox/π_behav as it was applied; 1 for plain PPO
    fate_T: Tensor  # of each token: its place in TOKEN_FATES


@dataclass(frozen=True)
class Figures:
    """What a loss depends on beyond its micro-batch: figures of the whole minibatch, on all ranks."""

    num_tokens: int
    num_sequences: int = 1
    moment_limit: float = 0.0  # `corrections.second_moment_limit`; 0: none
    entropy_coef: float = 0.0


def policy_loss(inputs: PolicyLossInput, figures: Figures, chosen: AlgorithmSection) -> PolicyLossOutput:
    """−Σ scale · [weight · surrogate(u, A) − kl + entropy bonus] / denominator."""
    tokens, segments = _only_masked(inputs), inputs.segments
    naive = chosen.objective == "naive"
    log_weight_T = log_ratio(tokens.proximal_T, tokens.behaviour_T)
    weight = _weight(log_weight_T, segments, chosen)
    masks = _masks(tokens, log_weight_T, segments, figures, chosen)
    log_ratio_T = log_ratio(tokens.logprobs_T, tokens.behaviour_T if naive else tokens.proximal_T)
    objective_T, clipped_T = surrogate(log_ratio_T, tokens, segments, chosen)
    applied_T = weight.applied_T if weight is not None else None
    for masked_T in masks.values():
        applied_T = (torch.ones_like(objective_T) if applied_T is None else applied_T).masked_fill(masked_T, 0.0)
    if applied_T is not None:
        objective_T = applied_T * objective_T
    terms, kl_T = _terms(tokens, figures, chosen)
    loss = _aggregated(objective_T + terms if terms is not None else objective_T, tokens, segments, figures, chosen)
    extra = {"reference_kl_sum": kl_T.sum()} if kl_T is not None else {}
    metrics = _metrics(tokens, log_weight_T, clipped_T, weight, applied_T)
    counts = {name: masked_T.sum().to(objective_T.dtype) for name, masked_T in masks.items()}
    return PolicyLossOutput(loss, metrics | counts | extra, *_tokens(clipped_T, weight, applied_T, masks))


def surrogate(
    log_ratio_T: Tensor, tokens: PolicyLossInput, segments: Segments, chosen: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """What is maximised at each token, and where the clip took effect."""
    low, high = chosen.clip_eps, chosen.high
    if chosen.ratio == "sequence":
        log_ratio_T = sequence_log_ratio(log_ratio_T, tokens.mask_T, segments)
    match chosen.objective:
        case "cispo":
            return cispo(log_ratio_T, tokens.logprobs_T, tokens.advantages_T, low, high)
        case "sapo":
            temperatures = chosen.sapo_temperature, chosen.sapo_temperature_negative
            return sapo(log_ratio_T, tokens.advantages_T, *temperatures), _nowhere(log_ratio_T)
        case "reinforce":
            return tokens.advantages_T * tokens.logprobs_T, _nowhere(log_ratio_T)
    return ppo(log_ratio_T, tokens.advantages_T, low, high, chosen.dual_clip)


def ppo(log_ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, dual: float = 0.0) -> tuple[Tensor, Tensor]:
    """min(u·A, clip(u, 1−low, 1+high)·A), and where the clipped side is the smaller one: there the gradient is 0.

    A `dual` above 0 bounds it from below by dual·A where A is negative: a ratio that ran away does not count for more.
    """
    ratio_T = log_ratio_T.exp()
    unclipped_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1 - low, 1 + high) * advantages_T
    objective_T, took_effect_T = torch.minimum(unclipped_T, clipped_T), (clipped_T < unclipped_T).detach()
    if dual > 0:
        floor_T = torch.where(advantages_T < 0, dual * advantages_T, -torch.inf)
        took_effect_T = took_effect_T | (objective_T < floor_T).detach()
        objective_T = torch.maximum(objective_T, floor_T)
    return objective_T, took_effect_T


def cispo(
    log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """clip(u, 1−low, 1+high)·A·log π_θ with no gradient through the ratio, and where it was clipped."""
    ratio_T = log_ratio_T.detach().exp()
    clipped_T = ratio_T.clamp(1 - low, 1 + high)
    return clipped_T * advantages_T * logprobs_T, clipped_T != ratio_T


def sapo(log_ratio_T: Tensor, advantages_T: Tensor, temperature: float, temperature_negative: float) -> Tensor:
    """σ(τ(u − 1))·4/τ·A: a smooth gate in the place of the clip, steeper for negative advantages."""
    steepness_T = torch.where(advantages_T > 0, temperature, temperature_negative).to(log_ratio_T.dtype)
    return torch.sigmoid(steepness_T * (log_ratio_T.exp() - 1)) * 4 / steepness_T * advantages_T


def sequence_log_ratio(log_ratio_T: Tensor, mask_T: Tensor, segments: Segments) -> Tensor:
    """The mean over each sequence (GSPO) as the value; the gradient at a token is that of its own log-prob.

    With one advantage a sequence, and weights that are alike within it, this is the gradient of the mean itself.
    """
    mean_T = segments.mean(log_ratio_T.detach(), mask_T)
    return mean_T + (log_ratio_T - log_ratio_T.detach())


def kl(logprobs_T: Tensor, reference_T: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(π‖reference) at sampled tokens: log-ratio, half its square, or r − 1 − log r, which is never negative."""
    log_T = log_ratio(reference_T, logprobs_T)
    if estimator == "k1":
        return -log_T
    return log_T.square() / 2 if estimator == "k2" else torch.expm1(log_T) - log_T


def merge_metrics(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of several micro-batches as those of one: sums add up, maxima compare."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            combine = torch.maximum if name.endswith("_max") else torch.add
            merged[name] = combine(merged[name], value) if name in merged else value
    return merged


def _only_masked(inputs: PolicyLossInput) -> PolicyLossInput:
    """Zeros outside the mask, where equal log-probs and no advantage add nothing to loss or gradient.

    Multiplying the loss by the mask instead would let a NaN outside it through: 0 · NaN is NaN.
    """
    mask_T = inputs.mask_T.bool()

    def inside(values_T: Tensor) -> Tensor:
        return torch.where(mask_T, values_T, 0.0)

    return PolicyLossInput(
        logprobs_T=inside(inputs.logprobs_T),
        proximal_T=inside(inputs.proximal_T),
        behaviour_T=inside(inputs.behaviour_T),
        advantages_T=inside(inputs.advantages_T),
        mask_T=mask_T,
        counts_N=inputs.counts_N,
        reference_T=None if inputs.reference_T is None else inside(inputs.reference_T),
        entropy_T=None if inputs.entropy_T is None else inside(inputs.entropy_T),
    )


def _weight(log_weight_T: Tensor, segments: Segments, chosen: AlgorithmSection) -> Weight | None:
    """Eq. 5's weight; None for plain PPO, whose ratio is measured from the behaviour policy already."""
    if chosen.objective == "naive":
        return None
    limits = chosen.behaviour_cap, chosen.behaviour_cap_mode, chosen.behaviour_level
    return corrections.behaviour_weight(log_weight_T, segments, *limits)


def _masks(
    tokens: PolicyLossInput, log_weight_T: Tensor, segments: Segments, figures: Figures, chosen: AlgorithmSection
) -> dict[str, Tensor]:
    """The tokens that each chosen mask takes out, none under two reasons."""
    found: dict[str, Tensor] = {}
    if chosen.mask_token_low or chosen.mask_token_high:
        found["masked_token"] = corrections.token_bounds(log_weight_T, chosen.mask_token_low, chosen.mask_token_high)
    if chosen.mask_sequence_low or chosen.mask_sequence_high:
        bounds = chosen.mask_sequence_low, chosen.mask_sequence_high
        found["masked_sequence"] = corrections.geometric_rejection(log_weight_T, tokens.mask_T, segments, *bounds)
    if chosen.mask_second_moment:
        found["masked_moment"] = corrections.beyond(log_weight_T, figures.moment_limit)
    if chosen.mask_negative_kl:
        policies = tokens.behaviour_T, tokens.logprobs_T, tokens.advantages_T
        limit = chosen.mask_negative_kl
        found["masked_negative"] = corrections.negative_divergence(*policies, tokens.mask_T, segments, limit)
    left_T = tokens.mask_T
    for name, masked_T in found.items():
        found[name] = masked_T & left_T
        left_T = left_T & ~masked_T
    return found


def _terms(tokens: PolicyLossInput, figures: Figures, chosen: AlgorithmSection) -> tuple[Tensor | None, Tensor | None]:
    """What else is maximised at each token: −β·KL and the entropy bonus; and the KL for metrics."""
    terms, kl_T = None, None
    if tokens.reference_T is not None:
        kl_T = kl(tokens.logprobs_T, tokens.reference_T, chosen.kl_estimator)
        if chosen.kl_place == "loss":
            terms = -chosen.kl_coef * kl_T
    if tokens.entropy_T is not None and figures.entropy_coef:
        bonus_T = figures.entropy_coef * tokens.entropy_T
        terms = bonus_T if terms is None else terms + bonus_T
    return terms, kl_T.detach() if kl_T is not None else None


def _aggregated(
    objective_T: Tensor, tokens: PolicyLossInput, segments: Segments, figures: Figures, chosen: AlgorithmSection
) -> Tensor:
    """−Σ over the denominator: tokens alike, or sequences alike, or tokens over sequences times a constant length."""
    denominator = float(figures.num_tokens)
    if chosen.aggregate == "sequence":
        denominator = float(figures.num_sequences)
        num_T = segments.spread(segments.sum(tokens.mask_T.to(objective_T.dtype)).clamp(min=1))
        objective_T = objective_T / num_T
    elif chosen.aggregate == "constant":
        denominator = float(figures.num_sequences * chosen.length_limit)
    if not denominator > 0:
        raise ValueError(f"the denominator is a positive figure of the minibatch, not {denominator}")
    return -objective_T.sum() / denominator


def _nowhere(values_T: Tensor) -> Tensor:
    return torch.zeros_like(values_T, dtype=torch.bool)


@torch.no_grad()
def _tokens(
    clipped_T: Tensor, weight: Weight | None, applied_T: Tensor | None, masks: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The weight that was applied to each token, and what became of it: of several limits, a mask before the cap."""
    fate_T = clipped_T.to(torch.float32) * TOKEN_FATES.index("clipped")
    if weight is not None:
        fate_T = fate_T.masked_fill(weight.over_cap_T, TOKEN_FATES.index("capped"))
    for name, masked_T in masks.items():
        fate_T = fate_T.masked_fill(masked_T, TOKEN_FATES.index(name))
    return (torch.ones_like(fate_T) if applied_T is None else applied_T.detach().float()), fate_T


@torch.no_grad()
def _metrics(
    tokens: PolicyLossInput, log_weight_T: Tensor, clipped_T: Tensor, weight: Weight | None, applied_T: Tensor | None
) -> dict[str, Tensor]:
    """Both divergences by the estimator r − 1 − log r, which is never negative; weights as they are before any cap.

    The last two sums give the effective sample size, (Σw)²/Σw², of the weights that were applied; for plain PPO, which
    applies none, of those that Eq. 5 would have applied.
    """
    log_ratio_T = log_ratio(tokens.logprobs_T, tokens.proximal_T)
    weight_T = torch.where(tokens.mask_T, log_weight_T.exp(), 0.0)
    over_cap_T = weight.over_cap_T if weight is not None else _nowhere(weight_T)
    used_T = weight_T if weight is None or applied_T is None else torch.where(tokens.mask_T, applied_T, 0.0)
    return {
        "tokens": tokens.mask_T.sum().to(weight_T.dtype),
        "clip_count": clipped_T.sum().to(weight_T.dtype),
        "capped_count": (over_cap_T & tokens.mask_T).sum().to(weight_T.dtype),
        "behaviour_weight_sum": weight_T.sum(),
        "behaviour_weight_max": torch.cat([weight_T.flatten(), weight_T.new_zeros(1)]).max(),
        "kl_sum": (torch.expm1(log_ratio_T) - log_ratio_T).sum(),
        "behaviour_kl_sum": (torch.expm1(log_weight_T) - log_weight_T).sum(),
        "weight_sum": used_T.sum(),
        "weight_square_sum": used_T.square().sum(),
    }
