"""The trainer's side: publishes named tensors under a version in one of two shared-memory buffers.

Tied tensors lie in the buffer once and are named twice. An update lists the places its bytes can be fetched from,
best first. Between GPUs of one machine the bytes need not pass through the host: cuda.py has that publisher.
"""

import logging
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.config import WeightsSection
from headway.errors import InvariantBroken, RunFailed
from headway.types import TensorInfo, WeightPlace, WeightUpdate
from headway.weights.files import WeightFiles
from headway.weights.fingerprints import bytes_of, digest, fingerprint, this_host
from headway.weights.stream import LOOPBACK, WeightServer

if TYPE_CHECKING:
    from headway.weights.cuda import DevicePublisher

_ALIGNMENT = 64


_LOG = logging.getLogger(__name__)


class _SharedBuffer:
    """Memory other processes of this user can map by `path`; it vanishes with its owner."""

    def __init__(self, num_bytes: int):
        self.file = os.memfd_create("headway-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        os.truncate(self.file, num_bytes)
        self.bytes = torch.frombuffer(mmap.mmap(self.file, num_bytes), dtype=torch.uint8)
        self.version: int | None = None  # of what lies in it, unless it is being written

    def close(self) -> None:
        os.close(self.file)


class Publisher:
    """The sending side. Two buffers alternate, so that an update stays readable until the one after the next.

    `transports` lists how receivers may fetch, in the order to try: `shared_memory` maps a buffer, `stream` serves it
    over TCP, `disk` writes it to a file. `part` distinguishes publishers that share a directory.
    """

    def __init__(
        self,
        transports: Sequence[str] = ("shared_memory",),
        address: str = LOOPBACK,
        directory: str = "",
        part: str = "model",
    ) -> None:
        self.version = 0
        self._transports = tuple(transports)
        self._buffers: list[_SharedBuffer] = []
        self._lock = threading.Lock()
        self._server = WeightServer(address, self) if "stream" in transports else None
        self._files = WeightFiles(Path(directory), part) if "disk" in transports else None

    def publish(self, version: int, tensors: Mapping[str, Tensor], base: str = "") -> WeightUpdate:
        """Write the tensors and return the update that describes them; with a `base`, an adapter of that base."""
        if version < self.version:
            raise InvariantBroken(f"version {version} cannot follow version {self.version}: versions never go back")
        placed: dict[int, int] = {}
        num_bytes = 0
        for tensor in tensors.values():
            if id(tensor) not in placed:
                placed[id(tensor)] = num_bytes
                num_bytes += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        buffer = self._claim(version, num_bytes)
        infos: list[TensorInfo] = []
        prints: dict[int, str] = {}
        for name, tensor in tensors.items():
            start, size = placed[id(tensor)], tensor.numel() * tensor.element_size()
            if id(tensor) not in prints:
                written = buffer.bytes[start : start + size]
                written.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
                prints[id(tensor)] = fingerprint(written)
            dtype = str(tensor.dtype).removeprefix("torch.")
            infos.append(TensorInfo(name, dtype, tuple(tensor.shape), start, size, prints[id(tensor)]))
        buffer.version = version
        return self._describe(buffer, tuple(infos), base)

    def _claim(self, version: int, num_bytes: int) -> _SharedBuffer:
        """The buffer for this version, no longer served to receivers while it is written."""
        with self._lock:
            self.version = version
            while len(self._buffers) < 2:
                self._buffers.append(_SharedBuffer(num_bytes))
            if len(self._buffers[version % 2].bytes) < num_bytes:
                self._buffers[version % 2].close()
                self._buffers[version % 2] = _SharedBuffer(num_bytes)
            self._buffers[version % 2].version = None
            return self._buffers[version % 2]

    def _describe(self, buffer: _SharedBuffer, infos: tuple[TensorInfo, ...], base: str) -> WeightUpdate:
        places = {"shared_memory": WeightPlace("shared_memory", buffer.path, this_host())}
        token = b""
        if self._server is not None:
            places["stream"], token = WeightPlace("stream", self._server.location), self._server.token
        if self._files is not None:
            places |= self._write_file(infos, buffer)
        first, *others = [places[name] for name in self._transports if name in places]
        return WeightUpdate(
            version=self.version,
            kind="adapter" if base else "full",
            transport=first.transport,
            location=first.location,
            tensors=infos,
            host=first.host,
            elsewhere=tuple(others),
            base=base,
            token=token,
        )

    def _write_file(self, infos: tuple[TensorInfo, ...], buffer: _SharedBuffer) -> dict[str, WeightPlace]:
        assert self._files is not None
        # A full disk ends the run only where engines have no other place to read from.
        try:
            return {"disk": self._files.write(self.version, infos, bytes_of(buffer.bytes))}
        except OSError as error:
            said = f"version {self.version} could not be written to {self._files.directory} ({error.strerror or error})"
            if self._transports == ("disk",):
                raise RunFailed(f"{said}; make room there or change weights.transport") from error
            _LOG.warning("%s; engines must fetch it by another transport", said)
            return {}

    def memory_of(self, version: int) -> memoryview | None:
        """The buffer that holds a version; None if it was overwritten or is being written."""
        with self._lock:
            return next((bytes_of(buffer.bytes) for buffer in self._buffers if buffer.version == version), None)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with self._lock:
            for buffer in self._buffers:
                buffer.close()
            self._buffers.clear()


def open_publisher(device: torch.device, section: WeightsSection, part: str) -> "Publisher | DevicePublisher":
    """The publisher for the section's transports; "cuda" is CUDA IPC between GPUs of this machine."""
    if section.transport != "cuda":
        return Publisher(section.transports, section.address, section.dir, part)
    from headway.weights.cuda import DevicePublisher

    return DevicePublisher(device)


def as_part(update: WeightUpdate, rows: Mapping[str, tuple[range, int]]) -> WeightUpdate:
    """One rank's update as a part of the whole; `rows` has its rows of each tensor, and the tensor's number of rows."""
    pieces = []
    for info in update.tensors:
        mine, num_rows = rows[info.name]
        pieces.append(replace(info, first_row=mine.start, num_rows=num_rows))
    return replace(update, tensors=tuple(pieces))


def joined(parts: Sequence[WeightUpdate]) -> WeightUpdate:
    """Join the ranks' updates into one."""
    whole = digest({str(rank): part.digest for rank, part in enumerate(parts)})
    return WeightUpdate(
        parts[0].version, parts[0].kind, "parts", "", (), tuple(parts), base=parts[0].base, digest=whole
    )
