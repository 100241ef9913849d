"""Learning-rate factors against values worked out by hand."""

import pytest

from maulstick.errors import OptionError
from maulstick.train.schedule import learning_rate_factor


def test_linear_with_a_tenth_of_warmup_is_the_documented_formula():
    factor = learning_rate_factor("linear", warmup_steps=2000, total_steps=20000)
    for step in range(0, 2000, 7):
        assert factor(step) == pytest.approx(step / 2000, abs=1e-12)
    for step in range(2000, 20001, 13):
        assert factor(step) == pytest.approx((20000 - step) / 18000, abs=1e-12)


@pytest.mark.parametrize(
    "name, values",
    [
        ("constant_with_warmup", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.0, 0.5, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627]),
        ("polynomial", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_warmup_two_of_six(name, values):
    factor = learning_rate_factor(name, warmup_steps=2, total_steps=6)
    assert [factor(step) for step in range(6)] == pytest.approx(values, abs=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_past_the_end_the_factor_stays_at_zero(name):
    factor = learning_rate_factor(name, warmup_steps=0, total_steps=10)
    assert [factor(step) for step in (10, 11, 15, 1000)] == pytest.approx([0.0] * 4, abs=1e-12)


def test_constant_refuses_a_warmup_and_names_both_options():
    with pytest.raises(OptionError, match=r"lr_scheduler 'constant'.*lr_warmup_steps is 10.*constant_with_warmup"):
        learning_rate_factor("constant", warmup_steps=10, total_steps=100)


def test_a_warmup_as_long_as_training_is_refused():
    with pytest.raises(OptionError, match="lr_warmup_steps is 100"):
        learning_rate_factor("linear", warmup_steps=100, total_steps=100)


def test_a_misspelt_name_is_answered_with_the_right_one():
    with pytest.raises(OptionError, match="Did you mean 'cosine'"):
        learning_rate_factor("cosin", warmup_steps=0, total_steps=100)
