"""Presets, manual flags, and what is said about combinations that have no effect."""

from __future__ import annotations

import pytest

from maulstick.guard import GuardError, WindowRule, preset, resolve
from maulstick.guard.presets import PRESETS, removed_option_message


def window_rule(name: str) -> WindowRule:
    rule = preset(name).rule
    assert isinstance(rule, WindowRule)
    return rule


def test_the_table_of_presets():
    table = {
        name: (
            window_rule(name).skip,
            preset(name).log,
            preset(name).cosine,
            window_rule(name).cap,
            window_rule(name).nan_to_window,
            window_rule(name).inf_to_window,
            window_rule(name).skip_nan_immediate,
            window_rule(name).skip_inf_immediate,
        )
        for name in ("stable", "stable_no_threshoff", "gamble")
    }
    assert table == {
        "stable": (True, True, "exact", 200000.0, True, True, False, False),
        "stable_no_threshoff": (True, True, "exact", 200000.0, False, False, False, False),
        "gamble": (True, True, "exact", None, False, False, True, True),
    }
    assert window_rule("stable").window == 200
    assert window_rule("stable").initial_threshold == 200000.0


def test_no_mode_and_no_flag_is_steady():
    assert resolve(None, {}) == (PRESETS["steady"], [])
    assert resolve(None, {"skip_grad_norm": None, "skip_grad_norm_max": None}) == (PRESETS["steady"], [])


def test_manual_flags_have_the_documented_defaults():
    config, notices = resolve(None, {"grad_norm_log": True})
    assert notices == []
    assert (config.name, config.log, config.cosine, config.skips) == ("manual", True, "off", False)
    assert config.rule == WindowRule(skip=False)
    config, _ = resolve(None, {"skip_grad_norm": True, "skip_grad_norm_max": 5000})
    assert (config.log, config.rule) == (False, WindowRule(skip=True, cap=5000.0))


@pytest.mark.parametrize("flag", ["skip_nan_immediate", "skip_inf_immediate"])
def test_a_preset_may_be_softened(flag: str):
    config, notices = resolve("gamble", {flag: False})
    assert notices == []
    assert getattr(config.rule, flag) is False
    assert config.name == "gamble"
    assert getattr(PRESETS["gamble"].rule, flag) is True


@pytest.mark.parametrize(
    ("mode", "flags", "words"),
    [
        ("gamble", {"skip_nan_immediate": True}, "--skip_nan_immediate is ignored: grad_norm_mode gamble sets it"),
        ("stable", {"skip_grad_norm_max": 5000}, "--skip_grad_norm_max 5000 is ignored"),
        ("stable", {"nan_to_window": False}, "--no-nan_to_window is ignored"),
        ("stable", {"grad_cosine_log": False}, "leave grad_norm_mode out"),
        ("steady", {"skip_nan_immediate": False}, "grad_norm_mode steady has no such setting"),
        ("off", {"skip_grad_norm": True}, "--skip_grad_norm is ignored: grad_norm_mode off has no such setting"),
    ],
)
def test_other_flags_beside_a_preset_are_ignored_and_said_so(mode: str, flags: dict, words: str):
    config, notices = resolve(mode, flags)
    assert config == PRESETS[mode]
    assert len(notices) == 1
    assert words in notices[0]


@pytest.mark.parametrize(
    ("name", "preset_named"),
    [
        ("nan_inf_until_step", "stable"),
        ("auto_cap_release", "gamble"),
        ("cap_release_scale", "gamble"),
        ("cap_release_trigger_ratio", "gamble"),
        ("idle_free_phase", "steady"),
        ("idle_max_steps", "steady"),
        ("--idle-free-len", "steady"),
    ],
)
def test_removed_options_name_what_replaces_them(name: str, preset_named: str):
    message = removed_option_message(name)
    assert message is not None
    assert "was removed" in message
    assert f"'{preset_named}'" in message
    with pytest.raises(GuardError, match="was removed"):
        resolve(None, {name: 1})


def test_what_cannot_be_used_is_refused():
    assert removed_option_message("skip_grad_norm") is None
    with pytest.raises(GuardError, match="Did you mean 'stable'"):
        resolve("stabel", {})
    with pytest.raises(GuardError, match="Did you mean 'skip_grad_norm'"):
        resolve(None, {"skip_gradnorm": True})
    with pytest.raises(GuardError, match="needs grad_norm_log"):
        resolve(None, {"grad_cosine_log": True})
    with pytest.raises(GuardError, match="true or false"):
        resolve(None, {"skip_grad_norm": "yes"})
    for value in (0, -3, float("nan"), True, "5000"):
        with pytest.raises(GuardError, match="number above 0"):
            resolve(None, {"skip_grad_norm": True, "skip_grad_norm_max": value})
