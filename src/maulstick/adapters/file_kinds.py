"""What a safetensors file holds, judged by its tensor names, so that an error can say it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from maulstick.adapters.module_kinds import change_shape

_KINDS: tuple[tuple[str, str], ...] = (
    (r"\.dora_scale$|lora_magnitude_vector", "a DoRA (weight-decomposed LoRA)"),
    (r"\.hada_w[12]_[ab]$", "a LoHa (LyCORIS Hadamard product)"),
    (r"\.lokr_w[12]", "a LoKr (LyCORIS Kronecker product)"),
    (r"\.oft_(blocks|diag)$|\.oft_R\.", "an OFT adapter"),
    (r"\.lora_mid\.weight$", "a LoCon with a Tucker (CP) decomposition"),
    (r"\.(a1|a2|b1|b2)\.weight$", "a GLoRA"),
    (r"\.on_input$", "an (IA)3 adapter"),
    (r"^ip_adapter\.|^image_proj\.", "an IP-Adapter"),
    (r"^base_model\.model\.", "a LoRA in peft's own naming (base_model.model.….lora_A.weight)"),
    (r"\.lora_[AB]\.weight$", "a LoRA in diffusers' naming (unet.….lora_A.weight)"),
    (r"[._]lora\.(down|up)\.weight$", "a LoRA in the old diffusers naming (….lora.down.weight)"),
    (r"^model\.diffusion_model\.|^cond_stage_model\.|^conditioner\.", "a whole Stable Diffusion checkpoint"),
    (r"^(unet\.)?(down_blocks|mid_block|up_blocks)\.", "the weights of a UNet"),
    (r"^(emb_params|clip_[lg]|string_to_param)", "a textual-inversion embedding"),
    (r"^(first_stage_model\.|encoder\.|decoder\.)", "the weights of a VAE"),
    (r"^(text_model|transformer\.text_model)\.", "the weights of a text encoder"),
)


def describe_kind(keys: Collection[str]) -> str | None:
    """What the file is when it is not a plain LoRA in kohya's naming; ``None`` when nothing speaks against that."""
    for pattern, description in _KINDS:
        compiled = re.compile(pattern)
        if any(compiled.search(key) for key in keys):
            return description
    return None


def describe_family(modules: Mapping[str, Any]) -> str | None:
    """The model family a kohya LoRA was made for, as far as module names and sizes tell."""
    if _any_contains(modules, ("joint_blocks_",)):
        return "Stable Diffusion 3"
    if _any_contains(modules, ("double_blocks_", "single_blocks_")):
        return "FLUX"
    if _any_contains(modules, ("lora_te2_", "transformer_blocks_1_")):
        return "SDXL"
    width_families = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "SDXL"}
    for name, weights in modules.items():
        reads_text = name.startswith("lora_unet_") and name.endswith(("attn2_to_k", "attn2_to_v"))
        if reads_text or (name.startswith("lora_te_") and name.endswith("_q_proj")):
            # Nothing in an OFT depends on the number of inputs.
            shape = change_shape(weights)
            return width_families.get(shape[1]) if len(shape) > 1 else None
    return None


def _any_contains(names: Iterable[str], parts: tuple[str, ...]) -> bool:
    return any(part in name for name in names for part in parts)
