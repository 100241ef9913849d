"""The optimizers there are: one row each, imported only when used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerInfo:
    """What is known of an optimizer.

    Attributes:
        class_path: importable name of the class.
        extra: the extra of this package that installs it, None when torch brings it.
        defaults: arguments that differ from the class's own defaults.
        aliases: names that the arguments have in the class that sd-scripts takes.
        honours_group_rates: two groups with different ``lr`` really move at different speeds.
        estimates_rate: it finds its own step size (a ``d`` in its groups) and wants a learning rate of about 1.
    """

    class_path: str
    description: str
    extra: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    honours_group_rates: bool = True
    estimates_rate: bool = False
    aliases: dict[str, str] = field(default_factory=dict)


def _bitsandbytes(name: str, description: str) -> OptimizerInfo:
    return OptimizerInfo(f"bitsandbytes.optim.{name}", description, extra="cuda")


OPTIMIZERS: dict[str, OptimizerInfo] = {
    # The fused kernels measure and update in one pass, and skip a step on a device flag without waiting for the host.
    "AdamW": OptimizerInfo("torch.optim.AdamW", "Adam with decoupled weight decay", defaults={"fused": True}),
    "Adam": OptimizerInfo("torch.optim.Adam", "Adam", defaults={"fused": True}),
    "SGD": OptimizerInfo("torch.optim.SGD", "gradient descent with optional momentum"),
    "SGDNesterov": OptimizerInfo(
        "torch.optim.SGD", "gradient descent with Nesterov momentum", defaults={"nesterov": True, "momentum": 0.9}
    ),
    # The class that sd-scripts takes too: torch's always scales by the weight's size, and presets turn that off.
    "Adafactor": OptimizerInfo(
        "transformers.optimization.Adafactor",
        "Adam with a factored second moment: little memory, at the learning rate given",
        defaults={"relative_step": False},
    ),
    "Lion": OptimizerInfo("pytorch_optimizer.Lion", "sign of the momentum; a third of AdamW's rate", extra="optim"),
    "CAME": OptimizerInfo("pytorch_optimizer.CAME", "confidence-guided Adafactor", extra="optim"),
    "AdamWScheduleFree": OptimizerInfo(
        "pytorch_optimizer.ScheduleFreeAdamW", "AdamW that needs no schedule", extra="optim"
    ),
    "Prodigy": OptimizerInfo(
        "pytorch_optimizer.Prodigy",
        "finds its own step size; learning rate 1",
        extra="optim",
        honours_group_rates=False,
        estimates_rate=True,
        aliases={"decouple": "weight_decouple", "use_bias_correction": "bias_correction"},
    ),
    "ProdigyPlusScheduleFree": OptimizerInfo(
        "prodigyplus.ProdigyPlusScheduleFree",
        "Prodigy without a schedule, with rates of its own per group; learning rate 1",
        extra="optim",
        # One step size for all groups, multiplied by each group's rate; split groups would each find their own and
        # undo the ratio between them.
        defaults={"split_groups": False},
        estimates_rate=True,
    ),
    "DAdaptAdam": OptimizerInfo(
        "pytorch_optimizer.DAdaptAdam",
        "Adam that finds its own step size; learning rate 1",
        extra="optim",
        honours_group_rates=False,
        estimates_rate=True,
    ),
    "AdamW8bit": _bitsandbytes("AdamW8bit", "AdamW with 8-bit state (CUDA)"),
    "PagedAdamW8bit": _bitsandbytes("PagedAdamW8bit", "AdamW with 8-bit state that may move to main memory (CUDA)"),
    "Lion8bit": _bitsandbytes("Lion8bit", "Lion with 8-bit state (CUDA)"),
}
