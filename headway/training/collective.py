"""What the ranks of one trainer do together: meet, agree on a number, add up. Knows nothing of RL.

Ranks meet at a store that listens where it is told to, on loopback by default, and then talk to each other by gloo on
CPUs and by NCCL between GPUs. Only numbers travel that way, and nothing that arrives is unpickled.

Invariant that lives here:
 15. Bounded waits: ranks meet within a deadline, and those that did not come are named.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from headway.codec import noun
from headway.errors import DeadlineExceeded

LOOPBACK = "127.0.0.1"
_MEET_S = 300.0  # they come as soon as they have imported what they need


@noun
class Place:
    """Where rank number `rank` meets the others, whose names are `names`; `deadline_s` is of any wait for them."""

    rank: int
    names: tuple[str, ...]
    host: str
    port: int
    deadline_s: float


class Meeting:
    """The store at which ranks find each other. It belongs to whoever starts them, and must outlive them."""

    def __init__(self, names: Sequence[str], deadline_s: float, host: str = LOOPBACK):
        self._names, self._deadline_s, self._host = tuple(names), deadline_s, host
        # Left to itself the store would listen on every interface.
        listener = socket.create_server((host, 0))
        self._port = listener.getsockname()[1]
        self._store = TCPStore(
            host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @property
    def places(self) -> list[Place]:
        where = self._names, self._host, self._port, self._deadline_s
        return [Place(rank, *where) for rank in range(len(self._names))]


def join(place: Place, device: torch.device) -> "Ranks":
    """Meet the other ranks of `place`; from here on this process is one of them."""
    if place.host == LOOPBACK:
        for knob in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(knob, "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Below the deadline of whoever started this rank, so that those missing are named first.
    meet_s = min(_MEET_S, place.deadline_s / 2)
    store = TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=meet_s))
    _wait_for_all(store, place, meet_s)
    # The host agrees over gloo, which does not wait for what a GPU is still computing.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    num, patience = len(place.names), timedelta(seconds=place.deadline_s)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=num, timeout=patience)
    return Ranks(place.rank, num)


def _wait_for_all(store: TCPStore, place: Place, meet_s: float) -> None:
    store.set(f"here/{place.rank}", "")
    keys = {f"here/{rank}": name for rank, name in enumerate(place.names)}
    try:
        store.wait(list(keys), timedelta(seconds=meet_s))
    except dist.DistStoreError as error:
        missing = ", ".join(name for key, name in keys.items() if not store.check([key]))
        raise DeadlineExceeded(f"{missing} did not come to where ranks meet within {meet_s:g} s") from error


class Ranks:
    """The ranks of a trainer as one of them sees them; of a single rank, everything is as it is."""

    def __init__(self, rank: int = 0, num: int = 1):
        self.rank, self.num = rank, num

    def rows(self, num_rows: int) -> range:
        """The rows this rank holds of a tensor that has `num_rows`, as FSDP2 deals them: some ranks may have none."""
        size = -(-num_rows // self.num)
        return range(min(self.rank * size, num_rows), min((self.rank + 1) * size, num_rows))

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.num == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def combined(self, figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The figures of all ranks as those of one: sums add up, maxima (`…_max`) compare."""
        if self.num == 1:
            return dict(figures)
        combined: dict[str, Tensor] = {}
        for operation, is_max in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
            names = [name for name in figures if name.endswith("_max") == is_max]
            values = torch.stack([figures[name] for name in names])
            dist.all_reduce(values, operation)
            combined |= dict(zip(names, values.unbind(), strict=True))
        return {name: combined[name] for name in figures}
