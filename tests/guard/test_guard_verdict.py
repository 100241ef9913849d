"""The sentences a person reads."""

from __future__ import annotations

import math

import pytest

from maulstick.guard import Reason, Verdict


def verdict(**fields) -> Verdict:
    values = {"skip": True, "reason": Reason.SPIKE, "norm": 41.3, "judged_norm": 41.3, "threshold": 2.34, **fields}
    return Verdict(**values)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"reference": 0.195, "images": ("a.png", "b.png")},
            "norm 41.3 is 212x the recent median 0.195; images: a.png, b.png",
        ),
        (
            {"reference": 0.195, "images": tuple("abcdef")},
            "norm 41.3 is 212x the recent median 0.195; images: a, b, c, d and 2 more",
        ),
        (
            {
                "skip": False,
                "reason": Reason.ACCEPTED,
                "norm": 0.2,
                "judged_norm": 0.2,
                "reference": 0.195,
                "images": ("a",),
            },
            "norm 0.2 is 1x the recent median 0.195",
        ),
        ({"skip": False, "reason": Reason.ACCEPTED, "threshold": math.inf}, "norm 41.3"),
        (
            {"skip": False, "reason": Reason.LEVEL_SHIFT, "reference": 0.195},
            "norm 41.3 is 212x the recent median 0.195, accepted as the new level",
        ),
        (
            {"judges_scaled": True, "judged_norm": 4.1e5, "scale": 65536.0, "threshold": 2e5, "reference": 9e3},
            "scaled norm 4.1e+05 is 46x the recent mean 9e+03, above the threshold 2e+05",
        ),
        ({"judges_scaled": True, "judged_norm": 4.1e5, "threshold": 2e5}, "norm 4.1e+05 is above the threshold 2e+05"),
        (
            {"judges_scaled": True, "judged_norm": 4.1e3, "threshold": 2e5, "skip": False},
            "norm 4.1e+03, with the threshold 2e+05",
        ),
        (
            {"judges_scaled": True, "judged_norm": math.inf, "scale": 65536.0, "norm": 1e20, "reason": Reason.INF},
            "the sum of squares of the scaled gradients overflows fp32 (norm 1e+20 in true units)",
        ),
        (
            {"norm": math.nan, "tensors": 8, "bad_tensors": 8, "bad_tensor": "x"},
            "the gradient is NaN in every one of 8 tensors",
        ),
        (
            {"norm": math.nan, "loss": math.nan, "bad_micro_batch": 1, "micro_batches": 4},
            "the gradient is NaN, loss nan; micro-batch 2 of 4",
        ),
        (
            {"norm": math.inf, "scale": 1024.0, "tensors": 8, "bad_tensors": 2, "bad_tensor": "up.0"},
            "the gradient is infinite in 2 of 8 tensors, first in up.0 (an fp16 overflow at loss scale 1024)",
        ),
        ({"reason": Reason.LOSS, "loss": math.inf}, "the loss is inf, with a gradient norm of 41.3"),
    ],
)
def test_sentences(fields: dict, sentence: str):
    assert verdict(**fields).describe() == sentence


def test_units_of_the_log():
    steady = verdict(scale=8.0)
    assert (steady.logged_norm, steady.logged_threshold) == (41.3 * 8, 2.34 * 8)
    scaled = verdict(scale=8.0, judges_scaled=True)
    assert (scaled.logged_norm, scaled.logged_threshold) == (41.3, 2.34)
    assert not steady.threshold_off
    assert verdict(threshold=math.nan).threshold_off
    assert not steady.accept
