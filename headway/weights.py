"""Publish and fetch named tensors under a version, with fingerprints.

A publisher writes an update into one of two shared-memory buffers; a receiver copies it beside its live weights and
exchanges the two between decode steps. Tied tensors lie in the buffer once and are named twice. An update says where
its bytes can be had, best first, and a receiver takes the first place it can reach: the memory itself on the same
machine, else a connection (weight_stream.py) or a file (weight_files.py). Between GPUs of one machine the bytes need
not pass through the host: device_weights.py has that publisher.

Invariant that lives here:
 11. Weight sync is proved at every load by fingerprint: each tensor's checksum is taken over its bytes as published,
     and again over the bytes the receiver is about to run; a mismatch stops the run.
"""

import logging
import mmap
import os
import platform
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from headway import weight_files, weight_stream
from headway.errors import InvariantBroken, RunFailed, WeightMismatch, WeightsUnreachable
from headway.types import TensorInfo, WeightPlace, WeightUpdate
from headway.weight_files import WeightFiles
from headway.weight_stream import LOOPBACK, Span, WeightServer

_ALIGNMENT = 64
_BUCKET_BYTES = 2**22
_LOG = logging.getLogger(__name__)


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


@cache
def this_host() -> str:
    """What processes have in common that can map each other's memory by path: a running kernel, and its numbering."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


class _SharedBuffer:
    """Memory other processes of this user can map by `path`; it vanishes with its owner."""

    def __init__(self, num_bytes: int):
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("headway-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        else:
            self.file, self.path = tempfile.mkstemp(prefix="headway-weights-")
        os.truncate(self.file, num_bytes)
        self.bytes = torch.frombuffer(mmap.mmap(self.file, num_bytes), dtype=torch.uint8)
        self.version: int | None = None  # of what lies in it, unless it is being written

    def close(self) -> None:
        os.close(self.file)
        if not self.path.startswith("/proc/"):
            os.unlink(self.path)


class Publisher:
    """The sending side: two buffers by turns, so that an update stays readable until the one after the next.

    Other processes map them, other machines are sent them by a server, or they are written to files, as `transports`
    says, in the order a receiver should try; `part` tells several publishers apart that share a directory.
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
        """Write the tensors, in the type they are given, and say where they lie; with a `base`, as its adapter."""
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
        """The buffer whose turn it is, from now on in nobody's hands but the writer's."""
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
            said = f"version {self.version} could not be written to {self._files.directory} ({error.strerror})"
            if self._transports == ("disk",):
                raise RunFailed(f"{said}; make room there or change weights.transport") from error
            _LOG.warning("%s; engines have to fetch it by other ways", said)
            return {}

    def memory_of(self, version: int) -> memoryview | None:
        """That version's bytes where they lie; None when they are gone or not yet there."""
        with self._lock:
            return next((bytes_of(buffer.bytes) for buffer in self._buffers if buffer.version == version), None)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with self._lock:
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
    return WeightUpdate(parts[0].version, parts[0].kind, "parts", "", (), tuple(parts), base=parts[0].base)


def open_update(update: WeightUpdate) -> dict[str, Tensor]:
    """The update's tensors: views of where they were published, if this process can map it, else a copy of its own."""
    for place in update.places:
        if place.transport in ("shared_memory", "cuda"):
            with suppress(WeightsUnreachable):  # the copy is tried next, and says why there is none
                return _mapped(update, place)
    tensors = {info.name: torch.empty(info.shape, dtype=getattr(torch, info.dtype)) for info in update.tensors}
    receive(update, tensors)
    return tensors


def open_whole(update: WeightUpdate) -> dict[str, Tensor]:
    """The update's tensors, whole and proved, whoever published which rows of them."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for part in update.parts or (update,):
        opened = open_update(part)
        found = fingerprints(opened, on_device=part.transport == "cuda")
        for info in part.tensors:
            if found[info.name] != info.fingerprint:
                raise WeightMismatch(
                    f"version {update.version}: {info.key} arrived with another checksum than published"
                )
            pieces.setdefault(info.name, []).append((info.first_row, opened[info.name]))
    for held in pieces.values():
        held.sort(key=lambda piece: piece[0])
    return {
        name: held[0][1] if len(held) == 1 else torch.cat([rows for _, rows in held]) for name, held in pieces.items()
    }


def receive(update: WeightUpdate, into: Mapping[str, Tensor]) -> None:
    """Copy the update's tensors into those of the same names, from the first place that can be reached."""
    distinct = {id(tensor): name for name, tensor in into.items()}
    wanted = [info for info in update.tensors if distinct.get(id(into[info.name])) == info.name]
    reasons = []
    for place in update.places:
        try:
            return _receive_from(update, place, wanted, into)
        except WeightsUnreachable as error:
            reasons.append(str(error))
    raise WeightsUnreachable(f"version {update.version} cannot be fetched: {'; '.join(reasons)}")


def _receive_from(
    update: WeightUpdate, place: WeightPlace, wanted: Sequence[TensorInfo], into: Mapping[str, Tensor]
) -> None:
    if place.transport == "cuda":
        published = _mapped(update, place)
        for info in wanted:
            into[info.name].copy_(published[info.name])
        return
    spans = [
        (info, start, min(_BUCKET_BYTES, info.num_bytes - start))
        for info in wanted
        for start in range(0, info.num_bytes, _BUCKET_BYTES)
    ]
    fetch = {"shared_memory": _fetch_memory, "stream": weight_stream.fetch, "disk": weight_files.fetch}
    fetch[place.transport](update, place, spans, _pieces([into[info.name] for info in wanted]))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Memory for the bytes of the tensors, a bucket at a time; what was written there lies in the tensor as soon as the
    next is asked for."""
    for tensor in tensors:
        direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        landed = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        memory = bytes_of(landed)
        for start in range(0, len(memory), _BUCKET_BYTES):
            yield memory[start : start + _BUCKET_BYTES]
        if not direct:
            tensor.copy_(landed)


def _mapped(update: WeightUpdate, place: WeightPlace) -> dict[str, Tensor]:
    if place.transport == "cuda":
        from headway.device_weights import open_on_device

        return open_on_device(update)
    return _map_memory(update, place)


def _open_memory(place: WeightPlace) -> int:
    if place.host not in ("", this_host()):
        raise WeightsUnreachable("its memory is another machine's")
    # The memory is the publisher's and goes with it: a dead trainer is a sentence, not a missing file.
    try:
        return os.open(place.location, os.O_RDONLY)
    except OSError as error:
        raise WeightsUnreachable(f"its publisher has ended ({error.strerror})") from error


def _fetch_memory(
    update: WeightUpdate, place: WeightPlace, spans: Sequence[Span], memory: Iterator[memoryview]
) -> None:
    """Read rather than mapped: the first touch of each mapped page would cost more than its copy."""
    file = _open_memory(place)
    try:
        for (info, start, _), piece in zip(spans, memory, strict=True):
            if not weight_files.read_into(piece, file, info.offset + start):
                raise WeightsUnreachable("its publisher has moved on")
    finally:
        os.close(file)


def _map_memory(update: WeightUpdate, place: WeightPlace) -> dict[str, Tensor]:
    """Views of the publisher's memory, copy-on-write: nobody can change it."""
    file = _open_memory(place)
    try:
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
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
        self._staged: dict[int, Tensor] = {}
        self._live_prints: dict[bool, dict[str, str]] = {}  # by whether a GPU computed them
        self._staged_prints: dict[bool, dict[str, str]] = {}
        self.staged_version: int | None = None

    def stage(self, update: WeightUpdate) -> None:
        """Copy the update into the shadow set and check every byte of it; the live set is untouched."""
        self.staged_version, self._staged = None, {}
        parts = update.parts or (update,)
        on_device = parts[0].transport == "cuda"
        self._check_kinds(update)
        untouched = self._untouched(update, on_device) if update.kind == "adapter" else {}
        # What each name will run, not what was published under it: tied here, two tensors may have arrived.
        running: dict[str, Tensor] = {}
        for part in parts:
            into = self._into(part)
            receive(part, into)
            running |= {info.key: into[info.name] for info in part.tensors}
        found = fingerprints(running, on_device)
        wrong = [name for name, value in update.fingerprints.items() if found[name] != value]
        if wrong:
            raise WeightMismatch(f"version {update.version}: {wrong[0]} arrived with another checksum than published")
        changed = {id(self._live[info.name]) for info in update.pieces}
        self._staged = {key: self._shadow[key] for key in changed}
        self._staged_prints = {on_device: untouched | found}
        self.staged_version = update.version

    def _into(self, part: WeightUpdate) -> dict[str, Tensor]:
        """Where the tensors of a part, or pieces of them, belong in the shadow set; tied ones are one tensor."""
        placed: dict[tuple[int, int], Tensor] = {}
        for info in part.tensors:
            parameter = self._live[info.name]
            if id(parameter) not in self._shadow:
                self._shadow[id(parameter)] = torch.empty_like(parameter.data)
            whole = self._shadow[id(parameter)]
            rows = whole if info.num_rows is None else whole[info.rows.start : info.rows.stop]
            placed.setdefault((id(parameter), info.first_row), rows)
        return {info.name: placed[id(self._live[info.name]), info.first_row] for info in part.tensors}

    def _check_kinds(self, update: WeightUpdate) -> None:
        """That names, types and shapes are those of the live set, and that no row is missing or comes twice."""
        published: dict[str, list[TensorInfo]] = {}
        for info in update.pieces:
            published.setdefault(info.name, []).append(info)
        missing = self._live.keys() - published.keys() if update.kind == "full" else set()
        differing = sorted(missing | (published.keys() - self._live.keys()))
        if differing:
            raise WeightMismatch(
                f"version {update.version}: published and loaded tensors differ by name, first {differing[0]}"
            )
        for name, pieces in published.items():
            ours = f"{self._live[name].dtype} {tuple(self._live[name].shape)}"
            for info in pieces:
                theirs = f"torch.{info.dtype} {info.whole_shape}"
                if theirs != ours:
                    raise WeightMismatch(
                        f"version {update.version}: {name} was published as {theirs}, loaded as {ours}"
                    )
            if not _make_a_whole(pieces):
                raise WeightMismatch(f"version {update.version}: the pieces of {name} do not make a whole")

    def _untouched(self, update: WeightUpdate, on_device: bool) -> dict[str, str]:
        """The fingerprints of what an adapter leaves as it is, which has to be the base it was made for."""
        named = {id(self._live[info.name]): info.name for info in update.pieces}
        kept = {name: tensor for name, tensor in self._live.items() if name not in named.values()}
        tied = [name for name, tensor in kept.items() if id(tensor) in named]
        if tied:
            other = named[id(kept[tied[0]])]
            raise WeightMismatch(f"version {update.version}: its adapter has {other}, which is one with {tied[0]} here")
        if on_device not in self._live_prints:
            self._live_prints[on_device] = fingerprints(self._live, on_device)
        prints = self._live_prints[on_device]
        untouched = {key: value for key, value in prints.items() if key.partition("[")[0] in kept}
        if digest(untouched) != update.base:
            found = f"made for the base {update.base}, and the base here is {digest(untouched)}"
            raise WeightMismatch(f"version {update.version}: its adapter was {found}; load that one first")
        return untouched

    def staged(self, parameter: Tensor) -> Tensor:
        """What a parameter will be after the swap: itself, where no update to it is staged."""
        return self._staged.get(id(parameter), parameter)

    def swap(self) -> dict[str, str]:
        """Exchange live and shadow tensors; the fingerprints of all that is now live."""
        if self.staged_version is None:
            raise InvariantBroken("a swap needs staged weights, and none are staged")
        parameters = {id(parameter): parameter for parameter in self._live.values() if id(parameter) in self._staged}
        if self._in_place:
            torch._foreach_copy_([p.data for p in parameters.values()], [self._shadow[key] for key in parameters])
        else:
            for key, parameter in parameters.items():
                parameter.data, self._shadow[key] = self._shadow[key], parameter.data
        self._live_prints = self._staged_prints
        self.staged_version, self._staged = None, {}
        return dict(next(iter(self._live_prints.values())))


def _make_a_whole(pieces: Sequence[TensorInfo]) -> bool:
    """Whether every row of a tensor is in one of its pieces, and in one only."""
    if len(pieces) == 1 and pieces[0].num_rows is None:
        return True
    end = 0
    for info in sorted(pieces, key=lambda info: info.first_row):
        end = info.rows.stop if info.first_row == end else -1
    return end == pieces[0].num_rows
