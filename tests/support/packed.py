"""Rows packed end to end, and their log-probs by a `Policy`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.model.logprobs import Policy


def draw_rows(lengths: list[int], seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 52, length) for length in lengths]


def policy_logprobs(policy: Policy, rows: list[Any], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of every token of every row but the first, packed end to end."""
    lengths, device = [len(row) for row in rows], next(policy.parameters()).device
    starts = np.cumsum([0, *lengths[:-1]])
    where = np.concatenate([np.arange(1, length) + start for length, start in zip(lengths, starts, strict=True)])
    out: tuple[Tensor, Tensor] = policy(
        torch.from_numpy(np.concatenate(rows)).long().to(device),
        torch.cat([torch.arange(length) for length in lengths]).to(device),
        lengths,
        torch.from_numpy(where).to(device),
        torch.full((len(where),), temperature, device=device),
    )
    return out
