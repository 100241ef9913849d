"""Which model family an adapter file was made for, and which block each of its modules belongs to.

Everything here works on canonical module names (see ``tensor_names``) and shapes; no model is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from maulstick.adapters.blocks import SD_BLOCKS, SDXL_BLOCKS, BlockMap
from maulstick.adapters.joint_names import SD3_KEY_NAMES
from maulstick.adapters.key_names import SD_KEY_NAMES, SDXL_KEY_NAMES, KeyNames

Kind = Literal["sd1", "sd2", "sd", "sdxl", "sd3", "flux", "unknown"]


@dataclass(frozen=True)
class LoraFamily:
    """A family as far as a file tells it: ``sd`` is SD 1.x or 2.x, undecided.

    ``blocks`` and ``key_names`` are ``None`` for families whose LoRA files can be read but not renamed here.
    """

    kind: Kind
    name: str
    blocks: BlockMap | None = None
    key_names: KeyNames | None = None

    def may_be(self, other: LoraFamily) -> bool:
        """Whether the two can be the same family, as far as is known."""
        if "unknown" in (self.kind, other.kind) or self.kind == other.kind:
            return True
        return "sd" in (self.kind, other.kind) and {self.kind, other.kind} <= {"sd", "sd1", "sd2"}


FAMILIES: dict[str, LoraFamily] = {
    family.kind: family
    for family in (
        LoraFamily("sd1", "Stable Diffusion 1.x", SD_BLOCKS, SD_KEY_NAMES),
        LoraFamily("sd2", "Stable Diffusion 2.x", SD_BLOCKS, SD_KEY_NAMES),
        LoraFamily("sd", "Stable Diffusion 1.x or 2.x", SD_BLOCKS, SD_KEY_NAMES),
        LoraFamily("sdxl", "SDXL", SDXL_BLOCKS, SDXL_KEY_NAMES),
        LoraFamily("sd3", "Stable Diffusion 3", None, SD3_KEY_NAMES),
        LoraFamily("flux", "FLUX"),
        LoraFamily("unknown", "an unknown model family"),
    )
}
# Both have blocks of the name in diffusers; SD3's are narrower (1536 to 2432).
_FLUX_WIDTH = 3072
_WIDTHS = {768: "sd1", 1024: "sd2", 2048: "sdxl"}
# Names that only one family has.
_SIGNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"joint_blocks_\d"), "sd3"),
    (re.compile(r"(double|single)_blocks_\d|single_transformer_blocks_\d"), "flux"),
    (re.compile(r"^lora_te2_|_attentions_\d_transformer_blocks_[1-9]"), "sdxl"),
)
_SD_ONLY = re.compile(r"^lora_te_|^lora_unet_(down_blocks_(0_attentions|3_)|up_blocks_(3_|2_attentions))")
_SD3_VERSIONS = (("sd3", "sd3"), ("3-medium", "sd3"), ("3-5-", "sd3"))
_IN_METADATA = (
    ("ss_base_model_version", (("sdxl", "sdxl"), ("sd_v1", "sd1"), ("sd_v2", "sd2"), *_SD3_VERSIONS, ("flux", "flux"))),
    (
        "modelspec.architecture",
        (
            ("stable-diffusion-xl", "sdxl"),
            ("stable-diffusion-v1", "sd1"),
            ("stable-diffusion-v2", "sd2"),
            ("stable-diffusion-3", "sd3"),
            ("flux", "flux"),
        ),
    ),
)


def recognise_lora_family(
    shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str], *, original_layout: bool = False
) -> LoraFamily:
    """Judge by names, then by the width of the text states, then by metadata, then by the naming of the UNet.

    ``shapes`` is canonical name -> shape of the weight that the module changes; ``original_layout`` says that the file
    names its UNet as kohya's SDXL files do.
    """
    transformer = {name: shape for name, shape in shapes.items() if name.startswith("lora_transformer_")}
    if transformer:
        is_flux = any("single_" in name or _FLUX_WIDTH in shape for name, shape in transformer.items())
        return FAMILIES["flux" if is_flux else "sd3"]
    for pattern, kind in _SIGNS:
        if any(pattern.search(name) for name in shapes):
            return FAMILIES[kind]
    if kind_by_width := _by_width(shapes):
        return FAMILIES[kind_by_width]
    for entry, beginnings in _IN_METADATA:
        for beginning, kind in beginnings:
            if metadata.get(entry, "").startswith(beginning):
                return FAMILIES[kind]
    if original_layout:
        return FAMILIES["sdxl"]
    if any(_SD_ONLY.search(name) for name in shapes):
        return FAMILIES["sd"]
    is_unet = any(name.startswith(("lora_unet_down_", "lora_unet_mid_", "lora_unet_up_")) for name in shapes)
    return FAMILIES["sd" if is_unet else "unknown"]


def _by_width(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    for name, shape in shapes.items():
        reads_text = name.startswith("lora_unet_") and name.endswith(("attn2_to_k", "attn2_to_v"))
        # CLIP-L of SDXL is as wide as that of SD 1.x, so only the undecided prefix counts.
        is_text = name.startswith("lora_te_") and name.endswith("_q_proj")
        if (reads_text or is_text) and len(shape) > 1 and shape[1] in _WIDTHS:
            return _WIDTHS[shape[1]]
    return None


def with_family_prefixes(names: Iterable[str], family: LoraFamily) -> dict[str, str]:
    """Name -> name with the prefix that the family gives its first text encoder (``lora_te_`` or ``lora_te1_``)."""
    first = {"sd1": "lora_te_", "sd2": "lora_te_", "sd": "lora_te_", "sdxl": "lora_te1_", "sd3": "lora_te1_"}
    wanted = first.get(family.kind)
    renamed: dict[str, str] = {}
    for name in names:
        prefix = next((prefix for prefix in ("lora_te_", "lora_te1_") if name.startswith(prefix)), None)
        renamed[name] = name if wanted is None or prefix is None else wanted + name.removeprefix(prefix)
    return renamed


def component_of(name: str) -> str:
    """The prefix of a canonical name: ``lora_unet``, ``lora_te``, ``lora_te1``, ``lora_te2``, …"""
    return "_".join(name.split("_", 2)[:2])


def block_label(name: str, family: LoraFamily) -> str:
    """The block that a module belongs to: ``IN04``, ``MID``, ``TE``, ``TE2``, ``double 07``; ``other`` outside all."""
    component = component_of(name)
    if component.startswith("lora_te"):
        return component.removeprefix("lora_").upper()
    if family.blocks is not None:
        index = family.blocks.index_of(name)
        return "other" if index is None else family.blocks.names[index]
    match = re.search(r"(double|single|joint)_(?:transformer_)?blocks_(\d+)|_(transformer)_blocks_(\d+)", name)
    if match is None:
        return "other"
    return f"{match[1] or match[3]} {int(match[2] or match[4]):02}"


def block_labels(family: LoraFamily, names: Iterable[str]) -> list[str]:
    """The labels of all blocks in the order of the model; of families without a map those that ``names`` are in."""
    labels = {block_label(name, family) for name in names}
    text = sorted(label for label in labels if label.startswith("TE"))
    if family.blocks is not None:
        return [*text, *family.blocks.names, *(["other"] if "other" in labels else [])]
    return text + sorted(labels - set(text) - {"other"}) + (["other"] if "other" in labels else [])


def kernel_size(name: str, family: LoraFamily) -> int | None:
    """Kernel of the convolution that a module of a UNet is; ``None`` where it is a matrix.

    Needed for files that keep kernels flattened. SD 1.x has 1x1 convolutions around its transformers, where the later
    families have matrices.
    """
    if not name.startswith("lora_unet_"):
        return None
    if name.endswith(("_conv1", "_conv2", "samplers_0_conv", "_conv_in", "_conv_out")):
        return 3
    if name.endswith("_conv_shortcut"):
        return 1
    return 1 if name.endswith(("_proj_in", "_proj_out")) and family.kind in ("sd1", "sd") else None
