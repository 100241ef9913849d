"""Adapter files that diffusers and PEFT write, old ones, relatives of LoRA, and what is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import (
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import save_file

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.lora_family import FAMILIES, kernel_size
from maulstick.adapters.module_kinds import DoraWeights, Unsupported, add_change, change_shape, exact_factors, kind_of
from maulstick.adapters.read_formats import is_zero, plain_modules, read_adapter
from maulstick.adapters.tensor_names import parse_tensor_name
from maulstick.errors import ModelError
from tests.adapters.peft_adapters import (
    CONV1,
    CONV3,
    LINEAR,
    MODULES,
    UPSAMPLER,
    adapted,
    deltas,
    fill,
    small_pipeline,
    underscored,
)
from tests.models import small_model

# ---------------------------------------------------------------------------------------------------------------------
# Files that diffusers and PEFT write


@pytest.mark.parametrize("with_metadata", [True, False])
def test_files_of_diffusers_are_read_with_the_strength_that_peft_applies(tmp_path, with_metadata):
    """Without its metadata entry a file says nothing of alpha, and diffusers takes the rank."""
    model = small_model("sd1")
    alpha, text_alpha = (2, 6) if with_metadata else (4, 2)
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["to_q", "to_out.0", "proj_in", "conv1"])
    unet = adapted(model.unet, config)
    text_config = LoraConfig(r=2, lora_alpha=text_alpha, use_rslora=with_metadata, target_modules=["q_proj", "fc1"])
    text = adapted(model.text_encoder, text_config, 1)
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
    expected = {underscored("lora_unet", path): delta for path, delta in deltas(unet).items()}
    expected |= {underscored("lora_te_text_model", path): delta for path, delta in deltas(text).items()}
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
    fill(wrapped)
    wrapped.save_pretrained(tmp_path)
    file = read_adapter(tmp_path)
    assert file.layout == "peft"
    assert {kind_of(module) for module in file.modules.values()} == {case.split(",")[0]}
    assert set(file.modules) == {underscored("lora_unet", path) for path in MODULES}
    merged = dict(wrapped.merge_and_unload().named_parameters())
    base = dict(small_model("sd1").unet.named_parameters())
    for path in MODULES:
        weight = base[f"{path}.weight"].detach()
        module = file.modules[underscored("lora_unet", path)]
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
            factors = plain_modules(file)[underscored("lora_unet", path)]
            assert factors.down.ndim == weight.ndim
            difference = delta_weight(factors).reshape(weight.shape) - (exact - weight)
            assert difference.norm() <= 1e-4 * (exact - weight).norm()


def test_an_oft_is_recognised_and_nothing_else_is_done_with_it(tmp_path):
    wrapped = get_peft_model(
        copy.deepcopy(small_model("sd1").unet), OFTConfig(oft_block_size=8, target_modules=[LINEAR, CONV3])
    )
    wrapped.save_pretrained(tmp_path)
    file = read_adapter(tmp_path)
    module = file.modules[underscored("lora_unet", LINEAR)]
    assert (kind_of(module), module.rank, change_shape(module)) == ("OFT", 4, ())
    with pytest.raises(ModelError, match="is an OFT, whose change depends on the weights"):
        plain_modules(file)
    with pytest.raises(Unsupported, match="is an OFT of PEFT's kind, which"):
        add_change(torch.zeros(2, 2), torch.zeros(2, 2), module, 1.0)


def test_a_peft_file_without_its_config_says_that_alpha_is_a_guess(tmp_path):
    wrapped = get_peft_model(
        copy.deepcopy(small_model("sd1").unet), LoraConfig(r=2, lora_alpha=8, target_modules=[LINEAR])
    )
    fill(wrapped).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    file = read_adapter(tmp_path / "adapter_model.safetensors")
    (module,) = file.modules.values()
    assert module.scale == 1.0
    assert "no adapter_config.json" in file.notes[0]


@pytest.mark.parametrize("form", ["0.18", "0.22", "bare"])
def test_old_files_are_read_as_diffusers_still_loads_them(form, tmp_path):
    model = small_model("sd1")
    unet = adapted(model.unet, LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    text = adapted(model.text_encoder, LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "out_proj"]), 1)
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
    expected = {underscored("lora_unet", p): delta for p, delta in deltas(unet).items()}
    if text is not None:
        expected |= {underscored("lora_te_text_model", p): delta for p, delta in deltas(text).items()}
    assert set(file.modules) == set(expected)
    for name, delta in expected.items():
        torch.testing.assert_close(delta_weight(file.modules[name]), delta)
    if form == "0.18":
        return
    loaded = small_pipeline()
    loaded.load_lora_weights(
        path if form == "0.22" else {f"unet.{key}": t for key, t in old.items()}, adapter_name="default"
    )
    theirs = deltas(loaded.unet)
    assert len(theirs) == 128
    for module_path, delta in theirs.items():
        torch.testing.assert_close(delta, expected[underscored("lora_unet", module_path)])


def test_a_pickled_lora_is_read_as_tensors_only(tmp_path):
    unet = adapted(small_model("sd1").unet, LoraConfig(r=2, lora_alpha=2, target_modules=[LINEAR]))
    state = {f"unet.{key}": tensor for key, tensor in get_peft_model_state_dict(unet, adapter_name="default").items()}
    torch.save(state, tmp_path / "pytorch_lora_weights.bin")
    file = read_adapter(tmp_path)
    torch.testing.assert_close(delta_weight(file.modules[underscored("lora_unet", LINEAR)]), deltas(unet)[LINEAR])


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


def test_flattened_kernels_get_their_shape_from_the_name():
    for path, kernel in ((CONV3, 3), (UPSAMPLER, 3), (LINEAR, None), ("up_blocks.1.resnets.0.conv_shortcut", 1)):
        assert kernel_size(underscored("lora_unet", path), FAMILIES["sdxl"]) == kernel
    assert kernel_size(underscored("lora_unet", CONV1), FAMILIES["sd1"]) == 1
    assert kernel_size(underscored("lora_unet", CONV1), FAMILIES["sd2"]) is None


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
        (["image_proj.latents", "ip_adapter.1.to_k_ip.weight"], r"not a LoRA\. `maulstick generate --ip_adapter"),
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
