"""Low-rank factors of a matrix's change: how trainer and engine alike merge them into the base, and peft's format."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

A, B = ".lora_A", ".lora_B"
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def merged(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """base + B·A, computed in fp32 and rounded to the base's type once; B carries the scale."""
    return torch.addmm(base.float(), b, a).to(base.dtype)


def in_peft(name: str) -> str:
    """The name that peft gives a factor in a file."""
    return f"base_model.model.{name}.weight"


def write(directory: Path, factors: Mapping[str, Tensor]) -> None:
    """Write published factors as an adapter directory in peft's format."""
    directory.mkdir()
    matrices = sorted({name.removesuffix(A).rpartition(".")[2] for name in factors if name.endswith(A)})
    rank = next(len(factor) for name, factor in factors.items() if name.endswith(A))
    # An alpha as large as the rank is a scale of 1: that of the run is in B.
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": matrices, "bias": "none"}
    (directory / CONFIG).write_text(json.dumps(config))
    save_file({in_peft(name): factor.contiguous() for name, factor in factors.items()}, directory / TENSORS)


def targets(names: list[str]) -> list[str]:
    """The matrices that factors of these names change; none where the names are those of whole tensors."""
    return [f"{name.removesuffix(A)}.weight" for name in names if name.endswith(A)]
