"""Rescue: goes back to a good state when a run is lost, and goes on. Works in any PyTorch loop.

The names below are loaded when first used, so that the parts that need no torch (the decisions, the quarantine) can be
used without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RescueConfig as RescueConfig
    from .config import RescueError as RescueError
    from .extra import HasState as HasState
    from .extra import RandomState as RandomState
    from .judge import Cause as Cause
    from .loss_range import LossRange as LossRange
    from .quarantine import Quarantine as Quarantine
    from .rescuer import Decision as Decision
    from .rescuer import Rescuer as Rescuer
    from .ring import StateRing as StateRing

_HOME = {
    "RescueConfig": "config",
    "RescueError": "config",
    "HasState": "extra",
    "RandomState": "extra",
    "Cause": "judge",
    "LossRange": "loss_range",
    "Quarantine": "quarantine",
    "Decision": "rescuer",
    "Rescuer": "rescuer",
    "StateRing": "ring",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'maulstick.rescue' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
