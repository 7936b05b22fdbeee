"""Packed attention: sequences laid end to end, without padding and without attending across borders.

transformers' attention layers call the `headway` function registered here, which hands queries, keys and values to the
`PackedAttention` of the micro-batch. On a GPU it is one flash-attention call over all sequences.

Shape suffixes: T packed tokens, S cached positions, N sequences, H heads, K key/value heads, G heads per key/value
head, D head dimension.
"""

import inspect
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedConfig
from transformers.modeling_utils import AttentionInterface

from headway.model.device import CPU, to_device

# torch 2.11 accepts fewer key/value heads than query heads; 2.12 needs a flag for it.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def _headway_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function transformers' attention layers call; tensors come as (1, heads, T, D)."""
    attention: PackedAttention = kwargs["attention"]
    # The layer number stays unread: a block that reads its own number is recompiled for every layer.
    window, softcap = kwargs.get("sliding_window") or 0, kwargs.get("softcap") or 0.0
    operands = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    out_THD = attention.attend(*operands, scaling, window, softcap)
    return out_THD.unsqueeze(0), None


# Register no mask function of this name: transformers would then search for sequence boundaries, too, and read
# positions back from the device in every forward pass.
AttentionInterface.register("headway", _headway_attention)


class PackedAttention:
    """Causal attention over sequences laid end to end, without padding and without attending across borders.

    On a GPU, 16-bit tensors go through one flash-attention call, which has no soft cap; its list of borders is made
    once for all layers. Everything else is computed sequence by sequence.
    """

    def __init__(self, lengths: list[int], device: torch.device = CPU):
        self.lengths = lengths
        self.longest = max(lengths, default=0)
        self.borders_N: Tensor | None = None
        if device.type == "cuda":
            self.borders_N = to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)

    def attend(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        scaling: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attention output, shaped like the query.

        A query sees the last `window` positions, its own among them; 0 is all. Scores go through
        softcap · tanh(score ÷ softcap); 0 leaves them as they are.
        """
        if self.borders_N is not None and query_THD.dtype != torch.float32 and not softcap:
            borders_N, longest = self.borders_N, self.longest
            operands = (query_THD, key_TKD, value_TKD, borders_N, borders_N, longest, longest)
            # (left, right) context; window (-1, 0) is causal with unlimited left context.
            seen = window - 1, 0
            return cast(Tensor, varlen_attn(*operands, scale=scaling, window_size=seen, **_GROUPED_HEADS))
        pieces = zip(
            *(x.transpose(0, 1).split(self.lengths, dim=1) for x in (query_THD, key_TKD, value_TKD)), strict=True
        )
        outs_HTD = [causal_attention(query, key, value, scaling, window, softcap) for query, key, value in pieces]
        return torch.cat(outs_HTD, dim=1).transpose(0, 1)


def causal_attention(
    query_HTD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """One sequence: T queries that are the last T of S positions."""
    num_queries, num_keys = query_HTD.shape[1], key_KSD.shape[1]
    mask = None
    if num_queries != num_keys or 0 < window < num_keys or softcap:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query_HTD.device)
        mask = mask.tril(diagonal=num_keys - num_queries)
        if window:
            mask = mask.triu(diagonal=num_keys - num_queries - window + 1)
    if mask is not None and softcap:
        query_KGTD = query_HTD.unflatten(0, (len(key_KSD), -1))
        key, value = key_KSD.unsqueeze(1), value_KSD.unsqueeze(1)
        return capped_attention(query_KGTD, key, value, mask, scaling, softcap).flatten(0, 1)
    out = F.scaled_dot_product_attention(
        query_HTD.unsqueeze(0),
        key_KSD.unsqueeze(0),
        value_KSD.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query_HTD.shape[0] != key_KSD.shape[0],
    )
    return out.squeeze(0)


def capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attention through a soft cap, in fp32 until its end; the mask is true where a query sees a key."""
    scores = softcap * torch.tanh(query.float() @ key.float().transpose(-1, -2) * scaling / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


def attention_softcap(config: PreTrainedConfig) -> float:
    """The cap on attention scores; Gemma 3's configuration has the number, too, but its attention ignores it."""
    return float(config.attn_logit_softcapping or 0.0) if config.model_type == "gemma2" else 0.0
