"""The weights the engine runs, the set staged beside them, and the exchange of the two.

On a CPU with oneDNN, wide matrices are also kept in that library's own layout: a decode step's products are 1.2 to 2
times as fast, the head's the most, and the copy is made while staging, not while decoding. Logits are always fp32.

Invariant that lives here:
 11. Weight sync is proved at every load: what is packed is packed from the bytes whose fingerprints were checked.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.models import head_logits, named_weights
from headway.types import WeightUpdate
from headway.weights import ShadowWeights

_PACKED_FROM = 1 << 18
"""Elements of the smallest matrix worth packing: below that, the call costs more than the layout saves."""


def packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() >= _PACKED_FROM and torch.backends.mkldnn.is_available()


def _pack(weight: Tensor, num_rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), num_rows)
    return packed


def _product(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return out


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear`, under the same parameter names, and multiplies by the packed copy."""

    def __init__(self, linear: nn.Linear, num_rows: int):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._num_rows = num_rows
        self._live = _pack(linear.weight, num_rows)
        self._staged: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        return _product(inputs, self._live, self.bias)

    def stage(self, weight: Tensor) -> None:
        self._staged = _pack(weight, self._num_rows)

    def swap(self) -> None:
        assert self._staged is not None
        self._live, self._staged = self._staged, None


class Head:
    """Hidden states to fp32 logits; a narrower head is cast once per version rather than at every step."""

    def __init__(self, weight: Tensor, num_rows: int):
        self._num_rows = num_rows
        self._packed = packable(weight)
        self._live = self._staged = self._prepared(weight)

    def _prepared(self, weight: Tensor) -> Tensor:
        exact = weight.detach().float() if weight.device.type == "cpu" else weight.detach()
        return _pack(exact, self._num_rows) if self._packed else exact

    def stage(self, weight: Tensor) -> None:
        self._staged = self._prepared(weight)

    def swap(self) -> None:
        self._live = self._staged

    def logits(self, hidden_TC: Tensor) -> Tensor:
        return _product(hidden_TC.float(), self._live, None) if self._packed else head_logits(hidden_TC, self._live)


class LiveWeights:
    def __init__(self, model: PreTrainedModel, num_rows: int):
        weights = named_weights(model)
        self._shadow = ShadowWeights(weights)
        self._head = Head(weights["lm_head.weight"], num_rows)
        self._linears = _replace_linears(model, num_rows)

    @property
    def staged_version(self) -> int | None:
        return self._shadow.staged_version

    def stage(self, update: WeightUpdate) -> None:
        """Receive an update beside the live weights; they are untouched."""
        self._shadow.stage(update)
        for name, linear in self._linears.items():
            linear.stage(self._shadow.staged(f"{name}.weight"))
        self._head.stage(self._shadow.staged("lm_head.weight"))

    def swap(self) -> dict[str, str]:
        """Make the staged set live; its fingerprints."""
        fingerprints = self._shadow.swap()
        for linear in self._linears.values():
            linear.swap()
        self._head.swap()
        return fingerprints

    def logits(self, hidden_TC: Tensor) -> Tensor:
        return self._head.logits(hidden_TC)


def _replace_linears(model: PreTrainedModel, num_rows: int) -> dict[str, PackedLinear]:
    """Put a `PackedLinear` in the place of every wide matrix of the decoder, the head aside."""
    replaced = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head" and packable(module.weight):
            replaced[name] = PackedLinear(module, num_rows)
            model.set_submodule(name, replaced[name])
    return replaced
