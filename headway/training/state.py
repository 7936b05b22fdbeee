"""What a training step changes on one rank: fp32 master weights and AdamW moments, by name.

Names are `weights/NAME`, `step/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`; of a sharded tensor a rank has its rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headway.model.sharding import Masters, local_rows

NUM_SAMPLED = 256
"""Master weights that a sample holds: enough to estimate how far two sets of weights lie apart."""


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


class HostCopy:
    """A copy of tensors in host memory.

    From a GPU it goes through pinned memory on a stream of its own, while the device computes; the next operation that
    changes the tensors has to be held until the copy is complete.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device):
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
            self._complete = stream.record_event()

    def hold_changes(self) -> None:
        """Make the device finish the copy before anything it is given from now on; the host does not wait."""
        if self._complete is not None:
            torch.cuda.current_stream().wait_event(self._complete)

    def tensors(self) -> dict[str, Tensor]:
        """The copied tensors; waits until they are complete."""
        if self._complete is not None:
            self._complete.synchronize()
        return self._tensors


def pinned_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Uninitialised page-locked memory of the same shapes.

    Locking pages takes seconds per ten gigabytes, but torch reuses what was freed: only the first call is slow.
    """
    return {name: torch.empty_like(tensor, device="cpu", pin_memory=True) for name, tensor in tensors.items()}
