"""Model sizes and the FLOPs of a forward pass; needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder with gated feed-forward layers, as far as they determine FLOPs and memory."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def kv_elements(self) -> int:
        """Numbers of one token's keys and values, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


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
