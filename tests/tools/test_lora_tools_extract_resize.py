"""Extracting a LoRA from two checkpoints, resizing one, and converting between layouts, through the commands."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.read_formats import plain_modules, read_adapter
from maulstick.cli import main
from maulstick.errors import ModelError, OptionError
from maulstick.tools.checkpoint import open_checkpoint
from maulstick.tools.extract import ExtractChoice, extract_lora, parse_block_ranks
from maulstick.tools.lora_choice import LoraChoice
from maulstick.tools.low_rank import RankChoice
from maulstick.tools.merge_checkpoint import merge_into_checkpoint, plan_merge
from maulstick.tools.resize import resize_lora
from maulstick.train.console import QuietConsole
from tests.models import model_folder, single_file
from tests.tools.lora_files import changes, random_lora, save_lora, sdxl_checkpoint, sdxl_lora

GOLDEN = Path(__file__).parents[1] / "data" / "blocks" / "sdxl.json"
Q = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
CONV = "lora_unet_mid_block_resnets_0_conv1"


def merged(base: Path, lora: Path, output: Path, strength: float = 1.0) -> Path:
    opened = open_checkpoint(base)
    merge_into_checkpoint(opened, plan_merge(opened, [LoraChoice(lora, strength)]), output, QuietConsole())
    return output


def error_of(found: dict[str, LoraWeights], exact: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over all modules, relative to the exact changes."""
    zero = LoraWeights(torch.zeros(1, 1), torch.zeros(1, 1), 1.0)
    cut = sum(float((delta_weight(found.get(name, zero)) - delta).norm()) ** 2 for name, delta in exact.items())
    return math.sqrt(cut / sum(float(delta.norm()) ** 2 for delta in exact.values()))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> dict[str, Path]:
    """The small model with a LoRA of ranks 3 and 2 merged in, as folder and as single file."""
    folder = tmp_path_factory.mktemp("tuned")
    lora = save_lora(folder / "lora.safetensors", random_lora(alpha=3.0))
    return {
        "folder": merged(model_folder(), lora, folder / "tuned"),
        "file": merged(single_file(), lora, folder / "tuned.safetensors"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Extract


@pytest.mark.parametrize("layout", ["folder", "file", "mixed"])
def test_a_known_lora_is_found_again(layout, tuned, tmp_path, capsys):
    base = single_file() if layout == "file" else model_folder()
    other = tuned["folder"] if layout == "folder" else tuned["file"]
    output = tmp_path / "found.safetensors"
    arguments = ["extract", str(base), str(other), "--rank", "3", "--conv_rank", "2", "--output", str(output)]
    assert main(arguments) == 0
    file = read_adapter(output)
    exact = changes(random_lora(alpha=3.0))
    assert file.modules.keys() == exact.keys()
    assert file.modules[Q].rank == 3
    assert file.modules[CONV].rank == 2
    assert error_of(plain_modules(file), exact) < 1e-3
    assert re.search(r"350 modules, error 0\.0\d% of their difference", capsys.readouterr().out)
    assert file.metadata["ss_base_model_version"] == "sd_v1"
    assert file.metadata["ss_sd_model_name"] == base.name
    (entry,) = json.loads(file.metadata["maulstick.history"])
    assert entry["tuned"] == other.name
    assert entry["error"] < 1e-3


def test_the_stated_error_is_the_error_and_near_the_best(tuned):
    base, other = open_checkpoint(model_folder()), open_checkpoint(tuned["folder"])
    found = extract_lora(base, other, ExtractChoice(rank=2, conv_rank=1))
    exact = changes(random_lora(alpha=3.0))
    modules = found.approximation.modules
    assert found.approximation.error == pytest.approx(error_of(modules, exact), rel=1e-3)
    best = total = 0.0
    for name, delta in exact.items():
        values = torch.linalg.svdvals(delta.flatten(1))
        best += float(values[modules[name].rank :].norm()) ** 2
        total += float(values.norm()) ** 2
    assert found.approximation.error <= 1.01 * math.sqrt(best / total)
    by_block = {block.block: block for block in found.approximation.blocks}
    assert by_block["IN04"].modules == 16
    assert by_block["IN04"].ranks == (1, 2)
    members = [name for name in exact if "_down_blocks_1_resnets_0_" in name or "_down_blocks_1_attentions_0_" in name]
    assert by_block["IN04"].error == pytest.approx(error_of(modules, {name: exact[name] for name in members}), rel=1e-3)


def test_modules_blocks_and_ranks_that_are_asked_for(tuned):
    base, other = open_checkpoint(model_folder()), open_checkpoint(tuned["folder"])
    ranks = parse_block_ranks("IN04=1, OUT11=0", base)
    found = extract_lora(base, other, ExtractChoice(rank=3, block_ranks=ranks, unet_only=True))
    modules = found.approximation.modules
    assert len(modules) == 192 - 12
    assert {w.rank for name, w in modules.items() if "_down_blocks_1_attentions_0_" in name} == {1}
    assert {w.rank for name, w in modules.items() if "_down_blocks_1_attentions_1_" in name} == {3}
    exact = changes(random_lora(alpha=3.0))
    left_out = sum(float(delta.norm()) ** 2 for name, delta in exact.items() if name not in modules)
    whole = sum(float(delta.norm()) ** 2 for delta in exact.values())
    assert found.outside == pytest.approx(math.sqrt(left_out / whole), rel=1e-4)


def test_an_energy_chooses_ranks_by_the_whole_difference(tuned):
    base, other = open_checkpoint(model_folder()), open_checkpoint(tuned["folder"])
    found = extract_lora(base, other, ExtractChoice(rank=3, conv_rank=2, energy=0.7))
    ranks = {name: weights.rank for name, weights in found.approximation.modules.items()}
    assert len(set(ranks.values())) > 1
    for name, delta in list(changes(random_lora(alpha=3.0)).items())[::7]:
        squares = torch.linalg.svdvals(delta.flatten(1).double()).square()
        needed = int((squares.cumsum(0) / squares.sum() < 0.7).sum()) + 1
        assert ranks[name] == needed
    assert found.approximation.error <= math.sqrt(0.3)


def test_text_encoders_are_written_whole_or_not_at_all(tmp_path):
    """Some programs skip a layer of which only some modules are there."""
    name = "lora_te_text_model_encoder_layers_3_mlp_fc1"
    lora = save_lora(tmp_path / "one.safetensors", {name: random_lora()[name]})
    other = open_checkpoint(merged(model_folder(), lora, tmp_path / "tuned"))
    found = extract_lora(open_checkpoint(model_folder()), other, ExtractChoice(rank=3))
    modules = found.approximation.modules
    assert len(modules) == 72
    assert all(name.startswith("lora_te_") for name in modules)
    assert {n for n, weights in modules.items() if delta_weight(weights).any()} == {name}
    assert found.unchanged == 192 + 71
    output = tmp_path / "found.safetensors"
    assert main(["extract", str(model_folder()), str(other.path), "--output", str(output)]) == 0
    assert len(read_adapter(output).modules) == 72


def test_differences_of_biases_and_rounding(tuned, tmp_path):
    base = shutil.copytree(model_folder(), tmp_path / "biased")
    path = base / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["mid_block.attentions.0.proj_in.bias"] += 1.0
    tensors["mid_block.attentions.0.proj_in.weight"] += 1e-5
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match="do not differ in any weight that a LoRA was asked for"):
        extract_lora(open_checkpoint(model_folder()), open_checkpoint(base), ExtractChoice(min_difference=1e-4))
    found = extract_lora(open_checkpoint(model_folder()), open_checkpoint(base), ExtractChoice())
    assert list(found.approximation.modules) == ["lora_unet_mid_block_attentions_0_proj_in"]
    assert found.outside == pytest.approx(1.0, abs=1e-3)
    assert (
        extract_lora(open_checkpoint(single_file()), open_checkpoint(tuned["folder"]), ExtractChoice()).outside is None
    )


def test_sdxl_with_its_fused_text_encoder(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    sdxl_checkpoint(golden, tmp_path / "xl.safetensors")
    modules = {name: weights for name, weights in sdxl_lora(golden).items() if "_attentions_" in name or "_te" in name}
    lora = save_lora(tmp_path / "lora.safetensors", modules, "sdxl")
    other = merged(tmp_path / "xl.safetensors", lora, tmp_path / "tuned.safetensors")
    output = tmp_path / "found.safetensors"
    arguments = ["extract", str(tmp_path / "xl.safetensors"), str(other), "--rank", "2", "--output", str(output)]
    assert main(arguments) == 0
    file = read_adapter(output)
    assert file.family.kind == "sdxl"
    assert any(key.startswith("lora_unet_input_blocks_4_1_") for key in load_file(output))
    found = plain_modules(file)
    assert len([name for name in found if name.startswith("lora_unet")]) == 722
    # The q of the fused projection was not changed, and is there all the same.
    assert found.keys() - modules.keys() == {"lora_te2_text_model_encoder_layers_0_self_attn_q_proj"}
    assert error_of(found, changes(modules)) < 1e-3


def test_extract_refuses_what_cannot_be_compared(tuned, tmp_path, capsys):
    with pytest.raises(ModelError, match=r"is Stable Diffusion 1\.x, .* is Stable Diffusion 2\.x"):
        extract_lora(open_checkpoint(model_folder()), open_checkpoint(model_folder("sd2")), ExtractChoice())
    with pytest.raises(OptionError, match=r"no block 'IN4'\. Did you mean 'IN04'"):
        parse_block_ranks("IN4=2", open_checkpoint(model_folder()))
    with pytest.raises(OptionError, match="MID=x: expected BLOCK=RANK, such as MID=16"):
        parse_block_ranks("MID=x", open_checkpoint(model_folder()))
    for option, words in (
        ({"rank": 0}, "--rank is 0"),
        ({"energy": 2.0}, "--energy is 2"),
        ({"iterations": -1}, "at least 0"),
    ):
        with pytest.raises(OptionError, match=words):
            ExtractChoice(**option)
    broken = shutil.copytree(tuned["folder"], tmp_path / "broken")
    path = broken / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["mid_block.attentions.0.proj_in.weight"][0] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"broken: the weight of 'lora_unet_mid_block_attentions_0_proj_in' holds values"
    ):
        extract_lora(open_checkpoint(model_folder()), open_checkpoint(broken), ExtractChoice())
    assert main(["extract", str(model_folder()), str(tuned["folder"])]) == 2
    assert "Name the file to write with --output FILE" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Resize


def test_resize_keeps_the_leading_singular_values_and_the_strength(tmp_path):
    path = save_lora(
        tmp_path / "a.safetensors", random_lora(rank=6, alpha=3.0), metadata={"ss_epoch": "3", "ss_network_dim": "6"}
    )
    output = tmp_path / "b.safetensors"
    assert main(["resize", str(path), "--rank", "4", "--output", str(output)]) == 0
    file = read_adapter(output)
    before, after = changes(random_lora(rank=6, alpha=3.0)), plain_modules(file)
    for name, delta in before.items():
        full = torch.linalg.svdvals(delta.flatten(1))
        rank = min(4, 2 if name.endswith(("_conv1", "_conv2", "samplers_0_conv")) else 6)
        assert after[name].rank == rank
        values = torch.linalg.svdvals(delta_weight(after[name]).flatten(1))
        torch.testing.assert_close(values[:rank], full[:rank], rtol=1e-4, atol=1e-6)
        assert (delta_weight(after[name]) - delta).norm() <= full[rank:].norm() * 1.001 + 1e-5
    assert after[Q].alpha == 2.0  # 3 / 6 = 2 / 4
    assert file.metadata["ss_epoch"] == "3"
    assert file.metadata["ss_network_dim"] == "Dynamic"
    assert json.loads(file.metadata["maulstick.history"])[0]["rank"] == 4


def test_resize_states_its_error_and_chooses_ranks_by_rule(tmp_path):
    file = read_adapter(save_lora(tmp_path / "a.safetensors", random_lora(rank=6)))
    exact = changes(random_lora(rank=6))
    for rule, value in (("sv_fro", 0.8), ("sv_energy", 0.64)):
        resized = resize_lora(file, RankChoice(rule, value, 6))
        assert resized.error == pytest.approx(error_of(resized.modules, exact), rel=1e-3)
        for name, delta in list(exact.items())[::9]:
            values = torch.linalg.svdvals(delta.flatten(1).double())
            shares = values.square().cumsum(0) / values.square().sum()
            assert resized.modules[name].rank == int((shares < 0.64).sum()) + 1
    conv = resize_lora(file, RankChoice("fixed", 0, 6), RankChoice("fixed", 0, 1))
    assert conv.modules[CONV].rank == 1
    assert conv.modules[Q] is file.modules[Q]


def test_resizing_up_or_by_half_a_rule_is_refused(tmp_path, capsys):
    path = save_lora(tmp_path / "a.safetensors", {Q: random_lora()[Q]})
    output = ["--output", str(tmp_path / "b.safetensors")]
    for arguments, words in (
        (["--rank", "3"], "no module of a rank above what was asked for (its largest is 3)"),
        ([], "No new rank is given"),
        (["--rank", "2", "--rule", "sv_fro"], "--rule and --value belong together"),
        (["--rank", "2", "--value", "0.5"], "--rule and --value belong together"),
        (["--rank", "2", "--rule", "sv_fro", "--value", "3"], "sv_fro is 3; it must be above 0 and at most 1"),
    ):
        assert main(["resize", str(path), *arguments, *output]) == 2
        assert words in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_loha_becomes_a_lora_and_a_dora_does_not(tmp_path, capsys):
    torch.manual_seed(0)
    name = CONV
    parts = {f"hada_w{n}_{x}": torch.randn(s) for n in (1, 2) for x, s in (("a", (8, 2)), ("b", (2, 6 * 9)))}
    loha = tmp_path / "loha.safetensors"
    save_file({f"{name}.{part}": tensor for part, tensor in parts.items()}, loha)
    output = tmp_path / "lora.safetensors"
    assert main(["resize", str(loha), "--rank", "4", "--output", str(output)]) == 0
    weights = plain_modules(read_adapter(output))[name]
    exact = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    torch.testing.assert_close(delta_weight(weights), exact.reshape(8, 6, 3, 3), rtol=1e-4, atol=1e-4)
    assert main(["convert", str(loha), "--output", str(tmp_path / "c.safetensors")]) == 2
    assert "is a LoHa, which has no other naming. 'maulstick resize --rank N'" in capsys.readouterr().err
    dora = tmp_path / "dora.safetensors"
    plain = {"lora_down.weight": torch.ones(1, 4), "lora_up.weight": torch.ones(4, 1), "dora_scale": torch.ones(4, 1)}
    save_file({f"{Q}.{part}": tensor for part, tensor in plain.items()}, dora)
    for command in (["resize", str(dora), "--rank", "1"], ["merge", str(dora)]):
        assert main([*command, "--output", str(tmp_path / "d.safetensors")]) == 2
        assert "is a DoRA, whose change depends on the weights of the base model" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Convert


@pytest.mark.parametrize("layout", ["diffusers", "peft", "comfyui", "kohya"])
def test_there_and_back_again(layout, tmp_path):
    modules = random_lora()
    modules[Q] = modules[Q]._replace(alpha=0.5)
    path = save_lora(tmp_path / "a.safetensors", modules, metadata={"ss_epoch": "3", "ss_network_dim": "3"})
    there = tmp_path / ("there" if layout == "peft" else "there.safetensors")
    back = tmp_path / "back.safetensors"
    assert main(["convert", str(path), "--to", layout, "--output", str(there)]) == 0
    assert main(["convert", str(there), "--output", str(back), "--save_precision", "float"]) == 0
    file = read_adapter(back)
    assert file.layout == "kohya"
    assert error_of(plain_modules(file), changes(modules)) < 1e-6
    assert file.modules.keys() == modules.keys()
    assert (file.metadata["ss_epoch"], file.metadata["ss_network_dim"]) == ("3", "3")
    assert "format" not in file.metadata
    assert [entry["to"] for entry in json.loads(file.metadata["maulstick.history"])] == [layout, "kohya"]
    if layout == "peft":
        assert (there / "unet" / "adapter_config.json").is_file()
        assert main(["convert", str(path), "--to", layout, "--output", str(there), "--set_aside"]) == 0
        assert (tmp_path / "there.old-1" / "unet" / "adapter_config.json").is_file()


def test_sdxl_names_and_number_formats(tmp_path):
    modules = sdxl_lora(json.loads(GOLDEN.read_text()))
    path = save_lora(tmp_path / "a.safetensors", modules, "sdxl", dtype=torch.float16)
    output = tmp_path / "b.safetensors"
    assert main(["convert", str(path), "--unet_names", "diffusers", "--output", str(output)]) == 0
    tensors = load_file(output)
    assert "lora_unet_down_blocks_1_attentions_0_proj_in.lora_up.weight" in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert main(["convert", str(output), "--output", str(tmp_path / "c.safetensors"), "--save_precision", "bf16"]) == 0
    assert load_file(tmp_path / "c.safetensors").keys() == load_file(path).keys()
    assert read_adapter(tmp_path / "c.safetensors").dtypes == (torch.bfloat16,)


def test_an_output_that_cannot_be_written_leaves_the_old_one_in_its_place(tmp_path, capsys):
    modules = {Q: LoraWeights(torch.full((1, 4), 1e5), torch.ones(4, 1), 1.0)}
    path = save_lora(tmp_path / "a.safetensors", modules)
    output = tmp_path / "b.safetensors"
    output.write_text("old")
    arguments = ["convert", str(path), "--output", str(output), "--save_precision", "fp16", "--set_aside"]
    assert main(arguments) == 2
    assert "65504 do not fit into fp16" in capsys.readouterr().err
    assert output.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
