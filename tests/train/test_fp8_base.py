"""``fp8_base``: the frozen base in eight bits, the LoRA in fp32, and nearly the training of the whole base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maulstick.adapters.fp8 import FP8
from maulstick.errors import OptionError
from maulstick.train.events import read_events
from maulstick.train.plan import plan_lines
from maulstick.train.run import TrainingRun
from tests.sd3_models import sd3_folder

MakeRun = Callable[..., TrainingRun]
BF16 = ("--mixed_precision", "bf16")


def large_weights(network: torch.nn.Module) -> list[torch.Tensor]:
    """The frozen matrices and kernels of blocks."""
    return [
        parameter
        for name, parameter in network.named_parameters()
        if not parameter.requires_grad and parameter.ndim > 1 and not name.startswith(("conv_in", "conv_out"))
    ]


def first_gradient(run: TrainingRun) -> torch.Tensor:
    run.prepare()
    assert run.loop is not None
    loop = run.loop
    loop.train_mode()
    with torch.no_grad():
        for name, parameter in loop.parts.named_parameters:
            if name.endswith("up.weight"):
                parameter.fill_(0.02)
    window, images = next(loop.windows(0))
    loop.accumulate_gradients(window, images)
    return torch.cat([p.grad.flatten() for _, p in loop.parts.named_parameters if p.grad is not None])


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_base_is_in_eight_bits_and_gradients_are_nearly_those_of_the_whole_base(
    make_run: MakeRun, kind: str
) -> None:
    common = (*BF16, "--network_type", kind)
    whole, small = make_run(*common, output="whole"), make_run(*common, "--fp8_base", output="small")
    expected, found = first_gradient(whole), first_gradient(small)
    assert torch.cosine_similarity(expected, found, dim=0) > 0.98
    assert 0.9 < found.norm() / expected.norm() < 1.1
    assert small.loop is not None
    for network in (small.prepared.family.denoiser, *small.prepared.family.text_encoders.values()):
        weights = large_weights(network)
        assert {weight.dtype for weight in weights if weight.ndim == 4 or weight.shape[0] != 49408} >= {FP8}
        in_fp8 = sum(weight.numel() for weight in weights if weight.dtype == FP8)
        assert in_fp8 > 0.95 * sum(weight.numel() for weight in weights if weight.shape[0] not in (49408, 77))
    assert {parameter.dtype for _, parameter in small.loop.parts.named_parameters} == {torch.float32}


def test_a_run_with_a_merged_8_bit_base_saves_an_ordinary_file(make_run: MakeRun, tmp_path: Path) -> None:
    first = make_run("--max_train_steps", "1", "--network_train_unet_only", output="first").train().path
    common = (*BF16, "--base_weights", str(first), "--network_train_unet_only", "--cache_text_encoder_outputs")
    files, losses = [], []
    for name, further in (("whole", ()), ("small", ("--fp8_base",)), ("unet", ("--fp8_base_unet",))):
        run = make_run(*common, *further, output=name)
        files.append(load_file(run.train().path))
        losses.append(
            [
                row["loss/current"]
                for row in read_events(tmp_path / name / "last.events.jsonl")
                if row["event"] == "step"
            ]
        )
        (encoder,) = run.prepared.family.text_encoders.values()
        kinds = {weight.dtype for weight in large_weights(encoder)}
        assert (FP8 in kinds) == (name == "small")
    assert files[0].keys() == files[1].keys() == files[2].keys()
    assert {tensor.dtype for tensor in files[1].values()} == {torch.float32}
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=0.05)


def test_sd3_keeps_its_joined_layers_in_eight_bits(make_run: MakeRun) -> None:
    model = ("--pretrained_model_name_or_path", str(sd3_folder(with_t5=True)), "--max_train_steps", "1")
    run = make_run(*model, *BF16, "--fp8_base", "--network_train_unet_only", "--cache_text_encoder_outputs")
    result = run.train()
    assert result.state.skipped == 0
    family: Any = run.prepared.family
    assert family.denoiser.get_submodule("transformer_blocks.0.attn.to_qkv.base_layer").weight.dtype == FP8
    t5 = family.text_encoders["text_encoder_3"]
    kinds = {name.rpartition(".")[0].rpartition(".")[2]: weight.dtype for name, weight in t5.named_parameters()}
    assert (kinds["q"], kinds["wo"]) == (FP8, torch.bfloat16)


def test_the_plan_says_what_the_base_takes(make_run: MakeRun) -> None:
    whole, small = (
        make_run(*BF16, *further, output=str(len(further))).prepare().plan for further in ((), ("--fp8_base",))
    )
    for name, size in small.base_bytes.items():
        assert 0.5 * whole.base_bytes[name] < size < whole.base_bytes[name]
    assert small.base_bytes["unet"] < 0.6 * whole.base_bytes["unet"]
    (line,) = [line for line in plan_lines(small) if line.startswith("base ")]
    assert "unet" in line
    assert "in 8 bits" in line


def test_eight_bits_need_a_format_to_compute_in(make_run: MakeRun) -> None:
    for name in ("--fp8_base", "--fp8_base_unet"):
        with pytest.raises(OptionError, match=f"{name[2:]} keeps .* Set mixed_precision = bf16"):
            make_run(name)
        with pytest.raises(OptionError, match="cannot be spread"):
            make_run(name, *BF16, "--fsdp_base")
    assert make_run(*BF16, "--fp8_base", "--fp8_base_unet").loaded.notices == [
        "fp8_base_unet has no effect with fp8_base, which includes the UNet."
    ]
