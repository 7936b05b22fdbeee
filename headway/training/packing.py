"""Sequences into micro-batches that fit the token budget: the paper's Algorithm 1, balanced by FLOPs. No padding.

Attention is quadratic in length, so micro-batches of equally many sequences, or tokens, are not equal work.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listed

from headway.errors import ConfigError


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
