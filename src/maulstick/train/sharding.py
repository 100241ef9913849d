"""The frozen base spread over the processes (FSDP2): each holds a part, and fetches a block's weights to compute it.

Only what is frozen is spread. What trains is small and stays whole on every process, so that guard, rescue, states and
files see ordinary tensors; its gradients are averaged here, because DDP cannot wrap a network whose weights move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

_BLOCK_LISTS = ("transformer_blocks", "single_transformer_blocks", "resnets")
"""The lists whose members are fetched one at a time; what is outside of them is fetched for the whole pass."""


def shard_frozen(network: nn.Module, device: torch.device) -> None:
    """Spread the frozen parameters of a network over all processes, in place.

    Every process must make every forward pass from now on: a pass of one alone would wait for the others for ever.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    trained = {parameter for parameter in network.parameters() if parameter.requires_grad}
    for block in _blocks(network):
        fully_shard(block, mesh=mesh, ignored_params=trained)
    fully_shard(network, mesh=mesh, ignored_params=trained)


def _blocks(network: nn.Module) -> Iterable[nn.Module]:
    for path, module in network.named_modules():
        if path.rpartition(".")[0].rpartition(".")[2] in _BLOCK_LISTS:
            yield module


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace every gradient by its mean over all processes, exchanged as one tensor.

    A missing gradient (a module that was left out this time) counts as zero.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
