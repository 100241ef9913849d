"""Mixed precision, the same on every device: torch's autocast and torch's GradScaler.

accelerate refuses fp16 on a CPU, which would leave the scaled path untested where there is no GPU; so the trainer
takes devices and processes from accelerate and precision from here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from maulstick.families.base import Family
from maulstick.options.schema import Precision, RunOptions

DTYPES: dict[str, torch.dtype] = {
    "no": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return the context a forward pass runs in."""
    if precision == "no":
        return nullcontext()
    return torch.autocast(device_type=device.type, dtype=DTYPES[precision])


def in_fp8(family: Family, run: RunOptions) -> frozenset[str]:
    """Return the components whose frozen weights are to be kept in eight bits."""
    denoiser = {family.denoiser_naming.component} if run.fp8_base or run.fp8_base_unet else set()
    return frozenset(denoiser | (family.text_encoder_components if run.fp8_base else set()))


def gradient_scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler:
    """Return the loss scaler, disabled unless training runs in fp16."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
