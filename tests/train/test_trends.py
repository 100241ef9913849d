"""Fits to a history: where it heads, and when nothing should be said."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maulstick.train.trends import heading_for

LIMIT = 65504.0
STEPS = list(range(100, 1300, 100))


def test_a_straight_course_is_followed_to_its_crossing():
    trend = heading_for(STEPS, [2000 + 20.0 * step for step in STEPS], LIMIT)
    assert trend.kind == "linear"
    assert trend.crossing == pytest.approx((65504 - 2000) / 20)


def test_an_exponential_course_is_followed_to_its_crossing():
    trend = heading_for(STEPS, [10 * math.exp(step / 200) for step in STEPS], LIMIT)
    assert trend.kind == "exponential"
    assert trend.crossing == pytest.approx(200 * math.log(6550.4), rel=1e-6)
    assert trend.fit == pytest.approx(1.0)


def test_single_outliers_do_not_change_what_is_said():
    values = [10 * math.exp(step / 200) for step in STEPS]
    values[4] *= 50
    values[8] /= 50
    trend = heading_for(STEPS, values, LIMIT)
    assert trend.kind == "exponential"
    assert trend.crossing == pytest.approx(200 * math.log(6550.4), rel=0.02)


@pytest.mark.parametrize(
    "values",
    [
        [math.sqrt(step) for step in STEPS],
        [4e4 + 100 * math.sin(step) for step in STEPS],
        [3e4 * math.exp(-step / 500) for step in STEPS],
        [1e-3 * math.exp(step / 100) for step in STEPS],
        [math.nan] * 12,
        [0.0] * 12,
    ],
    ids=["small", "level", "falling", "early", "nan", "zero"],
)
def test_nothing_is_said_of_what_does_not_head_for_the_limit(values):
    assert heading_for(STEPS, values, LIMIT) is None


def test_five_points_are_too_few():
    values = [10 * math.exp(step / 200) for step in STEPS]
    assert heading_for(STEPS[-5:], values[-5:], LIMIT) is None
    assert heading_for(STEPS[-6:], values[-6:], LIMIT) is not None


def test_a_crossing_farther_off_than_three_histories_is_not_believed():
    straight = [1000 + step for step in STEPS]
    assert heading_for(STEPS, straight, 1000 + 1200 + 3 * 1100 - 1) is not None
    assert heading_for(STEPS, straight, 1000 + 1200 + 3 * 1100 + 1) is None


@given(st.integers(0, 10**6), st.floats(1.0, 1e4))
def test_noise_without_trend_seldom_fits(seed, level):
    """Whatever the noise, a fit that explains 95 % of it by a line is not found in it."""
    rng = Random(seed)
    assert heading_for(STEPS, [level * (1 + 0.5 * rng.random()) for _ in STEPS], 10 * level) is None
