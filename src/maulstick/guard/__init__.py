"""The gradient guardian: sees a step that would damage the weights before it does. Works in any PyTorch loop.

The names below are loaded when first used, so that the parts that need no torch (the rules, the log, the replay of a
log) can be used without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import GuardError as GuardError
    from .guard import GradientGuard as GradientGuard
    from .log import GradientLog as GradientLog
    from .log import gradient_log_path as gradient_log_path
    from .log import read_gradient_log as read_gradient_log
    from .policies import OffRule as OffRule
    from .policies import Reason as Reason
    from .policies import SteadyRule as SteadyRule
    from .policies import WindowRule as WindowRule
    from .presets import PRESETS as PRESETS
    from .presets import GuardConfig as GuardConfig
    from .presets import preset as preset
    from .presets import resolve as resolve
    from .scale import scaled_by as scaled_by
    from .scale import unscaled_from as unscaled_from
    from .sources import GradientSource as GradientSource
    from .step import StepOutcome as StepOutcome
    from .step import guarded_step as guarded_step
    from .step import keep_scale_healthy as keep_scale_healthy
    from .verdict import Verdict as Verdict

_HOME = {
    "GuardError": "errors",
    "GradientGuard": "guard",
    "GradientLog": "log",
    "gradient_log_path": "log",
    "read_gradient_log": "log",
    "OffRule": "policies",
    "Reason": "policies",
    "SteadyRule": "policies",
    "WindowRule": "policies",
    "PRESETS": "presets",
    "GuardConfig": "presets",
    "preset": "presets",
    "resolve": "presets",
    "scaled_by": "scale",
    "unscaled_from": "scale",
    "GradientSource": "sources",
    "StepOutcome": "step",
    "guarded_step": "step",
    "keep_scale_healthy": "step",
    "Verdict": "verdict",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'maulstick.guard' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
