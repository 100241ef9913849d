"""Faults in the numbers: planted into the real trainer on the quickstart's model, with guard and rescue and without.

Every run has the fault-free run's seed and length, so that the two differ by the fault alone. What a fault costs is
lost windows and a learning rate halved for a while, which weighs most at the beginning of a run: so a rollback has a
longer run and comes late in it, and a burst of 40 is a quarter of its run.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.faults.plants import (
    INF,
    NAN,
    bad_captions,
    bad_gradients,
    bad_latents,
    bad_moment,
    bad_weight,
    before_windows,
    ends_when_lost,
    loss_scale,
    loss_times,
)
from tests.faults.table import AddRow
from tests.faults.trials import BARE, STEPS, Outcome, Plant, Workshop, bad_windows

pytestmark = pytest.mark.long
AT = 8
SPIKE_AT = 21
MIDDLE, LONG = 64, 160
LATER = 40
BURST = range(60, 100)
MOST_LOSS = 1.05


@dataclass(frozen=True)
class Fault:
    """A transient fault.

    Attributes:
        skipped: how many steps are skipped; None for those with latents or text states that are not finite.
        rescues: how often the run goes back.
        event: a kind of event that the log has.
        bare_is_lost: without guard and rescue the run leaves no file, because its weights are not finite.
    """

    name: str
    must: str
    plant: Plant
    skipped: int | None
    rescues: int
    event: str
    bare_is_lost: bool = True
    arguments: tuple[str, ...] = ()


SKIPS = "only its windows are skipped; the run ends as planned"
GOES_BACK = "back to the state before it; the run ends as planned"
BOTH = {AT: NAN, AT + 6: INF}
MIDDLE_RUN = ("--max_train_steps", str(MIDDLE))
LONG_RUN = ("--max_train_steps", str(LONG))
FAULTS = [
    Fault("NaN, infinity in two images' latents", SKIPS, bad_latents(BOTH), None, 0, "autopsy"),
    Fault("NaN, infinity in two embeddings", SKIPS, bad_captions(BOTH), None, 0, "autopsy"),
    Fault("NaN, infinity in a gradient", SKIPS, bad_gradients(BOTH), 2, 0, "skip"),
    Fault(
        "NaN, infinity in a weight",
        GOES_BACK,
        before_windows({step: bad_weight(value) for step, value in {LATER: NAN, LATER + 6: INF}.items()}),
        2,
        2,
        "rescue",
        arguments=MIDDLE_RUN,
    ),
    Fault(
        "NaN in the first moment",
        GOES_BACK,
        before_windows({LATER: bad_moment("exp_avg", NAN)}),
        1,
        1,
        "rescue",
        arguments=MIDDLE_RUN,
    ),
    Fault(
        "infinity in the second moment",
        GOES_BACK,
        before_windows({LATER + 1: bad_moment("exp_avg_sq", INF)}),
        0,
        1,
        "rescue",
        bare_is_lost=False,
        arguments=MIDDLE_RUN,
    ),
    Fault("loss x 1000 in a step", SKIPS, loss_times(1000, [SPIKE_AT]), 1, 0, "skip", bare_is_lost=False),
    Fault("40 losses x 1000", GOES_BACK, loss_times(1000, BURST), 40, 1, "rescue", False, LONG_RUN),
    Fault("40 NaN losses", GOES_BACK, loss_times(NAN, BURST), 40, 2, "rescue", True, LONG_RUN),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_transient_fault_is_survived(workshop: Workshop, add_row: AddRow, fault: Fault):
    fault_free = workshop.fault_free(*fault.arguments)
    outcome = workshop.trained(*fault.arguments, plant=fault.plant)
    bare = bare_run(workshop, fault.plant, *fault.arguments)
    add_row(fault.name, fault.must, outcome, bare, fault_free)
    steps = int(fault.arguments[-1]) if fault.arguments else STEPS
    assert (outcome.ended, outcome.step, outcome.finite) == ("0", steps, True)
    expected = bad_windows(outcome.run) if fault.skipped is None else fault.skipped
    assert (outcome.skipped, outcome.rescues) == (expected, fault.rescues)
    assert outcome.of(fault.event)
    assert outcome.loss <= MOST_LOSS * fault_free.loss
    assert (bare.finite is None) == fault.bare_is_lost


def bare_run(workshop: Workshop, plant: Plant, *arguments: str) -> Outcome:
    """Train with the fault and without guard and rescue, as far as there is anything to see."""
    run = workshop.ready(*BARE, *arguments)
    plant(run)
    ends_when_lost(run)
    return workshop.finish(run)


def test_the_fault_free_run_learns_and_needs_nothing(workshop: Workshop, add_row: AddRow):
    outcome = workshop.fault_free()
    bare = workshop.trained(*BARE)
    add_row("none", "nothing: no step is skipped", outcome, bare, outcome)
    assert (outcome.ended, outcome.skipped, outcome.rescues, outcome.finite) == ("0", 0, 0, True)
    # What is at stake: a file that has learned nothing is far outside of what is allowed above.
    assert workshop.untrained > 1.15 * outcome.loss
    assert bare.loss == outcome.loss


def test_a_fault_that_stays_ends_the_run_with_a_good_file(workshop: Workshop, add_row: AddRow):
    plant = loss_times(NAN, range(AT, 1000))
    # Patience is a matter of options; 16 steps and five rescues would take a hundred steps to see the same.
    given = ("--rescue_after", "4", "--rescue_limit", "2")
    outcome = workshop.trained(*given, plant=plant)
    bare = bare_run(workshop, plant)
    add_row(
        "NaN in every loss from a step on",
        "ends by itself: the best file, the reason",
        outcome,
        bare,
        workshop.fault_free(),
    )
    assert (outcome.ended, outcome.step, outcome.finite) == ("1", AT + 12, True)
    assert "4 windows in a row with a NaN, infinite or refused gradient, after 2 rollbacks already" in outcome.said
    assert outcome.loss < workshop.untrained
    assert bare.finite is None


def test_a_learning_rate_a_thousand_times_too_high(workshop: Workshop, add_row: AddRow):
    given = ("--learning_rate", "2.0")
    fault_free = workshop.fault_free(*LONG_RUN)
    outcome = workshop.trained(*given, *LONG_RUN)
    bare = workshop.trained(*BARE, *given, *LONG_RUN)
    add_row("learning rate x 1000", "goes back and lowers the rate until it helps", outcome, bare, fault_free)
    assert (outcome.ended, outcome.finite) == ("0", True)
    rescues = outcome.of("rescue")
    assert [each["cause"] for each in rescues] == ["worse_than_base"] * len(rescues)
    # Eight looks in a row from the eighth step on.
    assert (rescues[0]["step"], rescues[0]["back_to"]) == (15, 0)
    assert 2 <= len(rescues) <= 3
    assert outcome.loss < workshop.untrained / 1.15
    # Without, the weights overflow in the end, and there is nothing to save.
    assert (bare.ended, bare.finite) == ("ModelError", None)


def test_fp16_overflows_from_the_first_step(workshop: Workshop, add_row: AddRow):
    given = ("--mixed_precision", "fp16", "--max_train_steps", "20")
    fault_free = workshop.fault_free(*given)
    outcome = workshop.trained(*given, plant=loss_scale(2.0**25))
    bare = workshop.trained(*BARE, *given, plant=loss_scale(2.0**25))
    add_row("fp16 overflow from the first step", "the loss scale falls until it fits", outcome, bare, fault_free)
    assert (outcome.ended, outcome.step, outcome.finite) == ("0", 20, True)
    assert outcome.rescues == 0
    assert 1 <= outcome.skipped <= 8
    assert outcome.loss <= MOST_LOSS * fault_free.loss
