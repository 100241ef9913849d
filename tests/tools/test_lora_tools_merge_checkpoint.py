"""Merging LoRA files into checkpoints: every weight against the formula, layouts, number formats, memory, failures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.lora_family import FAMILIES
from maulstick.cli import main
from maulstick.errors import ModelError, OptionError
from maulstick.families.load import load_family
from maulstick.options.schema import ModelOptions
from maulstick.tools import merge_checkpoint
from maulstick.tools.checkpoint import open_checkpoint
from maulstick.tools.lora_choice import LoraChoice
from maulstick.tools.merge_checkpoint import merge_into_checkpoint, plan_merge
from maulstick.train.console import QuietConsole
from tests.models import model_folder, single_file, small_model
from tests.tools.lora_files import (
    assert_near,
    changes,
    random_lora,
    save_lora,
    sdxl_checkpoint,
    sdxl_lora,
    sdxl_rows,
    underscored,
)

GOLDEN = Path(__file__).parents[1] / "data" / "blocks" / "sdxl.json"


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def lora(tmp_path_factory) -> Path:
    return save_lora(tmp_path_factory.mktemp("lora") / "style.safetensors", random_lora())


def merge(base: Path, output: Path, *choices: LoraChoice, precision: str | None = None) -> Path:
    opened = open_checkpoint(base)
    merge_into_checkpoint(opened, plan_merge(opened, choices), output, QuietConsole(), precision)
    return output


def weights_of(path: Path, version: str = "sd1") -> dict[str, torch.Tensor]:
    """UNet and text encoder of a checkpoint of either layout, as the program loads them, by canonical name."""
    family = load_family(ModelOptions(pretrained_model_name_or_path=str(path)), device="cpu", dtype=torch.float32)
    unet = {f"lora_unet.{name}": tensor for name, tensor in family.denoiser.state_dict().items()}
    text = family.text_encoders["text_encoder"].state_dict()
    text = {f"lora_te.text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in text.items()}
    return {name.removesuffix(".weight").replace(".", "_"): t for name, t in (unet | text).items() if t.ndim > 1}


@cache
def base_weights(path: Path) -> dict[str, torch.Tensor]:
    return weights_of(path)


# ---------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("layout", ["folder", "single file"])
@pytest.mark.parametrize("strength", [0.5, -0.7])
def test_every_weight_gets_its_share_once(layout, strength, lora, tmp_path):
    base = model_folder() if layout == "folder" else single_file()
    output = merge(
        base, tmp_path / ("merged" if layout == "folder" else "merged.safetensors"), LoraChoice(lora, strength)
    )
    before, after, expected = base_weights(base), weights_of(output), changes(random_lora())
    assert len(expected) == 350
    for name, weight in before.items():
        delta = expected.get(name)
        if delta is None:
            assert torch.equal(after[name], weight), name
        else:
            assert delta.norm() > 0.1
            assert_near(after[name], weight + strength * delta, 2e-6)


@pytest.mark.parametrize("version", ["sd1", "sd2"])
def test_folder_and_single_file_come_out_the_same(version, tmp_path):
    lora = save_lora(tmp_path / "a.safetensors", random_lora(version), version)
    choice = LoraChoice(lora, 0.8)
    folder = weights_of(merge(model_folder(version), tmp_path / "folder", choice))
    single = weights_of(merge(single_file(version), tmp_path / "single.safetensors", choice))
    assert folder.keys() == single.keys()
    for name, weight in folder.items():
        assert_near(single[name], weight, 1e-6)


def test_strengths_apart_and_by_block_multiply_once(lora, tmp_path):
    """OUTALL leaves the text encoder, OUT03 to OUT11 and nothing else of the UNet's blocks."""
    choice = LoraChoice(
        lora, text_encoder_weight=0.25, denoiser_weight=-0.5, lbw=",".join(["0.5"] + ["0"] * 15 + ["0.3"])
    )
    after, before = weights_of(merge(model_folder(), tmp_path / "m", choice)), base_weights(model_folder())
    for name, delta in changes(random_lora()).items():
        strength = 0.25 * 0.5 if name.startswith("lora_te") else -0.5 * 0.3 * name.startswith("lora_unet_up_blocks_3_")
        strength *= not name.startswith("lora_unet_up_blocks_3_") or "_resnets_2_" in name or "_attentions_2_" in name
        assert_near(after[name], before[name] + strength * delta, 2e-6)


def test_several_loras_add_up_whatever_their_order(lora, tmp_path):
    other = save_lora(tmp_path / "other.safetensors", random_lora(seed=7, conv=False), layout="diffusers")
    one = weights_of(merge(model_folder(), tmp_path / "1", LoraChoice(lora, 0.5), LoraChoice(other, 2.0)))
    two = weights_of(merge(model_folder(), tmp_path / "2", LoraChoice(other, 2.0), LoraChoice(lora, 0.5)))
    before = base_weights(model_folder())
    first, second = changes(random_lora()), changes(random_lora(seed=7, conv=False))
    for name, weight in one.items():
        expected = before[name] + 0.5 * first.get(name, 0) + 2.0 * second.get(name, 0)
        assert_near(weight, expected, 1e-5)
        assert_near(two[name], weight, 1e-5)


def test_dora_is_applied_to_the_weight_as_it_was(tmp_path):
    """Merged beside another LoRA, its change is that of the original weight."""
    name, path = "lora_unet_mid_block_attentions_0_proj_in", "mid_block.attentions.0.proj_in"
    torch.manual_seed(0)
    plain = LoraWeights(torch.randn(2, 96, 1, 1), torch.randn(96, 2, 1, 1), 1.0)
    magnitude = torch.rand(96, 1, 1, 1) + 0.5
    save_file(
        {
            f"{name}.lora_down.weight": plain.down,
            f"{name}.lora_up.weight": plain.up,
            f"{name}.alpha": torch.tensor(1.0),
            f"{name}.dora_scale": magnitude,
        },
        tmp_path / "dora.safetensors",
    )
    lora = save_lora(tmp_path / "lora.safetensors", {name: plain})
    output = merge(model_folder(), tmp_path / "m", LoraChoice(lora), LoraChoice(tmp_path / "dora.safetensors", 0.5))
    base = small_model().unet.get_parameter(f"{path}.weight").detach()
    directed = base + delta_weight(plain)
    change = magnitude * directed / torch.linalg.vector_norm(directed, dim=(1, 2, 3), keepdim=True) - base
    expected = base + delta_weight(plain) + 0.5 * change
    torch.testing.assert_close(weights_of(output)[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unet_names", ["sai", "diffusers"])
def test_sdxl_names_and_its_fused_text_encoder(golden, unet_names, tmp_path):
    from maulstick.adapters.write_formats import layout_tensors, save_layout

    base = sdxl_checkpoint(golden, tmp_path / "xl.safetensors")
    modules = sdxl_lora(golden)
    tensors = layout_tensors(modules, FAMILIES["sdxl"], unet_names=unet_names)
    save_layout(tmp_path / "lora.safetensors", tensors, {})
    merged = load_file(
        merge(tmp_path / "xl.safetensors", tmp_path / "m.safetensors", LoraChoice(tmp_path / "lora.safetensors", 0.5))
    )
    delta = changes(modules)
    layer, names = "conditioner.embedders.1.model.transformer.resblocks.0.", "lora_te2_text_model_encoder_layers_0"
    clip = "conditioner.embedders.0.transformer.text_model.encoder.layers.0."
    expected = dict(base)
    for path, original, _ in sdxl_rows(golden):
        key = f"model.diffusion_model.{original}.weight"
        expected[key] = base[key] + 0.5 * delta[underscored("lora_unet", path)]
    for key, name in (
        (f"{clip}self_attn.q_proj.weight", "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"),
        (f"{clip}mlp.fc1.weight", "lora_te1_text_model_encoder_layers_0_mlp_fc1"),
        (f"{layer}attn.out_proj.weight", f"{names}_self_attn_out_proj"),
        (f"{layer}mlp.c_fc.weight", f"{names}_mlp_fc1"),
    ):
        expected[key] = base[key] + 0.5 * delta[name]
    fused = base[f"{layer}attn.in_proj_weight"].clone()
    fused[6:12] += 0.5 * delta[f"{names}_self_attn_k_proj"]
    fused[12:] += 0.5 * delta[f"{names}_self_attn_v_proj"]
    expected[f"{layer}attn.in_proj_weight"] = fused
    assert merged.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_near(merged[key], tensor, 1e-5)


def test_number_formats(golden, tmp_path):
    """Computed in fp32 and rounded once; what is no network keeps its format."""
    base = sdxl_checkpoint(golden, tmp_path / "xl.safetensors", torch.float16)
    modules = sdxl_lora(golden)
    lora = save_lora(tmp_path / "lora.safetensors", modules, "sdxl")
    path, original, _ = sdxl_rows(golden)[3]
    key = f"model.diffusion_model.{original}.weight"
    exact = base[key].float() + 0.1 * delta_weight(modules[underscored("lora_unet", path)])
    for precision, dtype in ((None, torch.float16), ("bf16", torch.bfloat16), ("float", torch.float32)):
        output = tmp_path / f"{precision}.safetensors"
        merged = load_file(merge(tmp_path / "xl.safetensors", output, LoraChoice(lora, 0.1), precision=precision))
        assert merged[key].dtype == dtype
        spacing = 1 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        assert (merged[key].float() - exact).abs().max() <= max(exact.abs().max() * spacing * 1.01, 1e-6)
        assert merged["first_stage_model.decoder.conv_in.weight"].dtype == dtype
        assert merged["denoiser.sigmas"].dtype == torch.float32
        assert torch.equal(merged["denoiser.sigmas"], base["denoiser.sigmas"])
        ids = "conditioner.embedders.0.transformer.text_model.embeddings.position_ids"
        assert torch.equal(merged[ids], torch.arange(7)[None])


def test_values_beyond_fp16_are_refused_and_nothing_is_written(golden, tmp_path):
    sdxl_checkpoint(golden, tmp_path / "xl.safetensors", torch.float16)
    lora = save_lora(tmp_path / "lora.safetensors", sdxl_lora(golden), "sdxl")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelError, match=r"the merged tensor '.*' holds values that torch.float16 cannot hold.*bf16"):
        merge(tmp_path / "xl.safetensors", tmp_path / "m.safetensors", LoraChoice(lora, 1e6))
    assert sorted(tmp_path.iterdir()) == before


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_a_folder_is_whole_and_says_what_was_done(lora, tmp_path):
    base = shutil.copytree(model_folder(), tmp_path / "base")
    (base / "unet" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"an old half-precision copy")
    (base / "v1-5.safetensors").write_bytes(b"the same model as a single file")
    output = merge(base, tmp_path / "merged", LoraChoice(lora, 0.5, lbw="OUTALL"))
    files = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert {"model_index.json", "unet/config.json", "vae/diffusion_pytorch_model.safetensors"} <= files
    assert "tokenizer/vocab.json" in files
    assert not files & {"unet/diffusion_pytorch_model.fp16.safetensors", "v1-5.safetensors"}
    vae = Path("vae/diffusion_pytorch_model.safetensors")
    assert load_file(output / vae).keys() == load_file(base / vae).keys()
    assert all(torch.equal(tensor, load_file(base / vae)[name]) for name, tensor in load_file(output / vae).items())
    with safe_open(output / "unet/diffusion_pytorch_model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    (entry,) = json.loads(metadata["maulstick.history"])
    assert entry["tool"] == "maulstick merge"
    assert entry["sources"][0] | {"sha256": ""} == {
        "file": "style.safetensors", "sha256": "", "unet": 0.5, "text_encoder": 0.5, "lbw": "OUTALL",
    }  # fmt: skip
    with safe_open(output / vae, "pt") as file:
        assert "maulstick.history" not in file.metadata()


def test_sharded_weights_stay_sharded(lora, tmp_path):
    base = shutil.copytree(model_folder(), tmp_path / "base")
    unet = base / "unet"
    tensors = load_file(unet / "diffusion_pytorch_model.safetensors")
    (unet / "diffusion_pytorch_model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a-00001-of-00002.safetensors": names[::2], "a-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, unet / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, members in parts.items() for n in members}}
    (unet / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    output = merge(base, tmp_path / "merged", LoraChoice(lora, 0.5), precision="fp16")
    written = json.loads((output / "unet" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert written["weight_map"] == index["weight_map"]
    assert written["metadata"]["total_size"] == 2 * sum(tensor.numel() for tensor in tensors.values())
    one = weights_of(merge(model_folder(), tmp_path / "one", LoraChoice(lora, 0.5)))
    for name, weight in weights_of(output).items():
        torch.testing.assert_close(weight, one[name], rtol=2e-3, atol=1e-3)


def test_a_pickled_checkpoint_becomes_safetensors(lora, tmp_path):
    torch.save({"state_dict": load_file(single_file())}, tmp_path / "model.ckpt")
    output = merge(tmp_path / "model.ckpt", tmp_path / "m.safetensors", LoraChoice(lora, 0.5))
    expected = load_file(merge(single_file(), tmp_path / "n.safetensors", LoraChoice(lora, 0.5)))
    for name, tensor in load_file(output).items():
        assert torch.equal(tensor, expected[name])


def test_metadata_of_a_single_file_is_kept_but_for_its_hash(golden, tmp_path):
    sdxl_checkpoint(golden, tmp_path / "xl.safetensors")
    lora = save_lora(tmp_path / "lora.safetensors", sdxl_lora(golden), "sdxl")
    once = merge(tmp_path / "xl.safetensors", tmp_path / "m.safetensors", LoraChoice(lora))
    twice = merge(once, tmp_path / "n.safetensors", LoraChoice(lora, -1.0))
    with safe_open(twice, "pt") as file:
        metadata = file.metadata()
    assert metadata["modelspec.title"] == "small"
    assert "modelspec.hash_sha256" not in metadata
    assert [entry["base"] for entry in json.loads(metadata["maulstick.history"])] == ["xl.safetensors", "m.safetensors"]
    restored = load_file(twice)
    for name, tensor in load_file(tmp_path / "xl.safetensors").items():
        assert_near(restored[name], tensor, 1e-5)


@pytest.mark.parametrize("layout", ["folder", "single file"])
def test_a_merge_that_breaks_off_leaves_everything_as_it_was(layout, lora, tmp_path, monkeypatch):
    base = model_folder() if layout == "folder" else single_file()
    output = tmp_path / ("merged" if layout == "folder" else "merged.safetensors")
    if layout == "folder":
        output.mkdir()
        (output / "old").write_text("old")
    else:
        output.write_text("old")
    calls = 0
    add_change = merge_checkpoint.add_change

    def failing(*arguments):
        nonlocal calls
        calls += 1
        if calls == 200:
            raise KeyboardInterrupt
        add_change(*arguments)

    monkeypatch.setattr(merge_checkpoint, "add_change", failing)
    with pytest.raises(KeyboardInterrupt):
        merge(base, output, LoraChoice(lora))
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert (output / "old" if layout == "folder" else output).read_text() == "old"
    monkeypatch.undo()
    merge(base, output, LoraChoice(lora))
    old = tmp_path / ("merged.old-1" if layout == "folder" else "merged.old-1.safetensors")
    assert (old / "old" if layout == "folder" else old).read_text() == "old"
    assert len(weights_of(output)) > 300


MEMORY = """
import re, sys
from pathlib import Path
from maulstick.tools.checkpoint import open_checkpoint
from maulstick.tools.lora_choice import LoraChoice
from maulstick.tools.merge_checkpoint import merge_into_checkpoint, plan_merge
from maulstick.train.console import QuietConsole

def status(entry):
    return int(re.search(entry + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

base = open_checkpoint(Path(sys.argv[1]))
plan = plan_merge(base, [LoraChoice(Path(sys.argv[2]))])
import torch
x = torch.ones(512, 512)
x.addmm_(torch.ones(512, 2), torch.ones(2, 512)).to(torch.float16)  # loads the code of the kernels
del x
Path("/proc/self/clear_refs").write_text("5")  # the peak so far, that of importing the libraries, is forgotten
before = status("VmRSS")
merge_into_checkpoint(base, plan, Path(sys.argv[3]), QuietConsole())
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
def test_memory_is_that_of_the_largest_tensor_not_of_the_checkpoint(tmp_path):
    """A checkpoint of 126 MB, its largest tensor of 6 MB: in memory it is there in fp16, in fp32 and in fp16 again.

    That is four times 6 MB; the allocator may keep as much again.
    """
    side = 2**10
    paths = [
        f"model.diffusion_model.input_blocks.{block}.1.transformer_blocks.{depth}.attn1.to_{role}.weight"
        for block, depth, role in [(b, d, r) for b in (4, 5, 7, 8) for d in (0, 1) for r in "qkv"]
    ]
    tensors = {path: torch.zeros(3 * side, side, dtype=torch.float16) for path in paths[:20]}
    largest = max(tensor.nbytes for tensor in tensors.values())
    tensors["conditioner.embedders.0.transformer.text_model.final_layer_norm.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "xl.safetensors")
    total = (tmp_path / "xl.safetensors").stat().st_size
    lora = {
        path.removeprefix("model.diffusion_model.").removesuffix(".weight"): LoraWeights(
            torch.ones(2, side), torch.ones(3 * side, 2), 2.0
        )
        for path in paths[:20]
    }
    save_file(
        {
            f"lora_unet_{path.replace('.', '_')}.{part}": tensor
            for path, weights in lora.items()
            for part, tensor in (("lora_down.weight", weights.down), ("lora_up.weight", weights.up))
        },
        tmp_path / "lora.safetensors",
    )
    arguments = [str(tmp_path / name) for name in ("xl.safetensors", "lora.safetensors", "m.safetensors")]
    source = Path(merge_checkpoint.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments],
        env={"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    grown = int(done.stdout)
    assert total > 20 * largest
    assert 2 * largest < grown < 8 * largest
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor(paths[3])[:2, :2], torch.full((2, 2), 2.0, dtype=torch.float16))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_loras_of_other_families_and_sizes_are_refused(golden, lora, tmp_path):
    xl = save_lora(tmp_path / "xl-lora.safetensors", sdxl_lora(golden), "sdxl")
    with pytest.raises(ModelError, match=r"is a LoRA for SDXL, but .* is Stable Diffusion 1.x"):
        merge(model_folder(), tmp_path / "m", LoraChoice(xl))
    sdxl_checkpoint(golden, tmp_path / "xl.safetensors")
    with pytest.raises(ModelError, match=r"is a LoRA for Stable Diffusion 1.x or 2.x, but .* is SDXL"):
        merge(tmp_path / "xl.safetensors", tmp_path / "m.safetensors", LoraChoice(lora))
    name = "lora_unet_mid_block_attentions_0_proj_in"
    wrong = save_lora(
        tmp_path / "w.safetensors", {name: LoraWeights(torch.ones(1, 8, 1, 1), torch.ones(4, 1, 1, 1), 1.0)}
    )
    with pytest.raises(ModelError, match=rf"{name}' changes a weight of shape \[4, 8, 1, 1\], but that weight is"):
        merge(model_folder(), tmp_path / "m", LoraChoice(wrong))
    with pytest.raises(ModelError, match=r"is a LoRA or similar adapter file, but an SD 1\.x, SD 2\.x, SDXL or SD3"):
        open_checkpoint(lora)
    with pytest.raises(ModelError, match="There is no model at"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(OptionError, match=r"no preset 'OUTAL'.*OUTALL"):
        merge(model_folder(), tmp_path / "m", LoraChoice(lora, lbw="OUTAL"))
    assert not (tmp_path / "m").exists()


def test_modules_without_a_place_are_named_and_the_rest_is_merged(tmp_path, capsys):
    modules = random_lora(text=False, conv=False) | {
        "lora_unet_down_blocks_7_attentions_0_proj_in": LoraWeights(torch.ones(1, 2), torch.ones(2, 1), 1.0)
    }
    lora = save_lora(tmp_path / "l.safetensors", modules)
    output = tmp_path / "m.safetensors"
    arguments = ["merge", f"{lora}:0.5", "--base", str(single_file()), "--output", str(output)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert (
        "1 modules have no place in sd1.safetensors (lora_unet_down_blocks_7_attentions_0_proj_in, …), left out" in said
    )
    assert "192 tensors of sd1.safetensors changed" in said
    assert main(arguments) == 2
    assert "exists already. Give another name, or --set_aside" in capsys.readouterr().err
    assert main([*arguments, "--set_aside"]) == 0
    assert (tmp_path / "m.old-1.safetensors").exists()
    assert main([*arguments[:4], "--output", str(tmp_path / "m.ckpt")]) == 2
    assert "should end in .safetensors" in capsys.readouterr().err
    assert main([*arguments[:4], "--output", str(tmp_path / "n.safetensors"), "--rank", "4"]) == 2
    assert "--rank is for LoRA + LoRA" in capsys.readouterr().err
    assert main(["merge", str(lora), "--base", str(model_folder()), "--output", str(tmp_path / "f.safetensors")]) == 2
    assert "a folder is written here" in capsys.readouterr().err
