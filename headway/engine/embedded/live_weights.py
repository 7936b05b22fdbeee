"""The engine's live weights, the staged set, and their exchange.

Matrices with the same input are concatenated. On a CPU with oneDNN, wide ones are stored in that library's own layout:
a decode step's products are 1.2 to 2 times as fast, the head's the most. Both copies are made while staging, not while
decoding. Logits are always fp32.

Invariant that lives here:
 11. Verified weight sync at every load: what is packed is packed from the bytes whose fingerprints were checked.
"""

import threading
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.errors import DeadlineExceeded
from headway.model.loading import named_weights
from headway.model.logprobs import cap_logits, head_logits
from headway.types import WeightUpdate
from headway.weights.shadow import ShadowWeights

_PACKED_FROM = 1 << 18
"""Elements of the smallest matrix worth packing: below that, the call costs more than the layout saves."""
_STAGING_S = 120.0


def packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() >= _PACKED_FROM and torch.backends.mkldnn.is_available()


def _pack(weight: Tensor, num_rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), num_rows)
    return packed


def _product(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return out


class Matrix:
    """One or more linear layers with the same input, as one product.

    On a GPU the layers' parameters become views of the product's own tensor, whose address never changes: a swap
    only writes the parameters, and captured graphs stay valid.
    """

    def __init__(self, linears: Sequence[nn.Linear], num_rows: int):
        self._parameters = [linear.weight for linear in linears]
        self._biases = [linear.bias for linear in linears if linear.bias is not None]
        self._num_rows = num_rows
        self._live = self._staged = self._prepared(lambda parameter: parameter)
        if self._parameters[0].is_cuda:
            _make_views(self._parameters, self._live[0])
            if self._live[1] is not None:
                _make_views(self._biases, self._live[1])

    def _prepared(self, value: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None, bool]:
        weight = torch.cat([value(parameter).detach() for parameter in self._parameters])
        bias = torch.cat([value(parameter).detach() for parameter in self._biases]) if self._biases else None
        packed = packable(weight)
        return _pack(weight, self._num_rows) if packed else weight, bias, packed

    def __call__(self, inputs: Tensor) -> Tensor:
        weight, bias, packed = self._live
        return _product(inputs, weight, bias) if packed else F.linear(inputs, weight, bias)

    def stage(self, staged: Callable[[Tensor], Tensor]) -> None:
        """Prepare the staged product; `staged` maps a parameter to its staged tensor."""
        changes = any(staged(parameter) is not parameter for parameter in [*self._parameters, *self._biases])
        self._staged = self._prepared(staged) if changes else self._live

    def swap(self) -> None:
        self._live = self._staged


def _make_views(parameters: Sequence[Tensor], whole: Tensor) -> None:
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part


class Head:
    """Hidden states to fp32 logits, through a soft cap where there is one; a narrower head is cast once per version
    rather than at every step."""

    def __init__(self, weight: Tensor, num_rows: int, softcap: float):
        self._parameter, self._num_rows, self._softcap = weight, num_rows, softcap
        self._packed = packable(weight)
        self._live = self._staged = self._prepared(weight)

    def _prepared(self, weight: Tensor) -> Tensor:
        exact = weight.detach().float() if weight.device.type == "cpu" else weight.detach()
        return _pack(exact, self._num_rows) if self._packed else exact

    def stage(self, staged: Callable[[Tensor], Tensor]) -> None:
        weight = staged(self._parameter)
        self._staged = self._live if weight is self._parameter else self._prepared(weight)

    def swap(self) -> None:
        self._live = self._staged

    def logits(self, hidden_TC: Tensor) -> Tensor:
        if self._packed:
            return cap_logits(_product(hidden_TC.float(), self._live, None), self._softcap)
        return cap_logits(head_logits(hidden_TC, self._live), self._softcap)


class LiveWeights:
    """A model's parameters, and the products made from them, as one set that changes at once.

    On a CPU the two sets change places. On a GPU the staged one is copied over the live one, so that nothing moves.
    """

    def __init__(self, model: PreTrainedModel, products: Sequence[Matrix | Head]):
        in_place = model.device.type == "cuda"
        self._shadow = ShadowWeights(named_weights(model), in_place)
        self._products = [] if in_place else products
        self._staging = threading.Lock()

    @property
    def staged_version(self) -> int | None:
        return self._shadow.staged_version

    def stage(self, update: WeightUpdate) -> None:
        """Receive an update into the staged set; the live weights are untouched."""
        # A caller that gave up leaves its transfer running, and two of them would write the same memory.
        if not self._staging.acquire(timeout=_STAGING_S):
            raise DeadlineExceeded(
                f"version {update.version} waited {_STAGING_S:g} s for the transfer of an earlier one to end"
            )
        try:
            self._shadow.stage(update)
            for product in self._products:
                product.stage(self._shadow.staged)
        finally:
            self._staging.release()

    def swap(self) -> dict[str, str]:
        """Make the staged set live; returns its fingerprints."""
        fingerprints = self._shadow.swap()
        for product in self._products:
            product.swap()
        return fingerprints
