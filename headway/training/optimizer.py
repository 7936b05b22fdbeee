"""AdamW over fp32 master weights, learning-rate warm-up, the scale of fp16 gradients, and what came of a step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.config import TrainerSection
from headway.training.algorithms.losses import merge_metrics

SCALE_SHIFTS = (0, 6, 12, 18)
"""Halvings of the fp16 gradient scale, tried in this order while gradients overflow."""


def adamw(weights: Iterable[Tensor], section: TrainerSection, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, and its moments allocated.

    Left to itself, AdamW allocates them one by one in its first step. Memory that ran out there would leave some
    parameters without moments, and show up only after the first batch.
    """
    weights = list(weights)
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(section.beta1, section.beta2),
        eps=section.adam_eps,
        fused=True,
    )
    for weight in weights:
        optimizer.state[weight] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
        }
    return optimizer


def warmed_up(step: int, warmup_steps: int) -> float:
    """The fraction of the learning rate at a step: rises linearly to 1."""
    return min(1.0, (step + 1) / max(1, warmup_steps))


def learning_rate(section: TrainerSection, step: int) -> float:
    """The learning rate of a training step: warm-up, then constant, or falling by half a cosine or a line."""
    rate = section.lr * warmed_up(step, section.warmup_steps)
    if section.lr_schedule == "constant":
        return rate
    length = max(1, section.schedule_steps - section.warmup_steps)
    done = min(1.0, max(0, step - section.warmup_steps) / length)
    left = 1 - done if section.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return rate * (section.lr_end + (1 - section.lr_end) * left)


def gradient_scale(dtype: torch.dtype, num_trained: int, shift: int) -> float:
    """The factor by which fp16 passes scale the loss; 1 for other types.

    Divided by the number of trained tokens, most gradients of one token would underflow in fp16; multiplied by it they
    are as large as those of one token's loss. A power of two rounds nothing, and each `shift` halves it. It depends on
    the batch alone, so that a replay uses the same.
    """
    return 2.0 ** (num_trained.bit_length() - 1 - shift) if dtype == torch.float16 and num_trained else 1.0


@dataclass(frozen=True)
class MinibatchOutcome:
    """A minibatch that was queued on the device; its figures may not exist yet."""

    denominator: int
    metrics: dict[str, Tensor]
    nonfinite: Tensor  # 1 if this minibatch or one before it was not finite, else 0


def read_back(outcomes: list[MinibatchOutcome]) -> tuple[dict[str, float], str]:
    """The sums and maxima of all minibatches, and what was not finite, if anything: the one synchronisation."""
    if not outcomes:
        return {}, ""
    merged = merge_metrics(outcome.metrics for outcome in outcomes)
    suspects = [outcome.metrics[name] for outcome in outcomes for name in ("loss_sum", "grad_norm_max")]
    values = torch.stack([*merged.values(), *suspects]).tolist()
    totals = dict(zip(merged, values, strict=False))
    pairs = zip(values[len(merged) :: 2], values[len(merged) + 1 :: 2], strict=True)
    for outcome, (loss, norm) in zip(outcomes, pairs, strict=True):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return totals, f"loss {loss / outcome.denominator:g}, gradient norm {norm:g}"
    return totals, "" if totals["weighted_count"] else "every token of the batch is masked or capped"
