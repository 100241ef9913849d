"""The named settings of the guard, and how a preset and manual flags combine. Pure Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .errors import GuardError, nearest
from .policies import OffRule, Rule, SteadyRule, WindowRule

CosineMode = Literal["off", "exact", "sampled"]
WhenStuck = Literal["adapt", "hand_over"]


def _one_of(field: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise GuardError(f"{field} must be one of {', '.join(valid)}, got '{value}'.{nearest(value, valid)}")


@dataclass(frozen=True)
class GuardConfig:
    """Everything that decides what a guard does.

    ``rule`` judges single norms. The other fields keep a run from getting stuck: after ``most_refusals_in_a_row``
    finite norms refused in a row (or when more than half of the last 200 were) the guard accepts the new level
    (``when_stuck="adapt"``) or sets ``Verdict.escalate`` and goes on refusing (``"hand_over"``). After
    ``most_non_finite_in_a_row`` windows with NaN or infinite gradients it always escalates. The loss scale never stays
    below ``scale_floor``, and an alarm is raised when it falls to ``scale_alarm``. ``log`` and ``cosine`` say whether
    this mode asks for the gradient log and its cosine column.
    """

    name: str
    rule: Rule
    log: bool = True
    cosine: CosineMode = "off"
    when_stuck: WhenStuck = "hand_over"
    most_refusals_in_a_row: int = 64
    most_non_finite_in_a_row: int = 16
    scale_floor: float = 2.0**-10
    scale_alarm: float = 1.0

    def __post_init__(self) -> None:
        _one_of("cosine", self.cosine, ("off", "exact", "sampled"))
        _one_of("when_stuck", self.when_stuck, ("adapt", "hand_over"))
        for name in ("most_refusals_in_a_row", "most_non_finite_in_a_row"):
            if getattr(self, name) < 1:
                raise GuardError(f"{name} must be at least 1, got {getattr(self, name)}.")
        # Below 2^-126 the reciprocal of the scale overflows fp32 and unscaling turns healthy gradients into inf.
        if not 2.0**-126 <= self.scale_floor <= self.scale_alarm:
            raise GuardError(
                f"scale_floor must lie between 2^-126 and scale_alarm ({self.scale_alarm}), got {self.scale_floor}."
            )

    @property
    def skips(self) -> bool:
        """Whether this mode may skip steps at all."""
        return not isinstance(self.rule, OffRule) and (not isinstance(self.rule, WindowRule) or self.rule.skip)


_STABLE = WindowRule(
    cap=200000.0, nan_to_window=True, inf_to_window=True, skip_nan_immediate=False, skip_inf_immediate=False
)

PRESETS: dict[str, GuardConfig] = {
    "steady": GuardConfig("steady", SteadyRule(), when_stuck="adapt"),
    "stable": GuardConfig("stable", _STABLE, cosine="exact"),
    "stable_no_threshoff": GuardConfig(
        "stable_no_threshoff", replace(_STABLE, nan_to_window=False, inf_to_window=False), cosine="exact"
    ),
    "gamble": GuardConfig("gamble", WindowRule(), cosine="exact"),
    "off": GuardConfig("off", OffRule(), log=False),
}
DEFAULT_PRESET = "steady"

MANUAL_DEFAULTS: dict[str, Any] = {
    "skip_grad_norm": False,
    "grad_norm_log": False,
    "grad_cosine_log": False,
    "skip_grad_norm_max": None,
    "nan_to_window": False,
    "inf_to_window": False,
    "skip_nan_immediate": True,
    "skip_inf_immediate": True,
}
_SOFTENING = ("skip_nan_immediate", "skip_inf_immediate")

_REMOVED_EXACT = {
    "nan_inf_until_step": (
        "'stable' lets NaN and inf lift the threshold at any step, 'stable_no_threshoff' never does; pick one"
    ),
    "auto_cap_release": "'gamble' has no cap, and 'steady' accepts a lasting new level by itself",
    "idle_free_phase": "'steady' cannot stay idle: it accepts a lasting new level by itself",
    "idle_max_steps": "'steady' cannot stay idle: it accepts a lasting new level by itself",
    "idle_free_len": "'steady' cannot stay idle: it accepts a lasting new level by itself",
}
_REMOVED_PREFIX = {"cap_release_": _REMOVED_EXACT["auto_cap_release"]}


def preset(name: str, **overrides: Any) -> GuardConfig:
    """The configuration called ``name``, with fields of ``GuardConfig`` or of its rule replaced.

    Raises ``GuardError`` for an unknown preset or a field that this preset does not have.
    """
    if name not in PRESETS:
        raise GuardError(
            f"There is no guard preset '{name}'; the presets are {', '.join(PRESETS)}.{nearest(name, PRESETS)}"
        )
    config = PRESETS[name]
    own = {field.name for field in fields(config)} - {"name", "rule"}
    of_rule = {field.name for field in fields(config.rule)}
    unknown = [key for key in overrides if key not in own | of_rule]
    if unknown:
        raise GuardError(
            f"Preset '{name}' has no setting '{unknown[0]}'; it has {', '.join(sorted(own | of_rule))}."
            f"{nearest(unknown[0], own | of_rule)}"
        )
    rule = replace(config.rule, **{key: value for key, value in overrides.items() if key in of_rule})
    return replace(config, rule=rule, **{key: value for key, value in overrides.items() if key in own})


def removed_option_message(name: str) -> str | None:
    """What to tell someone whose configuration still names an option of the original that is gone, else None."""
    bare = name.lstrip("-").replace("-", "_")
    advice = _REMOVED_EXACT.get(bare) or next((a for p, a in _REMOVED_PREFIX.items() if bare.startswith(p)), None)
    if advice is None:
        return None
    return (
        f"The option '{bare}' was removed: the presets of grad_norm_mode replace it ({advice}). "
        f"Delete it and set grad_norm_mode instead."
    )


def resolve(grad_norm_mode: str | None, manual: Mapping[str, Any]) -> tuple[GuardConfig, list[str]]:
    """The configuration for a mode and the manual flags given beside it, and notices about flags without effect.

    ``manual`` maps flag names to values; a flag that is absent or None was not given. Without a mode, manual flags
    make a configuration of their own, and no flag at all means ``steady``. Beside a compatible preset only
    ``skip_nan_immediate=False`` and ``skip_inf_immediate=False`` have an effect. Raises ``GuardError`` for an unknown
    mode or flag, a removed flag, or a value that cannot be used.
    """
    given = _checked_flags(manual)
    if grad_norm_mode is None:
        return (_manual_config(given), []) if given else (PRESETS[DEFAULT_PRESET], [])
    config = preset(grad_norm_mode)
    softened: dict[str, bool] = {}
    notices = []
    for flag, value in given.items():
        if flag in _SOFTENING and value is False and isinstance(config.rule, WindowRule):
            softened[flag] = False
        else:
            notices.append(_ignored_notice(flag, value, config))
    return (preset(grad_norm_mode, **softened) if softened else config), notices


def _checked_flags(manual: Mapping[str, Any]) -> dict[str, Any]:
    given = {}
    for name, value in manual.items():
        message = removed_option_message(name)
        if message is not None:
            raise GuardError(message)
        if name not in MANUAL_DEFAULTS:
            raise GuardError(
                f"There is no guard flag '{name}'; the flags are {', '.join(MANUAL_DEFAULTS)}."
                f"{nearest(name, MANUAL_DEFAULTS)}"
            )
        if value is None:
            continue
        if name == "skip_grad_norm_max":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not value > 0 or math.isnan(value):
                raise GuardError(f"skip_grad_norm_max must be a number above 0, got {value!r}.")
            value = float(value)
        elif not isinstance(value, bool):
            raise GuardError(f"{name} must be true or false, got {value!r}.")
        given[name] = value
    return given


def _manual_config(given: Mapping[str, Any]) -> GuardConfig:
    flags = {**MANUAL_DEFAULTS, **given}
    if flags["grad_cosine_log"] and not flags["grad_norm_log"]:
        raise GuardError("grad_cosine_log adds a column to the gradient log and needs grad_norm_log; set both.")
    rule = WindowRule(
        skip=flags["skip_grad_norm"],
        cap=flags["skip_grad_norm_max"],
        nan_to_window=flags["nan_to_window"],
        inf_to_window=flags["inf_to_window"],
        skip_nan_immediate=flags["skip_nan_immediate"],
        skip_inf_immediate=flags["skip_inf_immediate"],
    )
    return GuardConfig(
        "manual", rule, log=flags["grad_norm_log"], cosine="exact" if flags["grad_cosine_log"] else "off"
    )


def _ignored_notice(flag: str, value: Any, config: GuardConfig) -> str:
    text = f"{'' if value is not False else 'no-'}{flag}" if isinstance(value, bool) else f"{flag} {value:g}"
    if not isinstance(config.rule, WindowRule):
        return f"--{text} is ignored: grad_norm_mode {config.name} has no such setting."
    return (
        f"--{text} is ignored: grad_norm_mode {config.name} sets it. Beside a preset only --no-skip_nan_immediate and "
        f"--no-skip_inf_immediate have an effect; leave grad_norm_mode out to set every flag by hand."
    )
