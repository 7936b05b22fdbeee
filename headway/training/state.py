"""What a training step changes on one rank: fp32 master weights and AdamW moments, by name.

Names are `weights/NAME`, `step/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`; of a sharded tensor a rank has its rows.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headway.model.sharding import Masters, local_rows

NUM_SAMPLED = 64
"""Master weights in the sample that every step's event has: it estimates the norm of a difference to about a tenth."""


def state_tensors(masters: Masters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors of this rank, not copies."""
    tensors = {}
    for name, master in masters.named.items():
        tensors[f"weights/{name}"] = local_rows(master.detach())
        for moment, value in optimizer.state[master].items():
            tensors[f"{moment}/{name}"] = local_rows(value)
    return tensors


def restore(live: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the live ones of the same names."""
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(tensors[name])


def sample_weights(masters: Masters) -> tuple[float, ...]:
    """Master weights of this rank at fixed places, evenly spread over all tensors."""
    flat = [local_rows(master.detach()).view(-1) for master in masters.named.values()]
    places = torch.linspace(0, sum(map(len, flat)) - 1, NUM_SAMPLED, dtype=torch.float64).long()
    picked, start = [], 0
    for tensor in flat:
        inside = places[(places >= start) & (places < start + len(tensor))] - start
        if len(inside):
            picked.append(tensor[inside.to(tensor.device)])
        start += len(tensor)
    return tuple(torch.cat(picked).tolist()) if picked else ()


def weight_difference(recorded: Sequence[float | None], found: Sequence[float | None]) -> tuple[float, float]:
    """Two samples: their largest absolute difference, and the norm of it relative to the recorded one."""
    before, after = np.asarray(recorded, np.float64), np.asarray(found, np.float64)
    if len(before) != len(after) or not len(before):
        return float("nan"), float("nan")
    difference = after - before
    return float(np.abs(difference).max()), float(np.linalg.norm(difference) / (np.linalg.norm(before) or 1.0))


class HostCopy:
    """A copy of tensors in host memory.

    From a GPU it goes through pinned memory on a stream of its own, while the device computes; the next operation that
    changes the tensors has to be held until the copy is complete.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device):
        self._device = device
        self._complete: torch.cuda.Event | None = None
        if device.type == "cpu":
            self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._tensors = {
                name: pinned.copy_(tensors[name], non_blocking=True) for name, pinned in pinned_like(tensors).items()
            }
            for tensor in tensors.values():  # one that nobody else holds is not given away before it is copied
                tensor.record_stream(stream)
            self._complete = stream.record_event()

    def hold_changes(self) -> None:
        """Make the device finish the copy before anything it is given from now on; the host does not wait."""
        if self._complete is not None:
            torch.cuda.current_stream(self._device).wait_event(self._complete)

    def tensors(self) -> dict[str, Tensor]:
        """The copied tensors; waits until they are complete."""
        if self._complete is not None:
            self._complete.synchronize()
        return self._tensors


def lock_pages_early(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Lock the pages of the first snapshot in the background.

    This takes seconds per ten gigabytes; later snapshots reuse the memory, which torch does not give back.
    """

    def lock() -> None:
        with torch.cuda.device(device):
            pinned_like(tensors)

    if device.type == "cuda":
        threading.Thread(target=lock, daemon=True).start()


def pinned_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Uninitialised page-locked host memory of the same shapes."""
    return {name: torch.empty_like(tensor, device="cpu", pin_memory=True) for name, tensor in tensors.items()}
