"""Shares GPU buffers with other processes of the machine by CUDA IPC, and finds them within one process."""

import json
import os

import torch
from torch import Tensor

from headway.errors import CAUSE, WeightsUnreachable, translated
from headway.types import WeightUpdate

TRANSPORT = "cuda"

_own: dict[str, Tensor] = {}
"""Buffers this process published, by location: a process cannot map its own."""
_mapped: dict[str, Tensor] = {}
"""Buffers of other processes, which stay mapped from one update to the next."""


def share(buffer: Tensor) -> str:
    """Export a buffer; returns its IPC handle as text."""
    parts = buffer.untyped_storage()._share_cuda_()
    shown = [part.hex() if isinstance(part, bytes) else part for part in parts]
    location = json.dumps({"process": os.getpid(), "offset": buffer.storage_offset(), "storage": shown})
    _own[location] = buffer
    return location


def unshare(location: str) -> None:
    del _own[location]


def open_on_device(update: WeightUpdate) -> dict[str, Tensor]:
    """The update's tensors as views of the publisher's buffer."""
    buffer = _own.get(update.location)
    if buffer is None:
        buffer = _mapped.get(update.location)
    if buffer is None:
        buffer = _mapped[update.location] = _map(update.location)
    tensors = {}
    for info in update.tensors:
        part = buffer[info.offset : info.offset + info.num_bytes]
        tensors[info.name] = part.view(getattr(torch, info.dtype)).view(info.shape)
    return tensors


def release_other_publishers(update: WeightUpdate) -> None:
    """Unmap the buffers of processes that publish no part of this update: they belonged to a trainer that was replaced,
    and stay allocated on the GPU as long as they are mapped."""
    places = [place for part in (update, *update.parts) for place in part.places if place.transport == TRANSPORT]
    current = {_publisher(place.location) for place in places}
    for location in [location for location in _mapped if _publisher(location) not in current]:
        del _mapped[location]


def _publisher(location: str) -> int:
    return int(json.loads(location)["process"])


def _map(location: str) -> Tensor:
    described = json.loads(location)
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in described["storage"]]
    torch.cuda.init()
    # The memory ends with its publisher.
    with translated(RuntimeError, WeightsUnreachable, f"its publisher has ended ({CAUSE})"):
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage)[described["offset"] :]
