"""Two processes, one of them with a fault: both decide alike, and the run goes on as if the window had not been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maulstick.train.events import read_events
from tests.faults.table import AddRow
from tests.faults.trials import BARE, Outcome, Workshop, is_finite
from tests.processes import LEAVE, output_on_two

pytestmark = pytest.mark.long
STEPS, AT = 24, 12

# All three runs in one pair of processes: their start takes longer than a run.
TRAIN_THREE = """
import json, math, os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
from maulstick.options.load import load_train_options
from maulstick.train.console import QuietConsole
from maulstick.train.run import TrainingRun
from tests.faults.plants import ends_when_lost, loss_times

results = []
for name, arguments in json.loads(sys.argv[1]):
    run = TrainingRun(load_train_options(arguments), console=QuietConsole())
    run.prepare()
    if name != "fault_free" and run.accelerator.process_index == 1:
        loss_times(math.nan, [int(sys.argv[3])])(run)
    if name == "bare":
        ends_when_lost(run)
    try:
        ended = str(run.train().exit_code)
    except Exception as error:
        ended = type(error).__name__
    weights = torch.cat([p.detach().flatten() for _, p in run.loop.parts.named_parameters])
    all_weights = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(all_weights, weights)
    same = torch.equal(*(each.nan_to_num(9.0) for each in all_weights))
    results.append({"ended": ended, "step": run.loop.state.step, "skipped": run.loop.state.skipped, "same": same})
if run.accelerator.is_main_process:
    open(sys.argv[2], "w").write(json.dumps(results))
"""


def test_one_bad_process_of_two(workshop: Workshop, add_row: AddRow, tmp_path: Path):
    length = ("--max_train_steps", str(STEPS), "--train_batch_size", "1")
    runs = [
        ("fault_free", workshop.arguments(*length, output=tmp_path / "fault_free")),
        ("guarded", workshop.arguments(*length, output=tmp_path / "guarded")),
        ("bare", workshop.arguments(*BARE, *length, output=tmp_path / "bare")),
    ]
    given = [json.dumps(runs), str(tmp_path / "results.json"), str(AT)]
    output_on_two(tmp_path, TRAIN_THREE + LEAVE, given, timeout=400)
    found = json.loads((tmp_path / "results.json").read_text())
    fault_free, outcome, bare = (
        outcome_of(workshop, tmp_path / name, result) for (name, _), result in zip(runs, found, strict=True)
    )
    add_row("NaN loss on one process of two", "both skip that window", outcome, bare, fault_free)
    assert [result["same"] for result in found[:2]] == [True, True]
    assert (fault_free.skipped, fault_free.finite) == (0, True)
    assert (outcome.ended, outcome.step, outcome.skipped, outcome.finite) == ("0", STEPS, 1, True)
    assert outcome.loss <= 1.05 * fault_free.loss
    assert bare.finite is None


def outcome_of(workshop: Workshop, folder: Path, result: dict[str, object]) -> Outcome:
    """Return what one of the runs left in its folder."""
    path = next(iter(folder.glob("*.safetensors")), None)
    finite = None if path is None else is_finite(path)
    return Outcome(
        ended=str(result["ended"]),
        step=int(str(result["step"])),
        skipped=int(str(result["skipped"])),
        path=path,
        finite=finite,
        loss=workshop.loss_with(path) if path is not None and finite else float("inf"),
        said="",
        events=read_events(folder / "last.events.jsonl"),
    )
