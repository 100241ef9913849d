"""The tools for LoRA files on SD3: merging into folder and file, converting, inspecting, drawing with any form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from maulstick.adapters.factors import delta_weight
from maulstick.adapters.read_formats import plain_modules, read_adapter
from maulstick.adapters.write_formats import save_layout
from maulstick.cli import main
from maulstick.errors import ModelError, OptionError
from maulstick.families.load import load_family
from maulstick.options.schema import ModelOptions
from maulstick.tools.apply_lora import apply_loras
from maulstick.tools.checkpoint import open_checkpoint
from maulstick.tools.convert import convert_lora
from maulstick.tools.extract import ExtractChoice, extract_lora, parse_block_ranks
from maulstick.tools.inspect_lora import inspect_file
from maulstick.tools.lora_choice import LoraChoice, parse_lora_choice
from maulstick.tools.merge_checkpoint import merge_into_checkpoint, plan_merge
from maulstick.train.console import QuietConsole
from tests.models import model_folder
from tests.sd3_models import kohya_file, sd3_file, sd3_folder
from tests.sdxl_models import sdxl_folder


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kohya_file(tmp_path_factory.mktemp("lora") / "style.safetensors")


def load(path: Path):
    options = ModelOptions(pretrained_model_name_or_path=str(path), no_t5xxl=True)
    family = load_family(options, device="cpu", dtype=torch.float32)
    family.prepare_for_adapters()
    return family


def merge(base: Path, output: Path, lora: Path, weight: float) -> Path:
    opened = open_checkpoint(base)
    plan = plan_merge(opened, [LoraChoice(lora, weight)])
    assert plan.unmatched == {lora: ()}
    merge_into_checkpoint(opened, plan, output, QuietConsole())
    return output


@pytest.mark.parametrize("form", ["folder", "file"])
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_merged_checkpoint_has_the_change_of_every_module(lora: Path, tmp_path: Path, form: str, layout: str) -> None:
    base = sd3_folder(with_t5=False) if form == "folder" else sd3_file()
    file = read_adapter(lora)
    if layout == "diffusers":
        tensors, metadata = convert_lora(file, tmp_path / "other.safetensors", layout="diffusers")
        save_layout(tmp_path / "other.safetensors", tensors, metadata, layout="diffusers")
        lora = tmp_path / "other.safetensors"
    merged = merge(base, tmp_path / ("merged" if form == "folder" else "merged.safetensors"), lora, 0.5)
    before, after = load(base), load(merged)
    changed = 0
    for name, module in file.modules.items():
        component, path = before.key_names.locate(name)
        networks = [
            family.denoiser if component == "transformer" else family.text_encoders[component]
            for family in (before, after)
        ]
        old, new = (network.get_submodule(path).weight for network in networks)
        torch.testing.assert_close(new - old, 0.5 * delta_weight(module), rtol=1e-4, atol=1e-5)
        changed += 1
    assert changed == 32
    untouched = ("context_embedder.weight", "pos_embed.proj.weight", "transformer_blocks.0.attn2.norm_q.weight")
    for name in untouched:
        assert torch.equal(after.denoiser.state_dict()[name], before.denoiser.state_dict()[name])


def test_a_lora_of_another_family_is_refused(lora: Path) -> None:
    with pytest.raises(ModelError, match="is a LoRA for Stable Diffusion 3, but"):
        plan_merge(open_checkpoint(model_folder()), [LoraChoice(lora, 1.0)])


def test_a_lora_is_not_put_on_another_family_for_the_sake_of_the_text_encoders_they_share(tmp_path: Path) -> None:
    path = tmp_path / "sd3.safetensors"
    shapes = {"unet_joint_blocks_0_x_block_mlp_fc1": (512, 128), "te1_text_model_encoder_layers_0_mlp_fc1": (128, 64)}
    tensors = {f"lora_{name}.lora_down.weight": torch.zeros(2, columns) for name, (_, columns) in shapes.items()}
    tensors |= {f"lora_{name}.lora_up.weight": torch.zeros(rows, 2) for name, (rows, _) in shapes.items()}
    save_file(tensors, path)
    options = ModelOptions(pretrained_model_name_or_path=str(sdxl_folder()))
    family = load_family(options, device="cpu", dtype=torch.float32)
    with pytest.raises(ModelError, match=r"for Stable Diffusion 3: .* fit this SDXL model, but none of the 1 for"):
        apply_loras(family, [LoraChoice(path, 1.0)])


def test_every_form_draws_with_the_same_change(lora: Path, tmp_path: Path) -> None:
    file = read_adapter(lora)
    tensors, metadata = convert_lora(file, tmp_path / "theirs.safetensors", layout="diffusers")
    save_layout(tmp_path / "theirs.safetensors", tensors, metadata, layout="diffusers")
    family = load(sd3_folder(with_t5=False))
    first, second = apply_loras(
        family, [parse_lora_choice(f"{lora}:0.5:te=0.25"), parse_lora_choice(f"{tmp_path / 'theirs.safetensors'}:-0.5")]
    )
    assert (first.modules, second.modules, first.unmatched) == (32, 32, ())
    assert first.modules_by_place == {"block.0": 12, "block.1": 10, "block.2": 7, "BASE": 3}
    noisy, times = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([500.0])
    generator = torch.Generator().manual_seed(1)
    text = {
        "encoder_hidden_states": torch.randn(1, 9, 256, generator=generator),
        "pooled_projections": torch.randn(1, 160, generator=generator),
    }
    plain = load(sd3_folder(with_t5=False)).predict(noisy, times, text)
    # What the one adds the other takes away again.
    torch.testing.assert_close(family.predict(noisy, times, text), plain, rtol=1e-3, atol=1e-3)
    (alone,) = apply_loras(again := load(sd3_folder(with_t5=False)), [parse_lora_choice(f"{lora}:0.5")])
    assert alone.modules == 32
    merged = load(merge(sd3_folder(with_t5=False), tmp_path / "merged", lora, 0.5))
    expected = merged.predict(noisy, times, text)
    torch.testing.assert_close(again.predict(noisy, times, text), expected, rtol=1e-3, atol=1e-3)
    assert (expected - plain).abs().max() > 0.1


def test_inspect_counts_by_joint_block(lora: Path) -> None:
    facts = inspect_file(lora)
    assert (facts.family, facts.layout) == ("Stable Diffusion 3", "kohya")
    assert {block.block: block.modules for block in facts.blocks} == {
        "TE1": 2,
        "TE2": 1,
        "joint 00": 12,
        "joint 01": 10,
        "joint 02": 7,
    }


def test_what_is_not_there_for_sd3_is_refused(lora: Path) -> None:
    with pytest.raises(OptionError, match="lbw"):
        apply_loras(load(sd3_folder(with_t5=False)), [parse_lora_choice(f"{lora}:lbw=OUTALL")])


@pytest.mark.parametrize("form", ["folder", "file", "mixed"])
def test_a_merged_lora_is_found_again(lora: Path, tmp_path: Path, form: str) -> None:
    base = sd3_file() if form == "file" else sd3_folder(with_t5=False)
    merged_base = sd3_folder(with_t5=False) if form == "folder" else sd3_file()
    tuned = merge(merged_base, tmp_path / ("tuned" if form == "folder" else "tuned.safetensors"), lora, 1.0)
    output = tmp_path / "found.safetensors"
    assert main(["extract", str(base), str(tuned), "--rank", "3", "--output", str(output)]) == 0
    file = read_adapter(output)
    assert (file.family.kind, file.metadata["ss_network_module"]) == ("sd3", "networks.lora_sd3")
    found = plain_modules(file)
    exact = {name: delta_weight(module) for name, module in read_adapter(lora).modules.items()}
    # Text encoders are written whole: the rest of their modules change nothing.
    extra = {name: weights for name, weights in found.items() if name not in exact}
    assert all(name.startswith(("lora_te1_", "lora_te2_")) and not weights.up.any() for name, weights in extra.items())
    assert exact.keys() <= found.keys()
    for name, delta in exact.items():
        torch.testing.assert_close(delta_weight(found[name]), delta, rtol=1e-2, atol=1e-2 * float(delta.abs().max()))


def test_extracted_ranks_by_joint_block(lora: Path, tmp_path: Path) -> None:
    base = open_checkpoint(sd3_folder(with_t5=False))
    tuned = open_checkpoint(merge(sd3_folder(with_t5=False), tmp_path / "tuned", lora, 1.0))
    choice = ExtractChoice(rank=2, unet_only=True, block_ranks=parse_block_ranks("1=1, joint 02=0", base))
    found = extract_lora(base, tuned, choice)
    ranks = {block.block: (block.modules, block.ranks) for block in found.approximation.blocks if block.modules}
    assert ranks == {"joint 00": (12, (2,)), "joint 01": (10, (1,))}
    with pytest.raises(OptionError, match=r"no block 'joint 03'.*Blocks: joint 00, joint 01, joint 02"):
        parse_block_ranks("3=1", base)
