"""The most memory that a run has needed so far."""

from __future__ import annotations

import sys

import torch


def peak_memory(device: torch.device) -> tuple[int | None, str]:
    """Return the most memory that was in use, in bytes (None where the system does not say), and what was counted."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "GPU memory"
    try:
        import resource
    except ImportError:
        return None, "unknown on this system"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "memory of the whole process"
