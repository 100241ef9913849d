"""Two gloo processes: whatever happens on one of them, both decide the same, from the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import results_of_both

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    return results_of_both(HERE / "guard_process.py", tmp_path_factory.mktemp("processes"))


def test_data_parallel_runs_stay_together(both: tuple[dict, dict]):
    zero, one = (each["data_parallel"] for each in both)
    assert zero["verdicts"] == one["verdicts"]
    assert zero["state"] == one["state"]
    assert zero["weights"] == one["weights"]
    assert all(abs(weight) < 10 for weight in zero["weights"])
    skipped = {step: verdict["reason"] for step, verdict in enumerate(zero["verdicts"]) if verdict["skip"] == "True"}
    assert list(skipped) == [10, 14, 18]
    assert "NAN" in skipped[10]
    assert "SPIKE" in skipped[18]
    # Process 0 saw nothing wrong in its own loss: only numbers from both can tell.
    assert all(zero["local_finite"])
    assert [step for step, finite in enumerate(one["local_finite"]) if not finite] == [10, 14]
    assert zero["verdicts"][10]["loss"] == "nan"
    assert zero["verdicts"][10]["bad_tensor"] == "'0.weight'"


def test_a_bad_micro_batch_of_one_process_is_known_to_both(both: tuple[dict, dict]):
    zero, one = (each["accumulation"] for each in both)
    assert zero["verdicts"] == one["verdicts"]
    assert [verdict["skip"] for verdict in zero["verdicts"]] == ["False", "True", "False"]
    assert [verdict["bad_micro_batch"] for verdict in zero["verdicts"]] == ["None", "1", "None"]
    assert "works on one process only" in zero["refused"]


def test_different_gradients_lead_to_one_decision(both: tuple[dict, dict]):
    zero, one = (each["own_gradients"] for each in both)
    assert zero["verdicts"] == one["verdicts"]
    steady = [step for step, (verdict, _) in enumerate(zero["verdicts"]) if verdict["skip"] == "True"]
    gamble = [step for step, (_, verdict) in enumerate(zero["verdicts"]) if verdict["skip"] == "True"]
    assert steady == [25, 28, 31]
    assert gamble == [25, 28]
    # Each for itself, they would have parted at once.
    assert not any(zero["local"])
    assert [step for step, skip in enumerate(one["local"]) if skip] == [25, 28, 31]
    # Finite gradients, but the loss of process 1 was not.
    assert zero["loss_of_one"] == one["loss_of_one"]
    assert "LOSS" in zero["loss_of_one"]["reason"]
    # The mean of the squared norms, 2 and 6, and the mean loss; added up by the host and by the device.
    assert zero["norms"] == one["norms"]
    assert zero["norms"] == [[pytest.approx(20**0.5), 0.5]] * 2


def test_sharded_gradients_are_judged_as_a_whole(both: tuple[dict, dict]):
    zero, one = (each["sharded"] for each in both)
    assert zero["verdicts"] == one["verdicts"]
    assert float(zero["verdicts"][0]["norm"]) == pytest.approx(zero["want"][0], rel=1e-5)
    skipped = [step for step, verdict in enumerate(zero["verdicts"]) if verdict["skip"] == "True"]
    assert skipped == [10, 14, 18]
    assert zero["verdicts"][10]["bad_tensor"] == "'2.weight'"
    assert zero["finite"]
    assert one["finite"]
    assert "processes='auto'" in zero["refused"]
