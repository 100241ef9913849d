"""The probe's figures against what they should be: unbiased signal, gradients of whole weights, weights by rule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maulstick.adapters.block_table import read_block_table
from maulstick.adapters.block_weights import numbered_blocks
from maulstick.adapters.lora import inject_lora, lora_parameters
from maulstick.adapters.targets import LoraTarget
from maulstick.tools.chart_canvas import nice_step
from maulstick.tools.probe_measure import GradientFacts, Trial, _to_weight_gradient, paired_change, statistics
from maulstick.tools.probe_report import block_lr_entries, ranks, suggested_weights


def facts_of(gradients: torch.Tensor) -> GradientFacts:
    """Statistics of gradients (replicates, draws, values) of one block, as they are collected in a probe."""
    means = gradients.mean(1)
    sums = means.cumsum(0)
    products = (means[1:] * sums[:-1]).sum(1, keepdim=True)
    squares = gradients.flatten(0, 1).square().sum(1, keepdim=True)
    return statistics(squares, products)[0]


def test_signal_is_the_mean_product_of_different_replicates() -> None:
    gradients = torch.randn(5, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    means = gradients.mean(1)
    pairs = [means[i] @ means[j] for i in range(5) for j in range(5) if i != j]
    facts = facts_of(gradients)
    assert facts.signal == pytest.approx(float(sum(pairs)) / len(pairs), rel=1e-12)
    square = float(gradients.square().sum(2).mean())
    assert facts.norm == pytest.approx(math.sqrt(square), rel=1e-12)
    assert facts.noise == pytest.approx(square - facts.signal, rel=1e-12)


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_signal_and_its_error_are_right_on_average(shift: float) -> None:
    generator = torch.Generator().manual_seed(1)
    found = [facts_of(torch.randn(6, 2, 20, dtype=torch.float64, generator=generator) + shift) for _ in range(4000)]
    signals = torch.tensor([facts.signal for facts in found])
    true = 20 * shift**2
    assert float(signals.mean()) == pytest.approx(true, abs=4 * float(signals.std()) / math.sqrt(4000))
    assert sum(facts.noise for facts in found) / 4000 == pytest.approx(20, rel=0.02)
    if not shift:
        assert float(signals.min()) < 0 < float(signals.max())
        errors = sum(facts.signal_error**2 for facts in found) / 4000
        assert math.sqrt(errors) == pytest.approx(float(signals.std()), rel=0.05)


@pytest.mark.parametrize("rank, alpha", [(4, 4.0), (32, 1.0)])
@pytest.mark.parametrize("kind", ["linear", "conv3x3"])
def test_gradients_of_up_factors_give_the_norm_of_the_weights_gradient(rank: int, alpha: float, kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        layer = torch.nn.Linear(40, 24) if kind == "linear" else torch.nn.Conv2d(10, 24, 3, padding=1)
        x = torch.randn(6, 40) if kind == "linear" else torch.randn(3, 10, 6, 6)
    root = torch.nn.ModuleDict({"m": layer})
    layer(x).sin().sum().backward()
    wanted = float(layer.weight.grad.square().sum())
    estimates = []
    for seed in range(200):
        copy = torch.nn.ModuleDict({"m": type(layer)(*_shape(layer))})
        copy.load_state_dict(root.state_dict())
        target = LoraTarget("unet", "m", kind, "c", tuple(layer.weight.shape), rank, alpha, 0)
        inject_lora(copy, [target], seed=seed)
        copy["m"](x).sin().sum().backward()
        (up,) = (p.parameter for p in lora_parameters(copy) if p.role == "up")
        estimates.append(float((up.grad * _to_weight_gradient(target)).square().sum()))
    found = torch.tensor(estimates)
    assert float(found.mean()) == pytest.approx(wanted, abs=4 * float(found.std()) / math.sqrt(200))
    # sqrt(2 / rank) is what a gradient of rank one would give; a spread from 200 values is not exact.
    assert float(found.std()) / wanted < 1.25 * math.sqrt(2 / rank)


def _shape(layer: torch.nn.Module) -> tuple[int, ...]:
    if isinstance(layer, torch.nn.Linear):
        return layer.in_features, layer.out_features
    assert isinstance(layer, torch.nn.Conv2d)
    return layer.in_channels, layer.out_channels, 3, 1, 1


def test_the_error_of_a_change_is_taken_over_replicates() -> None:
    before = torch.zeros(6, dtype=torch.float64)
    after = torch.tensor([1.0, 3.0, 2.0, 4.0, 6.0, 8.0], dtype=torch.float64)
    change, error = paired_change(before, after, [2, 2, 2])
    assert change == pytest.approx(4.0)
    assert error == pytest.approx(math.sqrt(((2 - 4) ** 2 + (3 - 4) ** 2 + (7 - 4) ** 2) / 2 / 3))


def gradient(signal: float) -> GradientFacts:
    return GradientFacts(1.0, signal, 0.1, 1.0)


def test_weights_follow_the_rule() -> None:
    changes = [-1.0, -0.52, -0.1, -0.1, -0.004, 0.2, math.nan, -0.004]
    errors = [0.1, 0.1, 0.01, 0.2, 0.001, 0.01, math.nan, 0.001]
    signals = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    trials = [Trial(change, error, 1.0) for change, error in zip(changes, errors, strict=True)]
    # Proportional; floor; floor, though not clear; surely too little; worse; diverged; too little, but with a signal.
    wanted = [1.0, 0.5, 0.25, 0.25, 0.0, 0.0, 0.0, 0.25]
    assert suggested_weights(trials, [gradient(signal) for signal in signals]) == wanted
    assert ranks(trials) == [1, 2, 3, 4, 5, 7, 8, 6]


def test_nothing_is_suggested_where_nothing_is_clear() -> None:
    trials = [Trial(-0.1, 0.2, 1.0), Trial(0.3, 0.1, 1.0)]
    assert suggested_weights(trials, [gradient(0.1), gradient(-1.0)]) == [0.0, 0.0]
    # A clear signal is enough, and then what is not known to be useless stays.
    assert suggested_weights(trials, [gradient(0.1), gradient(1.0)]) == [1.0, 0.25]


@given(
    st.lists(
        st.tuples(st.floats(-1, 1) | st.just(math.nan), st.floats(0, 1), st.floats(-1, 1)), min_size=1, max_size=12
    )
)
def test_every_suggestion_can_be_read_by_training(measured: list[tuple[float, float, float]]) -> None:
    trials = [Trial(change, error, 1.0) for change, error, _ in measured]
    weights = suggested_weights(trials, [gradient(signal) for _, _, signal in measured])
    assert all(weight == 0 or 0.25 <= weight <= 1 for weight in weights)
    layout = numbered_blocks({"double": len(weights), "single": 2})
    entries = block_lr_entries(layout.names[: len(weights)], weights)
    if not any(weights):
        assert entries == []
    else:
        assert read_block_table(layout, entries).values == (*weights, 1.0, 1.0)


@given(st.floats(1e-12, 1e12))
def test_steps_of_an_axis_are_round_and_few(span: float) -> None:
    step = nice_step(span)
    assert 1.5 < span / step < 5
    assert f"{step:.0e}"[0] in "125"
