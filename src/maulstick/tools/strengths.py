"""How strongly each module of a LoRA is merged: strengths of UNet and text encoders, times the ratios by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maulstick.adapters.block_presets import builtin_presets, resolve_ratios
from maulstick.adapters.lora_family import LoraFamily
from maulstick.errors import OptionError
from maulstick.tools.lora_choice import LoraChoice

Presets = Mapping[str, Sequence[str]]


def strength_function(choice: LoraChoice, family: LoraFamily, presets: Presets | None = None) -> Callable[[str], float]:
    """Return what gives the strength of a module by its canonical name.

    A ratio multiplies the strength once; the text encoders' is BASE, and a module outside every block has ratio 1.
    ``presets`` are known before those that the family has.

    Raises:
        OptionError: the ratios are no preset and no list for this family, or are to be drawn anew each time.
    """
    ratios = None
    if choice.lbw is not None:
        where = f"{choice.path}: lbw"
        if family.blocks is None:
            raise OptionError(
                f"{where}: ratios by block are for SD 1.x, SD 2.x and SDXL, but this is for {family.name}."
            )
        known = {**builtin_presets(family.blocks), **(presets or {})}
        ratios = resolve_ratios(choice.lbw, family.blocks, known, where=where, x=choice.x)

    def strength(name: str) -> float:
        if name.startswith("lora_te"):
            return choice.text_encoder_strength * (1.0 if ratios is None else ratios.base)
        index = None if family.blocks is None else family.blocks.index_of(name)
        return choice.denoiser_strength * (1.0 if ratios is None or index is None else ratios.blocks[index])

    return strength


def strength_facts(choice: LoraChoice) -> dict[str, Any]:
    """The strengths, for the history of a file."""
    facts: dict[str, Any] = {"unet": choice.denoiser_strength, "text_encoder": choice.text_encoder_strength}
    return facts if choice.lbw is None else {**facts, "lbw": choice.lbw}
