"""What a run ran on: for whoever reads the log later, and wants to know why another run went differently."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow")


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Return versions, system and device as plain values; nothing of it names the user or the machine."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
        "device": str(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
    }
    if device.type == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
