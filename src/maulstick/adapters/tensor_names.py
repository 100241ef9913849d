"""What other programs call the tensors of an adapter file, brought to one name per module.

The one name ("canonical" here) is kohya's, with the UNet in diffusers' layout: ``lora_unet_mid_block_resnets_0_conv1``,
``lora_te1_text_model_encoder_layers_0_mlp_fc1``. Modules of transformer denoisers (SD3, FLUX) keep the name they have.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from maulstick.adapters.key_names import SD_KEY_NAMES, from_original_layout, to_original_layout

Layout = Literal["kohya", "diffusers", "peft", "comfyui"]

LAYOUT_NAMES: dict[Layout, str] = {
    "kohya": "kohya",
    "diffusers": "diffusers",
    "peft": "PEFT",
    "comfyui": "ComfyUI",
}

# Ending of a tensor's name -> which part of a module it is. PEFT puts the adapter's name behind lora_A, and leaves
# ".weight" away in some versions; diffusers before 0.22 wrote "_lora.down", text encoders "lora_linear_layer".
_PART_ENDINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern + "$"), part)
    for pattern, part in (
        (r"[._]lora(?:_linear_layer\.|\.|_)down\.weight", "down"),
        (r"[._]lora(?:_linear_layer\.|\.|_)up\.weight", "up"),
        (r"\.lora_mid\.weight", "mid"),
        (r"\.lora_A(?:\.default(?:_\d+)?)?(?:\.weight)?", "down"),
        (r"\.lora_B(?:\.default(?:_\d+)?)?(?:\.weight)?", "up"),
        (r"\.lora_magnitude_vector(?:\.default(?:_\d+)?)?(?:\.weight)?", "row_magnitude"),
        (r"\.dora_scale", "magnitude"),
        (r"\.alpha", "alpha"),
        (r"\.hada_(?P<factor>w[12]_[ab]|t[12])(?:\.default)?", "hada"),
        (r"\.lokr_(?P<factor>w[12](?:_[ab])?|t2)(?:\.default)?", "lokr"),
        (r"\.oft_(?P<factor>blocks|diag|R)(?:\.default)?(?:\.weight)?", "oft"),
    )
)

# The attention processors of old diffusers versions, and what their parts belong to.
_OLD_UNET_PARTS = {"to_q_lora": "to_q", "to_k_lora": "to_k", "to_v_lora": "to_v", "to_out_lora": "to_out.0"}
_OLD_TEXT_PARTS = {"to_q_lora": "q_proj", "to_k_lora": "k_proj", "to_v_lora": "v_proj", "to_out_lora": "out_proj"}

_DOTTED_COMPONENTS = (
    ("unet.", "lora_unet"),
    ("text_encoder_2.", "lora_te2"),
    ("text_encoder_3.", "lora_te3"),
    ("text_encoder.", "lora_te1"),
    ("transformer.", "lora_transformer"),
)
_COMFYUI_ENCODERS = {"clip_l": "lora_te1", "clip_h": "lora_te1", "clip_g": "lora_te2", "t5xxl": "lora_te3"}
_UNET_BEGINNINGS = ("down_blocks.", "mid_block.", "up_blocks.", "conv_in.", "conv_out.", "time_embedding.")
_TEXT_BEGINNINGS = ("text_model.", "encoder.layers.")
_TRANSFORMER_BEGINNINGS = ("transformer_blocks.", "single_transformer_blocks.", "joint_transformer_blocks.")


class TensorName(NamedTuple):
    """A tensor of an adapter file: its module under the canonical name, which part of it, and in whose naming."""

    module: str
    part: str
    layout: Layout
    original_layout: bool
    """Whether the module's name follows the original (SAI) layout of the UNet."""
    path: str
    """The module's path in its component as the file has it; empty for kohya names, which have no dots."""


def parse_tensor_name(key: str) -> TensorName | None:
    """Read the name of a tensor; ``None`` when it is no part of a LoRA or of one of its relatives.

    Parts are ``down``, ``up``, ``mid``, ``alpha``, ``magnitude``, ``row_magnitude`` (PEFT's, one value an output),
    and ``hada_…``, ``lokr_…``, ``oft_…``. A text encoder that is not numbered comes out as ``lora_te`` from kohya
    names and as ``lora_te1`` from dotted ones.
    """
    for pattern, part in _PART_ENDINGS:
        match = pattern.search(key)
        if match is None:
            continue
        stem = key[: match.start()]
        if "factor" in match.groupdict():
            part = f"{part}_{match['factor']}"
        # "…to_q_lora.down.weight" ends in "_lora.down.weight": the underscore form names the part of a processor.
        if match.group().startswith("_lora."):
            stem += "_lora"
        named = _canonical(stem)
        return None if named is None else TensorName(named[0], part, *named[1:])
    return None


def _canonical(stem: str) -> tuple[str, Layout, bool, str] | None:
    """Canonical name, layout, whether the UNet was named in the original layout, and the path in the component."""
    if "." not in stem:
        return _canonical_kohya(stem)
    if stem.startswith("diffusion_model."):
        underscored = stem.removeprefix("diffusion_model.").replace(".", "_")
        return f"lora_unet_{from_original_layout(underscored)}", "comfyui", True, stem
    if match := re.fullmatch(r"text_encoders\.(\w+)\.transformer\.(.+)", stem):
        encoder = _COMFYUI_ENCODERS.get(match[1])
        return None if encoder is None else (_text_name(encoder, match[2]), "comfyui", False, match[2])
    layout: Layout = "diffusers"
    prefix = ""
    for beginning, component in _DOTTED_COMPONENTS:
        if stem.startswith(beginning):
            prefix, stem = component, stem.removeprefix(beginning)
            break
    if stem.startswith("base_model.model."):
        layout, stem = "peft", stem.removeprefix("base_model.model.")
    prefix = prefix or _component_of(stem)
    if not prefix:
        return None
    return _dotted_name(prefix, stem), layout, False, stem


def _canonical_kohya(name: str) -> tuple[str, Layout, bool, str] | None:
    if not name.startswith(("lora_unet_", "lora_te", "lora_transformer_")):
        return None
    if not name.startswith("lora_unet_"):
        return name, "kohya", False, ""
    underscored = name.removeprefix("lora_unet_")
    diffusers = from_original_layout(underscored)
    return f"lora_unet_{diffusers}", "kohya", diffusers != underscored, ""


def _component_of(path: str) -> str:
    """What a path without a component is part of, judged by its first level."""
    for beginnings, prefix in (
        (_UNET_BEGINNINGS, "lora_unet"),
        (_TEXT_BEGINNINGS, "lora_te1"),
        (_TRANSFORMER_BEGINNINGS, "lora_transformer"),
    ):
        if path.startswith(beginnings):
            return prefix
    return ""


def _dotted_name(prefix: str, path: str) -> str:
    path = path.replace(".processor.", ".")
    parent, _, last = path.rpartition(".")
    if prefix.startswith("lora_te"):
        return _text_name(prefix, f"{parent}.{_OLD_TEXT_PARTS.get(last, last)}")
    return f"{prefix}_{parent}.{_OLD_UNET_PARTS.get(last, last)}".replace(".", "_")


def _text_name(prefix: str, path: str) -> str:
    if prefix != "lora_te3" and not path.startswith("text_model."):
        path = f"text_model.{path}"
    return f"{prefix}_{path.replace('.', '_')}"


def sai_name(name: str) -> str:
    """Return a canonical name with the UNet in the original layout, as kohya's SDXL files have it."""
    if not name.startswith("lora_unet_"):
        return name
    return f"lora_unet_{to_original_layout(name.removeprefix('lora_unet_'))}"


def original_path(name: str, *, is_sdxl: bool) -> str | None:
    """Return a UNet module's dotted path in the original layout, such as ``input_blocks.1.1.proj_in``.

    ``None`` when it has none. ``is_sdxl`` says whether the first up block has attention, which moves its upsampler.
    """
    underscored = to_original_layout(name.removeprefix("lora_unet_"), attention_in_first_up_block=is_sdxl)
    match = re.fullmatch(r"(input_blocks|output_blocks)_(\d+)_(\d)_(.+)|(middle_block)_(\d)_(.+)", underscored)
    if match is None:
        outer = re.fullmatch(r"(time_embed|label_emb|out|input_blocks)((?:_\d)+)", underscored)
        return None if outer is None else outer[1] + outer[2].replace("_", ".")
    place = [part for part in match.groups() if part is not None]
    tail = place.pop()
    residual = re.fullmatch(r"(in_layers|out_layers|emb_layers)_(\d)", tail)
    if residual:
        inner: str | None = f"{residual[1]}.{residual[2]}"
    elif tail in ("skip_connection", "op", "conv"):
        inner = tail
    else:
        location = SD_KEY_NAMES.locate(f"lora_unet_{tail}")
        inner = None if location is None else location.path
    return None if inner is None else ".".join([*place, inner])
