"""``maulstick convert`` for IP-Adapters: the flat form, and the nested ones of InstantX and ComfyUI."""

from __future__ import annotations

from pathlib import Path

import torch

from maulstick.adapters.ip_adapter_files import IpAdapterFile, save_flat, save_nested
from maulstick.errors import ModelError, OptionError

FORMS = {"diffusers": ".safetensors", "comfyui": ".bin", "instantx": ".bin"}
"""Layouts that an IP-Adapter can have, with the ending of their files."""


def ip_adapter_ending(layout: str) -> str:
    """Return the ending of a file in this layout. Raises OptionError for layouts that are for LoRA only."""
    if layout not in FORMS:
        raise OptionError(
            f"--to {layout} is for LoRA files, and this is an IP-Adapter. Choose diffusers (one safetensors file, "
            "which ComfyUI reads too for SD 1.x and SDXL), comfyui, or instantx (SD3)."
        )
    return FORMS[layout]


def convert_ip_adapter(file: IpAdapterFile, output: Path, *, layout: str, dtype: torch.dtype | None) -> int:
    """Write an IP-Adapter in another form; return the number of its tensors.

    Raises:
        ModelError: InstantX's form is asked for, which only SD3 has, or a value is not finite in ``dtype``.
    """
    if layout == "instantx" and file.spec.kind != "time":
        raise ModelError(f"{file.path} is an {file.spec.title}; InstantX's form is that of IP-Adapters for SD3.")
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in file.tensors.items()}
    if layout == "diffusers":
        save_flat(output, tensors, file.metadata)
    else:
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise ModelError(f"{output} was not written: '{name}' does not fit into {dtype}.")
        save_nested(output, tensors)
    return len(tensors)
