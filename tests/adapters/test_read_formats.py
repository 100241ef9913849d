"""Adapter files of other programs: what diffusers and PEFT themselves write, old files, and every layout we write."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import (
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import nn

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.files import data_hash
from maulstick.adapters.lora_family import FAMILIES, block_label, kernel_size
from maulstick.adapters.module_kinds import DoraWeights, Unsupported, add_change, change_shape, exact_factors, kind_of
from maulstick.adapters.read_formats import is_zero, plain_modules, read_adapter, read_plain_lora
from maulstick.adapters.targets import plan_lora
from maulstick.adapters.tensor_names import parse_tensor_name
from maulstick.adapters.write_formats import layout_tensors, save_layout
from maulstick.errors import ModelError
from tests.models import original_layout, small_model

LINEAR = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
WIDE = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
CONV1 = "down_blocks.0.attentions.0.proj_in"
CONV3 = "down_blocks.1.resnets.0.conv1"
UPSAMPLER = "up_blocks.0.upsamplers.0.conv"
MODULES = [LINEAR, WIDE, CONV1, CONV3, UPSAMPLER]


def _fill(root: nn.Module, seed: int = 0) -> nn.Module:
    """Give every trainable value of the adapters a random number, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in root.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return root


def _adapted(root: nn.Module, config, seed: int = 0) -> nn.Module:
    root = copy.deepcopy(root)
    inject_adapter_in_model(config, root)
    return _fill(root, seed)


def _deltas(root: nn.Module) -> dict[str, torch.Tensor]:
    """What PEFT adds to each weight, by path."""
    layers = {path: m for path, m in root.named_modules() if isinstance(m, BaseTunerLayer)}
    return {path: layer.get_delta_weight("default").detach() for path, layer in layers.items()}


def _underscored(prefix: str, path: str) -> str:
    return f"{prefix}_{path.replace('.', '_')}"


def _random_lora(version: str = "sd1", *, alphas: bool = True) -> dict[str, LoraWeights]:
    """A LoRA with convolutions, text encoder and different ranks and alphas, by canonical name."""
    model = small_model(version)
    generator = torch.Generator().manual_seed(1)
    modules: dict[str, LoraWeights] = {}
    for component, root, prefix in (("unet", model.unet, "lora_unet"), ("text_encoder", model.text_encoder, "lora_te")):
        for place, target in enumerate(plan_lora(root, component=component, network_dim=3, conv_dim=2)):
            rank = target.dim + place % 2
            path = target.path if component == "unet" else f"text_model.{target.path}"
            kernel = [1, 1] if len(target.shape) == 4 else []
            modules[_underscored(prefix, path)] = LoraWeights(
                torch.randn(rank, *target.shape[1:], generator=generator),
                torch.randn(target.shape[0], rank, *kernel, generator=generator),
                [1.0, 2.0, None, 5.0][place % 4] if alphas else None,
            )
    return modules


def _assert_same_changes(read: dict[str, LoraWeights], expected: dict[str, LoraWeights], tolerance: float = 1e-5):
    assert set(read) == set(expected)
    for name, weights in expected.items():
        exact = delta_weight(weights)
        assert read[name].down.ndim == weights.down.ndim, name
        assert (delta_weight(read[name]) - exact).norm() <= tolerance * exact.norm(), name


@pytest.fixture
def pipeline():
    """A function that builds a pipeline over copies of the small model's networks."""

    def build() -> StableDiffusionPipeline:
        model = small_model("sd1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return StableDiffusionPipeline(
                vae=model.vae,
                text_encoder=copy.deepcopy(model.text_encoder),
                tokenizer=None,
                unet=copy.deepcopy(model.unet),
                scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )

    return build


# ---------------------------------------------------------------------------------------------------------------------
# Files that diffusers and PEFT write


@pytest.mark.parametrize("with_metadata", [True, False])
def test_files_of_diffusers_are_read_with_the_strength_that_peft_applies(tmp_path, with_metadata):
    """Without its metadata entry a file says nothing of alpha, and diffusers takes the rank."""
    model = small_model("sd1")
    alpha, text_alpha = (2, 6) if with_metadata else (4, 2)
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["to_q", "to_out.0", "proj_in", "conv1"])
    unet = _adapted(model.unet, config)
    text_config = LoraConfig(r=2, lora_alpha=text_alpha, use_rslora=with_metadata, target_modules=["q_proj", "fc1"])
    text = _adapted(model.text_encoder, text_config, 1)
    metadata = {}
    if with_metadata:
        metadata = {
            "unet_lora_adapter_metadata": config.to_dict(),
            "text_encoder_lora_adapter_metadata": text_config.to_dict(),
        }
    StableDiffusionPipeline.save_lora_weights(
        tmp_path,
        unet_lora_layers=get_peft_model_state_dict(unet, adapter_name="default"),
        text_encoder_lora_layers=get_peft_model_state_dict(text, adapter_name="default"),
        **metadata,
    )
    file = read_adapter(tmp_path)
    assert (file.layout, file.original_layout) == ("diffusers", False)
    expected = {_underscored("lora_unet", path): delta for path, delta in _deltas(unet).items()}
    expected |= {_underscored("lora_te_text_model", path): delta for path, delta in _deltas(text).items()}
    assert set(file.modules) == set(expected)
    for name, delta in expected.items():
        torch.testing.assert_close(delta_weight(file.modules[name]), delta, rtol=1e-5, atol=1e-6)


PEFT_CONFIGS = {
    "LoRA": LoraConfig(
        r=4,
        lora_alpha=3,
        target_modules=MODULES,
        rank_pattern={"attn1.to_q": 2, "proj_in": 6},
        alpha_pattern={"conv1": 9},
    ),
    "LoRA, rank-stabilised": LoraConfig(r=4, lora_alpha=3, target_modules=MODULES, use_rslora=True),
    "DoRA": LoraConfig(r=4, lora_alpha=3, target_modules=MODULES, use_dora=True),
    "LoHa": LoHaConfig(r=3, alpha=2, target_modules=MODULES),
    "LoHa, Tucker": LoHaConfig(r=3, alpha=2, target_modules=MODULES, use_effective_conv2d=True),
    "LoKr, whole": LoKrConfig(r=64, alpha=16, target_modules=MODULES),
    "LoKr, factored": LoKrConfig(r=2, alpha=3, target_modules=MODULES, decompose_both=True),
    "LoKr, Tucker": LoKrConfig(r=2, alpha=3, target_modules=MODULES, use_effective_conv2d=True),
}


@pytest.mark.parametrize("case", PEFT_CONFIGS)
def test_adapters_of_peft_change_a_weight_as_peft_merges_it(case, tmp_path):
    unet = copy.deepcopy(small_model("sd1").unet)
    wrapped = get_peft_model(unet, copy.deepcopy(PEFT_CONFIGS[case]))
    _fill(wrapped)
    wrapped.save_pretrained(tmp_path)
    file = read_adapter(tmp_path)
    assert file.layout == "peft"
    assert {kind_of(module) for module in file.modules.values()} == {case.split(",")[0]}
    assert set(file.modules) == {_underscored("lora_unet", path) for path in MODULES}
    merged = dict(wrapped.merge_and_unload().named_parameters())
    base = dict(small_model("sd1").unet.named_parameters())
    for path in MODULES:
        weight = base[f"{path}.weight"].detach()
        module = file.modules[_underscored("lora_unet", path)]
        total = weight.clone()
        add_change(total, weight, module, 1.0)
        exact = merged[f"{path}.weight"].detach()
        assert (exact - weight).norm() > 0.01 * weight.norm()
        assert (total - exact).norm() <= 1e-5 * exact.norm()
        halfway = weight.clone()
        add_change(halfway, weight, module, 0.5)
        torch.testing.assert_close(halfway, (weight + exact) / 2, rtol=1e-4, atol=1e-5)
        if case == "DoRA":
            with pytest.raises(Unsupported, match="depends on the weights of the base model"):
                exact_factors(module)
        else:
            factors = plain_modules(file)[_underscored("lora_unet", path)]
            assert factors.down.ndim == weight.ndim
            difference = delta_weight(factors).reshape(weight.shape) - (exact - weight)
            assert difference.norm() <= 1e-4 * (exact - weight).norm()


def test_an_oft_is_recognised_and_nothing_else_is_done_with_it(tmp_path):
    wrapped = get_peft_model(
        copy.deepcopy(small_model("sd1").unet), OFTConfig(oft_block_size=8, target_modules=[LINEAR, CONV3])
    )
    wrapped.save_pretrained(tmp_path)
    file = read_adapter(tmp_path)
    module = file.modules[_underscored("lora_unet", LINEAR)]
    assert (kind_of(module), module.rank, change_shape(module)) == ("OFT", 4, ())
    with pytest.raises(ModelError, match="is an OFT, whose change depends on the weights"):
        plain_modules(file)
    with pytest.raises(Unsupported, match="is an OFT, which this program reads but cannot merge"):
        add_change(torch.zeros(2, 2), torch.zeros(2, 2), module, 1.0)


def test_a_peft_file_without_its_config_says_that_alpha_is_a_guess(tmp_path):
    wrapped = get_peft_model(
        copy.deepcopy(small_model("sd1").unet), LoraConfig(r=2, lora_alpha=8, target_modules=[LINEAR])
    )
    _fill(wrapped).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    file = read_adapter(tmp_path / "adapter_model.safetensors")
    (module,) = file.modules.values()
    assert module.scale == 1.0
    assert "no adapter_config.json" in file.notes[0]


@pytest.mark.parametrize("form", ["0.18", "0.22", "bare"])
def test_old_files_are_read_as_diffusers_still_loads_them(form, tmp_path, pipeline):
    model = small_model("sd1")
    unet = _adapted(model.unet, LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    text = _adapted(model.text_encoder, LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "out_proj"]), 1)
    state = get_peft_model_state_dict(unet, adapter_name="default")
    text_state = get_peft_model_state_dict(text, adapter_name="default")
    if form == "0.22":
        old = {f"unet.{key}": tensor for key, tensor in convert_state_dict_to_diffusers(state).items()}
        old |= {
            f"text_encoder.text_model.{key}": tensor
            for key, tensor in convert_state_dict_to_diffusers(text_state).items()
        }
        assert any(key.endswith(".lora_linear_layer.up.weight") for key in old)
        assert any(key.endswith("to_q.lora.down.weight") for key in old)
    elif form == "0.18":
        parts = {"lora_A": "down", "lora_B": "up"}
        old = {}
        for key, tensor in state.items():
            path, part = key.removesuffix(".weight").rsplit(".", 1)
            block, role = path.removesuffix(".0").rsplit(".", 1)
            old[f"unet.{block}.processor.{role}_lora.{parts[part]}.weight"] = tensor
        for key, tensor in text_state.items():
            path, part = key.removesuffix(".weight").rsplit(".", 1)
            block, role = path.rsplit(".", 1)
            role = {"q_proj": "to_q", "out_proj": "to_out"}[role]
            old[f"text_encoder.text_model.{block}.{role}_lora.{parts[part]}.weight"] = tensor
    else:
        old, text = dict(state), None
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(old, path)
    file = read_adapter(path)
    expected = {_underscored("lora_unet", p): delta for p, delta in _deltas(unet).items()}
    if text is not None:
        expected |= {_underscored("lora_te_text_model", p): delta for p, delta in _deltas(text).items()}
    assert set(file.modules) == set(expected)
    for name, delta in expected.items():
        torch.testing.assert_close(delta_weight(file.modules[name]), delta)
    if form == "0.18":
        return
    loaded = pipeline()
    loaded.load_lora_weights(
        path if form == "0.22" else {f"unet.{key}": t for key, t in old.items()}, adapter_name="default"
    )
    theirs = _deltas(loaded.unet)
    assert len(theirs) == 128
    for module_path, delta in theirs.items():
        torch.testing.assert_close(delta, expected[_underscored("lora_unet", module_path)])


def test_a_pickled_lora_is_read_as_tensors_only(tmp_path):
    unet = _adapted(small_model("sd1").unet, LoraConfig(r=2, lora_alpha=2, target_modules=[LINEAR]))
    state = {f"unet.{key}": tensor for key, tensor in get_peft_model_state_dict(unet, adapter_name="default").items()}
    torch.save(state, tmp_path / "pytorch_lora_weights.bin")
    file = read_adapter(tmp_path)
    torch.testing.assert_close(delta_weight(file.modules[_underscored("lora_unet", LINEAR)]), _deltas(unet)[LINEAR])


# ---------------------------------------------------------------------------------------------------------------------
# Layouts that we write


@pytest.mark.parametrize("layout", ["kohya", "diffusers", "peft", "comfyui"])
@pytest.mark.parametrize("version", ["sd1", "sd2"])
def test_every_layout_is_read_back_with_the_same_strengths(layout, version, tmp_path):
    modules = _random_lora(version)
    path = tmp_path / ("adapter" if layout == "peft" else "lora.safetensors")
    tensors = layout_tensors(modules, FAMILIES[version], layout=layout)
    save_layout(path, tensors, {"ss_base_model_version": {"sd1": "sd_v1", "sd2": "sd_v2"}[version]}, layout=layout)
    file = read_adapter(path)
    assert (file.layout, file.family.kind) == (layout, version)
    _assert_same_changes(plain_modules(file), modules)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_diffusers_applies_mixed_ranks_and_alphas_of_both_layouts(layout, tmp_path, pipeline):
    modules = _random_lora()
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_layout(path, layout_tensors(modules, FAMILIES["sd1"], layout=layout), {}, layout=layout)
    loaded = pipeline()
    loaded.load_lora_weights(path, adapter_name="default")
    found = {_underscored("lora_unet", p): d for p, d in _deltas(loaded.unet).items()}
    found |= {_underscored("lora_te_text_model", p): d for p, d in _deltas(loaded.text_encoder).items()}
    assert set(found) == set(modules)
    for name, delta in found.items():
        torch.testing.assert_close(delta, delta_weight(modules[name]), rtol=1e-4, atol=1e-4)


def test_peft_loads_what_is_written_for_it(tmp_path):
    modules = _random_lora()
    save_layout(tmp_path / "a", layout_tensors(modules, FAMILIES["sd1"], layout="peft"), {}, layout="peft")
    for component, prefix in (("unet", "lora_unet"), ("text_encoder", "lora_te_text_model")):
        network = copy.deepcopy(small_model("sd1").networks()[component])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing")  # PEFT's word for keys that it does not find
            loaded = PeftModel.from_pretrained(network, str(tmp_path / "a" / component))
        deltas = _deltas(loaded.base_model.model)
        assert len(deltas) == {"unet": 278, "text_encoder": 72}[component]
        for path, delta in deltas.items():
            torch.testing.assert_close(delta, delta_weight(modules[_underscored(prefix, path)]), rtol=1e-4, atol=1e-4)


def test_comfyui_names_are_those_of_its_model():
    """ComfyUI calls a module diffusion_model. and the path that the original checkpoint has, and prefixes encoders."""
    checkpoint = original_layout(small_model("sd1"))
    tensors = layout_tensors(_random_lora(), FAMILIES["sd1"], layout="comfyui")
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
        modules[_underscored("lora_unet", path)] = LoraWeights(torch.ones(1, inputs, *kernel), up, 1.0)
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
        label = block_label(_underscored("lora_unet", module_path), file.family)
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
    modules = _random_lora()
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        path = tmp_path / "lora.safetensors"
        save_layout(
            path, layout_tensors(modules, FAMILIES["sd1"], dtype=dtype, layout="diffusers"), {}, layout="diffusers"
        )
        file = read_adapter(path)
        assert file.dtypes == (dtype,)
        assert file.metadata["sshs_model_hash"] == data_hash(path)
        _assert_same_changes(plain_modules(file), modules, tolerance)


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
            layout_tensors(plain_modules(file), file.family, layout="diffusers")
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


# ---------------------------------------------------------------------------------------------------------------------
# Relatives of LoRA in kohya's naming


def _save_kohya(path: Path, parts: dict[str, torch.Tensor], name: str = "lora_unet_mid_block_resnets_0_conv1") -> Path:
    save_file({f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}, path)
    return path


def test_a_locon_in_tucker_form_is_the_plain_lora_that_it_stands_for(tmp_path):
    torch.manual_seed(0)
    down, mid, up = torch.randn(4, 5, 1, 1), torch.randn(3, 4, 3, 3), torch.randn(6, 3, 1, 1)
    parts = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up, "alpha": torch.tensor(2.0)}
    file = read_adapter(_save_kohya(tmp_path / "t.safetensors", parts))
    (module,) = file.modules.values()
    exact = torch.einsum("om,mnkl,ni->oikl", up[:, :, 0, 0], mid, down[:, :, 0, 0]) * 2.0 / 3
    torch.testing.assert_close(delta_weight(module), exact)


@pytest.mark.parametrize("axis", [0, 1])
def test_dora_scales_rows_or_columns_of_the_changed_weight(axis, tmp_path):
    torch.manual_seed(0)
    base, down, up = torch.randn(6, 4, 3, 3), torch.randn(2, 4, 3, 3), torch.randn(6, 2, 1, 1)
    shape = (6, 1, 1, 1) if axis == 0 else (1, 4, 1, 1)
    magnitude = torch.rand(shape) + 0.5
    parts = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(1.0), "dora_scale": magnitude}
    (module,) = read_adapter(_save_kohya(tmp_path / "d.safetensors", parts)).modules.values()
    assert isinstance(module, DoraWeights)
    directed = base + 0.5 * (up.flatten(1) @ down.flatten(1)).reshape(base.shape)
    norm = torch.linalg.vector_norm(directed, dim=(1, 2, 3) if axis == 0 else (0, 2, 3), keepdim=True)
    total = base.clone()
    add_change(total, base, module, 1.0)
    torch.testing.assert_close(total, magnitude * directed / norm)
    with pytest.raises(Unsupported, match="has 5 magnitudes"):
        add_change(total, base, DoraWeights(module.change, torch.ones(5), axis), 1.0)


def test_a_whole_lokr_ignores_alpha_and_a_loha_does_not(tmp_path):
    torch.manual_seed(0)
    left, right = torch.randn(2, 3), torch.randn(4, 5)
    file = read_adapter(
        _save_kohya(tmp_path / "k.safetensors", {"lokr_w1": left, "lokr_w2": right, "alpha": torch.tensor(1e9)})
    )
    total = torch.zeros(8, 15)
    add_change(total, total.clone(), next(iter(file.modules.values())), -2.0)
    torch.testing.assert_close(total, -2.0 * torch.kron(left, right))
    parts = {f"hada_w{n}_{x}": torch.randn(shape) for n in (1, 2) for x, shape in (("a", (8, 2)), ("b", (2, 15)))}
    file = read_adapter(_save_kohya(tmp_path / "h.safetensors", parts | {"alpha": torch.tensor(1.0)}))
    total = torch.zeros(8, 15)
    add_change(total, total.clone(), next(iter(file.modules.values())), 1.0)
    exact = 0.5 * (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    torch.testing.assert_close(total, exact)


def test_read_plain_lora_gives_names_that_a_models_table_knows(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_layout(path, layout_tensors(_random_lora(), FAMILIES["sd1"], layout="diffusers"), {}, layout="diffusers")
    from maulstick.adapters.key_names import SD_KEY_NAMES

    model = small_model("sd1")
    modules = {
        "unet": [t.path for t in plan_lora(model.unet, component="unet", network_dim=1, conv_dim=1)],
        "text_encoder": [t.path for t in plan_lora(model.text_encoder, component="text_encoder", network_dim=1)],
    }
    assert set(read_plain_lora(path).modules) <= set(SD_KEY_NAMES.table(modules))
    assert len(read_plain_lora(path).modules) == 350


def test_flattened_kernels_get_their_shape_from_the_name():
    for path, kernel in ((CONV3, 3), (UPSAMPLER, 3), (LINEAR, None), ("up_blocks.1.resnets.0.conv_shortcut", 1)):
        assert kernel_size(_underscored("lora_unet", path), FAMILIES["sdxl"]) == kernel
    assert kernel_size(_underscored("lora_unet", CONV1), FAMILIES["sd1"]) == 1
    assert kernel_size(_underscored("lora_unet", CONV1), FAMILIES["sd2"]) is None


def test_zero_factors_are_noticed(tmp_path):
    parts = {"lora_down.weight": torch.ones(1, 3, 3, 3), "lora_up.weight": torch.zeros(2, 1, 1, 1)}
    (module,) = read_adapter(_save_kohya(tmp_path / "z.safetensors", parts)).modules.values()
    assert is_zero(module)
    assert not is_zero(LoraWeights(torch.ones(1, 2), torch.ones(2, 1), 1.0))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

GOOD = {"lora_down.weight": torch.ones(2, 5), "lora_up.weight": torch.ones(6, 2), "alpha": torch.tensor(1.0)}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["model.diffusion_model.out.2.weight"], "is a whole Stable Diffusion checkpoint, not a LoRA"),
        (["down_blocks.0.resnets.0.conv1.weight"], "is the weights of a UNet, not a LoRA"),
        (["emb_params"], "is a textual-inversion embedding, not a LoRA"),
        (["image_proj.latents", "ip_adapter.1.to_k_ip.weight"], "is an IP-Adapter, not a LoRA"),
        (["lora_unet_x.on_input", "lora_unet_x.weight"], r"\(IA\)3"),
        (["lora_unet_x.a1.weight"], "is a GLoRA, not a LoRA"),
        (["something.else"], "'something.else' that is no part of a LoRA"),
        (["bundle_emb.x.string_to_param.*"], "holds no tensors of a LoRA"),
    ],
)
def test_files_that_are_no_lora_are_named(tmp_path, keys, words):
    save_file({key: torch.ones(2, 2) for key in keys}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=words):
        read_adapter(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.pop("lora_up.weight"), r"'lora_unet_mid_block_resnets_0_conv1' has no lora_up\.weight"),
        (lambda p: p.pop("lora_down.weight"), r"has no lora_down\.weight"),
        (lambda p: p.update({"lora_up.weight": torch.ones(6, 3)}), r"lora_down is \(2, 5\), lora_up is \(6, 3\)"),
        (lambda p: p.update({"alpha": torch.ones(2)}), r"alpha of shape \(2,\)"),
        (
            lambda p: p.update({"diff": torch.ones(2)}),
            r"'lora_unet_mid_block_resnets_0_conv1.diff' that is no part of a LoRA",
        ),
        (lambda p: p.update({"lora_A.weight": torch.ones(2, 5)}), "two tensors for"),
        (
            lambda p: p["lora_up.weight"].fill_(float("nan")),
            r"lora_up.weight' holds 12 of 12 values that are not finite",
        ),
        (lambda p: p["alpha"].fill_(float("inf")), r"alpha' holds 1 of 1 values that are not finite"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, change, words):
    parts = {key: tensor.clone() for key, tensor in GOOD.items()}
    change(parts)
    with pytest.raises(ModelError, match=words):
        read_adapter(_save_kohya(tmp_path / "broken.safetensors", parts))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"hada_w1_a": (4, 2), "hada_w1_b": (2, 3), "hada_w2_a": (4, 2)}, "has no hada_w2_b"),
        ({"hada_w1_a": (4, 2), "hada_w1_b": (2, 3), "hada_w2_a": (4, 2), "hada_w2_b": (2, 5)}, "do not fit each other"),
        ({"lokr_w1": (2, 2)}, "has no lokr_w2 and no lokr_w2_a"),
        ({"lokr_w1": (2, 2), "lokr_w2_a": (2, 3), "lokr_w2_b": (2, 2)}, "do not fit each other"),
    ],
)
def test_incomplete_relatives_are_refused(tmp_path, parts, words):
    tensors = {part: torch.ones(shape) for part, shape in parts.items()}
    with pytest.raises(ModelError, match=words):
        read_adapter(_save_kohya(tmp_path / "broken.safetensors", tensors))


def test_non_finite_values_can_be_looked_at(tmp_path):
    parts = {key: tensor.clone() for key, tensor in GOOD.items()}
    parts["lora_up.weight"][0, 0] = float("inf")
    file = read_adapter(_save_kohya(tmp_path / "broken.safetensors", parts), allow_non_finite=True)
    assert file.not_finite == {"lora_unet_mid_block_resnets_0_conv1.lora_up.weight": 1}


def test_damaged_and_absent_files(tmp_path):
    path = _save_kohya(tmp_path / "lora.safetensors", GOOD)
    content = path.read_bytes()
    for length in (0, 8, 40, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"is not a safetensors file|not complete|damaged"):
            read_adapter(path)
    path.write_bytes(content[:8] + b"{not json" + content[17:])
    with pytest.raises(ModelError, match="damaged"):
        read_adapter(path)
    with pytest.raises(ModelError, match="There is no file"):
        read_adapter(tmp_path / "absent.safetensors")
    with pytest.raises(ModelError, match="is a folder without a LoRA"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    (tmp_path / "adapter_config.json").write_text("[1")
    save_file(
        {f"base_model.model.{LINEAR}.lora_{x}.weight": torch.ones(1, 1) for x in "AB"},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(ModelError, match=r"adapter_config.json: the adapter's config is not valid JSON"):
        read_adapter(tmp_path)


def test_packed_embeddings_are_left_out_and_named(tmp_path):
    path = tmp_path / "lora.safetensors"
    tensors = {f"lora_unet_mid_block_resnets_0_conv1.{part}": tensor for part, tensor in GOOD.items()}
    save_file(tensors | {"bundle_emb.cat.string_to_param": torch.ones(2)}, path)
    assert read_adapter(path).notes == (
        "lora.safetensors also holds 1 tensors of textual-inversion embeddings, left out.",
    )


def test_writing_fails_without_leaving_anything(tmp_path):
    modules = _random_lora()
    tensors = layout_tensors(modules, FAMILIES["sd1"], layout="peft")
    key = next(key for key in tensors if "encoder.layers" in key)  # the second component, after the first is written
    tensors[key][0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        save_layout(tmp_path / "a", tensors, {}, layout="peft")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "key",
    [
        "lora_unet_x",
        "x.lora_down.weight",
        "lora_prior_x.lora_down.weight",
        "text_encoders.gemma.transformer.x.lora_up.weight",
    ],
)
def test_names_of_nothing_we_know(key):
    assert parse_tensor_name(key) is None


def test_the_config_of_a_peft_folder_names_every_rank(tmp_path):
    save_layout(tmp_path / "a", layout_tensors(_random_lora(), FAMILIES["sd1"], layout="peft"), {}, layout="peft")
    config = json.loads((tmp_path / "a" / "unet" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"]
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert set(config["rank_pattern"].values()) | {config["r"]} == {2, 3, 4}
    assert len(config["target_modules"]) == 278
