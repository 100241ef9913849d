"""What options by block say together."""

from __future__ import annotations

from maulstick.errors import OptionError
from maulstick.options.schema import TrainOptions

PART_WEIGHTS = ("down_lr_weight", "mid_lr_weight", "up_lr_weight")
BLOCK_RANKS = ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas")


def check_blocks(options: TrainOptions) -> None:
    """Refuse numbers by block that contradict each other or lack a partner. Raises OptionError."""
    network = options.network
    by_part = [name for name in PART_WEIGHTS if getattr(network, name) is not None]
    if network.block_lr and by_part:
        raise OptionError(
            f"block_lr and {by_part[0]} contradict each other: both give weights by block. Put all of them into one."
        )
    if network.block_alphas is not None and network.block_dims is None and not (by_part or network.block_lr):
        # sd-scripts ignores it silently then.
        raise OptionError(
            "block_alphas is given without block_dims. Give block_dims too: as many ranks as block_alphas has values, "
            f"or one for all blocks (block_dims = {network.network_dim} keeps network_dim)."
        )
    if network.conv_block_alphas is not None and network.conv_block_dims is None:
        raise OptionError(
            "conv_block_alphas is given without conv_block_dims. Give conv_block_dims too: as many ranks as "
            "conv_block_alphas has values, or one for all blocks."
        )
