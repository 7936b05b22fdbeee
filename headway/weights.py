"""Publish and fetch named tensors under a version, with fingerprints.

A publisher writes an update into one of two shared-memory buffers; a receiver copies it beside its live weights and
exchanges the two between decode steps. Tied tensors lie in the buffer once and are named twice. Between GPUs of one
machine the bytes need not pass through the host: device_weights.py has that publisher.

Invariant that lives here:
 11. Weight sync is proved at every load by fingerprint: each tensor's checksum is taken over its bytes as published,
     and again over the bytes the receiver is about to run; a mismatch stops the run.
"""

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from headway.errors import InvariantBroken, WeightMismatch
from headway.types import TensorInfo, WeightUpdate

_ALIGNMENT = 64


def fingerprint(tensor: Tensor) -> str:
    """A checksum over the tensor's bytes."""
    return str(xxhash.xxh3_64_hexdigest(bytes_of(tensor)))


def digest(fingerprints: Mapping[str, str]) -> str:
    """One checksum for a whole set of weights."""
    lines = "\n".join(f"{name} {fingerprints[name]}" for name in sorted(fingerprints))
    return str(xxhash.xxh3_64_hexdigest(lines.encode()))


def fingerprints(tensors: Mapping[str, Tensor], on_device: bool = False) -> dict[str, str]:
    """Of each tensor its checksum: of the bytes on the host, or another that a GPU computes where they lie."""
    if on_device:
        from headway.device_weights import fingerprints_on_device

        return fingerprints_on_device(tensors)
    prints: dict[int, str] = {}
    for tensor in tensors.values():
        if id(tensor) not in prints:
            prints[id(tensor)] = fingerprint(tensor.detach())
    return {name: prints[id(tensor)] for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's numbers as they lie in memory, on the host."""
    array: NDArray[np.uint8] = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return array.data


class _SharedBuffer:
    """Memory other processes of this user can map by `path`; it vanishes with its owner."""

    def __init__(self, num_bytes: int):
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("headway-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="headway-weights-")
        os.truncate(self._file, num_bytes)
        self.memory = mmap.mmap(self._file, num_bytes)

    def close(self) -> None:
        os.close(self._file)
        if not self.path.startswith("/proc/"):
            os.unlink(self.path)


class Publisher:
    """The sending side: two buffers by turns, so that an update stays readable until the one after the next."""

    def __init__(self) -> None:
        self._buffers: list[_SharedBuffer] = []
        self._version = 0

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> WeightUpdate:
        """Write the tensors, in the type they are given, and say where they lie."""
        if version < self._version:
            raise InvariantBroken(f"version {version} cannot follow version {self._version}: versions never go back")
        self._version = version
        placed: dict[int, int] = {}
        offset = 0
        for tensor in tensors.values():
            if id(tensor) not in placed:
                placed[id(tensor)] = offset
                offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        buffer = self._buffer(version, offset)
        infos: list[TensorInfo] = []
        prints: dict[int, str] = {}
        for name, tensor in tensors.items():
            data = bytes_of(tensor.detach())
            start = placed[id(tensor)]
            if id(tensor) not in prints:
                buffer.memory[start : start + len(data)] = data
                prints[id(tensor)] = str(xxhash.xxh3_64_hexdigest(data))
            dtype = str(tensor.dtype).removeprefix("torch.")
            infos.append(TensorInfo(name, dtype, tuple(tensor.shape), start, len(data), prints[id(tensor)]))
        return WeightUpdate(version, "full", "shared_memory", buffer.path, tuple(infos))

    def _buffer(self, version: int, num_bytes: int) -> _SharedBuffer:
        while len(self._buffers) < 2:
            self._buffers.append(_SharedBuffer(num_bytes))
        return self._buffers[version % 2]

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()


def as_part(update: WeightUpdate, rows: Mapping[str, tuple[range, int]]) -> WeightUpdate:
    """One rank's update as part of the whole, given which rows it has of each tensor and how many there are."""
    pieces = []
    for info in update.tensors:
        mine, num_rows = rows[info.name]
        pieces.append(replace(info, first_row=mine.start, num_rows=num_rows))
    return replace(update, tensors=tuple(pieces))


def joined(parts: Sequence[WeightUpdate]) -> WeightUpdate:
    """The update that the ranks published together."""
    return WeightUpdate(parts[0].version, parts[0].kind, "parts", "", (), tuple(parts))


def open_update(update: WeightUpdate) -> dict[str, Tensor]:
    """The update's tensors as views of where they were published; on the host copy-on-write: nobody can change them."""
    if update.transport == "cuda":
        from headway.device_weights import open_on_device

        return open_on_device(update)
    # The memory is the publisher's and goes with it: a dead trainer is a sentence, not a missing file.
    try:
        with open(update.location, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightMismatch(f"version {update.version} is gone: its publisher has ended ({error.strerror})") from error
    whole = np.frombuffer(memory, dtype=np.uint8)
    tensors = {}
    for info in update.tensors:
        data = torch.from_numpy(whole[info.offset : info.offset + info.num_bytes])
        tensors[info.name] = data.view(getattr(torch, info.dtype)).view(info.shape)
    return tensors


class ShadowWeights:
    """The receiving side: a second set of tensors beside a module's live ones."""

    def __init__(self, live: Mapping[str, Tensor], in_place: bool = False):
        """With `in_place`, a swap copies the shadow set over the live one instead of exchanging the two."""
        self._in_place = in_place
        self._live = {name: parameter for name, parameter in live.items() if isinstance(parameter, nn.Parameter)}
        self._shadow: dict[int, Tensor] = {}
        self._fingerprints: dict[str, str] = {}
        self.staged_version: int | None = None

    def stage(self, update: WeightUpdate) -> None:
        """Copy the update into the shadow set and check every byte of it; the live set is untouched."""
        self.staged_version = None
        self._check_kinds(update)
        self._fingerprints = {}
        for part in update.parts or (update,):
            into, published = self._places(part), open_update(part)
            for name, rows in {id(rows): (name, rows) for name, rows in into.items()}.values():
                rows.copy_(published[name])
            # Taken from the tensor each name will run, not from what was copied: tied here, two may have arrived.
            found = fingerprints(into, on_device=part.transport == "cuda")
            self._fingerprints |= {info.key: found[info.name] for info in part.tensors}
        wrong = [name for name, value in update.fingerprints.items() if self._fingerprints[name] != value]
        if wrong:
            raise WeightMismatch(f"version {update.version}: {wrong[0]} arrived with another checksum than published")
        self.staged_version = update.version

    def _places(self, part: WeightUpdate) -> dict[str, Tensor]:
        """Where the part's tensors, or pieces of them, belong in the shadow set; what is tied is one tensor there."""
        places: dict[tuple[int, int], Tensor] = {}
        for info in part.tensors:
            parameter = self._live[info.name]
            if id(parameter) not in self._shadow:
                self._shadow[id(parameter)] = torch.empty_like(parameter.data)
            rows = self._shadow[id(parameter)][info.rows.start : info.rows.stop]
            places.setdefault((id(parameter), info.first_row), rows)
        return {info.name: places[id(self._live[info.name]), info.first_row] for info in part.tensors}

    def _check_kinds(self, update: WeightUpdate) -> None:
        """That names, types and shapes are those of the live set, and that no row is missing or comes twice."""
        version, published = update.version, dict[str, list[TensorInfo]]()
        for info in update.pieces:
            published.setdefault(info.name, []).append(info)
        differing = sorted(self._live.keys() ^ published.keys())
        if differing:
            raise WeightMismatch(
                f"version {version}: published and loaded tensors differ by name, first {differing[0]}"
            )
        for name, parameter in self._live.items():
            ours, num_rows = f"{parameter.dtype} {tuple(parameter.shape)}", 0
            for info in sorted(published[name], key=lambda info: info.first_row):
                theirs = f"torch.{info.dtype} {info.whole_shape}"
                if theirs != ours:
                    raise WeightMismatch(f"version {version}: {name} was published as {theirs}, loaded as {ours}")
                num_rows = info.rows.stop if info.first_row == num_rows else -1
            if num_rows != len(parameter):
                raise WeightMismatch(f"version {version}: the pieces of {name} do not make a whole")

    def staged(self, parameter: Tensor) -> Tensor:
        """What a parameter will be after the swap."""
        return self._shadow[id(parameter)]

    def swap(self) -> dict[str, str]:
        """Exchange live and shadow tensors; the fingerprints of what is now live."""
        if self.staged_version is None:
            raise InvariantBroken("a swap needs staged weights, and none are staged")
        parameters = {id(parameter): parameter for parameter in self._live.values()}
        if self._in_place:
            torch._foreach_copy_([p.data for p in parameters.values()], [self._shadow[key] for key in parameters])
        else:
            for key, parameter in parameters.items():
                parameter.data, self._shadow[key] = self._shadow[key], parameter.data
        self.staged_version = None
        return dict(self._fingerprints)
