"""The optimizer of the trainer and the warm-up: how large a step is, and how gradients of a narrow type are scaled."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headway.config import TrainerSection

SCALE_SHIFTS = (0, 6, 12, 18)
"""Halvings of the scale of fp16 gradients, one after the other while they overflow."""


def adamw(weights: Iterable[Tensor], section: TrainerSection, lr: float) -> torch.optim.AdamW:
    """Weight decay is for matrices; norms and biases are left alone."""
    weights = list(weights)
    matrices = [weight for weight in weights if weight.ndim >= 2]
    vectors = [weight for weight in weights if weight.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(section.beta1, section.beta2),
        eps=section.adam_eps,
        fused=True,
    )


def warmed_up(step: int, warmup_steps: int) -> float:
    """The share of the learning rate at a step: rising linearly, then 1."""
    return min(1.0, (step + 1) / max(1, warmup_steps))


def gradient_scale(dtype: torch.dtype, num_trained: int, shift: int) -> float:
    """What gradients are multiplied by in passes of a type of narrow range.

    Divided by the number of trained tokens, most gradients of a token would be too small for fp16; multiplied by it
    they are about as large as those of one token's loss. A power of two rounds nothing, and `shift` halvings make it
    smaller. It follows from the batch alone, so that a replay takes the same.
    """
    return 2.0 ** (num_trained.bit_length() - 1 - shift) if dtype == torch.float16 and num_trained else 1.0
