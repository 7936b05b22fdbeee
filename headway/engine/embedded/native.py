"""The decoder's small operations and its decode attention in C++, compiled for this processor on first use.

The library compiles in a second and stays in the user's cache directory. Without a compiler the engine runs the torch
operations of decoder.py instead: the same numbers to rounding, at about two thirds of the speed.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.engine.embedded.decoder import Layer, Norm, Rotation
from headway.engine.embedded.slab_kv import KvMemory, Row

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILE_DEADLINE_S = 120
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_SHARED, MAX_DIM = 16, 256
"""What native.cpp holds on its stack: query heads per key/value head, and the head dimension."""
_GATED = {"silu": "gated_silu", "gelu_pytorch_tanh": "gated_gelu_tanh"}


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "") or "c++") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled operations; None without a compiler that works."""
    cxx = compiler()
    if cxx is None:
        return None
    path = _cache_directory() / f"native-{_identity(cxx)}.so"
    if not path.exists() and not _compile(cxx, path):
        return None
    loaded = ctypes.CDLL(str(path))
    for dtype in _DTYPES.values():
        _declare(loaded, dtype)
    return loaded


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headway"


def _identity(cxx: str) -> str:
    """A hash of source, compiler and processor: machines of several kinds may share a home directory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    parts = [_SOURCE.read_text(), cxx, *_FLAGS, platform.machine(), *features]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(cxx: str, path: Path) -> bool:
    # A compiler that fails, or a home directory that cannot be written, costs speed only.
    with suppress(OSError, subprocess.SubprocessError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch) / "native.so"
            command = [cxx, *_FLAGS, "-o", str(built), str(_SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_DEADLINE_S)
            built.replace(path)
        return True
    return False


def _declare(loaded: ctypes.CDLL, dtype: str) -> None:
    """Arguments as the C++ functions take them: pointers, floats, 64-bit integers."""
    shapes = {
        "add_rms_norm": "ppppfiii",
        "gated_silu": "ppii",
        "gated_gelu_tanh": "ppii",
        "rotate": "pppppfiiiii",
        "decode": "pppppppffiiiiiii",
    }
    kinds = {"p": ctypes.c_void_p, "f": ctypes.c_float, "i": ctypes.c_int64}
    for name, shape in shapes.items():
        function = getattr(loaded, f"{name}_{dtype}")
        function.argtypes, function.restype = [kinds[letter] for letter in shape], None


def supports(memory: KvMemory, activation: str) -> bool:
    """Whether the library has all of a model's operations; otherwise torch runs all of them."""
    shape = memory.shape
    fits = shape.num_heads // shape.num_kv_heads <= MAX_SHARED and shape.head_dim <= MAX_DIM and activation in _GATED
    return fits and memory.dtype in _DTYPES and memory.device.type == "cpu" and library() is not None


class NativeOperations:
    """The decoder's `Operations` through the compiled library. Tensors are contiguous and of one type."""

    def __init__(self, dtype: torch.dtype, activation: str):
        loaded = library()
        assert loaded is not None
        name = _DTYPES[dtype]
        self._add_rms_norm = getattr(loaded, f"add_rms_norm_{name}")
        self._gated = getattr(loaded, f"{_GATED[activation]}_{name}")
        self._rotate = getattr(loaded, f"rotate_{name}")

    def add_norm(self, residual_TC: Tensor, delta_TC: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(residual_TC)
        delta = None if delta_TC is None else delta_TC.data_ptr()
        places = residual_TC.data_ptr(), delta, norm.weight.data_ptr(), out.data_ptr()
        self._add_rms_norm(*places, norm.eps, norm.unit_offset, *residual_TC.shape)
        return residual_TC, out

    def gated(self, gate_up_T2F: Tensor, layer: Layer) -> Tensor:
        rows, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        out = gate_up_T2F.new_empty(rows, size)
        self._gated(gate_up_T2F.data_ptr(), out.data_ptr(), rows, size)
        return out

    def rotate(self, qkv_TXD: Tensor, layer: Layer, rotation: Rotation) -> None:
        query_norm = key_norm = None
        eps, unit_offset = 0.0, False
        if layer.query_norm is not None and layer.key_norm is not None:
            query_norm, key_norm = layer.query_norm.weight.data_ptr(), layer.key_norm.weight.data_ptr()
            eps, unit_offset = layer.query_norm.eps, layer.query_norm.unit_offset
        rows, _, dim = qkv_TXD.shape
        heads = layer.num_heads, layer.num_kv_heads
        cos, sin = rotation.cos_TD.data_ptr(), rotation.sin_TD.data_ptr()
        self._rotate(qkv_TXD.data_ptr(), cos, sin, query_norm, key_norm, eps, unit_offset, rows, *heads, dim)


class NativeDecodeAttention:
    """One new token for each of many rows, in any order. Queries beyond the rows are padding."""

    def __init__(self, memory: KvMemory, rows: list[Row], positions: list[int], operations: NativeOperations):
        self._memory, self._operations = memory, operations
        places = [memory.place(row) for row in rows]
        self._starts = np.array([start for start, _ in places], np.int64)
        self._strides = np.array([stride for _, stride in places], np.int64)
        self._positions = np.array(positions, np.int64)
        self._longest = max(positions) + 1
        self._scratch = torch.empty(len(rows) * memory.shape.num_heads * self._longest)
        self._decode = getattr(library(), f"decode_{_DTYPES[memory.dtype]}")

    def attend(self, index: int, layer: Layer, qkv_TXD: Tensor, rotation: Rotation) -> Tensor:
        self._operations.rotate(qkv_TXD, layer, rotation)
        num_rows, dim = len(self._positions), qkv_TXD.shape[2]
        out_TE = qkv_TXD.new_zeros(len(qkv_TXD), layer.num_heads * dim)
        self._decode(
            qkv_TXD.data_ptr(), self._memory.layer_address(index), self._starts.ctypes.data,
            self._strides.ctypes.data, self._positions.ctypes.data, out_TE.data_ptr(), self._scratch.data_ptr(),
            layer.scaling, layer.softcap, layer.window, self._memory.layer_elements, num_rows, layer.num_heads,
            layer.num_kv_heads, dim, self._longest,
        )  # fmt: skip
        return out_TE
