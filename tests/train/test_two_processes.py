"""Two processes on one machine, started as users start them: one run, one file, the same weights on both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from maulstick.adapters.files import read_lora_file
from maulstick.options.load import load_train_options
from maulstick.tools.quickstart import ASSETS
from maulstick.train.events import read_events
from maulstick.train.run import TrainingRun
from tests.processes import LEAVE, output_on_two

RUN_AND_COMPARE = """
import os, sys
import torch, torch.distributed as dist
from maulstick.options.load import load_train_options
from maulstick.train.run import TrainingRun
torch.set_num_threads(1)
run = TrainingRun(load_train_options(sys.argv[1:]))
run.train()
mine = torch.cat([p.detach().flatten() for _, p in run.loop.parts.named_parameters])
others = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(others, mine)
assert torch.equal(others[0], others[1]), "the processes drifted apart"
"""


@pytest.mark.slow
def test_two_processes_train_one_lora(images: Path, tmp_path: Path):
    arguments = {
        "--pretrained_model_name_or_path": str(ASSETS / "model"),
        "--train_data_dir": str(images),
        "--output_dir": str(tmp_path / "out"),
        "--resolution": "64",
        "--train_batch_size": "1",
        "--gradient_accumulation_steps": "2",
        "--max_train_epochs": "1",
        "--optimizer_type": "SGD",
        "--learning_rate": "1.0",
        "--seed": "3",
        "--console": "plain",
    }
    given = [token for pair in arguments.items() for token in pair]
    output = output_on_two(tmp_path, RUN_AND_COMPARE + LEAVE, given)
    steps = [event for event in read_events(tmp_path / "out" / "last.events.jsonl") if event["event"] == "step"]
    # 10 images an epoch in 10 batches, five for each process, two to a window.
    assert [step["train/steps"] for step in steps] == [1, 2, 3]
    assert len(read_lora_file(tmp_path / "out" / "last.safetensors").modules) == 216
    assert output.count("saved ") == 1
    # One process with as many micro-batches to a window sees the same images with the same noise.
    alone = {**arguments, "--output_dir": str(tmp_path / "alone"), "--gradient_accumulation_steps": "4"}
    TrainingRun(load_train_options([token for pair in alone.items() for token in pair])).train()
    together, by_one = (load_file(tmp_path / name / "last.safetensors") for name in ("out", "alone"))
    assert together.keys() == by_one.keys()
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, by_one[name], rtol=0, atol=1e-5, msg=name)
    ups = [tensor for name, tensor in by_one.items() if name.endswith("lora_up.weight")]
    assert max(float(tensor.abs().max()) for tensor in ups) > 1e-3
