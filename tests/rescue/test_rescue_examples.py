"""The example in docs/rescue.md runs as it stands."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from maulstick import rescue
from maulstick.guard import GradientGuard, guarded_step
from tests.rescue.conftest import Toy

TEXT = (Path(__file__).parents[2] / "docs" / "rescue.md").read_text()


@pytest.mark.parametrize("fault, want", [(None, 1.0), (math.nan, 0.5)])
def test_the_loop_of_the_documentation(fault, want):
    [example] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    toy = Toy("AdamW", "fused=False")
    inputs, targets = torch.randn(5, 6), torch.zeros(5, 2)
    names = {
        **{name: getattr(rescue, name) for name in ("RescueConfig", "Rescuer")},
        "GradientGuard": GradientGuard,
        "guarded_step": guarded_step,
        "model": toy.model,
        "optimizer": toy.optimizer,
        "scaler": torch.amp.GradScaler("cpu"),
        "data": [(inputs if fault is None else inputs * fault, targets)] * 120,
        "loss_fn": torch.nn.functional.mse_loss,
        "schedule": lambda step: 0.01,
    }
    exec(example, names)
    assert names["decision"].action == ("go_on" if fault is None else "gave_up")
    assert names["rescuer"].lr_scale == want
    assert toy.weights().isfinite().all()


def test_the_numbers_in_the_documentation_are_the_defaults():
    config = rescue.RescueConfig()
    for name in ("after", "after_again", "limit"):
        assert f"`{name}` ({getattr(config, name)})" in TEXT
    assert (config.loss_history, config.loss_recent, config.loss_patience) == (256, 32, 32)
    assert set(rescue.__all__) >= {"RescueConfig", "Rescuer", "Decision", "StateRing", "Quarantine", "RandomState"}
    assert all(getattr(rescue, name) for name in rescue.__all__)
