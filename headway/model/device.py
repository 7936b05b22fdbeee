"""Devices and dtypes of a config, deterministic mode, and copies to a device."""

import os

import torch
from torch import Tensor

from headway.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


CPU = torch.device("cpu")


def find_device(knob: str, name: str, dtype: torch.dtype) -> torch.device:
    """The device that `knob` names; one that is missing, or cannot compute in `dtype`, raises `ConfigError`."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= there:
        raise ConfigError(f"{knob} = {name} asks for a GPU that is not there ({there} found); set cpu or another")
    device = torch.device("cuda", device.index or 0)
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(f"{knob} = {name} is a GPU without bfloat16; set model.dtype = float16, or use another GPU")
    return device


def make_repeatable(device: torch.device) -> None:
    """Make arithmetic in this process repeat bit for bit on a GPU; on a CPU, with fixed threads, it does anyway.

    torch then takes the deterministic backward passes of attention, gather and embedding. cuBLAS needs a workspace of
    fixed size, which it reads from the environment when its first handle is created.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`, without making the host wait for a GPU."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
