"""Sequences into micro-batches that fit the token budget: the paper's Algorithm 1, balanced by FLOPs. No padding.

Attention is quadratic in length, so micro-batches of equally many sequences, or tokens, are not equal work.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from headway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost of a forward pass depends on, in a decoder with gated feed-forward layers."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


def flops(length: int, shape: ModelShape) -> float:
    """Floating-point operations of the matrix products of one forward pass over a sequence, causal attention included.

    A product with a matrix of n weights costs 2n operations a token. A query costs 4 per head dimension for each key it
    sees, half for the score and half for the weighted sum of values, and there are length·(length + 1)/2 such pairs.
    """
    query_width = shape.num_heads * shape.head_dim
    key_width = shape.num_kv_heads * shape.head_dim
    attention_weights = shape.hidden_size * (2 * query_width + 2 * key_width)
    feed_forward_weights = 3 * shape.hidden_size * shape.intermediate_size
    weights = shape.num_layers * (attention_weights + feed_forward_weights) + shape.hidden_size * shape.vocab_size
    pairs = length * (length + 1) / 2
    return 2.0 * weights * length + 4.0 * shape.num_layers * query_width * pairs


def pack(
    lengths: Listed[int], capacity: int, min_batches: int = 1, cost: Callable[[int], float] | None = None
) -> list[list[int]]:
    """Indices of `lengths`, each exactly once, in micro-batches of at most `capacity` tokens.

    From the longest sequence to the shortest: with fewer than `min_batches` open, or where it fits in none, a sequence
    opens a micro-batch; otherwise it joins the fitting one with the smallest load. Load is the sum of `cost(length)`,
    or without a cost the number of sequences, as in the paper. Equal lengths go by index, equal loads to the
    micro-batch opened first. There are never empty micro-batches, so fewer than `min_batches` sequences give fewer.
    """
    batches: list[list[int]] = []
    num_tokens: list[int] = []
    loads: list[float] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > capacity:
            given = f"a sequence of {length} tokens does not fit into a micro-batch of {capacity}"
            raise ConfigError(f"{given}; raise trainer.token_budget")
        fitting = (batch for batch, used in enumerate(num_tokens) if used + length <= capacity)
        chosen = None if len(batches) < min_batches else min(fitting, key=loads.__getitem__, default=None)
        if chosen is None:
            chosen = len(batches)
            batches.append([])
            num_tokens.append(0)
            loads.append(0.0)
        batches[chosen].append(index)
        num_tokens[chosen] += length
        loads[chosen] += cost(length) if cost else 1.0
    return [sorted(batch) for batch in batches]
