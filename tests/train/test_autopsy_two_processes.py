"""The autopsy on two processes: the bad image is on the second one, the first one writes the report, both go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maulstick.autopsy import Report
from tests.models import model_folder
from tests.processes import LEAVE, output_on_two

RUN_WITH_A_FAULT = """
import os, sys
import torch, torch.distributed as dist
from maulstick.options.load import load_train_options
from maulstick.train.run import TrainingRun
torch.set_num_threads(1)
run = TrainingRun(load_train_options(sys.argv[1:]))
run.prepare()
stream = run.loop.parts.latents.stream
def with_fault(schedule, epoch, start=0):
    for batch, latents in stream(schedule, epoch, start):
        if dist.get_rank() == 1 and batch.number == 1:
            latents = latents.clone()
            latents[0, 0, 0, 0] = float("nan")
            print("SPOILT", batch.items[0].record.path, flush=True)
        yield batch, latents
run.loop.parts.latents.stream = with_fault
run.train()
mine = torch.cat([p.detach().flatten() for _, p in run.loop.parts.named_parameters])
others = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(others, mine)
assert torch.equal(others[0], others[1]) and bool(torch.isfinite(mine).all())
"""


@pytest.mark.slow
def test_the_process_with_the_bad_image_is_named(images: Path, tmp_path: Path):
    arguments = {
        "--pretrained_model_name_or_path": str(model_folder()),
        "--train_data_dir": str(images),
        "--output_dir": str(tmp_path / "out"),
        "--resolution": "64",
        "--train_batch_size": "1",
        "--max_train_steps": "3",
        "--console": "plain",
    }
    given = [*(token for pair in arguments.items() for token in pair), "--network_train_unet_only"]
    output = output_on_two(tmp_path, RUN_WITH_A_FAULT + LEAVE, given)
    (file,) = (tmp_path / "out").glob("last-autopsy-*.json")
    report = Report.from_json(json.loads(file.read_text()))
    assert report.title == "Autopsy of step 2, process 1"
    (spoilt,) = {line.removeprefix("SPOILT ") for line in output.splitlines() if line.startswith("SPOILT ")}
    assert [sample.name for sample in report.samples] == [spoilt]
    assert output.count("Autopsy of step 2") == 1
