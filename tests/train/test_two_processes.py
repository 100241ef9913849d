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
from tests.image_encoders import clip_encoder
from tests.models import model_folder
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
        "--pretrained_model_name_or_path": str(model_folder()),
        "--train_data_dir": str(images),
        "--output_dir": str(tmp_path / "out"),
        "--resolution": "64",
        "--train_batch_size": "1",
        "--gradient_accumulation_steps": "2",
        "--max_train_epochs": "1",
        "--learning_rate": "1e-3",
        "--console": "plain",
    }
    given = [token for pair in arguments.items() for token in pair]
    output = output_on_two(tmp_path, RUN_AND_COMPARE + LEAVE, given)
    steps = [event for event in read_events(tmp_path / "out" / "last.events.jsonl") if event["event"] == "step"]
    # 10 images an epoch in 10 batches, five for each process, two to a window.
    assert [step["train/steps"] for step in steps] == [1, 2, 3]
    assert len(read_lora_file(tmp_path / "out" / "last.safetensors").modules) == 264
    assert output.count("saved ") == 1


HELD_PARTS = """
from torch.distributed.tensor import DTensor
network = run.loop.parts.family.denoiser
trained = {id(p) for _, p in run.loop.parts.named_parameters}
assert not any(isinstance(p, DTensor) for _, p in run.loop.parts.named_parameters)
frozen = [p for p in network.parameters() if id(p) not in trained]
assert frozen and all(isinstance(p, DTensor) for p in frozen)
held = sum(p.to_local().numel() for p in frozen)
assert 0.4 < held / sum(p.numel() for p in frozen) < 0.6, held
"""
"""Each process holds about half of what is frozen, and all of what trains."""


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("network_type", ["lora", "ip_adapter"])
def test_two_processes_give_the_weights_of_one_with_the_same_global_batch(
    images: Path, tmp_path: Path, network_type: str, fsdp: bool
):
    further = {
        "lora": ["--network_train_unet_only", "--network_alpha", "4", "--network_dropout", "0.1"],
        "ip_adapter": ["--image_encoder", str(clip_encoder())],
    }
    usual = {
        "--pretrained_model_name_or_path": str(ASSETS / "model"),
        "--train_data_dir": str(images),
        "--network_type": network_type,
        "--resolution": "64",
        "--train_batch_size": "1",
        # Adam divides by the size of the gradient, so that tiny gradients would blow rounding up.
        "--optimizer_type": "SGD",
        "--learning_rate": "0.1",
        # 10 images an epoch: the tail of an epoch is in it.
        "--max_train_steps": "4",
        "--seed": "1",
        "--console": "quiet",
    }
    shared = [*(token for pair in usual.items() for token in pair), *further[network_type]]
    one = TrainingRun(
        load_train_options([*shared, "--output_dir", str(tmp_path / "one"), "--gradient_accumulation_steps", "4"])
    )
    one.prepare()
    start = [parameter.detach().clone() for _, parameter in one.loop.parts.named_parameters]
    assert one.train().exit_code == 0
    ends = zip(start, one.loop.parts.named_parameters, strict=True)
    assert max(float((parameter - before).abs().max()) for before, (_, parameter) in ends) > 1e-4
    two = [*shared, "--output_dir", str(tmp_path / "two"), "--gradient_accumulation_steps", "2"]
    if fsdp:
        output_on_two(tmp_path, RUN_AND_COMPARE + HELD_PARTS + LEAVE, [*two, "--fsdp_base", "--gradient_checkpointing"])
    else:
        output_on_two(tmp_path, RUN_AND_COMPARE + LEAVE, two)
    alone, together = (load_file(tmp_path / name / "last.safetensors") for name in ("one", "two"))
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-5, atol=1e-5)


VALIDATE = """
import os, sys
import torch, torch.distributed as dist
from maulstick.options.load import load_train_options
from maulstick.train.run import TrainingRun
torch.set_num_threads(1)
run = TrainingRun(load_train_options(sys.argv[1:]))
run.train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("spread", [(), ("--fsdp_base",)])
def test_two_processes_measure_the_validation_loss_of_one(images: Path, tmp_path: Path, spread: tuple[str, ...]):
    def arguments(output: str, *further: str) -> list[str]:
        usual = {
            "--pretrained_model_name_or_path": str(model_folder("tiny")),
            "--train_data_dir": str(images),
            "--output_dir": str(tmp_path / output),
            "--resolution": "64",
            "--train_batch_size": "2",
            "--max_train_steps": "2",
            "--learning_rate": "1e-3",
            "--seed": "1",
            "--validation_split": "0.6",
            "--validate_every_n_steps": "1",
            "--console": "plain",
        }
        return [*(token for pair in usual.items() for token in pair), "--network_train_unet_only", *further]

    output_on_two(tmp_path, VALIDATE + LEAVE, arguments("two", *spread))
    TrainingRun(load_train_options(arguments("one", "--gradient_accumulation_steps", "2"))).train()
    two, one = (
        [event for event in read_events(tmp_path / name / "last.events.jsonl") if event["event"] == "validation"]
        for name in ("two", "one")
    )
    assert [event["step"] for event in two] == [event["step"] for event in one] == [0, 1, 2]
    for mine, others in zip(two, one, strict=True):
        assert mine["losses"] == pytest.approx(others["losses"], rel=1e-4)
        assert mine["training_losses"] == pytest.approx(others["training_losses"], rel=1e-4)
