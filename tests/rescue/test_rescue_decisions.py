"""When a run goes back, on streams of numbers: loss range, patience, learning rate, and an end in every case."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maulstick.rescue import Cause, LossRange, Quarantine, RescueConfig, RescueError
from maulstick.rescue.judge import RescueJudge
from maulstick.rescue.loss_range import Level


def losses(count, sigma, *, seed=0, middle=0.1, factor=lambda step: 1.0):
    """Log-normal losses; batch size 1 of a diffusion model has a sigma of about 1."""
    generator = random.Random(seed)
    return [middle * factor(step) * math.exp(sigma * generator.gauss(0, 1)) for step in range(count)]


def levels(stream):
    """What the range says of every loss; a rollback follows whenever it says LEFT."""
    loss_range, found = LossRange(RescueConfig()), []
    for loss in stream:
        found.append(loss_range.note(loss))
        if found[-1] is Level.LEFT:
            loss_range.went_back(blamed=True)
    return found


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 1.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_ordinary_noise_is_in_range(sigma, seed):
    assert set(levels(losses(6000, sigma, seed=seed))) == {Level.USUAL}


def test_heavy_tails_and_slow_changes_are_in_range():
    generator = random.Random(3)
    heavy = [
        0.05 * math.exp(0.8 * generator.gauss(0, 1)) * (50 if generator.random() < 0.1 else 1) for _ in range(5000)
    ]
    assert set(levels(heavy)) == {Level.USUAL}
    # A loss that falls to a tenth, and one that slowly doubles in a thousand windows.
    assert set(levels(losses(4000, 0.8, factor=lambda step: 0.1 ** (step / 4000)))) == {Level.USUAL}
    assert Level.LEFT not in levels(losses(4000, 0.8, factor=lambda step: 2 ** (step / 1000)))


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
def test_a_loss_that_leaves_for_good_is_noticed_in_time(sigma):
    stream = losses(700, sigma, factor=lambda step: 1.0 if step < 500 else 20.0)
    found = levels(stream)
    first = found.index(Level.LEFT)
    # About half of 32 losses must be high before their median is, which must last for 32 windows.
    assert 500 + 10 + 31 <= first <= 500 + 32 + 32
    assert set(found[:500]) == {Level.USUAL}


def test_a_burst_that_passes_is_no_reason():
    found = levels(losses(900, 0.5, factor=lambda step: 50.0 if 500 <= step < 524 else 1.0))
    assert Level.HIGH in found
    assert Level.LEFT not in found


def test_a_level_that_going_back_does_not_cure_is_accepted():
    found = levels(losses(4000, 0.5, factor=lambda step: 1.0 if step < 500 else 20.0))
    assert found.count(Level.LEFT) == 1
    assert found.count(Level.ACCEPTED) == 1
    assert set(found[found.index(Level.ACCEPTED) + 1 :]) == {Level.USUAL}


def test_a_loss_that_comes_back_and_leaves_again_is_a_new_reason():
    def factor(step):
        return 20.0 if 500 <= step < 560 or step >= 900 else 1.0

    assert levels(losses(1000, 0.3, factor=factor)).count(Level.LEFT) == 2


def test_the_range_is_the_documented_formula():
    config = RescueConfig(loss_history=8, loss_recent=4, loss_deviations=1.5, loss_ratio=1.1)
    loss_range = LossRange(config)
    # The last four are the recent ones, the eight before them the history: median 0.5 * (4 + 5), MAD 2. They fall, so
    # that none is cut off at the range of those before it.
    for exponent in (8, 7, 6, 5, 4, 3, 2, 1, 4, 4, 5, 5):
        loss_range.note(math.exp(exponent))
    assert loss_range.level() == pytest.approx(4.5)
    assert loss_range.top() == pytest.approx(4.5 + 1.5 * 1.4826022185056018 * 2)
    loss_range.note(math.exp(5))
    loss_range.note(math.exp(9))
    for _ in range(4):
        loss_range.note(math.exp(5))
    # A loss above the range enters the history cut off at its upper end, which was 9.4 at the most.
    assert max(loss_range.history) < 9
    assert LossRange(RescueConfig(loss_ratio=3.0)).top() is None


def test_losses_without_a_logarithm_leave_no_trace():
    loss_range = LossRange(RescueConfig())
    for loss in (0.0, -1.0, math.nan, math.inf):
        assert loss_range.note(loss) is Level.USUAL
    assert not loss_range.recent


USUAL = RescueConfig()


def run(windows, config=USUAL, state_is_finite=lambda step: True):
    """Feed (bad, loss, finite) windows; return the judge, and (step, cause) of every rollback and of giving up."""
    judge, found = RescueJudge(config), []
    for step, (bad, loss, finite) in enumerate(windows, 1):
        judge.note(bad=bad, loss=loss, finite=finite)
        cause = judge.cause(state_is_finite=state_is_finite(step))
        if cause is not None and judge.may_give_up:
            return judge, [*found, (step, "gave up")]
        if cause is not None:
            judge.note_rescue(cause[0], 1)
            found.append((step, cause[0]))
        elif judge.snapshot_due:
            judge.note_snapshot()
    return judge, found


GOOD, NAN, REFUSED = (False, 0.1, True), (True, math.nan, False), (True, 0.1, True)


def test_sixteen_bad_windows_in_a_row_are_one_too_many():
    assert run([GOOD] * 5 + ([NAN] * 15 + [GOOD]) * 4)[1] == []
    assert run([GOOD] * 5 + [NAN] * 16 + [GOOD] * 5)[1] == [(21, Cause.BAD_WINDOWS)]


def test_a_fault_that_stays_ends_after_the_limit():
    assert run([NAN] * 1000)[1] == [*((16 * n, Cause.BAD_WINDOWS) for n in range(1, 6)), (96, "gave up")]
    assert run([NAN] * 1000, RescueConfig(limit=1, after=3))[1] == [(3, Cause.BAD_WINDOWS), (6, "gave up")]


def test_refused_but_finite_gradients_get_time_to_become_a_new_level():
    """The guard accepts a level after 64 refusals in a row; the second rollback would come too early for that."""
    assert run([GOOD] * 5 + [REFUSED] * 16 + [REFUSED] * 64 + [GOOD] * 100)[1] == [(21, Cause.BAD_WINDOWS)]
    again = run([REFUSED] * 16 + [REFUSED] * 80)[1]
    assert again == [(16, Cause.BAD_WINDOWS), (96, Cause.BAD_WINDOWS)]
    # After one good window the next streak is a new one.
    assert run([REFUSED] * 16 + [GOOD] + [REFUSED] * 16)[1] == [(16, Cause.BAD_WINDOWS), (33, Cause.BAD_WINDOWS)]


def test_non_finite_state_is_a_reason_at_once():
    assert run([GOOD] * 20, state_is_finite=lambda step: step != 7)[1] == [(7, Cause.NON_FINITE_STATE)]


def test_the_learning_rate_is_cut_and_given_back_in_steps():
    twice = [NAN] * 16 + [GOOD] + [NAN] * 16
    judge, _ = run(twice + [GOOD] * 199)
    assert judge.lr_scale == 0.25
    # Single bad windows do not hold it up.
    assert run(twice + [GOOD] * 199 + [NAN, GOOD])[0].lr_scale == 0.5
    assert run(twice + [GOOD] * 399)[0].lr_scale == 0.5
    assert run(twice + [GOOD] * 400)[0].lr_scale == 1.0
    assert run(twice + [GOOD] * 2000)[0].lr_scale == 1.0
    never = RescueConfig(lr_restore_after=0, lr_factor=0.1)
    assert run(twice + [GOOD] * 2000, never)[0].lr_scale == pytest.approx(0.01)


def test_a_burst_that_outlasts_a_rollback_cuts_the_learning_rate_once():
    judge, found = run([GOOD] * 5 + [NAN] * 40)
    assert [step for step, _ in found] == [21, 37]
    assert judge.lr_scale == 0.5
    assert run([GOOD] * 5 + [NAN] * 40 + [GOOD] * 200)[0].lr_scale == 1.0


def test_snapshots_are_due_on_good_windows_only():
    judge = RescueJudge(RescueConfig(every=3))
    due = []
    for bad, loss, finite in [GOOD, GOOD, NAN, NAN, GOOD, GOOD, GOOD, GOOD]:
        judge.note(bad=bad, loss=loss, finite=finite)
        due.append(judge.snapshot_due)
        if due[-1]:
            judge.note_snapshot()
    assert due == [False, False, False, False, True, False, False, True]


def test_no_snapshot_while_the_loss_is_out_of_range():
    judge = RescueJudge(RescueConfig(every=1))
    due = []
    for loss in losses(545, 0.1, factor=lambda step: 1.0 if step < 500 else 20.0):
        judge.note(bad=False, loss=loss, finite=True)
        due.append(judge.snapshot_due)
    assert all(due[:510])
    assert not any(due[518:])


@settings(deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([GOOD, NAN, REFUSED, (False, 1e6, True), (False, 0.0, True)])),
        max_size=40,
    ),
    st.builds(
        RescueConfig,
        after=st.integers(1, 20),
        after_again=st.integers(1, 40),
        every=st.integers(1, 30),
        limit=st.integers(1, 6),
        lr_factor=st.floats(0.1, 1.0),
        lr_restore_after=st.integers(0, 30),
        loss_history=st.integers(8, 64),
        loss_recent=st.integers(1, 8),
        loss_patience=st.integers(1, 8),
    ),
    st.integers(1, 30),
)
def test_whatever_happens_there_are_few_rollbacks_and_an_end(blocks, config, broken_every):
    windows = [window for count, window in blocks for _ in range(count)]
    judge, found = run(windows, config, state_is_finite=lambda step: step % broken_every != 0 or step % 7 > 0)
    assert judge.rescued <= config.limit
    assert [cause for _, cause in found].count("gave up") <= 1
    assert 0 < judge.lr_scale <= 1
    # A saved state is complete, plain, and goes on the same way.
    other = RescueJudge(config)
    other.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    assert other.state_dict() == judge.state_dict()
    # A fault that stays always ends the run.
    more = [NAN] * (config.after * (config.limit + 1))
    assert run(windows + more, config, state_is_finite=lambda step: True)[1][-1][1] == "gave up"


def test_a_resumed_judge_decides_as_an_uninterrupted_one():
    stream = losses(1200, 0.5, factor=lambda step: 1.0 if step < 500 else 20.0)
    windows = [(step % 11 == 3, loss, step % 22 == 3) for step, loss in enumerate(stream)]
    whole, _ = run(windows)
    judge = RescueJudge(RescueConfig())
    for bad, loss, finite in windows:
        state = json.loads(json.dumps(judge.state_dict()))
        judge = RescueJudge(RescueConfig())
        judge.load_state_dict(state)
        judge.note(bad=bad, loss=loss, finite=finite)
        cause = judge.cause(state_is_finite=True)
        if cause is not None:
            judge.note_rescue(cause[0], 1)
        elif judge.snapshot_due:
            judge.note_snapshot()
    assert judge.rescued == 1
    assert judge.state_dict() == whole.state_dict()


def test_an_image_is_left_out_after_two_rollbacks():
    quarantine = Quarantine(most=2)
    for _ in range(2):
        quarantine.note(["good.png"], bad=False, stepped=True)
        quarantine.note(["bad.png"], bad=True, stepped=False)
        last = quarantine.note_rescue(Cause.BAD_WINDOWS)
    assert last == ("bad.png",)
    assert quarantine.images == {"bad.png"}


def test_an_image_that_was_trained_without_harm_is_cleared():
    quarantine = Quarantine(most=2)
    quarantine.note(["a.png", "b.png"], bad=True, stepped=False)
    assert quarantine.note_rescue(Cause.BAD_WINDOWS) == ()
    quarantine.note(["a.png"], bad=False, stepped=True)
    quarantine.clear()
    quarantine.note(["a.png", "b.png"], bad=True, stepped=False)
    assert quarantine.note_rescue(Cause.BAD_WINDOWS) == ("b.png",)


def test_weights_that_turn_non_finite_are_blamed_on_what_was_trained():
    quarantine = Quarantine(most=1)
    for _ in range(2):
        quarantine.note(["cleared.png"], bad=False, stepped=True)
        quarantine.clear()
        quarantine.note(["poison.png"], bad=False, stepped=True)
        quarantine.note(["innocent.png"], bad=True, stepped=False)
        last = quarantine.note_rescue(Cause.NON_FINITE_STATE)
    assert last == ("poison.png",)


def test_when_too_many_are_suspects_it_is_not_the_images():
    quarantine = Quarantine(most=2)
    for _ in range(3):
        quarantine.note(["a", "b", "c"], bad=True, stepped=False)
        assert quarantine.note_rescue(Cause.BAD_WINDOWS) == ()
    quarantine.note(["a"], bad=False, stepped=True)
    quarantine.note(["x"], bad=False, stepped=True)
    assert quarantine.note_rescue(Cause.LOSS) == ()
    other = Quarantine(most=2)
    other.load_state_dict(json.loads(json.dumps(quarantine.state_dict())))
    assert other.state_dict() == quarantine.state_dict()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"after": 0}, "after = 0: expected a whole number, at least 1"),
        ({"every": 2.5}, "every = 2.5"),
        ({"keep": True}, "keep = True"),
        ({"lr_factor": 1.5}, "lr_factor = 1.5: expected above 0 and at most 1"),
        ({"lr_factor": math.nan}, "lr_factor = nan"),
        ({"loss_ratio": 1.0}, "loss_ratio = 1.0: expected above 1"),
        ({"watch_loss": 1}, "watch_loss = 1: expected True or False"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(RescueError, match=message):
        RescueConfig(**wrong)
