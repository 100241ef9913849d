"""The compatible modes against recorded runs of the original: every decision, threshold and byte of the log."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from maulstick.guard import (
    GradientGuard,
    GradientLog,
    GuardConfig,
    read_gradient_log,
    resolve,
    scaled_by,
    unscaled_from,
)
from maulstick.guard.replay import replay

GOLDEN = Path(__file__).parents[1] / "data" / "guardian"
SCENARIOS = ("healthy", "huge", "inf_sparse", "nan_burst", "scale_jumps", "spikes", "ties")
MANUAL = {
    "manual_skip_log": {"skip_grad_norm": True, "grad_norm_log": True},
    "manual_log_only": {"grad_norm_log": True},
    "manual_cap_5000": {"skip_grad_norm": True, "grad_norm_log": True, "skip_grad_norm_max": 5000},
    "manual_nan_window_only": {
        "skip_grad_norm": True,
        "grad_norm_log": True,
        "nan_to_window": True,
        "skip_nan_immediate": False,
    },
    "manual_inf_window_skip_nan": {
        "skip_grad_norm": True,
        "grad_norm_log": True,
        "skip_grad_norm_max": 200000,
        "inf_to_window": True,
        "skip_inf_immediate": False,
    },
}
CONFIGURATIONS = ("stable", "stable_no_threshoff", "gamble", *MANUAL)


def configuration(name: str) -> GuardConfig:
    config, notices = resolve(None, MANUAL[name]) if name in MANUAL else resolve(name, {})
    assert notices == []
    return config


def load(scenario: str, name: str) -> tuple[dict, dict, str]:
    recorded = json.loads((GOLDEN / f"{scenario}.json").read_text())
    expected = recorded["expected"][name]
    return recorded, expected, (GOLDEN / expected["csv"]).read_bytes().decode()


def without_cosine(text: str) -> tuple[str, list[float]]:
    """The file without its CosineSim column, and that column."""
    lines = text.splitlines()
    if not lines[0].endswith(",CosineSim"):
        return text, []
    rows = [line.rsplit(",", 1) for line in lines]
    return "\n".join(row[0] for row in rows) + "\n", [float(row[1]) for row in rows[1:]]


def close(got: float, want: float) -> bool:
    return (math.isnan(got) and math.isnan(want)) or got == want or abs(got - want) <= 1e-5 * abs(want)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_recorded_run_is_reproduced(scenario: str, name: str, tmp_path: Path):
    recorded, expected, want = load(scenario, name)
    config = configuration(name)
    guard = GradientGuard(config)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1e-30)
    path = tmp_path / "log.txt"
    skipped, steps_taken = [], 0
    with GradientLog(path, scale=recorded["logs_scale"], cosine=config.cosine != "off") as log:
        assert len(path.read_text().splitlines()) == 1
        for number, (epoch, step, gradient, loss, scale) in enumerate(recorded["rows"]):
            parameter.grad = torch.tensor(float(gradient))
            applied = scaled_by(scale) if recorded["logs_scale"] else None
            verdict = guard.observe(optimizer, loss=float(loss), scale=applied)
            if verdict.skip:
                skipped.append(number)
            else:
                optimizer.step()
                steps_taken += 1
            optimizer.zero_grad()
            log.write(epoch, step, verdict)
            lines = expected["lines_on_disk_after_rows"].get(str(number))
            assert lines is None or path.read_bytes().count(b"\n") == lines
    assert skipped == expected["skipped_rows"]
    assert steps_taken == len(recorded["rows"]) - len(skipped)
    assert guard.skipped == len(skipped)
    (got, got_cosines), (want, want_cosines) = without_cosine(path.read_bytes().decode()), without_cosine(want)
    assert got == want
    assert len(got_cosines) == len(want_cosines)
    assert all(map(close, got_cosines, want_cosines))


@pytest.mark.parametrize("scenario", ["huge", "scale_jumps", "nan_burst"])
def test_unscaled_gradients_are_judged_alike(scenario: str):
    """After ``unscale_`` the gradients are divided by the scale; decisions and logged numbers stay what they were."""
    recorded, expected, text = load(scenario, "stable")
    want = list(csv.DictReader(text.splitlines()))
    guard = GradientGuard(configuration("stable"))
    parameter = torch.nn.Parameter(torch.zeros(()))
    skipped = []
    for number, (_, _, gradient, loss, scale) in enumerate(recorded["rows"]):
        parameter.grad = torch.tensor(float(gradient)) / scale
        verdict = guard.observe([parameter], loss=float(loss), scale=unscaled_from(scale))
        assert repr(verdict.logged_norm) == want[number]["Gradient Norm"]
        assert repr(verdict.logged_threshold) == want[number]["Threshold"]
        if verdict.skip:
            skipped.append(number)
    assert skipped == expected["skipped_rows"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_replay_of_an_original_log_skips_the_recorded_rows(scenario: str):
    """Any configuration can be replayed from any recorded file, because a log does not depend on what was skipped."""
    rows = read_gradient_log(GOLDEN / f"{scenario}.gamble.csv")
    for name in CONFIGURATIONS:
        expected = load(scenario, name)[1]["skipped_rows"]
        found = replay(rows, [configuration(name)])["presets"][configuration(name).name]
        assert found["skipped"] == expected, name
        assert found["steps"] == 900
    json.dumps(replay(rows, ["steady", "stable", "off"]), allow_nan=False)


def test_every_recorded_file_is_read():
    for path in sorted(GOLDEN.glob("*.csv")):
        rows = read_gradient_log(path)
        assert len(rows) == 900
        assert rows[0].scale == (None if path.name.startswith("ties") else 65536.0)
