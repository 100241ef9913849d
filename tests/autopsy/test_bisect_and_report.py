"""Finding the samples of a batch, and reports that go to JSON and back."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from maulstick.autopsy import Report, Sample, bisect_batch, examine
from maulstick.autopsy.examination import healthy_loss


@given(st.integers(1, 12), st.data())
def test_bad_samples_are_found(size, data):
    bad = data.draw(st.sets(st.integers(0, size - 1)))
    tried = []

    def is_bad(places):
        tried.append(tuple(places))
        return bool(bad & set(places))

    search = bisect_batch(is_bad, size)
    assert set(search.alone) == bad
    assert search.together == ()
    assert search.runs == len(tried) == len(set(tried))
    assert search.all_of_them is (len(bad) == size)


@given(st.integers(2, 9), st.data())
def test_samples_that_are_bad_only_together_are_found(size, data):
    group = data.draw(st.sets(st.integers(0, size - 1), min_size=2))
    search = bisect_batch(lambda places: group <= set(places), size)
    assert search.alone == ()
    assert set(search.together) == group


def test_one_bad_of_sixteen_takes_few_runs():
    search = bisect_batch(lambda places: 11 in places, 16)
    assert search.alone == (11,)
    assert search.runs == 9


def test_bisecting_a_real_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.randn(5, 3)
    x[3, 1] = math.inf

    def is_bad(places):
        return not healthy_loss(lambda: model(x[list(places)]).mean(), model.named_parameters())

    assert bisect_batch(is_bad, 5).alone == (3,)
    assert all(parameter.grad is None for parameter in model.parameters())


def overflow_report() -> Report:
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 4).half())
    with torch.no_grad():
        model[0].weight.fill_(100)
        model[0].bias.zero_()
        model[1].weight.fill_(1e4)
    return examine(lambda: model(torch.ones(2, 4).half()).float().mean(), model, title="Step 3", facts={"a": math.nan})


def test_a_report_survives_json():
    report = overflow_report()
    stored = json.loads(json.dumps(report.as_json(), allow_nan=False))
    again = Report.from_json(stored)
    assert again.as_json() == report.as_json()
    assert again.text() == report.text()
    assert math.isinf(again.loss)
    with pytest.raises(ValueError, match="not an autopsy report"):
        Report.from_json({"format": "something"})
    with pytest.raises(ValueError, match="cannot be read"):
        Report.from_json({"format": "maulstick-autopsy-1"})


def test_the_text_of_an_overflow_says_what_happened_and_how_near_it_was():
    text = overflow_report().text()
    assert text.startswith("Step 3: Inf arose in the forward pass in 1 (Linear) by aten.addmm")
    assert "+Inf of 8" in text
    # 4 * 100 * 1e4 * 4 operands; the module before reached 400 (and its bias): 164x below 65504.
    assert "the same operation reaches 1.6" in text
    assert "0 (Linear): max |x| 400" in text
    assert "headroom 16" in text
    assert "mixed_precision = bf16" in text


def test_samples_are_named_with_caption_and_detail():
    alone = Sample(1, "a.png", "a red shape", detail="timestep 999")
    assert alone.describe() == "a.png: “a red shape” (timestep 999)"
    assert Sample(0, alone=False).describe() == "sample 0; only together with the others named here"


def test_a_stored_report_is_read_without_torch():
    code = (
        "import sys; from maulstick.autopsy import Report; import maulstick.autopsy.report_text;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
