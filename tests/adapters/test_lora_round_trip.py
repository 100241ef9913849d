"""Files as their main reader applies them: diffusers' load_lora_weights, module by module."""

from __future__ import annotations

import warnings

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline

from maulstick.adapters.blocks import sd_block_index
from maulstick.adapters.factors import delta_weight
from maulstick.adapters.files import lora_tensors, save_lora_file
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.adapters.lora import inject_lora, lora_parameters, lora_state
from maulstick.adapters.targets import BlockRank, plan_lora

MIXED_RANKS = {block: BlockRank(1 + block % 4, 0.5 * (1 + block % 3), 1 + block % 2, 3.0) for block in range(25)}
ONLY_MID = {block: BlockRank(0, 1.0) for block in range(25) if block != 12}
SD2 = {"use_linear_projection": True}

CASES = {
    "attention": ({"network_dim": 4}, {}, False, "one_alpha"),
    "conv": ({"network_dim": 4, "conv_dim": 2, "network_alpha": 1.5}, {}, False, "one_alpha"),
    "conv and text encoder": ({"network_dim": 4, "conv_dim": 2, "conv_alpha": 4.0}, {}, True, "one_alpha"),
    "text encoder only": (None, {}, True, "one_alpha"),
    "linear projections": ({"network_dim": 4, "conv_dim": 4}, SD2, True, "one_alpha"),
    "middle block only": ({"network_dim": 4, "block_ranks": ONLY_MID}, {}, False, "one_alpha"),
    "mixed, one alpha": ({"network_dim": 4, "block_ranks": MIXED_RANKS}, {}, True, "one_alpha"),
    "mixed, no alpha": ({"network_dim": 4, "block_ranks": MIXED_RANKS}, {}, True, "no_alpha"),
}


def _trained(root, component, seed, **plan):
    """A LoRA with values, as training leaves one; its factors by path."""
    inject_lora(root, plan_lora(root, component=component, **plan))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for entry in lora_parameters(root):
            entry.parameter.copy_(torch.randn(entry.parameter.shape, generator=generator))
    return lora_state(root)


@pytest.fixture
def pipeline(small_text_encoder):
    def build(unet):
        vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return StableDiffusionPipeline(
                vae=vae,
                text_encoder=small_text_encoder(),
                tokenizer=None,
                unet=unet,
                scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )

    return build


@pytest.mark.parametrize("case", CASES)
def test_diffusers_applies_what_was_trained(case, small_unet, small_text_encoder, pipeline, tmp_path):
    unet_plan, changes, with_text_encoder, folding = CASES[case]
    components = {}
    if unet_plan is not None:
        components["unet"] = _trained(small_unet(**changes), "unet", 1, block_of=sd_block_index, **unet_plan)
    if with_text_encoder:
        components["text_encoder"] = _trained(small_text_encoder(), "text_encoder", 2, network_dim=3, network_alpha=2.0)
    path = tmp_path / "lora.safetensors"
    save_lora_file(path, lora_tensors(components, SD_KEY_NAMES, folding=folding), {"ss_v2": "False"})

    loaded = pipeline(small_unet(**changes))
    loaded.load_lora_weights(path, adapter_name="file")
    checked = 0
    for component in ("unet", "text_encoder"):
        expected = {path: delta_weight(weights) for path, weights in components.get(component, {}).items()}
        for module_path, module in getattr(loaded, component).named_modules():
            if hasattr(module, "lora_A"):
                delta = expected.pop(module_path)
                torch.testing.assert_close(module.get_delta_weight("file"), delta, rtol=1e-5, atol=1e-6)
                assert delta.norm() > 0.1
                checked += 1
        assert expected == {}
    assert checked == sum(len(modules) for modules in components.values())


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys")
def test_unfolded_alphas_would_be_applied_wrongly(small_unet, pipeline, tmp_path):
    """The reason for folding; when this fails, diffusers reads mixed alphas and folding can go."""
    unet = small_unet()
    state = _trained(unet, "unet", 1, network_dim=4, block_of=sd_block_index, block_ranks=MIXED_RANKS)
    path = tmp_path / "lora.safetensors"
    save_lora_file(path, lora_tensors({"unet": state}, SD_KEY_NAMES, folding="none"), {})
    loaded = pipeline(small_unet())
    loaded.load_lora_weights(path, adapter_name="file")
    wrong = [
        module_path
        for module_path, weights in state.items()
        if not torch.allclose(loaded.unet.get_submodule(module_path).get_delta_weight("file"), delta_weight(weights))
    ]
    assert wrong


def test_half_precision_files_differ_by_rounding_only(small_unet, pipeline, tmp_path):
    state = _trained(small_unet(), "unet", 1, network_dim=4, network_alpha=0.7)
    path = tmp_path / "lora.safetensors"
    save_lora_file(path, lora_tensors({"unet": state}, SD_KEY_NAMES, torch.bfloat16), {})
    loaded = pipeline(small_unet())
    loaded.load_lora_weights(path, adapter_name="file")
    for module_path, weights in state.items():
        exact = delta_weight(weights)
        error = loaded.unet.get_submodule(module_path).get_delta_weight("file") - exact
        assert error.norm() <= 0.01 * exact.norm()
