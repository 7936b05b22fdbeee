"""The engine's forward pass: the weights of the transformers module, in fewer and larger operations.

A decode step multiplies a handful of rows by every matrix of the model, so what surrounds the products weighs as much
as they do. Here queries, keys and values are one product, gate and up another; what lies between products is a set of
`Operations`: in torch here, in C++ (native.py) and in Triton (cuda.py). The mathematics, and the parameters, are the
transformers module's; a test compares the two. What families differ in is read off their modules once, by `Layer`.

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
from headway.model.attention import attention_softcap
from headway.model.loading import model_shape, named_weights
from headway.model.logprobs import logit_softcap


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm; with `unit_offset` the weight is added to 1, and applied before rounding instead of after."""

    weight: Tensor
    eps: float
    unit_offset: bool

    @staticmethod
    def of(module: Any) -> "Norm":
        unit_offset = type(module).__name__.startswith("Gemma")
        return Norm(module.weight, module.eps if unit_offset else module.variance_epsilon, unit_offset)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary embedding of the tokens' positions, in the model's type."""

    cos_TD: Tensor
    sin_TD: Tensor


class Layer:
    """One layer's parameters, those with the same input side by side, and what its family does with them.

    Its queries see the last `window` positions (0 is all) through a soft cap (0 is none). A family that normalises what
    a branch adds to the residual stream has norms after the branch as well as before it.
    """

    def __init__(self, layer: Any, num_rows: int, config: Any):
        shape, family = model_shape(config), config.model_type
        attention, feed_forward = layer.self_attn, layer.mlp
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.scaling: float = attention.scaling
        window = config.sliding_window if family == "mistral" else getattr(attention, "sliding_window", None)
        self.window: int = window or 0
        self.softcap = attention_softcap(config)
        self.rotary: str = config.layer_types[attention.layer_idx] if family == "gemma3_text" else ""
        self.activation: nn.Module = feed_forward.act_fn
        self.before_attention = Norm.of(layer.input_layernorm)
        self.after_attention: Norm | None = None
        self.after_feed_forward: Norm | None = None
        if hasattr(layer, "pre_feedforward_layernorm"):
            self.after_attention = Norm.of(layer.post_attention_layernorm)
            self.before_feed_forward = Norm.of(layer.pre_feedforward_layernorm)
            self.after_feed_forward = Norm.of(layer.post_feedforward_layernorm)
        else:
            self.before_feed_forward = Norm.of(layer.post_attention_layernorm)
        has_norms = hasattr(attention, "q_norm")
        self.query_norm = Norm.of(attention.q_norm) if has_norms else None
        self.key_norm = Norm.of(attention.k_norm) if has_norms else None
        self.qkv = Matrix([attention.q_proj, attention.k_proj, attention.v_proj], num_rows)
        self.out = Matrix([attention.o_proj], num_rows)
        self.gate_up = Matrix([feed_forward.gate_proj, feed_forward.up_proj], num_rows)
        self.down = Matrix([feed_forward.down_proj], num_rows)

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkv, self.out, self.gate_up, self.down]


class Operations(Protocol):
    """The operations of a layer between its matrix products."""

    def add_norm(self, residual_TC: Tensor, delta_TC: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """The residual stream with `delta`, if any, added, possibly in place, and that normalised."""
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
        # The embedding's module scales what it finds where the family does.
        self._embedding, self._rotary, self._last_norm = decoder.embed_tokens, decoder.rotary_emb, Norm.of(decoder.norm)
        self._layers = [Layer(layer, num_rows, model.config) for layer in decoder.layers]
        self.head = Head(named_weights(model)["lm_head.weight"], num_rows, logit_softcap(model.config))

    @property
    def windows(self) -> set[int]:
        return {layer.window for layer in self._layers}

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for layer in self._layers for matrix in layer.matrices]

    def hidden_states(
        self, tokens_T: Tensor, positions_T: Tensor, attention: CachedAttention, operations: Operations | None = None
    ) -> Tensor:
        """Final hidden states (T, C), before the head; by other operations than the decoder's own, if given."""
        operations, layers = operations or self._operations, self._layers
        residual_TC: Tensor = self._embedding(tokens_T)
        rotations = self._rotations(residual_TC, positions_T)
        residual_TC, normed_TC = operations.add_norm(residual_TC, None, layers[0].before_attention)
        following = [*(layer.before_attention for layer in layers[1:]), self._last_norm]
        for index, (layer, norm) in enumerate(zip(layers, following, strict=True)):
            qkv_TXD = layer.qkv(normed_TC).view(len(tokens_T), -1, layer.head_dim)
            attended_TC = layer.out(attention.attend(index, layer, qkv_TXD, rotations[layer.rotary]))
            if layer.after_attention is not None:
                attended_TC = operations.add_norm(attended_TC, None, layer.after_attention)[1]
            residual_TC, normed_TC = operations.add_norm(residual_TC, attended_TC, layer.before_feed_forward)
            forward_TC = layer.down(operations.gated(layer.gate_up(normed_TC), layer))
            if layer.after_feed_forward is not None:
                forward_TC = operations.add_norm(forward_TC, None, layer.after_feed_forward)[1]
            residual_TC, normed_TC = operations.add_norm(residual_TC, forward_TC, norm)
        return normed_TC

    def _rotations(self, like: Tensor, positions_T: Tensor) -> dict[str, Rotation]:
        """Rotary embeddings by layer kind; most families have one kind, with an empty name."""
        rotations = {}
        for name in {layer.rotary for layer in self._layers}:
            cos, sin = self._rotary(like, positions_T[None], *([name] if name else []))
            rotations[name] = Rotation(cos[0], sin[0])
        return rotations


class RotatingOperations(Operations, Protocol):
    """On a CPU, rotation is an operation of its own."""

    def rotate(self, qkv_TXD: Tensor, layer: Layer, rotation: Rotation) -> None:
        """Normalise queries and keys where the family does, and rotate them by position, in place."""
        ...


class TorchOperations:
    """The reference: plain torch, on any device."""

    def add_norm(self, residual_TC: Tensor, delta_TC: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
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


def _rms_norm(states: Tensor, norm: Norm) -> Tensor:
    """As the families' modules compute it: in fp32, rounded before the weight is applied, or after that once."""
    normed = F.rms_norm(states.float(), norm.weight.shape, None, norm.eps)
    if norm.unit_offset:
        return (normed * (1.0 + norm.weight.float())).to(states.dtype)
    return normed.to(states.dtype) * norm.weight


def activation_name(config: Any) -> str:
    return str(config.hidden_activation if config.model_type in ("gemma2", "gemma3_text") else config.hidden_act)
