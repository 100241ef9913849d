"""The names of the original layout, against diffusers' own converters and at full size."""

from __future__ import annotations

import json
import logging
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from maulstick.families.configs import fit_text_encoder, fit_unet, fit_vae, shipped_config
from maulstick.families.ldm_keys import (
    clip_weights,
    open_clip_weights,
    unet_name,
    unet_weights,
    vae_name,
    vae_weights,
)
from maulstick.weight_files import NamedWeights, SafetensorsFile, WeightFile
from tests.models import SmallModel, Version, original_layout, single_file, small_model

GOLDEN = Path(__file__).parents[1] / "data" / "blocks"
MODELS = Path(str(files("maulstick"))) / "assets" / "model_configs"


class _NamesOnly(WeightFile):
    """A file of which only names and shapes are known."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path, self.shapes, self.metadata = Path("names"), shapes, {}

    def read(self, names: object, consume: object) -> None:
        raise AssertionError("nothing should be read")


def _full_size(model: str) -> SmallModel:
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(shipped_config(model, "unet"))
        vae = AutoencoderKL.from_config(shipped_config(model, "vae"))
        text = CLIPTextModel(CLIPTextConfig.from_dict(shipped_config(model, "text_encoder")))
    return SmallModel("sd1" if model == "sd1" else "sd2", unet, vae, text)


def _parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    "model, unet, vae, text_encoder",
    [
        ("sd1", 859_520_964, 83_653_863, 123_060_480),
        ("sd2-base", 865_910_724, 83_653_863, 340_387_840),
        ("sd2-768-v", 865_910_724, 83_653_863, 340_387_840),
    ],
)
def test_shipped_configs_have_the_published_numbers_of_parameters(
    model: str, unet: int, vae: int, text_encoder: int
) -> None:
    full = _full_size(model)
    assert (_parameters(full.unet), _parameters(full.vae), _parameters(full.text_encoder)) == (unet, vae, text_encoder)


@pytest.mark.parametrize("model", ["sd1", "sd2-base", "sd2-768-v"])
def test_shipped_configs_are_complete_folders(model: str) -> None:
    index = json.loads((MODELS / model / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    scheduler = shipped_config(model, "scheduler")
    assert (scheduler["beta_start"], scheduler["beta_end"]) == (0.00085, 0.012)
    assert scheduler["prediction_type"] == ("v_prediction" if model == "sd2-768-v" else "epsilon")
    assert index["scheduler"][1] == scheduler["_class_name"]


def test_every_full_size_lora_target_of_sd15_exists_with_its_shape() -> None:
    unet = {name: tuple(t.shape) for name, t in _full_size("sd1").unet.state_dict().items()}
    golden = json.loads((GOLDEN / "sd15.json").read_text())
    assert len(golden["rows"]) == 278
    for path, _, _, _, shape, _ in golden["rows"]:
        assert unet[f"{path}.weight"] == tuple(shape), path


@pytest.mark.parametrize("model", ["sd1", "sd2-base"])
def test_full_size_checkpoints_map_onto_every_weight_and_back_to_the_shipped_config(model: str) -> None:
    full = _full_size(model)
    with torch.device("meta"):
        file = _NamesOnly({name: tuple(t.shape) for name, t in _original_on_meta(full).items()})
    text_config = shipped_config(model, "text_encoder")
    text = clip_weights(file) if model == "sd1" else open_clip_weights(file, text_config["num_hidden_layers"])
    for weights, network in ((unet_weights(file), full.unet), (vae_weights(file), full.vae), (text, full.text_encoder)):
        assert _mapped_shapes(weights) == {name: tuple(t.shape) for name, t in network.state_dict().items()}
        assert weights.leftover == ()
    for part, fitted in (
        ("unet", fit_unet(shipped_config(model, "unet"), unet_weights(file))),
        ("vae", fit_vae(shipped_config(model, "vae"), vae_weights(file))),
        ("text_encoder", fit_text_encoder(text_config, text)),
    ):
        assert fitted == shipped_config(model, part)


def _original_on_meta(model: SmallModel) -> dict[str, torch.Tensor]:
    """The narrow model's names with the full model's shapes; its fixed-size heads and buffers are beside the point."""
    unused = ("text_projection", "logit_scale", "attn_mask", "position_ids")
    return {name: tensor for name, tensor in original_layout(model).items() if not name.endswith(unused)}


def _mapped_shapes(weights: NamedWeights) -> dict[str, tuple[int, ...]]:
    return {name: slot.shape for name, slot in weights.slots.items()}


@pytest.mark.parametrize("version", ["sd1", "sd2"])
def test_mapping_agrees_with_diffusers_converters(version: Version, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    file = SafetensorsFile(single_file(version))
    tensors, network = original_layout(small_model(version)), small_model(version)
    pairs = [
        (unet_weights(file), convert_ldm_unet_checkpoint(dict(tensors), network.unet.config)),
        (vae_weights(file), convert_ldm_vae_checkpoint(dict(tensors), network.vae.config)),
    ]
    if version == "sd2":
        # Its converter keeps the layer that SD 2.x does not use, and the prefix of transformers 4.x.
        theirs = convert_open_clip_checkpoint(network.text_encoder, dict(tensors))
        known = {
            name.removeprefix("text_model."): t
            for name, t in theirs.items()
            if ".layers.23." not in name and "position_ids" not in name and "text_projection" not in name
        }
        pairs.append((open_clip_weights(file, 23), known))
    for ours, theirs in pairs:
        mapped = ours.tensors(None)
        assert mapped.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mapped.items())


def test_names_outside_the_layout_are_left_over_not_guessed(tmp_path: Path) -> None:
    for name in ("label_emb.weight", "input_blocks.1.0.new_layer.weight", "middle_block.3.in_layers.0.weight", "x"):
        assert unet_name(name) is None
    for name in ("encoder.mid.attn_1.x.weight", "encoder.something.weight", "quant.weight"):
        assert vae_name(name, 4) is None
    save_file({"model.diffusion_model.odd": torch.zeros(1)}, tmp_path / "odd.safetensors")
    assert unet_weights(SafetensorsFile(tmp_path / "odd.safetensors")).leftover == ("model.diffusion_model.odd",)
