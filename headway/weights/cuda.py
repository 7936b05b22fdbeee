"""Publishes weights in GPU memory that other processes of this machine map by CUDA IPC, with checksums.

The bytes never leave the device. The publisher copies an update into one of its two buffers; a receiver maps the
buffer (within one process it uses it directly) and copies from there into its shadow weights.

Invariant that lives here:
 11. Verified weight sync at every load by fingerprint: a checksum of each tensor's bytes, taken where they were
     published and again where they are about to be live, in one reading on the device.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.errors import InvariantBroken
from headway.types import TensorInfo, WeightUpdate
from headway.weights.ipc import TRANSPORT, share, unshare

_ALIGNMENT = 256
_BLOCK = 4096


@triton.jit(do_not_specialize=["num_elements"])
def _checksum_kernel(data_ptr, num_elements, sum_ptr, BLOCK: tl.constexpr):
    """The sum of a hash of (place, value) over all elements. Sums wrap around, so their order does not matter."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    value = tl.load(data_ptr + place, mask=inside, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
    z = value + (place + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    tl.atomic_add(sum_ptr, tl.sum(tl.where(inside, z.to(tl.int64, bitcast=True), 0), 0))


def fingerprints_on_device(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Checksums of the tensors' bytes, with one host synchronisation for all of them."""
    distinct = {tensor.data_ptr(): tensor for tensor in tensors.values()}
    place = {pointer: number for number, pointer in enumerate(distinct)}
    device = next(iter(tensors.values())).device
    sums = torch.zeros(len(distinct), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        for pointer, tensor in distinct.items():
            words = _as_words(tensor)
            grid = (triton.cdiv(words.numel(), _BLOCK),)
            _checksum_kernel[grid](words, words.numel(), sums[place[pointer] :], _BLOCK, num_warps=4)
    found = sums.tolist()
    return {name: f"{found[place[tensor.data_ptr()]] % 2**64:016x}" for name, tensor in tensors.items()}


def _as_words(tensor: Tensor) -> Tensor:
    """The bytes as the widest integers that fit."""
    flat = tensor.detach().contiguous().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    words = torch.int32 if num_bytes % 4 == 0 else torch.int16 if num_bytes % 2 == 0 else torch.uint8
    # Rows of a larger tensor may begin in the middle of a word.
    aligned = flat.storage_offset() * flat.element_size() % words.itemsize == 0
    return (flat if aligned else flat.clone()).view(words)


class DevicePublisher:
    """The sending side. Two buffers alternate, so that an update stays readable until the one after the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[str, Tensor]] = []
        self._version = 0

    def publish(self, version: int, tensors: Mapping[str, Tensor], base: str = "") -> WeightUpdate:
        if version < self._version:
            raise InvariantBroken(f"version {version} cannot follow version {self._version}: versions never go back")
        self._version = version
        distinct = {id(tensor): tensor.detach() for tensor in tensors.values()}
        offsets, total = {}, 0
        for key, tensor in distinct.items():
            offsets[key] = total
            total += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        location, buffer = self._buffer(version, total)
        views = {key: _view(buffer, offsets[key], tensor) for key, tensor in distinct.items()}
        torch._foreach_copy_(list(views.values()), list(distinct.values()))
        prints = fingerprints_on_device({name: views[id(tensor)] for name, tensor in tensors.items()})
        torch.cuda.current_stream(self._device).synchronize()  # a checkpoint's copy on its own stream goes on
        infos = tuple(
            TensorInfo(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                offsets[id(tensor)],
                tensor.numel() * tensor.element_size(),
                prints[name],
            )
            for name, tensor in tensors.items()
        )
        return WeightUpdate(version, "adapter" if base else "full", TRANSPORT, location, infos, base=base)

    def _buffer(self, version: int, num_bytes: int) -> tuple[str, Tensor]:
        while len(self._buffers) < 2:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            location = share(buffer)
            self._buffers.append((location, buffer))
        if len(self._buffers[version % 2][1]) < num_bytes:
            raise InvariantBroken(
                f"version {version} is larger than the first one published here; publish that in full"
            )
        return self._buffers[version % 2]

    def close(self) -> None:
        for location, _ in self._buffers:
            unshare(location)
        self._buffers.clear()


def _view(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    num_bytes = like.numel() * like.element_size()
    return buffer[offset : offset + num_bytes].view(like.dtype).view(like.shape)
