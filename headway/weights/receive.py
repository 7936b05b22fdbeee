"""Fetches an update's tensors from the first place that can be reached: the publisher's memory on the same machine, a
connection (stream.py) or a file (files.py).
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from headway.errors import CAUSE, WeightMismatch, WeightsUnreachable, translated
from headway.files import opened
from headway.types import TensorInfo, WeightPlace, WeightUpdate
from headway.weights import files, ipc, stream
from headway.weights.fingerprints import bytes_of, fingerprints, this_host
from headway.weights.stream import Span

_BUCKET_BYTES = 2**22


def open_update(update: WeightUpdate) -> dict[str, Tensor]:
    """The update's tensors: views of the publisher's memory if this process can map it, otherwise a copy."""
    for place in update.places:
        if place.transport in ("shared_memory", "cuda"):
            with suppress(WeightsUnreachable):  # the copy is tried next, and its error lists every reason
                return _mapped(update, place)
    tensors = {info.name: torch.empty(info.shape, dtype=getattr(torch, info.dtype)) for info in update.tensors}
    receive(update, tensors)
    return tensors


def open_whole(update: WeightUpdate) -> dict[str, Tensor]:
    """The update's tensors, verified, with the rows of all ranks joined."""
    ipc.release_other_publishers(update)
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
    fetch = {"shared_memory": _fetch_memory, "stream": stream.fetch, "disk": files.fetch}
    fetch[place.transport](update, place, spans, _pieces([into[info.name] for info in wanted]))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yield memory for the tensors' bytes, a bucket at a time; asking for the next completes the tensor before."""
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
        return ipc.open_on_device(update)
    return _map_memory(update, place)


@contextmanager
def _open_memory(place: WeightPlace) -> Iterator[int]:
    if place.host not in ("", this_host()):
        raise WeightsUnreachable("its memory is on another machine")
    # The memory ends with its publisher: report a dead trainer, not a missing file.
    with translated(OSError, WeightsUnreachable, f"its publisher has ended ({CAUSE})"), opened(place.location) as file:
        yield file


def _fetch_memory(
    update: WeightUpdate, place: WeightPlace, spans: Sequence[Span], memory: Iterator[memoryview]
) -> None:
    """Read instead of mapping: the first access to each mapped page would cost more than its copy."""
    with _open_memory(place) as file:
        for (info, start, _), piece in zip(spans, memory, strict=True):
            if not files.read_into(piece, file, info.offset + start):
                raise WeightsUnreachable("its publisher has overwritten the version")


def _map_memory(update: WeightUpdate, place: WeightPlace) -> dict[str, Tensor]:
    """Copy-on-write views of the publisher's memory."""
    with _open_memory(place) as file:
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    whole = np.frombuffer(memory, dtype=np.uint8)
    tensors = {}
    for info in update.tensors:
        data = torch.from_numpy(whole[info.offset : info.offset + info.num_bytes])
        tensors[info.name] = data.view(getattr(torch, info.dtype)).view(info.shape)
    return tensors
