"""Options about the base in memory and about several processes, where they contradict others."""

from __future__ import annotations

from maulstick.errors import OptionError, contradiction
from maulstick.options.schema import TrainOptions


def check_hardware(options: TrainOptions) -> None:
    """Refuse a base in eight bits without a format to compute in, and what DDP cannot do. Raises OptionError."""
    run = options.run
    for name in ("fp8_base", "fp8_base_unet"):
        if not getattr(run, name):
            continue
        if run.mixed_precision == "no":
            raise OptionError(
                f"{name} keeps the base in 8 bits, in which nothing can be computed. Set mixed_precision = bf16 (or "
                "fp16), which it is computed in."
            )
        if run.fsdp_base:
            raise contradiction(name, "fsdp_base", "weights in 8 bits cannot be spread. Leave one of them out.")
    if run.ddp_static_graph and options.network.module_dropout:
        raise contradiction(
            "ddp_static_graph",
            "module_dropout",
            "dropped modules change the way through the network from step to step. Leave one of them out.",
        )
    if run.ddp_static_graph and run.gradient_accumulation_steps > 1:
        raise OptionError(
            f"ddp_static_graph and gradient_accumulation_steps = {run.gradient_accumulation_steps} do not go together: "
            "PyTorch's DDP fails where the first backward pass of a static graph exchanges no gradients. Leave "
            "ddp_static_graph out."
        )
