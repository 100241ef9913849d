"""Which block of the denoiser a module belongs to.

Block-wise learning rates, ranks and strengths all speak of these indices. A module may be named by its path in the
diffusers UNet (``down_blocks.1.attentions.0.proj_in``), by its path in the original layout
(``input_blocks.4.1.proj_in``) or by its name in a LoRA file (``lora_unet_down_blocks_1_attentions_0_proj_in``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

# What may stand before the first block name: the prefix of LoRA files, of pipelines, of original checkpoints.
_LEADING = re.compile(r"^(?:lora_unet_|unet_|(?:model_)?diffusion_model_)?")


@dataclass(frozen=True)
class BlockMap:
    """The blocks of one family of denoisers.

    ``names`` has one entry per index; ``parts`` gives the indices that a user's list for ``down``, ``mid`` or ``up``
    stands for, in the order of that list; ``index_of`` answers for a module, ``None`` where it is in no block.
    """

    family: str
    names: tuple[str, ...]
    parts: Mapping[str, range]
    index_of: Callable[[str], int | None]


def _block_pattern(text: str) -> re.Pattern[str]:
    """Anchor a pattern at the start of an underscored path and let it end only at a name boundary."""
    return re.compile(rf"^(?:{text})(?=_|$)")


def _first_match(rules: tuple[tuple[re.Pattern[str], Callable[[list[int]], int]], ...], path: str) -> int | None:
    underscored = _LEADING.sub("", path.replace(".", "_"), count=1)
    for pattern, index in rules:
        if match := pattern.match(underscored):
            return index([int(number) for number in match.groups()])
    return None


# The indices of sd-scripts for SD 1.x/2.x: every level of the UNet owns three indices, the third being the down- or
# upsampler. The numbers are bounded, because one level more would run into the indices of the next part.
_SD_RULES = (
    (_block_pattern(r"down_blocks_([0-3])_(?:resnets|attentions)_([01])"), lambda n: 1 + 3 * n[0] + n[1]),
    (_block_pattern(r"down_blocks_([0-2])_downsamplers"), lambda n: 3 + 3 * n[0]),
    (_block_pattern(r"mid_block"), lambda n: 12),
    (_block_pattern(r"up_blocks_([0-3])_(?:resnets|attentions)_([0-2])"), lambda n: 13 + 3 * n[0] + n[1]),
    (_block_pattern(r"up_blocks_([0-2])_upsamplers"), lambda n: 15 + 3 * n[0]),
    (_block_pattern(r"conv_in"), lambda n: 0),
    (_block_pattern(r"input_blocks_([0-9]|1[01])"), lambda n: n[0]),
    (_block_pattern(r"middle_block"), lambda n: 12),
    (_block_pattern(r"output_blocks_([0-9]|1[01])"), lambda n: 13 + n[0]),
)

# The indices of sd-scripts for SDXL: one for the embeddings, nine, three, nine, and one for the output layers.
_SDXL_RULES = (
    (_block_pattern(r"down_blocks_([0-2])_(?:resnets|attentions)_([01])"), lambda n: 2 + 3 * n[0] + n[1]),
    (_block_pattern(r"down_blocks_([01])_downsamplers"), lambda n: 4 + 3 * n[0]),
    (_block_pattern(r"mid_block_resnets_([01])"), lambda n: 10 + 2 * n[0]),
    (_block_pattern(r"mid_block_attentions_0"), lambda n: 11),
    (_block_pattern(r"up_blocks_([0-2])_(?:resnets|attentions)_([0-2])"), lambda n: 13 + 3 * n[0] + n[1]),
    (_block_pattern(r"up_blocks_([01])_upsamplers"), lambda n: 15 + 3 * n[0]),
    (_block_pattern(r"time_embedding|add_embedding|time_embed|label_emb"), lambda n: 0),
    (_block_pattern(r"conv_in"), lambda n: 1),
    (_block_pattern(r"conv_norm_out|conv_out|out"), lambda n: 22),
    (_block_pattern(r"input_blocks_([0-8])"), lambda n: 1 + n[0]),
    (_block_pattern(r"middle_block_([0-2])"), lambda n: 10 + n[0]),
    (_block_pattern(r"output_blocks_([0-8])"), lambda n: 13 + n[0]),
)


def sd_block_index(path: str) -> int | None:
    """Index 0 to 24 of a module of an SD 1.x/2.x UNet; ``None`` for a module outside every block.

    0-11 are IN00-IN11, 12 is MID, 13-24 are OUT00-OUT11.
    """
    return _first_match(_SD_RULES, path)


def sdxl_block_index(path: str) -> int | None:
    """Index 0 to 22 of a module of an SDXL UNet; ``None`` for a module outside every block.

    0 is the embeddings, 1-9 are IN00-IN08, 10-12 are MID0-MID2, 13-21 are OUT00-OUT08, 22 is the output layers.
    """
    return _first_match(_SDXL_RULES, path)


SD_BLOCKS = BlockMap(
    family="sd",
    names=(*(f"IN{n:02}" for n in range(12)), "MID", *(f"OUT{n:02}" for n in range(12))),
    parts=MappingProxyType({"down": range(12), "mid": range(12, 13), "up": range(13, 25)}),
    index_of=sd_block_index,
)

SDXL_BLOCKS = BlockMap(
    family="sdxl",
    names=("EMB", *(f"IN{n:02}" for n in range(9)), "MID0", "MID1", "MID2", *(f"OUT{n:02}" for n in range(9)), "OUT"),
    parts=MappingProxyType({"down": range(1, 10), "mid": range(10, 13), "up": range(13, 22)}),
    index_of=sdxl_block_index,
)
