"""Sampling: counter-based randomness, log-probs and truncated draws, for a batch of rows on any device.

What a request samples depends on (seed, stream, group, trajectory, call, position) and its logits, never on the
rest of its batch: one uniform number per token, drawn by hashing, inverts the cumulative distribution.

Shape suffixes: B rows, R truncated rows, V vocabulary.
"""

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from headway.types import Request, Sampling, truncates

_BLOCK = 256
_ROWS_SORTED = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def request_counter(request: Request) -> np.uint64:
    """The start of the request's random stream: a hash of its seed and key."""
    key = request.key
    name = f"{request.seed}/{key.stream}/{key.group}/{key.trajectory}/{key.call}"
    return np.uint64(xxhash.xxh3_64_intdigest(name.encode()))


def uniforms(counters_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row: the SplitMix64 output at `position` of the stream that starts at `counter`."""
    with np.errstate(over="ignore"):
        z = counters_B + (positions_B + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    numbers: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def sample(logits_BV: Tensor, samplings: list[Sampling], uniforms_B: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob: that of the full distribution at the row's temperature.

    The vocabulary is walked as few times as possible: one maximum, one exponential, one sum over blocks.
    """
    device = logits_BV.device
    temperatures = torch.tensor([s.temperature if s.temperature > 0 else 1.0 for s in samplings])
    scaled_BV = logits_BV if bool((temperatures == 1).all()) else logits_BV / temperatures[:, None].to(device)
    largest_B = scaled_BV.amax(-1)
    weights_BV = (scaled_BV - largest_B[:, None]).exp_()
    num_rows, vocab = weights_BV.shape
    if vocab % _BLOCK:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, -vocab % _BLOCK))
    blocks = weights_BV.view(num_rows, -1, _BLOCK)
    masses = blocks.sum(-1).double()
    log_mass_B = masses.sum(-1).log().float()
    truncated = [row for row, sampling in enumerate(samplings) if is_truncated(sampling)]
    for start in range(0, len(truncated), _ROWS_SORTED):
        rows_R = truncated[start : start + _ROWS_SORTED]
        weights_BV[rows_R] = _truncate(weights_BV[rows_R], [samplings[row] for row in rows_R])
        masses[rows_R] = blocks[rows_R].sum(-1).double()
    # With NaN among the weights any token may come out; its log-prob is NaN, and the scheduler ends the request.
    tokens_B = _invert(blocks, masses, torch.from_numpy(uniforms_B).to(device)).clamp_(max=vocab - 1)
    greedy_B = torch.tensor([s.temperature == 0 for s in samplings], device=device)
    if greedy_B.any():
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    # The maximum first: added to it, the mass of large logits would be rounded away.
    logprobs_B = scaled_BV.gather(-1, tokens_B[:, None]).squeeze(-1) - largest_B - log_mass_B
    return tokens_B, logprobs_B


def is_truncated(sampling: Sampling) -> bool:
    """Whether the draw excludes tokens; the likeliest, which greedy sampling takes, never is."""
    return truncates(sampling) and sampling.temperature > 0


def _truncate(weights_RV: Tensor, samplings: list[Sampling]) -> Tensor:
    """The weights without what top-k and top-p exclude; the likeliest token always stays."""
    vocab, device = weights_RV.shape[1], weights_RV.device
    top_k_R = torch.tensor([s.top_k or vocab for s in samplings], device=device)
    top_p_R = torch.tensor([s.top_p if s.top_p < 1 else torch.inf for s in samplings], device=device).double()
    ordered_RV, order_RV = weights_RV.sort(descending=True, stable=True)
    allowed_RV = torch.arange(vocab, device=device) < top_k_R[:, None]
    ordered_RV = torch.where(allowed_RV, ordered_RV, 0.0)  # top-p is of what top-k leaves
    mass_RV = ordered_RV.double().cumsum(-1)
    allowed_RV &= mass_RV - ordered_RV < top_p_R[:, None] * mass_RV[:, -1:]
    allowed_RV[:, 0] = True
    return torch.where(torch.zeros_like(allowed_RV).scatter(-1, order_RV, allowed_RV), weights_RV, 0.0)


def _invert(blocks: Tensor, masses: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds u times the total.

    In two levels, so that no cumulative sum runs over the whole vocabulary: first the block, then the token in it.
    Cumulative sums are in double precision: in single, one over 50,000 weights would shift the borders visibly.
    """
    edges = masses.cumsum(-1)
    target_B = uniforms_B * edges[:, -1]
    block_B = torch.searchsorted(edges, target_B[:, None], right=True).squeeze(-1).clamp_(max=edges.shape[1] - 1)
    rows_B = torch.arange(len(block_B), device=block_B.device)
    before_B = torch.where(block_B > 0, edges[rows_B, block_B - 1], 0.0)
    inner = blocks[rows_B, block_B].double()
    within = torch.searchsorted(inner.cumsum(-1), (target_B - before_B)[:, None], right=True).squeeze(-1)
    # Rounding may put the target past the block's last weight; take the last token with any weight then.
    last_with_weight = _BLOCK - 1 - (inner.flip(-1) > 0).int().argmax(-1)
    return block_B * _BLOCK + torch.minimum(within, last_with_weight)
