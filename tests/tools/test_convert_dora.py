"""A DoRA in another naming: what diffusers makes of it, and which one it cannot have."""

from __future__ import annotations

import copy

import pytest
import torch

from maulstick.adapters.adapter_tensors import adapter_tensors
from maulstick.adapters.files import save_lora_file
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.adapters.kinds import DoraKind
from maulstick.adapters.read_formats import read_adapter
from maulstick.adapters.targets import plan_lora
from maulstick.cli import main
from tests.adapters.peft_adapters import fill, small_pipeline
from tests.models import small_model


@pytest.fixture
def dora(tmp_path):
    """A function that writes a DoRA of the small UNet; returns the adapted UNet and the file."""

    def make(on_output: bool):
        kind = DoraKind(on_output=on_output)
        unet = copy.deepcopy(small_model().unet)
        targets = plan_lora(unet, component="unet", network_dim=3, network_alpha=2.0, conv_dim=2, conv_alpha=4.0)
        kind.inject(unet, targets)
        fill(unet)
        path = tmp_path / "dora.safetensors"
        save_lora_file(path, adapter_tensors({"unet": kind.state(unet)}, SD_KEY_NAMES), {})
        return unet, path

    return make


@torch.no_grad()
def prediction(unet) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noisy, states = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 77, 64, generator=generator)
    return unet(noisy, torch.tensor([300]), encoder_hidden_states=states).sample


def test_diffusers_draws_what_was_trained(dora, tmp_path):
    unet, path = dora(True)
    output = tmp_path / "diffusers.safetensors"
    assert main(["convert", str(path), "--to", "diffusers", "--output", str(output)]) == 0
    pipeline = small_pipeline()
    base = prediction(pipeline.unet)
    pipeline.load_lora_weights(output)
    expected = prediction(unet)
    assert (expected - base).abs().max() > 0.1
    torch.testing.assert_close(prediction(pipeline.unet), expected, rtol=1e-3, atol=1e-3)


def test_it_comes_back_as_it_was(dora, tmp_path):
    _, path = dora(True)
    there, back = tmp_path / "peft", tmp_path / "back.safetensors"
    assert main(["convert", str(path), "--to", "peft", "--output", str(there)]) == 0
    assert main(["convert", str(there), "--to", "kohya", "--output", str(back)]) == 0
    first, second = read_adapter(path).modules, read_adapter(back).modules
    assert first.keys() == second.keys()
    for name, module in first.items():
        other = second[name]
        torch.testing.assert_close(other.magnitude, module.magnitude)
        assert other.axis == module.axis == 0
        change, restored = module.change, other.change
        torch.testing.assert_close(
            restored.scale * restored.up.flatten(1) @ restored.down.flatten(1),
            change.scale * change.up.flatten(1) @ change.down.flatten(1),
        )


def test_lengths_of_inputs_have_no_place_in_diffusers(dora, tmp_path, capsys):
    _, path = dora(False)
    output = str(tmp_path / "d.safetensors")
    assert main(["convert", str(path), "--to", "diffusers", "--output", output]) == 2
    assert "a length for each input, but diffusers and PEFT" in capsys.readouterr().err
