"""How fast each factor of each module learns, and what the log calls it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from maulstick.adapters.targets import LoraTarget
from maulstick.errors import ModelError
from maulstick.options.schema import NetworkOptions, OptimizerOptions
from maulstick.options.text_rates import text_encoder_rates

PLUS_SUFFIX = "_plus"
"""Behind the name of a group that holds up factors with a rate of their own (LoRA+)."""


@dataclass(frozen=True)
class ComponentRates:
    """The learning rates inside one network.

    Attributes:
        log_name: the network's name in the log, such as ``unet``.
        learning_rate: that of the network as a whole, without weights.
        block_weights: weight of each block index; None where all modules learn alike.
        up_ratio: LoRA+, the multiple at which up factors learn; None where both factors learn alike.
        notes: what the user should know about the weights.
    """

    log_name: str
    learning_rate: float
    block_weights: Sequence[float] | None = None
    up_ratio: float | None = None
    notes: Sequence[str] = ()

    def group_of(self, target: LoraTarget, role: str) -> tuple[str, float]:
        """Return the name and learning rate of the parameter group of one trained tensor (see ``AdapterParameter``).

        The name is that of the network, with ``_block{index}`` where weights are given by block (as in sd-scripts) and
        ``_plus`` for up factors under LoRA+.
        """
        name, rate = self.log_name, self.learning_rate
        if self.block_weights is not None:
            name, rate = f"{name}_block{target.block}", rate * self.weight_of(target)
        if role == "up" and self.up_ratio is not None:
            name, rate = name + PLUS_SUFFIX, rate * self.up_ratio
        return name, rate

    def weight_of(self, target: LoraTarget) -> float:
        """Return the weight of a module's block, 1 where none are given."""
        if self.block_weights is None:
            return 1.0
        if target.block is None:
            raise ModelError(
                f"{target.component} module '{target.path}' is in no block of this family, so weights by block cannot "
                "say how fast it learns. Leave the weights out for this model."
            )
        return self.block_weights[target.block]

    def groups(self, targets: Iterable[LoraTarget]) -> dict[str, float]:
        """Return group name -> learning rate for everything that is trained, in the order of the modules."""
        return dict(self.group_of(target, role) for target in targets for role in ("down", "up"))


def component_rates(optimizer: OptimizerOptions, text_encoders: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Return the denoiser's learning rate and that of each text encoder."""
    unet = optimizer.learning_rate if optimizer.unet_lr is None else optimizer.unet_lr
    rates = text_encoder_rates(optimizer, len(text_encoders))
    return unet, dict(zip(text_encoders, rates, strict=True))


def up_ratio(network: NetworkOptions, *, text_encoder: bool) -> float | None:
    """Return LoRA+'s ratio for the denoiser or the text encoders; the one for all where it has none of its own."""
    own = network.loraplus_text_encoder_lr_ratio if text_encoder else network.loraplus_unet_lr_ratio
    return network.loraplus_lr_ratio if own is None else own
