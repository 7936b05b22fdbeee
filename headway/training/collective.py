"""Rendezvous and collective operations of trainer ranks. Knows nothing of RL.

Ranks rendezvous at a store, which listens on loopback, or among several machines on the address of the one that starts
them, and then communicate by gloo on CPUs and by NCCL between GPUs. Only numbers travel that way, and nothing that
arrives is unpickled.

Invariant that lives here:
 15. Bounded waits: the rendezvous has a deadline, and ranks missing from it are named.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from headway.codec import message
from headway.errors import DeadlineExceeded

LOOPBACK = "127.0.0.1"
_RENDEZVOUS_S = 300.0  # covers the imports of a rank's process


@message
class RankSpec:
    """What a rank needs to join the others: its number, all names, the store's address, and the deadline of waits."""

    rank: int
    names: tuple[str, ...]
    host: str
    port: int
    deadline_s: float


class Rendezvous:
    """The store at which ranks find each other. It belongs to the process that starts them, and must outlive them."""

    def __init__(self, names: Sequence[str], deadline_s: float, host: str = LOOPBACK):
        self._names, self._deadline_s, self._host = tuple(names), deadline_s, host
        # Left to itself the store would listen on every interface.
        listener = socket.create_server((host, 0))
        self._port = listener.getsockname()[1]
        self._store = TCPStore(
            host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @property
    def specs(self) -> list[RankSpec]:
        shared = self._names, self._host, self._port, self._deadline_s
        return [RankSpec(rank, *shared) for rank in range(len(self._names))]


def join(spec: RankSpec, device: torch.device) -> "Ranks":
    """Join the other ranks; afterwards this process takes part in collective operations."""
    # Left to themselves they would take the address of the host's name, which may be one that others cannot reach.
    if interface := _interface_towards(spec.host):
        for knob in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(knob, interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Below the deadline for starting this rank, so that the error names the missing ranks.
    timeout_s = min(_RENDEZVOUS_S, spec.deadline_s / 2)
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(spec.host, spec.port, is_master=False, wait_for_workers=False, timeout=timeout)
    _wait_for_all(store, spec, timeout_s)
    # Host numbers go over gloo, which does not wait for pending work of a GPU.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    num, patience = len(spec.names), timedelta(seconds=spec.deadline_s)
    dist.init_process_group(backend, store=store, rank=spec.rank, world_size=num, timeout=patience)
    return Ranks(spec.rank, num)


def _interface_towards(host: str) -> str:
    """The network interface by which this machine reaches `host`; empty if none has that address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    named = [name for name, addresses in interfaces if any(each.address == own for each in addresses)]
    return named[0] if named else ""


def _wait_for_all(store: TCPStore, spec: RankSpec, timeout_s: float) -> None:
    store.set(f"joined/{spec.rank}", "")
    keys = {f"joined/{rank}": name for rank, name in enumerate(spec.names)}
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = ", ".join(name for key, name in keys.items() if not store.check([key]))
        raise DeadlineExceeded(f"the rendezvous of ranks timed out after {timeout_s:g} s: {missing} missing") from error


class Ranks:
    """The ranks of a trainer as one of them sees them; a single rank agrees with itself without communication."""

    def __init__(self, rank: int = 0, num: int = 1):
        self.rank, self.num = rank, num

    def rows(self, num_rows: int) -> range:
        """The rows this rank holds of a tensor of `num_rows`, as FSDP2 splits it: some ranks may have none."""
        size = -(-num_rows // self.num)
        return range(min(self.rank * size, num_rows), min((self.rank + 1) * size, num_rows))

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.num == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def total(self, figures: Tensor) -> Tensor:
        """The sums of the ranks' figures, which lie on the host."""
        if self.num > 1:
            dist.all_reduce(figures)
        return figures

    def combined(self, figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The figures of all ranks together: sums, but maxima of those named `…_max`."""
        if self.num == 1:
            return dict(figures)
        combined: dict[str, Tensor] = {}
        for operation, is_max in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
            names = [name for name in figures if name.endswith("_max") == is_max]
            values = torch.stack([figures[name] for name in names])
            dist.all_reduce(values, operation)
            combined |= dict(zip(names, values.unbind(), strict=True))
        return {name: combined[name] for name in figures}
