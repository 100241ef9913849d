"""What a user says about a LoRA to draw with: ``style.safetensors:0.8:te=0.5:lbw=OUTALL``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from maulstick.adapters.block_weights import is_number
from maulstick.errors import ModelError, OptionError, nearest_file_hint, nearest_name_hint

_ITEM = re.compile(r"(\w+)=(.*)")
_KEYS = ("te", "unet", "lbw", "x")
_FORM = "FILE, FILE:WEIGHT or with further items behind, such as style.safetensors:0.8:te=0.5:unet=1:lbw=OUTALL"


@dataclass(frozen=True)
class LoraChoice:
    """A LoRA file and the strengths it is applied with.

    Attributes:
        weight: strength of all that has none of its own.
        text_encoder_weight, denoiser_weight: strength of these parts; None for ``weight``.
        lbw: ratios by block, as the LoRA Block Weight extension writes them: a preset's name or a list.
        x: what ``X`` in that list stands for.
    """

    path: Path
    weight: float = 1.0
    text_encoder_weight: float | None = None
    denoiser_weight: float | None = None
    lbw: str | None = None
    x: float = 1.0

    @property
    def text_encoder_strength(self) -> float:
        return self.weight if self.text_encoder_weight is None else self.text_encoder_weight

    @property
    def denoiser_strength(self) -> float:
        return self.weight if self.denoiser_weight is None else self.denoiser_weight


def parse_lora_choice(text: str) -> LoraChoice:
    """Read ``FILE``, ``FILE:WEIGHT`` and the items ``te=``, ``unet=``, ``lbw=`` and ``x=`` behind it.

    A colon that neither a number nor an item follows (as in ``C:\\file``) belongs to the name, and so does everything
    in the name of a file that exists.

    Raises:
        ModelError: there is no such file.
        OptionError: an item is unknown, stands twice, or its value is no number.
    """
    name, weight = text, None
    items: dict[str, str] = {}
    while not Path(name).expanduser().exists():
        head, colon, last = name.rpartition(":")
        item = _ITEM.fullmatch(last)
        if colon and item is not None:
            _add(items, item[1], item[2], text)
        elif colon and weight is None and is_number(last):
            weight = _number("weight", last, text)
        else:
            break
        name = head
    path = Path(name).expanduser()
    if not path.is_file():
        # With a number too many it is not the name that is wrong.
        hint = "" if ":" in path.name else nearest_file_hint(path)
        raise ModelError(f"There is no LoRA file {path}.{hint} Give it as {_FORM}.")
    numbers = {key: _number(key, items[key], text) for key in ("te", "unet", "x") if key in items}
    return LoraChoice(
        path,
        1.0 if weight is None else weight,
        numbers.get("te"),
        numbers.get("unet"),
        items.get("lbw"),
        numbers.get("x", 1.0),
    )


def _add(items: dict[str, str], key: str, value: str, text: str) -> None:
    if key not in _KEYS:
        raise OptionError(
            f"--lora {text}: there is no item '{key}='.{nearest_name_hint(key, _KEYS)} There are te=, unet=, lbw= and "
            f"x=. Expected {_FORM}."
        )
    if key in items:
        raise OptionError(f"--lora {text}: '{key}=' stands twice. Keep one.")
    items[key] = value.strip()


def _number(name: str, value: str, text: str) -> float:
    if not is_number(value) or not math.isfinite(float(value)):
        raise OptionError(f"--lora {text}: {name} '{value}' is not a number.")
    return float(value)
