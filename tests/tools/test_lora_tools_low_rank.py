"""Singular values without the matrix, sketches, and the rules that choose a rank, against the full decomposition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.module_kinds import DoraWeights, LohaWeights, LokrWeights, Unsupported, plain_change
from maulstick.errors import OptionError
from maulstick.tools.low_rank import (
    RankChoice,
    effective_rank,
    factor_svd,
    from_svd,
    randomised_svd,
    residual,
    singular_values,
    squared_norm,
)


def lora(outputs: int, inputs: int, rank: int, alpha: float | None, seed: int = 0, kernel: int = 0) -> LoraWeights:
    generator = torch.Generator().manual_seed(seed)
    sizes = (kernel, kernel) if kernel else ()
    down = torch.randn(rank, inputs, *sizes, generator=generator)
    return LoraWeights(down, torch.randn(outputs, rank, *([1, 1] if kernel else []), generator=generator), alpha)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 16),
    st.sampled_from([None, 1.0, 8.0, -2.0]),
    st.sampled_from([0, 1, 3]),
)
def test_factor_svd_is_the_svd_of_the_product(outputs, inputs, rank, alpha, kernel):
    weights = lora(outputs, inputs, rank, alpha, kernel=kernel)
    exact = delta_weight(weights)
    svd = factor_svd(weights)
    full = torch.linalg.svdvals(exact.flatten(1))
    torch.testing.assert_close(svd.values[: len(full)], full[: len(svd.values)], rtol=1e-4, atol=2e-5 * float(full[0]))
    product = (svd.left * svd.values) @ svd.right
    assert (product - exact.flatten(1)).norm() <= 1e-5 * exact.norm()
    count = len(svd.values)
    for new_alpha in (None, 0.5):
        again = from_svd(svd, count, new_alpha, exact.shape)
        assert again.alpha == new_alpha
        assert again.down.ndim == exact.ndim
        assert (delta_weight(again) - exact).norm() <= 1e-5 * exact.norm()


SPECTRA = {
    "flat": torch.ones(96),
    "slow decay": torch.arange(1, 97).float().pow(-0.5),
    "fast decay": 0.8 ** torch.arange(96).float(),
    "steps": torch.tensor([10.0] * 8 + [1.0] * 8 + [0.05] * 80),
}


def with_spectrum(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    left = torch.linalg.qr(torch.randn(rows, len(values), generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), generator=generator)).Q
    return (left * values) @ right.T


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(96, 300), (300, 96), (160, 160)])
def test_a_sketch_is_within_one_percent_of_the_best_and_knows_its_error(spectrum, shape):
    values = SPECTRA[spectrum]
    matrix = with_spectrum(values, *shape)
    square = squared_norm(matrix)
    for rank in (4, 16):
        svd = randomised_svd(matrix, rank)
        assert (svd.left.shape, svd.right.shape) == ((shape[0], rank), (rank, shape[1]))
        error = float((matrix - (svd.left * svd.values) @ svd.right).norm())
        best = float(values[rank:].norm())
        assert error <= 1.01 * best
        assert residual(square, svd.values) == pytest.approx(error, rel=1e-3)
        again = randomised_svd(matrix, rank)
        assert torch.equal(again.left, svd.left)
        assert not torch.equal(randomised_svd(matrix, rank, seed=1).left, svd.left)


@pytest.mark.parametrize("rank", [16, 32, 64, 128])
def test_noise_is_the_hardest_case_and_still_within_one_percent(rank):
    matrix = torch.randn(640, 1280, generator=torch.Generator().manual_seed(2))
    best = torch.linalg.svdvals(matrix)[rank:].norm()
    svd = randomised_svd(matrix, rank)
    assert residual(squared_norm(matrix), svd.values) <= 1.01 * best


def test_small_matrices_are_decomposed_whole():
    matrix = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    svd = randomised_svd(matrix, 5)
    torch.testing.assert_close((svd.left * svd.values) @ svd.right, matrix)
    tall = randomised_svd(matrix.T, 2)
    torch.testing.assert_close(tall.values, torch.linalg.svdvals(matrix)[:2])


def test_effective_rank():
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(4)) == 0
    # Two values of shares 3/4 and 1/4: exp of the entropy.
    assert effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(
        math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    )


def test_singular_values_of_relatives():
    torch.manual_seed(0)
    pairs = [LoraWeights(torch.randn(2, 6), torch.randn(5, 2), None) for _ in range(2)]
    loha = LohaWeights(*pairs, alpha=3.0)
    lokr = LokrWeights(torch.randn(3, 2), LoraWeights(torch.randn(2, 6), torch.randn(5, 2), None), alpha=1.0, rank=2)
    for module in (loha, lokr):
        full = torch.linalg.svdvals(plain_change(module, ()))
        values = singular_values(module)
        torch.testing.assert_close(values[: len(full)], full[: len(values)], rtol=1e-4, atol=1e-5)
        assert torch.equal(values, values.sort(descending=True).values)
    with pytest.raises(Unsupported, match="a DoRA, whose change depends on the weights"):
        singular_values(DoraWeights(pairs[0], torch.ones(5), 0))


# ---------------------------------------------------------------------------------------------------------------------
# Rules

VALUES = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5])  # squares 64, 16, 4, 1, 0.25: 85.25 together; sum 15.5


@pytest.mark.parametrize(
    ("rule", "value", "rank"),
    [
        ("fixed", 0, 5),
        ("sv_ratio", 1, 1),
        ("sv_ratio", 2, 2),  # a value of exactly the largest divided by the ratio stays
        ("sv_ratio", 3.9, 2),
        ("sv_ratio", 16, 5),
        ("sv_cumulative", 0.5, 1),
        ("sv_cumulative", 12 / 15.5, 2),
        ("sv_cumulative", 0.8, 3),
        ("sv_cumulative", 1, 5),
        ("sv_energy", 0.75, 1),
        ("sv_energy", 0.76, 2),
        ("sv_energy", 1, 5),
        ("sv_fro", 0.86, 1),  # 0.86 squared is 0.7396, below 64 / 85.25 = 0.7507
        ("sv_fro", 0.87, 2),
        ("sv_fro", 1, 5),
    ],
)
def test_rules_keep_the_fewest_values_that_they_need(rule, value, rank):
    assert RankChoice(rule, value, 99).rank(VALUES) == rank
    assert RankChoice(rule, value, 2).rank(VALUES) == min(rank, 2)


def test_rules_of_nothing_and_of_a_part():
    for rule in ("sv_fro", "sv_energy", "sv_ratio", "sv_cumulative"):
        assert RankChoice(rule, 1, 8).rank(torch.zeros(4)) == 1
    # Of a sketch only the leading values are known; what they are a share of is the whole.
    assert RankChoice("sv_energy", 0.6, 8).rank(VALUES[:2], 128.0) == 2
    assert RankChoice("sv_energy", 0.9, 8).rank(VALUES[:2], 128.0) == 2
    assert RankChoice("sv_energy", 0.5, 8).rank(VALUES[:2], 128.0) == 1


@pytest.mark.parametrize(
    ("rule", "value", "limit", "words"),
    [
        ("fixed", 0, 0, "A rank of 0"),
        ("sv_ratio", 0.5, 4, "sv_ratio is 0.5; it must be 1 or more"),
        ("sv_fro", 0, 4, "sv_fro is 0; it must be above 0"),
        ("sv_energy", 1.5, 4, "sv_energy is 1.5; it must be above 0 and at most 1"),
        ("sv_cumulative", float("nan"), 4, "sv_cumulative is nan"),
    ],
)
def test_senseless_rules_are_refused(rule, value, limit, words):
    with pytest.raises(OptionError, match=words):
        RankChoice(rule, value, limit)
