"""Low-rank factors of a matrix's change: how trainer and engine alike merge them into the base."""

import torch
from torch import Tensor

A, B = ".lora_A", ".lora_B"


def merged(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """base + B·A, computed in fp32 and rounded to the base's type once; B carries the scale."""
    return torch.addmm(base.float(), b, a).to(base.dtype)


def targets(names: list[str]) -> list[str]:
    """The matrices that factors of these names change; none where the names are those of whole tensors."""
    return [f"{name.removesuffix(A)}.weight" for name in names if name.endswith(A)]
