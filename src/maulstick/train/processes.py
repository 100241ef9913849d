"""One process or several: how they find each other, and how DDP wraps what they train."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from maulstick.errors import OptionError
from maulstick.options.schema import TrainOptions

USUAL_TIMEOUT = timedelta(hours=12)
"""Caching and sampling on one process take longer than the usual ten minutes."""


def must_use_cpu() -> bool:
    """Return whether there is no accelerator. accelerate joins several processes on a CPU only when told so."""
    return not torch.accelerator.is_available()


def make_accelerator(options: TrainOptions) -> Accelerator:
    """Join the processes, with DDP set up as the options say. Raises OptionError for another way of spreading work."""
    run = options.run
    accelerator = Accelerator(
        cpu=must_use_cpu(),
        # Precision is ours (precision.py); a saved configuration of accelerate must not add its own.
        mixed_precision="no",
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                # With a static graph DDP finds out in the first step what is never used.
                find_unused_parameters=_may_leave_parameters_unused(options) and not run.ddp_static_graph,
                gradient_as_bucket_view=run.ddp_gradient_as_bucket_view,
                static_graph=run.ddp_static_graph,
            ),
            InitProcessGroupKwargs(
                timeout=USUAL_TIMEOUT if run.ddp_timeout is None else timedelta(minutes=run.ddp_timeout)
            ),
        ],
    )
    if accelerator.distributed_type.value in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise OptionError(
            f"accelerate is set up for {accelerator.distributed_type.value}; Maulstick trains on several processes "
            "with plain DDP. Start it with torchrun, or with accelerate launch --multi_gpu."
        )
    if run.fsdp_base and accelerator.num_processes == 1:
        raise OptionError(
            "fsdp_base spreads the base over several processes, but there is one. Start several: torchrun --standalone "
            "--nproc_per_node 2 -m maulstick train …"
        )
    return accelerator


def without_effect_alone(options: TrainOptions, processes: int) -> list[str]:
    """Say which options about several processes do nothing because there is one."""
    given = [name for name, value in vars(options.run).items() if name.startswith("ddp_") and value]
    if not given or processes > 1:
        return []
    return [f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect on one process."]


def wrap_for_gradients(trainee: nn.Module, accelerator: Accelerator, *, in_fp8: bool) -> nn.Module:
    """Return the trained networks so that several processes exchange their gradients.

    ``in_fp8``: some frozen weights are in eight bits, which gloo cannot send; all processes have read the same.
    """
    if accelerator.num_processes == 1:
        return trainee
    if in_fp8:
        frozen = [name for name, parameter in trainee.named_parameters() if not parameter.requires_grad]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trainee, frozen)
    wrapped: nn.Module = accelerator.prepare_model(trainee)
    return wrapped


def _may_leave_parameters_unused(options: TrainOptions) -> bool:
    """Dropped modules, and text layers behind the one that clip_skip or SDXL reads, get no gradient in a step."""
    return bool(options.network.module_dropout) or not options.network.network_train_unet_only
