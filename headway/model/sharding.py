"""fp32 master weights, and the same module over several ranks by FSDP2."""

from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.model.device import CPU
from headway.model.logprobs import Policy


class Masters:
    """The fp32 master weights that the optimizer updates, by parameter name.

    With a narrower `dtype` the module holds a cast copy, which its passes use and which is published. Each gradient is
    added to its master's, in fp32, as soon as it is complete, and `refresh` casts again after the masters moved.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype | None = None):
        self.named: dict[str, Tensor] = dict(policy.named_parameters())
        self._cast: list[tuple[Tensor, Tensor]] = []
        if dtype is None:
            return
        for name, parameter in list(self.named.items()):
            master = self.named[name] = nn.Parameter(parameter.data)
            parameter.data = master.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(partial(_hand_over_gradient, master))
            self._cast.append((parameter, master))

    @torch.no_grad()
    def refresh(self) -> None:
        for parameter, master in self._cast:
            parameter.copy_(master)

    def base(self, on_device: bool) -> str:
        """The digest of the weights that an adapter is for; empty where all weights are trained."""
        return ""

    def factors(self) -> dict[str, Tensor]:
        """The adapter as it is published, if that is what is trained."""
        return {}

    def adapter(self) -> dict[str, Tensor]:
        """The adapter as it is saved, if that is what is trained."""
        return {}

    def put_back(self) -> None:
        """Make the masters the parameters of the module again."""
        for parameter, master in self._cast:
            parameter.data = master.data
        self._cast.clear()


def _hand_over_gradient(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


def shard(policy: Policy, dtype: torch.dtype, device: torch.device = CPU) -> Masters:
    """Make the policy compute on `device` in `dtype` from fp32 masters: over several ranks by FSDP2, on one without it.

    FSDP2 keeps the parameters fp32 and casts them where they are gathered. One rank has nothing to gather, and casting
    once a step is cheaper than once a pass. Either way the forward pass uses exactly the published tensors, and the
    rest of the trainer does not distinguish the two.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        return Masters(policy.to(device), None if dtype == torch.float32 else dtype)
    # The model is never whole on the device: each layer is moved as it is sharded, and only this rank's rows stay.
    wrap(policy, init_device_mesh(device.type, (num_ranks,)), dtype)
    return Masters(policy)


def wrap(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2 around each layer and the whole; gradients add up over the ranks, as denominators are global."""
    # The one floating-point input is the temperature, and 0.7 is another number in bf16. A root left gathered after a
    # forward pass without a backward would expose cast parameters where master weights are saved or copied.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    decoder = cast(nn.Module, policy.model.model)
    for module in (*cast(nn.ModuleList, decoder.layers), policy):
        wrapped = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def local_rows(tensor: Tensor) -> Tensor:
    """The rows this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; a collective operation of all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
