"""The autopsy: re-runs a step that gave NaN or infinity and names what made it. Works in any PyTorch loop.

The names below are loaded when first used, so that a stored report can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bisect import BatchSearch as BatchSearch
    from .bisect import bisect_batch as bisect_batch
    from .causes import KNOWN_CAUSES as KNOWN_CAUSES
    from .causes import explain as explain
    from .causes import explain_error as explain_error
    from .examination import examine as examine
    from .report import Cause as Cause
    from .report import Direction as Direction
    from .report import Finding as Finding
    from .report import Headroom as Headroom
    from .report import Report as Report
    from .report import Sample as Sample
    from .report import TensorFacts as TensorFacts

_HOME = {
    "BatchSearch": "bisect",
    "bisect_batch": "bisect",
    "KNOWN_CAUSES": "causes",
    "explain": "causes",
    "explain_error": "causes",
    "examine": "examination",
    "Cause": "report",
    "Direction": "report",
    "Finding": "report",
    "Headroom": "report",
    "Report": "report",
    "Sample": "report",
    "TensorFacts": "report",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'maulstick.autopsy' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
