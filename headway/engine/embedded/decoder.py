"""The decoder as the engine runs it: the model's own weights, in fewer and larger operations than its module takes.

A decode step multiplies a handful of rows by every matrix of the model, so what surrounds the products weighs as much
as they do. Here queries, keys and values are one product, gate and up another; what lies between products is a set of
`Operations`: in torch here, in C++ (native.py) and in Triton (cuda.py). The mathematics, and the parameters, are the
transformers module's; a test compares the two.

Shape suffixes: T tokens, X all heads (query, key and value), D head dimension, C hidden size, F feed-forward size,
E query heads times head dimension.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.engine.embedded.live_weights import Head, Matrix
from headway.models import model_shape, named_weights


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary embedding of the tokens' positions, in the model's type."""

    cos_TD: Tensor
    sin_TD: Tensor


class Layer:
    """One layer's parameters, those with the same input side by side."""

    def __init__(self, layer: Any, num_rows: int, config: Any):
        shape = model_shape(config)
        attention, feed_forward = layer.self_attn, layer.mlp
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.scaling: float = attention.scaling
        self.activation: nn.Module = feed_forward.act_fn
        self.before_attention: nn.Module = layer.input_layernorm
        self.before_feed_forward: nn.Module = layer.post_attention_layernorm
        self.query_norm: nn.Module | None = getattr(attention, "q_norm", None)
        self.key_norm: nn.Module | None = getattr(attention, "k_norm", None)
        self.qkv = Matrix([attention.q_proj, attention.k_proj, attention.v_proj], num_rows)
        self.out = Matrix([attention.o_proj], num_rows)
        self.gate_up = Matrix([feed_forward.gate_proj, feed_forward.up_proj], num_rows)
        self.down = Matrix([feed_forward.down_proj], num_rows)

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkv, self.out, self.gate_up, self.down]


class Operations(Protocol):
    """What a layer does between its products."""

    def add_norm(self, residual_TC: Tensor, delta_TC: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """The residual stream with `delta` added, possibly in place, and that normalised."""
        ...

    def gated(self, gate_up_T2F: Tensor, layer: Layer) -> Tensor:
        """activation(gate) × up."""
        ...


class CachedAttention(Protocol):
    def attend(self, index: int, layer: Layer, qkv_TXD: Tensor, rotation: Rotation) -> Tensor:
        """Rotate, store the new keys and values of layer `index`, attend to what is stored: (T, E)."""
        ...


class Decoder:
    def __init__(self, model: PreTrainedModel, operations: Operations, num_rows: int):
        decoder: Any = model.model
        self._operations = operations
        self._embedding, self._rotary, self._last_norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self._layers = [Layer(layer, num_rows, model.config) for layer in decoder.layers]
        self.head = Head(named_weights(model)["lm_head.weight"], num_rows)

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for layer in self._layers for matrix in layer.matrices]

    def hidden_states(
        self, tokens_T: Tensor, positions_T: Tensor, attention: CachedAttention, operations: Operations | None = None
    ) -> Tensor:
        """Final hidden states (T, C), before the head; by other operations than the decoder's own, if given."""
        operations, layers = operations or self._operations, self._layers
        residual_TC: Tensor = self._embedding(tokens_T)
        rotation = self._rotation(residual_TC, positions_T)
        residual_TC, normed_TC = operations.add_norm(residual_TC, None, layers[0].before_attention)
        following = [*(layer.before_attention for layer in layers[1:]), self._last_norm]
        for index, (layer, norm) in enumerate(zip(layers, following, strict=True)):
            qkv_TXD = layer.qkv(normed_TC).view(len(tokens_T), -1, layer.head_dim)
            attended_TC = layer.out(attention.attend(index, layer, qkv_TXD, rotation))
            residual_TC, normed_TC = operations.add_norm(residual_TC, attended_TC, layer.before_feed_forward)
            forward_TC = layer.down(operations.gated(layer.gate_up(normed_TC), layer))
            residual_TC, normed_TC = operations.add_norm(residual_TC, forward_TC, norm)
        return normed_TC

    def _rotation(self, like: Tensor, positions_T: Tensor) -> Rotation:
        return Rotation(*(table[0] for table in self._rotary(like, positions_T[None])))


class RotatingOperations(Operations, Protocol):
    """On a CPU, rotation is an operation of its own."""

    def rotate(self, qkv_TXD: Tensor, layer: Layer, rotation: Rotation) -> None:
        """Normalise queries and keys where the family does, and rotate them by position, in place."""
        ...


class TorchOperations:
    """The reference: plain torch, on any device."""

    def add_norm(self, residual_TC: Tensor, delta_TC: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        if delta_TC is not None:
            residual_TC += delta_TC
        return residual_TC, _rms_norm(residual_TC, norm)

    def gated(self, gate_up_T2F: Tensor, layer: Layer) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        activated: Tensor = layer.activation(gate_TF)
        return activated * up_TF

    def rotate(self, qkv_TXD: Tensor, layer: Layer, rotation: Rotation) -> None:
        num_rotated = layer.num_heads + layer.num_kv_heads
        queries, keys = qkv_TXD[:, : layer.num_heads], qkv_TXD[:, layer.num_heads : num_rotated]
        for heads, norm in ((queries, layer.query_norm), (keys, layer.key_norm)):
            if norm is not None:
                heads.copy_(_rms_norm(heads, norm))
        heads = qkv_TXD[:, :num_rotated]
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        heads.mul_(rotation.cos_TD[:, None]).add_(turned * rotation.sin_TD[:, None])


def norm_parameters(norm: nn.Module) -> tuple[Tensor, float]:
    weight, eps = norm.weight, norm.variance_epsilon
    assert isinstance(weight, Tensor) and isinstance(eps, float)
    return weight, eps


def _rms_norm(states: Tensor, norm: nn.Module) -> Tensor:
    """As the families' modules compute it: in fp32, rounded before the weight is applied."""
    weight, eps = norm_parameters(norm)
    return F.rms_norm(states.float(), weight.shape, None, eps).to(states.dtype) * weight
