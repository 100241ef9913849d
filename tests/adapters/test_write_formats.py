"""LoRA files in the naming of every program: read back, and loaded by the programs themselves."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.files import data_hash
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.adapters.lora_family import FAMILIES, block_label
from maulstick.adapters.read_formats import plain_modules, read_adapter, read_plain_lora
from maulstick.adapters.targets import plan_lora
from maulstick.adapters.write_formats import layout_tensors, save_layout
from maulstick.errors import ModelError
from tests.adapters.peft_adapters import (
    assert_same_changes,
    deltas,
    random_lora,
    small_pipeline,
    underscored,
)
from tests.models import original_layout, small_model

# ---------------------------------------------------------------------------------------------------------------------
# Layouts that we write


@pytest.mark.parametrize("layout", ["kohya", "diffusers", "peft", "comfyui"])
@pytest.mark.parametrize("version", ["sd1", "sd2"])
def test_every_layout_is_read_back_with_the_same_strengths(layout, version, tmp_path):
    modules = random_lora(version)
    path = tmp_path / ("adapter" if layout == "peft" else "lora.safetensors")
    tensors = layout_tensors(modules, FAMILIES[version], layout=layout)
    save_layout(path, tensors, {"ss_base_model_version": {"sd1": "sd_v1", "sd2": "sd_v2"}[version]}, layout=layout)
    file = read_adapter(path)
    assert (file.layout, file.family.kind) == (layout, version)
    assert_same_changes(plain_modules(file), modules)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_diffusers_applies_mixed_ranks_and_alphas_of_both_layouts(layout, tmp_path):
    modules = random_lora()
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_layout(path, layout_tensors(modules, FAMILIES["sd1"], layout=layout), {}, layout=layout)
    loaded = small_pipeline()
    loaded.load_lora_weights(path, adapter_name="default")
    found = {underscored("lora_unet", p): d for p, d in deltas(loaded.unet).items()}
    found |= {underscored("lora_te_text_model", p): d for p, d in deltas(loaded.text_encoder).items()}
    assert set(found) == set(modules)
    for name, delta in found.items():
        torch.testing.assert_close(delta, delta_weight(modules[name]), rtol=1e-4, atol=1e-4)


def test_peft_loads_what_is_written_for_it(tmp_path):
    modules = random_lora()
    save_layout(tmp_path / "a", layout_tensors(modules, FAMILIES["sd1"], layout="peft"), {}, layout="peft")
    for component, prefix in (("unet", "lora_unet"), ("text_encoder", "lora_te_text_model")):
        network = copy.deepcopy(small_model("sd1").networks()[component])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing")  # PEFT's word for keys that it does not find
            loaded = PeftModel.from_pretrained(network, str(tmp_path / "a" / component))
        found = deltas(loaded.base_model.model)
        assert len(found) == {"unet": 278, "text_encoder": 72}[component]
        for path, delta in found.items():
            torch.testing.assert_close(delta, delta_weight(modules[underscored(prefix, path)]), rtol=1e-4, atol=1e-4)


def test_comfyui_names_are_those_of_its_model():
    """ComfyUI calls a module diffusion_model. and the path that the original checkpoint has, and prefixes encoders."""
    checkpoint = original_layout(small_model("sd1"))
    tensors = layout_tensors(random_lora(), FAMILIES["sd1"], layout="comfyui")
    stems = {key.removesuffix(".lora_up.weight") for key in tensors if key.endswith(".lora_up.weight")}
    unet = {stem for stem in stems if stem.startswith("diffusion_model.")}
    assert len(unet) == 278
    assert all(f"model.{stem}.weight" in checkpoint for stem in unet)
    clip = {stem.removeprefix("text_encoders.clip_l.") for stem in stems - unet}
    assert len(clip) == 72
    assert all(f"cond_stage_model.{stem}.weight" in checkpoint for stem in clip)


def test_comfyui_encoders_by_family(golden_sdxl):
    text = {
        f"lora_te{n}_text_model_encoder_layers_0_mlp_fc1": LoraWeights(torch.ones(1, 2), torch.ones(3, 1), 1.0)
        for n in (1, 2)
    }
    tensors = layout_tensors(text, FAMILIES["sdxl"], layout="comfyui")
    stems = {key.removesuffix(".alpha") for key in tensors if key.endswith(".alpha")}
    tail = "transformer.text_model.encoder.layers.0.mlp.fc1"
    assert stems == {f"text_encoders.clip_l.{tail}", f"text_encoders.clip_g.{tail}"}
    one = {"lora_te_text_model_encoder_layers_0_mlp_fc1": next(iter(text.values()))}
    assert all(
        key.startswith("text_encoders.clip_h.") for key in layout_tensors(one, FAMILIES["sd2"], layout="comfyui")
    )


def _golden_lora(golden_sdxl) -> dict[str, LoraWeights]:
    """A rank-1 LoRA over the 788 modules of SDXL, narrow but for the width that tells the family."""
    modules: dict[str, LoraWeights] = {}
    for path, _, kind, _, _, _ in golden_sdxl["rows"]:
        inputs = 2048 if path.endswith(("attn2.to_k", "attn2.to_v")) else 2
        kernel = {"linear": (), "conv1x1": (1, 1), "conv3x3": (3, 3)}[kind]
        up = torch.ones(3, 1, *([1, 1] if kernel else []))
        modules[underscored("lora_unet", path)] = LoraWeights(torch.ones(1, inputs, *kernel), up, 1.0)
    return modules


@pytest.mark.parametrize("unet_names", ["sai", "diffusers"])
def test_sdxl_in_both_naming_schemes(golden_sdxl, unet_names, tmp_path):
    modules = _golden_lora(golden_sdxl)
    tensors = layout_tensors(modules, FAMILIES["sdxl"], unet_names=unet_names)
    names = {key.removesuffix(".alpha") for key in tensors if key.endswith(".alpha")}
    if unet_names == "sai":
        assert names == {row[1] for row in golden_sdxl["rows"]}
    path = tmp_path / "xl.safetensors"
    save_layout(path, tensors, {})
    file = read_adapter(path)
    assert (file.family.kind, file.original_layout, len(file.modules)) == ("sdxl", unet_names == "sai", 788)
    assert set(file.modules) == set(modules)
    by_block = {row[0]: row[5] for row in golden_sdxl["rows"]}
    for module_path, index in by_block.items():
        label = block_label(underscored("lora_unet", module_path), file.family)
        assert label == FAMILIES["sdxl"].blocks.names[index]


def test_sdxl_in_diffusers_and_comfyui_layouts(golden_sdxl, tmp_path):
    modules = _golden_lora(golden_sdxl)
    for layout in ("diffusers", "comfyui"):
        path = tmp_path / f"{layout}.safetensors"
        save_layout(path, layout_tensors(modules, FAMILIES["sdxl"], layout=layout), {}, layout=layout)
        file = read_adapter(path)
        assert (file.layout, file.family.kind) == (layout, "sdxl")
        assert set(file.modules) == set(modules)
    diffusers = load_file(tmp_path / "diffusers.safetensors")
    assert {key.removesuffix(".lora_A.weight") for key in diffusers if "lora_A" in key} == {
        f"unet.{row[0]}" for row in golden_sdxl["rows"]
    }


def test_number_formats_and_hashes(tmp_path):
    modules = random_lora()
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        path = tmp_path / "lora.safetensors"
        save_layout(
            path, layout_tensors(modules, FAMILIES["sd1"], dtype=dtype, layout="diffusers"), {}, layout="diffusers"
        )
        file = read_adapter(path)
        assert file.dtypes == (dtype,)
        assert file.metadata["sshs_model_hash"] == data_hash(path)
        assert_same_changes(plain_modules(file), modules, tolerance)


def test_transformer_families_are_recognised_and_not_renamed(tmp_path):
    cases = {
        "sd3": ["lora_unet_joint_blocks_0_x_block_attn_qkv", "lora_te3_encoder_block_0_layer_0_SelfAttention_q"],
        "flux": ["lora_unet_double_blocks_7_img_attn_qkv", "lora_unet_single_blocks_37_linear1"],
    }
    for kind, names in cases.items():
        path = tmp_path / f"{kind}.safetensors"
        plain = {name: LoraWeights(torch.ones(1, 3), torch.ones(2, 1), 1.0) for name in names}
        save_layout(path, layout_tensors(plain, FAMILIES[kind]), {})
        file = read_adapter(path)
        assert file.family.kind == kind
        assert set(file.modules) == set(names)
    with pytest.raises(ModelError, match=r"no known name in the layout 'diffusers'"):
        layout_tensors(plain, FAMILIES["flux"], layout="diffusers")
    assert block_label(cases["flux"][0], FAMILIES["flux"]) == "double 07"
    save_file(
        {
            f"transformer.single_transformer_blocks.4.attn.to_q.lora_{part}.weight": torch.ones(1, 1)
            for part in ("A", "B")
        },
        tmp_path / "d.safetensors",
    )
    file = read_adapter(tmp_path / "d.safetensors")
    assert (file.family.kind, file.layout) == ("flux", "diffusers")
    assert block_label(next(iter(file.modules)), file.family) == "single 04"
    with pytest.raises(ModelError, match="no known name in the layout 'kohya'"):
        layout_tensors(plain_modules(file), file.family)


def test_read_plain_lora_gives_names_that_a_models_table_knows(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_layout(path, layout_tensors(random_lora(), FAMILIES["sd1"], layout="diffusers"), {}, layout="diffusers")
    model = small_model("sd1")
    modules = {
        "unet": [t.path for t in plan_lora(model.unet, component="unet", network_dim=1, conv_dim=1)],
        "text_encoder": [t.path for t in plan_lora(model.text_encoder, component="text_encoder", network_dim=1)],
    }
    assert set(read_plain_lora(path).modules) <= set(SD_KEY_NAMES.table(modules))
    assert len(read_plain_lora(path).modules) == 350


def test_writing_fails_without_leaving_anything(tmp_path):
    modules = random_lora()
    tensors = layout_tensors(modules, FAMILIES["sd1"], layout="peft")
    key = next(key for key in tensors if "encoder.layers" in key)  # the second component, after the first is written
    tensors[key][0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        save_layout(tmp_path / "a", tensors, {}, layout="peft")
    assert list(tmp_path.iterdir()) == []


def test_the_config_of_a_peft_folder_names_every_rank(tmp_path):
    save_layout(tmp_path / "a", layout_tensors(random_lora(), FAMILIES["sd1"], layout="peft"), {}, layout="peft")
    config = json.loads((tmp_path / "a" / "unet" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"]
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert set(config["rank_pattern"].values()) | {config["r"]} == {2, 3, 4}
    assert len(config["target_modules"]) == 278
