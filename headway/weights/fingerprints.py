"""Checksums of published tensors, and the one digest of a whole set of weights."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor


def fingerprint(tensor: Tensor) -> str:
    """A checksum over the tensor's bytes."""
    return str(xxhash.xxh3_64_hexdigest(bytes_of(tensor)))


def digest(fingerprints: Mapping[str, str]) -> str:
    """One checksum for a whole set of weights."""
    lines = "\n".join(f"{name} {fingerprints[name]}" for name in sorted(fingerprints))
    return str(xxhash.xxh3_64_hexdigest(lines.encode()))


def fingerprints(tensors: Mapping[str, Tensor], on_device: bool = False) -> dict[str, str]:
    """Each tensor's checksum: xxh3 of the bytes on the host, or another one that the GPU computes."""
    if on_device:
        from headway.weights.cuda import fingerprints_on_device

        return fingerprints_on_device(tensors)
    prints: dict[int, str] = {}
    for tensor in tensors.values():
        if id(tensor) not in prints:
            prints[id(tensor)] = fingerprint(tensor.detach())
    return {name: prints[id(tensor)] for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's raw bytes in host memory."""
    array: NDArray[np.uint8] = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return array.data


@cache
def this_host() -> str:
    """Identifies processes that can map each other's memory by path: same boot, same PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
