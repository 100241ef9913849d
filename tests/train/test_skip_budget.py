"""The skip budget: when it stops a run, what it says, and that a resumed run counts on."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maulstick.guard import StepOutcome
from maulstick.guard.policies import Reason
from maulstick.guard.verdict import Verdict
from maulstick.train.skip_budget import SkipBudget, windows_judged
from maulstick.train.watchers import WindowDone

NORMS = {Reason.NAN: math.nan, Reason.INF: math.inf}


class FakeLoop:
    """What the watcher sees of a loop: whether the run is to stop."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(stopped_by=None)
        self.seen = 0

    def show(self, budget: SkipBudget, skipped_for: Reason | None, **outcome: Any) -> str | None:
        """Show the budget one window; return why the run stops."""
        reason = skipped_for or Reason.ACCEPTED
        verdict = Verdict(skipped_for is not None, reason, NORMS.get(reason, 1.0), 1.0, 2.0)
        done = WindowDone(self.seen, 0, (), 1.0, StepOutcome(verdict, **{"stepped": not verdict.skip, **outcome}), 0.1)
        self.seen += 1
        budget.after_window(self, done)  # type: ignore[arg-type]
        return self.state.stopped_by


@pytest.mark.parametrize("total, windows", [(1, 20), (200, 20), (1000, 100), (2000, 200), (100_000, 200)])
def test_a_tenth_of_training_is_judged(total: int, windows: int) -> None:
    assert windows_judged(total) == windows


def test_it_stops_at_the_first_window_above_the_share_and_says_why() -> None:
    loop, budget = FakeLoop(), SkipBudget(0.5, 2000)
    pattern = [Reason.SPIKE, None, Reason.NAN, None]
    for window in range(301):
        assert loop.show(budget, pattern[window % 4]) is None  # exactly half is allowed
    # This one takes the place of a good window.
    said = loop.show(budget, Reason.SPIKE)
    assert said is not None
    assert said.startswith(
        "101 of the last 200 steps were skipped (51 for a gradient norm out of the ordinary, 50 for a NaN gradient), "
        "more than max_skipped_fraction = 0.5 allows. Lower the learning rate"
    )
    assert "maulstick replay" in said
    assert said.endswith("max_skipped_fraction = 1 never stops")


@pytest.mark.parametrize("reason, advice", [(Reason.NAN, "bad data"), (Reason.INF, "bf16"), (Reason.LOSS, "bad data")])
def test_the_advice_is_for_the_most_frequent_reason(reason: Reason, advice: str) -> None:
    loop, budget = FakeLoop(), SkipBudget(0.5, 10)
    stopped = [loop.show(budget, Reason.SPIKE if n < 5 else reason) for n in range(20)]
    assert stopped[:19] == [None] * 19
    assert f"allows. {'Look' if advice == 'bad data' else 'Train in'}" in str(stopped[19])
    assert advice in str(stopped[19])


def test_nothing_is_judged_before_enough_windows_were_seen() -> None:
    """However bad the beginning is: a loss scale that is still falling, a guard that still learns."""
    loop, budget = FakeLoop(), SkipBudget(0.0, 1000)
    assert [loop.show(budget, Reason.INF) for _ in range(99)] == [None] * 99
    assert loop.show(budget, None) is not None


def test_one_turns_it_off_and_zero_allows_none() -> None:
    off, none = SkipBudget(1.0, 100), SkipBudget(0.0, 100)
    assert {FakeLoop().show(off, Reason.NAN) for _ in range(500)} == {None}
    loop = FakeLoop()
    assert [loop.show(none, None) for _ in range(40)] == [None] * 40
    assert loop.show(none, Reason.SPIKE) is not None


def test_a_step_that_a_lenient_mode_let_pass_is_lost_all_the_same() -> None:
    """Without a guard, NaN gradients are accepted, and the loop still makes no step with them."""
    loop, budget = FakeLoop(), SkipBudget(0.5, 100)
    for norm in [math.nan] * 12 + [math.inf] * 8:
        verdict = Verdict(False, Reason.ACCEPTED, norm, norm, math.inf)
        done = WindowDone(0, 0, (), 1.0, StepOutcome(verdict, stepped=False), math.nan)
        budget.after_window(loop, done)  # type: ignore[arg-type]
    assert "20 of the last 20 steps were skipped (12 for a NaN gradient, 8 for an infinite gradient)" in str(
        loop.state.stopped_by
    )


def test_a_window_without_any_gradient_is_not_a_skip() -> None:
    loop, budget = FakeLoop(), SkipBudget(0.0, 100)
    assert {loop.show(budget, None, stepped=False) for _ in range(50)} == {None}


def test_an_earlier_reason_to_stop_is_kept() -> None:
    loop, budget = FakeLoop(), SkipBudget(0.0, 100)
    loop.state.stopped_by = "Ctrl-C"
    for _ in range(20):
        loop.show(budget, Reason.NAN)
    assert loop.state.stopped_by == "Ctrl-C"


def test_after_a_stop_the_count_begins_anew() -> None:
    """Whoever resumes with a lower learning rate must not be stopped at the first step."""
    loop, budget = FakeLoop(), SkipBudget(0.5, 100)
    while loop.show(budget, Reason.NAN) is None:
        pass
    resumed, again = FakeLoop(), SkipBudget(0.5, 100)
    again.load_state_dict(budget.state_dict())
    assert [resumed.show(again, Reason.NAN) for _ in range(19)] == [None] * 19


@given(
    reasons=st.lists(st.sampled_from([None, None, *NORMS, Reason.SPIKE]), min_size=1, max_size=120),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    data=st.data(),
)
def test_it_stops_where_counting_says_so_and_a_resumed_run_too(
    reasons: list[Reason | None], share: float, data: st.DataObject
) -> None:
    first_above = next(
        (
            end
            for end in range(20, len(reasons) + 1)
            if sum(reason is not None for reason in reasons[end - 20 : end]) > share * 20
        ),
        None,
    )
    cut = data.draw(st.integers(0, len(reasons)))
    loop, budget, stopped = FakeLoop(), SkipBudget(share, 100), None
    for number, reason in enumerate(reasons, start=1):
        if number == cut:
            state, budget = budget.state_dict(), SkipBudget(share, 100)
            budget.load_state_dict(state)
        if loop.show(budget, reason) is not None:
            stopped = number
            break
    assert stopped == first_above


def test_a_shorter_run_takes_over_the_last_windows() -> None:
    loop, budget = FakeLoop(), SkipBudget(0.5, 2000)
    for number in range(60):
        loop.show(budget, Reason.NAN if number >= 45 else None)
    shorter = SkipBudget(0.5, 100)
    shorter.load_state_dict(budget.state_dict())
    assert shorter.state_dict() == {"recent": [None] * 5 + ["nan"] * 15, "row_was_rescued": False}
    assert loop.show(shorter, None) is not None


@pytest.mark.parametrize("resumed", [False, True])
def test_the_rest_of_a_row_that_was_rescued_does_not_end_the_run(resumed: bool) -> None:
    """Forty spikes in a short run: back after 16, and the other 24 would be most of the last 20 windows."""
    loop, budget = FakeLoop(), SkipBudget(0.5, 100, beside_rescue=True)
    for number in range(40):
        assert loop.show(budget, Reason.SPIKE) is None
        if number == 15:
            budget.forget()
        if resumed and number == 25:
            state, budget = budget.state_dict(), SkipBudget(0.5, 100, beside_rescue=True)
            budget.load_state_dict(state)
    assert [loop.show(budget, None) for _ in range(30)] == [None] * 30
    # A new row counts again.
    assert [loop.show(budget, Reason.SPIKE) for _ in range(11)] == [None] * 11
    assert loop.show(budget, None) is not None
