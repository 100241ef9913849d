"""Strengths by block when pictures are drawn: exact on every module, and seen in pictures and their text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from maulstick.adapters.block_presets import BASE
from maulstick.adapters.blocks import SD_BLOCKS
from maulstick.errors import OptionError
from maulstick.families.base import Family
from maulstick.families.load import load_family
from maulstick.options.generate import GenerateOptions, LoraOptions, OutputOptions, PictureOptions
from maulstick.options.schema import ModelOptions
from maulstick.tools.apply_lora import OUTSIDE, AppliedLora, apply_loras, set_block_shares
from maulstick.tools.generate import generate
from maulstick.tools.lora_choice import LoraChoice, parse_lora_choice
from tests.models import model_folder, small_model

# One module in a block of each kind, in no block, and in the text encoder.
PATHS = {
    "unet": [
        "down_blocks.0.attentions.1.proj_in",
        "down_blocks.0.downsamplers.0.conv",
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_q",
        "up_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k",
        "up_blocks.3.attentions.2.transformer_blocks.0.ff.net.2",
        "time_embedding.linear_1",
    ],
    "text_encoder": ["encoder.layers.3.mlp.fc1"],
}
PLACES = ["IN02", "IN03", "MID", "OUT03", "OUT11", OUTSIDE, BASE]


def write_lora(path: Path, scale: float = 0.1) -> dict[str, Tensor]:
    """Write a LoRA on ``PATHS`` with alphas of its own for each module; return path -> what it adds at strength 1."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    for component, paths in PATHS.items():
        network = small_model().networks()[component]
        for number, module_path in enumerate(paths):
            weight = network.get_submodule(_own_path(network, module_path)).weight
            up_shape = (weight.shape[0], 2) + (1, 1) * (weight.ndim == 4)
            down = torch.randn((2, *weight.shape[1:]), generator=generator) * scale
            up = torch.randn(up_shape, generator=generator) * scale
            prefix = "lora_unet_" if component == "unet" else "lora_te_text_model_"
            name = prefix + module_path.replace(".", "_")
            alpha = 1.0 + number
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
            deltas[module_path] = alpha / 2 * (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
    save_file(tensors, path)
    return deltas


def _own_path(network: nn.Module, path: str) -> str:
    names = dict(network.named_modules())
    return path if path in names else f"text_model.{path}"


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    path = tmp_path / "style.safetensors"
    write_lora(path)
    return path


def load() -> Family:
    options = ModelOptions(pretrained_model_name_or_path=str(model_folder()))
    return load_family(options, device="cpu", dtype=torch.float32)


def acting(family: Family, applied: AppliedLora) -> dict[str, Tensor]:
    """Path -> what the adapter adds to the weight."""
    found = {}
    for network in (family.denoiser, *family.text_encoders.values()):
        for path, module in network.named_modules():
            if isinstance(module, LoraLayer):
                found[path.removeprefix("text_model.")] = module.get_delta_weight(applied.adapter_name)
    return found


SEVENTEEN = "0.25,0,0.5" + ",0" * 4 + ",-2,0.75" + ",0" * 7 + ",1.5"


@pytest.mark.parametrize(
    ("items", "strengths"),
    [
        ("", [1, 1, 1, 1, 1, 1, 1]),
        (":0.8:te=0.5", [0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.5]),
        (":te=0:unet=0.3", [0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0]),
        (":lbw=OUTALL", [0, 0, 0, 1, 1, 1, 1]),
        (":0.5:lbw=INS", [0.5, 0, 0, 0, 0, 0.5, 0.5]),
        (":lbw=MIDD:unet=2", [0, 0, 2, 2, 0, 2, 1]),
        (f":0.5:te=2:lbw={SEVENTEEN}", [0.25, 0, -1, 0.375, 0.75, 0.5, 0.5]),
        (":lbw=0,1,1,1,0.5" + ",0" * 20 + ",3", [1, 0.5, 0, 0, 3, 1, 0]),
    ],
)
def test_every_module_acts_at_its_strength(lora: Path, items: str, strengths: list[float]) -> None:
    deltas = write_lora(lora)
    family = load()
    (applied,) = apply_loras(family, [parse_lora_choice(f"{lora}{items}")])
    assert applied.modules_by_place == dict.fromkeys(PLACES, 1)
    found = acting(family, applied)
    assert found.keys() == deltas.keys()
    for (path, delta), strength in zip(deltas.items(), strengths, strict=True):
        torch.testing.assert_close(found[path], strength * delta, rtol=1e-5, atol=1e-7)


def test_several_files_have_strengths_of_their_own(tmp_path: Path, lora: Path) -> None:
    family = load()
    deltas = write_lora(tmp_path / "second.safetensors", scale=0.2)
    second = LoraChoice(tmp_path / "second.safetensors", 0.5, lbw="OUTALL")
    first_applied, second_applied = apply_loras(family, [LoraChoice(lora, 1.0, lbw="INALL"), second])
    path = "up_blocks.3.attentions.2.transformer_blocks.0.ff.net.2"
    torch.testing.assert_close(acting(family, second_applied)[path], 0.5 * deltas[path])
    assert acting(family, first_applied)[path].abs().max() == 0


def test_shares_come_on_top_and_go_again(lora: Path) -> None:
    deltas = write_lora(lora)
    family = load()
    applied = apply_loras(family, [LoraChoice(lora, 0.5)])
    before = acting(family, applied[0])
    set_block_shares(family, applied, {"MID": 0.0, BASE: 3.0})
    found = acting(family, applied[0])
    assert found["mid_block.attentions.0.transformer_blocks.0.attn1.to_q"].abs().max() == 0
    torch.testing.assert_close(found["encoder.layers.3.mlp.fc1"], 1.5 * deltas["encoder.layers.3.mlp.fc1"])
    set_block_shares(family, applied)
    for path, delta in acting(family, applied[0]).items():
        assert torch.equal(delta, before[path])


def test_the_presets_of_a_file_win_and_random_values_follow_the_seed(lora: Path) -> None:
    presets = {"OUTALL": ("1",) * 17, "DICE": ("R", *["U"] * 16)}
    (applied,) = apply_loras(load(), [LoraChoice(lora, 1.0, lbw="OUTALL")], presets=presets)
    assert applied.strengths(SD_BLOCKS.names)["IN02"] == 1.0
    drawn = [
        apply_loras(load(), [LoraChoice(lora, lbw="DICE")], presets=presets, draw=random.Random(seed))[0].ratios.values
        for seed in (4, 4, 5)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_weights_that_cannot_be_meant_are_refused_before_the_model_is_changed(lora: Path) -> None:
    family = load()
    with pytest.raises(OptionError, match=r"lbw: there is no preset 'OUTAL'\. Did you mean 'OUTALL'"):
        apply_loras(family, [LoraChoice(lora), LoraChoice(lora, lbw="OUTAL")])
    assert not any(isinstance(module, LoraLayer) for module in family.denoiser.modules())


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def draw(tmp_path: Path, *loras: str, say: list[str] | None = None, grid: Any = False, **settings: Any) -> list[Path]:
    presets = settings.pop("lbw_presets", None)
    options = GenerateOptions(
        model=ModelOptions(pretrained_model_name_or_path=str(model_folder())),
        lora=LoraOptions(lora=list(loras), lbw_presets=presets),
        picture=PictureOptions(**{"prompt": ["a cat"], "seed": 5, "steps": 2, **settings}),
        output=OutputOptions(output_dir=tmp_path / "out", device="cpu", grid=grid),
    )
    return generate(options, say=[].append if say is None else say.append)


def values(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def texts(path: Path) -> tuple[dict[str, Any], str]:
    with Image.open(path) as image:
        return json.loads(image.text["maulstick"]), image.text["parameters"]


def test_pictures_name_weights_by_block(tmp_path: Path, lora: Path) -> None:
    presets = tmp_path / "lbwpresets.txt"
    presets.write_text("HALF:" + ",".join(["0.5"] * 17))
    said: list[str] = []
    (path,) = draw(tmp_path, f"{lora}:0.8:te=0.1:lbw=HALF", say=said, lbw_presets=presets)
    record, parameters = texts(path)
    (used,) = record["loras"]
    assert (used["weight"], used["text_encoder_weight"], used["lbw"]) == (0.8, 0.1, "HALF")
    assert used["lbw_values"] == [0.5] * 17
    assert "unet_weight" not in used
    assert f"<lora:style:0.1:0.8:lbw={','.join(['0.5'] * 17)}>" in parameters
    assert f"style.safetensors at 0.8, text encoder 0.1, lbw {','.join(['0.5'] * 17)}: 7 modules, 6 of them" in said[0]
    assert "; IN03 have no place in a list of 17 and get 0; 1 are in no block and keep their strength" in said[0]


def test_a_sheet_shows_every_block_alone_and_left_out(tmp_path: Path) -> None:
    """Cells are compared with pictures of the same strengths given by hand."""
    path = tmp_path / "style.safetensors"
    write_lora(path, scale=0.5)
    (sheet_path,) = draw(tmp_path, f"{path}:0.8", grid="block")
    assert sheet_path.name == "00001-blocks-5.png"
    sheet = values(sheet_path)
    in_order = [BASE, "IN02", "IN03", "MID", "OUT03", "OUT11"]
    assert 64 * 7 < sheet.shape[1] - 110 < 74 * 7
    cells = _cells(sheet, rows=2, columns=1 + len(in_order))
    (base,), (full,) = draw(tmp_path), draw(tmp_path, f"{path}:0.8")
    assert (cells[0][0] == values(base)).all()
    assert (cells[1][0] == values(full)).all()
    # Twenty-six values: BASE, then all blocks. The module in no block acts in the lower row only.
    (without_last,) = draw(tmp_path, f"{path}:0.8:lbw={'1,' * 25}0")
    assert (cells[1][1 + in_order.index("OUT11")] == values(without_last)).all()
    (only_text,) = draw(tmp_path, f"{path}:te=0.8:unet=0")
    assert (cells[0][1 + in_order.index(BASE)] == values(only_text)).all()
    assert abs(cells[0][1] - cells[0][0]).max() > 0
    assert abs(values(without_last) - values(full)).max() > 0


def _cells(sheet: np.ndarray, *, rows: int, columns: int) -> list[list[np.ndarray]]:
    """Cut out the 64x64 cells: they end 6 pixels from the right and lower edges and are 6 apart."""
    height, width = sheet.shape[:2]
    tops = [height - (rows - row) * 70 for row in range(rows)]
    lefts = [width - (columns - column) * 70 for column in range(columns)]
    return [[sheet[top : top + 64, left : left + 64] for left in lefts] for top in tops]


def test_a_sheet_of_blocks_needs_a_lora(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--grid block shows the blocks of a LoRA"):
        draw(tmp_path, grid="block")
