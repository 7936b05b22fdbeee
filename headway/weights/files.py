"""Weights as files: each version an ordinary safetensors file in a directory of its own, which every engine can read.

The safetensors library writes a temporary file, which is fsynced and renamed, so a file is whole or absent. The last
two versions stay. A file holds every tensor under every name it has, tied or not, and the version in its metadata.
Engines read it without mapping it: a mapped file that is deleted on a network file system would kill them.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from headway.errors import CAUSE, KIND, WeightMismatch, WeightsUnreachable, translated
from headway.files import fsync_directory, opened
from headway.types import TensorInfo, WeightPlace, WeightUpdate
from headway.weights.stream import Span

TRANSPORT = "disk"
_MAX_HEADER_BYTES = 100_000_000  # as safetensors has it
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class WeightFiles:
    """The writing side. Several may share a directory, each with a `name` of its own."""

    def __init__(self, directory: Path, name: str = "model") -> None:
        self.directory, self._name = directory, f"{name}.safetensors"
        self._retained: list[int] = []

    def write(self, version: int, tensors: Sequence[TensorInfo], memory: memoryview) -> WeightPlace:
        """Write the tensors that lie in the memory; remove versions before the last two. A full disk raises OSError."""
        path = self._path(version)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = path.with_name(path.name + ".unfinished")
        start = np.frombuffer(memory, np.uint8).ctypes.data
        specs = {
            info.name: TensorSpec(
                dtype=info.dtype, shape=list(info.shape), data_ptr=start + info.offset, data_len=info.num_bytes
            )
            for info in tensors
        }
        with ExitStack() as on_error:
            on_error.callback(unfinished.unlink, missing_ok=True)
            unfinished.touch(mode=0o600)
            with translated(SafetensorError, OSError, CAUSE):
                serialize_file(specs, unfinished, {"format": "pt", "version": str(version)})
            with opened(unfinished) as file:
                os.fsync(file)
            unfinished.replace(path)
            on_error.pop_all()
        fsync_directory(path.parent)
        fsync_directory(self.directory)
        self._prune(version)
        return WeightPlace(TRANSPORT, str(path.absolute()))

    def _path(self, version: int) -> Path:
        return self.directory / f"version-{version}" / self._name

    def _prune(self, version: int) -> None:
        """Remove this writer's files of all versions but the last two it wrote, and what earlier runs left."""
        self._retained = [*[number for number in self._retained if number < version][-1:], version]
        for directory in self.directory.glob("version-*"):
            number = re.fullmatch(r"version-(\d+)", directory.name)
            if number and int(number[1]) not in self._retained:
                for name in (self._name, self._name + ".unfinished"):
                    (directory / name).unlink(missing_ok=True)
                with suppress(OSError):  # another writer's file is still there
                    directory.rmdir()


def fetch(update: WeightUpdate, place: WeightPlace, spans: Sequence[Span], memory: Iterator[memoryview]) -> None:
    """Read the spans, in their order, each into the next piece of memory."""
    unreadable = f"{place.location} cannot be read ({CAUSE})"
    with translated(OSError, WeightsUnreachable, unreadable), opened(place.location) as file:
        starts = _find(update, place, file)
        for (info, start, _), piece in zip(spans, memory, strict=True):
            if not read_into(piece, file, starts[info.name] + start):
                raise _damaged(update, place, "it ends early")


def _find(update: WeightUpdate, place: WeightPlace, file: int) -> dict[str, int]:
    """The byte at which each tensor of the update starts in the file, after checking the file's header."""
    with translated(
        (ValueError, TypeError, KeyError, AttributeError),
        partial(_damaged, update, place),
        f"its header cannot be read: {KIND} {CAUSE}",
    ):
        num_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
        entries: Mapping[str, Any] = json.loads(os.pread(file, min(num_bytes, _MAX_HEADER_BYTES), 8))
        version = int(entries["__metadata__"]["version"])
        found = {info.name: _described(entries[info.name]) for info in update.tensors}
    if version != update.version:
        raise WeightsUnreachable(f"{place.location} holds version {version}")
    for info in update.tensors:
        dtype, shape, start, end = found[info.name]
        if (dtype, shape, end - start) != (_TYPES.get(info.dtype), info.shape, info.num_bytes):
            raise _damaged(update, place, f"{info.name} is there as {dtype} {shape}")
    return {name: 8 + num_bytes + start for name, (_, _, start, _) in found.items()}


def _described(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    start, end = entry["data_offsets"]
    return str(entry["dtype"]), tuple(entry["shape"]), int(start), int(end)


def read_into(piece: memoryview, file: int, start: int) -> bool:
    """Fill the memory from byte `start` on, with the GIL released; False if the file ends before."""
    while len(piece):
        num_read = os.preadv(file, [piece], start)
        if num_read == 0:
            return False
        piece, start = piece[num_read:], start + num_read
    return True


def _damaged(update: WeightUpdate, place: WeightPlace, why: str) -> WeightMismatch:
    return WeightMismatch(f"version {update.version}: {place.location} is damaged, {why}")
