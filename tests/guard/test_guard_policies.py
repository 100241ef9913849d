"""The rules on their own: exact arithmetic, the promises of ``steady``, and what never gets stuck."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import guard as bench
from maulstick.guard.errors import GuardError
from maulstick.guard.judge import Evidence, Judge
from maulstick.guard.policies import (
    OffRule,
    Reason,
    SteadyPolicy,
    SteadyRule,
    WindowPolicy,
    WindowRule,
    make_policy,
    mean_and_deviation,
    median,
    pairwise_sum,
)
from maulstick.guard.presets import preset

STEADY = bench.RULES["steady (ours)"]


def evidence(norm: float, scale: float | None = None) -> Evidence:
    return Evidence(norm, norm * (scale or 1.0), scale)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=700))
@settings(max_examples=150, deadline=None)
def test_sums_are_those_of_numpy_to_the_bit(values: list[float]):
    assert pairwise_sum(values, 0, len(values)) == np.sum(np.array(values))
    mean, deviation = mean_and_deviation(values)
    assert mean == np.mean(values)
    assert deviation == np.std(values)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_value_in_the_window_switches_the_threshold_off(bad: float):
    rule = WindowRule(window=4, nan_to_window=True, inf_to_window=True, skip_nan_immediate=False)
    policy = WindowPolicy(rule)
    for norm in (1.0, 1.0, 1.0):
        assert policy.judge(norm).threshold == 200000.0
    policy.judge(bad)
    for _ in range(3):
        judgement = policy.judge(1e9)
        assert math.isnan(judgement.threshold)
        assert not judgement.skip
    assert not math.isnan(policy.judge(1.0).threshold)


def test_a_norm_at_the_threshold_is_kept():
    policy = WindowPolicy(WindowRule(window=4, cap=2.0))
    for _ in range(8):
        judgement = policy.judge(1.0)
        assert not judgement.skip
    assert judgement.threshold == 1.0
    capped = WindowPolicy(WindowRule(window=2, cap=2.0))
    assert [capped.judge(norm).skip for norm in (2.0, 2.0, 2.0, 2.5)] == [False, False, False, True]


def test_median_of_even_and_odd_counts():
    assert median([5.0, 1.0, 3.0]) == 3.0
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.8])
def test_steady_keeps_healthy_steps(sigma: float):
    assert bench.healthy_share(STEADY, sigma, seeds=5) <= 0.001


def test_the_others_do_not_keep_what_steady_keeps():
    assert bench.healthy_share(bench.RULES["stable, bf16"], 0.3, seeds=2) > 0.015
    assert bench.healthy_share(bench.RULES["ZClip z > 2.5"], 0.3, seeds=2) > 0.02
    assert bench.spikes_after_spike(bench.RULES["OLMo mean + 6 sd"], 0.3, seeds=2) < 0.1
    assert bench.level_shift(bench.RULES["ZClip z > 2.5"], 5, 0.3, seeds=1) == (1800.0, 1800)
    assert bench.after_nan(bench.RULES["OLMo mean + 6 sd"], 0.3, seeds=2) > 100


def test_steady_sees_a_spike_right_after_a_huge_one():
    assert bench.spikes_after_spike(STEADY, 0.3, seeds=5) >= 0.98
    judge = Judge(preset("steady"))
    for norm in bench.stream(7, 0.3, 300):
        judge.decide(evidence(norm))
    assert judge.decide(evidence(0.05 * 1e4)).skip
    assert judge.decide(evidence(0.05 * 30)).skip


def test_steady_catches_a_whole_burst():
    assert bench.burst(STEADY, 0.3, seeds=5) == 40.0


def test_steady_follows_changes_of_level():
    assert bench.level_shift(STEADY, 5, 0.3, seeds=5)[0] <= 0.4
    lost, last = bench.level_shift(STEADY, 100, 0.3, seeds=5)
    assert last <= 100
    assert lost <= 70
    assert bench.level_shift(STEADY, 0.01, 0.3, seeds=2) == (0.0, 0)


def test_steady_is_active_from_twenty_observations():
    judge = Judge(preset("steady"))
    for place in range(19):
        assert judge.decide(evidence(0.05)).threshold == math.inf, place
    assert not judge.decide(evidence(5.0)).skip
    assert judge.decide(evidence(5.0)).skip
    assert bench.early_spikes(STEADY, 0.3, seeds=5) >= 0.96


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_leaves_the_statistics_alone(bad: float):
    policy = SteadyPolicy(SteadyRule())
    for norm in bench.stream(1, 0.3, 300):
        policy.judge(norm)
    before = policy.state_dict()
    judgement = policy.judge(bad)
    assert judgement.skip
    assert judgement.reason is (Reason.NAN if math.isnan(bad) else Reason.INF)
    assert policy.judge(0.05, loss_is_finite=False).reason is Reason.LOSS
    assert policy.judge(50.0).reason is Reason.SPIKE
    assert policy.judge(0.0).reason is Reason.ACCEPTED
    assert policy.state_dict() == before
    assert bench.after_nan(STEADY, 0.3, seeds=3) == 0


def test_steady_follows_a_growing_and_a_mixed_run():
    """Growth of 1 % a step over six orders, and a run that becomes a mixture with 60 % of norms at 100x."""
    source = random.Random(3)
    growing = [math.exp(0.2 * source.gauss(0, 1) + min(0.01 * step, 14)) for step in range(2400)]
    assert bench.skipped(STEADY, growing) == []
    mixed = [
        norm * (100 if place > 600 and source.random() < 0.6 else 1)
        for place, norm in enumerate(bench.stream(4, 0.3, 2400))
    ]
    assert 50 < len(bench.skipped(STEADY, mixed)) <= 101


def test_a_lasting_level_is_accepted_at_the_cap_and_said_so():
    judge = Judge(preset("steady"))
    for _ in range(50):
        judge.decide(evidence(1.0))
    for streak in range(1, 65):
        decision = judge.decide(evidence(1000.0))
        assert decision.skip
        assert decision.consecutive_skips == streak
        assert not decision.escalate
    decision = judge.decide(evidence(1000.0))
    assert decision.reason is Reason.LEVEL_SHIFT
    assert not decision.skip
    assert "new level" in decision.alarms[0]
    assert not judge.decide(evidence(1000.0)).skip
    # Refusals before the new level are forgotten: a burst after it is caught as a whole.
    assert all(judge.decide(evidence(100000.0)).skip for _ in range(60))
    assert judge.longest_streak == 64


def test_hand_over_keeps_refusing_and_asks_for_help():
    judge = Judge(preset("steady", when_stuck="hand_over", most_refusals_in_a_row=10))
    for _ in range(50):
        judge.decide(evidence(1.0))
    decisions = [judge.decide(evidence(1000.0)) for _ in range(40)]
    assert all(decision.skip for decision in decisions)
    assert [decision.escalate for decision in decisions] == [False] * 10 + [True] * 30
    assert sum(bool(decision.alarms) for decision in decisions) == 3


def test_a_compatible_mode_can_be_told_to_adapt():
    """Norms always above the cap: the original skips for ever; with ``adapt`` the threshold is lifted until needed."""
    judge = Judge(preset("stable", when_stuck="adapt"))
    decisions = [judge.decide(evidence(300000.0)) for _ in range(400)]
    assert [decision.skip for decision in decisions] == [True] * 64 + [False] * 336
    assert not judge.decide(evidence(10.0)).skip
    assert judge.decide(evidence(300000.0)).skip
    never = Judge(preset("stable"))
    decisions = [never.decide(evidence(300000.0)) for _ in range(400)]
    assert all(decision.skip for decision in decisions)
    assert decisions[64].escalate
    assert "steady" in decisions[64].alarms[0]


@pytest.mark.parametrize("name", ["steady", "stable", "stable_no_threshoff", "gamble"])
def test_non_finite_for_ever_always_escalates(name: str):
    judge = Judge(preset(name))
    decisions = [judge.decide(evidence(math.nan)) for _ in range(40)]
    assert [decision.escalate for decision in decisions] == [False] * 15 + [True] * 25
    assert [place for place, decision in enumerate(decisions) if decision.alarms] == [15, 31]
    assert not judge.decide(evidence(1.0)).escalate


def test_off_never_skips_nor_escalates():
    judge = Judge(preset("off"))
    for norm in (1.0, math.nan, math.inf, 1e30) * 40:
        decision = judge.decide(evidence(norm))
        assert not decision.skip
        assert not decision.escalate
    assert make_policy(OffRule()).state_dict() == {}


@given(
    st.lists(st.sampled_from([0.05, 0.06, 0.04, 1.5, 500.0, 0.0, math.nan, math.inf]), min_size=1, max_size=250),
    st.sampled_from(["steady", "stable", "gamble", "stable_no_threshoff"]),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_resumed_judge_decides_like_an_uninterrupted_one(norms: list[float], name: str, data: st.DataObject):
    cut = data.draw(st.integers(0, len(norms)))
    config = preset(name, window=20, active_from=5) if name == "steady" else preset(name, window=20)
    whole, first, second = Judge(config), Judge(config), Judge(config)
    decisions = [whole.decide(evidence(norm, 65536.0)) for norm in norms]
    resumed = [first.decide(evidence(norm, 65536.0)) for norm in norms[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed += [second.decide(evidence(norm, 65536.0)) for norm in norms[cut:]]
    assert repr(resumed) == repr(decisions)
    assert json.dumps(second.state_dict()) == json.dumps(whole.state_dict())


@pytest.mark.parametrize("scale", [1.0, 2.0**-8, 2.0**10, 2.0**22])
def test_steady_does_not_look_at_the_scale(scale: float):
    norms = bench.stream(11, 0.5, 400)
    norms[300] *= 500
    plain, scaled = Judge(preset("steady")), Judge(preset("steady"))
    for norm in norms:
        assert plain.decide(evidence(norm)) == scaled.decide(evidence(norm, scale))


def test_ordinary_steps_lost_to_the_scale_ask_for_a_lower_one():
    """0.05 in true units is ordinary, but times 2^23 it is above the cap of ``stable``."""
    judge = Judge(preset("stable"))
    for _ in range(250):
        assert not judge.decide(evidence(0.05, 2.0**16)).skip
    asked = [judge.decide(evidence(0.05, 2.0**23)) for _ in range(60)]
    assert all(decision.skip for decision in asked)
    # At first the window itself refuses, and would soon follow; what counts is being refused by the cap.
    capped = [place for place, decision in enumerate(asked) if decision.threshold == 200000.0]
    assert next(place for place, decision in enumerate(asked) if decision.lower_scale) == capped[7]
    exploding = [judge.decide(evidence(0.05 * 4**step, 2.0**16)) for step in range(4, 24)]
    assert not any(decision.lower_scale for decision in exploding)


def test_wrong_settings_are_refused():
    for settings_, word in (
        ({"window": 1}, "active_from"),
        ({"least_ratio": 0.5}, "least_ratio"),
        ({"deviations": 0}, "deviations"),
        ({"scale_floor": 0.0}, "scale_floor"),
        ({"when_stuck": "adopt"}, "Did you mean 'adapt'"),
        ({"most_refusals_in_a_row": 0}, "most_refusals_in_a_row"),
        ({"least_ration": 3}, "Did you mean 'least_ratio'"),
    ):
        with pytest.raises(GuardError, match=word):
            preset("steady", **settings_)
    with pytest.raises(GuardError, match="above 0"):
        preset("stable", cap=-1.0)
    with pytest.raises(ValueError, match="Did you mean 'steady'"):
        preset("stedy")


def test_the_pure_parts_do_not_import_torch():
    code = (
        "import sys; import maulstick.guard.policies, maulstick.guard.presets, maulstick.guard.replay, "
        "maulstick.guard.log, maulstick.guard.judge, maulstick.guard.verdict; "
        "from maulstick.guard import preset, resolve, GradientLog, read_gradient_log; assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
