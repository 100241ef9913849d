"""What training asks of the SD family: latents, identities, memory, gradients, blocks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from maulstick.adapters.lora import inject_lora
from maulstick.adapters.targets import plan_lora
from maulstick.families.sd import StableDiffusion
from tests.families.conftest import Load
from tests.models import model_folder, save_folder, single_file, small_model

GOLDEN = Path(__file__).parents[1] / "data" / "blocks"


def pixels(count: int = 2, width: int = 64, height: int = 48) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(3)) * 2 - 1


# --- images -----------------------------------------------------------------------------------------------------------


def test_latents_are_the_scaled_mean_of_the_vae(load: Load) -> None:
    latents = load(model_folder()).encode_images(pixels())
    with torch.no_grad():
        expected = small_model().vae.encode(pixels()).latent_dist.mean * 0.18215
    assert latents.shape == (2, 4, 6, 8)
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)


def test_the_scaling_factor_comes_from_the_vae_config(load: Load, tmp_path: Path) -> None:
    config = save_folder(small_model(), tmp_path) / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"scaling_factor": 0.5}))
    plain, scaled = load(model_folder()), load(tmp_path)
    torch.testing.assert_close(scaled.encode_images(pixels()), plain.encode_images(pixels()) * (0.5 / 0.18215))
    assert scaled.latent_identity != plain.latent_identity


def test_latents_are_fp32_whatever_the_vae_is_and_autocast_does_not_reach_it(load: Load) -> None:
    exact = load(model_folder()).encode_images(pixels())
    family = load(model_folder(), dtype=torch.bfloat16, vae_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(family.encode_images(pixels()), exact)
    half = load(model_folder(), vae_dtype=torch.bfloat16).encode_images(pixels())
    assert half.dtype == torch.float32
    assert 0 < (half - exact).abs().max() < 0.05


def test_an_image_that_overflows_in_half_precision_can_be_encoded_in_fp32(load: Load) -> None:
    family = load(model_folder(), vae_dtype=torch.float16)
    family.vae.quant_conv.weight.data.mul_(1e6)
    assert not torch.isfinite(family.encode_images(pixels())).all()
    rescued = family.encode_images_in_fp32(pixels())
    assert torch.equal(rescued, load(model_folder()).encode_images(pixels()))
    assert family.vae.dtype == torch.float16


def test_decoding_undoes_the_scaling_and_saves_what_overflows(load: Load) -> None:
    family = load(model_folder(), vae_dtype=torch.float16)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = small_model().vae.decode(latents / 0.18215).sample
    assert (family.decode_latents(latents) - expected).abs().max() < 0.05
    family.vae.post_quant_conv.weight.data.mul_(1e6)
    torch.testing.assert_close(family.decode_latents(latents), expected, rtol=1e-4, atol=1e-4)


# --- identities -------------------------------------------------------------------------------------------------------


def test_identities_follow_the_weights_and_not_the_form_they_come_in(load: Load, tmp_path: Path) -> None:
    folder, file = load(model_folder()), load(single_file())
    assert folder.latent_identity == file.latent_identity
    assert folder.text_identity == file.text_identity
    other = load(model_folder("sd2"))
    assert folder.latent_identity != other.latent_identity
    assert folder.text_identity != other.text_identity


@pytest.mark.parametrize("part, identity", [("vae", "latent_identity"), ("text_encoder", "text_identity")])
def test_one_changed_bit_changes_the_identity(load: Load, tmp_path: Path, part: str, identity: str) -> None:
    name = "model" if part == "text_encoder" else "diffusion_pytorch_model"
    path = save_folder(small_model(), tmp_path) / part / f"{name}.safetensors"
    same = load(tmp_path)
    assert getattr(same, identity) == getattr(load(model_folder()), identity)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert getattr(load(tmp_path), identity) != getattr(load(model_folder()), identity)


def test_identities_depend_on_everything_that_changes_the_states(load: Load) -> None:
    variants = [
        load(model_folder()),
        load(model_folder(), clip_skip=2),
        load(model_folder(), max_token_length=150),
        load(model_folder(), dtype=torch.bfloat16),
    ]
    assert len({family.text_identity for family in variants}) == 4
    assert load(model_folder(), clip_skip=1).text_identity == variants[0].text_identity
    assert load(model_folder(), vae_dtype=torch.float16).latent_identity != variants[0].latent_identity


def test_asking_for_an_identity_loads_no_encoder(load: Load) -> None:
    family = load(model_folder())
    assert family.latent_identity
    assert family.text_identity
    assert family.encoders_on_device() == frozenset()


# --- encoders come and go ---------------------------------------------------------------------------------------------


def test_encoders_are_loaded_when_used_released_and_loaded_again(load: Load) -> None:
    family = load(model_folder())
    latents, states = family.encode_images(pixels()), _states(family)
    assert family.encoders_on_device() == {"vae", "text_encoder"}
    family.release_encoders(vae=True, text_encoders=False)
    assert family.encoders_on_device() == {"text_encoder"}
    family.release_encoders(vae=False, text_encoders=True)
    assert family.encoders_on_device() == frozenset()
    assert torch.equal(family.encode_images(pixels()), latents)
    assert torch.equal(_states(family), states)


def test_borrowed_encoders_go_again_and_others_stay(load: Load) -> None:
    family = load(model_folder())
    _states(family)
    with family.encoders_borrowed():
        family.encode_images(pixels())
        assert family.encoders_on_device() == {"vae", "text_encoder"}
    assert family.encoders_on_device() == {"text_encoder"}


def test_a_text_encoder_with_an_adapter_survives_its_release(load: Load) -> None:
    family = load(model_folder())
    encoder = family.text_encoders["text_encoder"]
    inject_lora(encoder, plan_lora(encoder, component="text_encoder", network_dim=2))
    for name, parameter in encoder.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    states = _states(family)
    assert not torch.allclose(states, _states(load(model_folder())))
    family.release_encoders(vae=True, text_encoders=True)
    assert torch.equal(_states(family), states)
    assert family.text_encoders["text_encoder"] is encoder


def _states(family: StableDiffusion) -> torch.Tensor:
    return family.encode_text(family.tokenize(["a cat"]))["encoder_hidden_states"].detach()


# --- denoiser ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predictions_take_fp32_inputs_in_any_precision(load: Load, dtype: torch.dtype) -> None:
    family = load(model_folder(), dtype=dtype)
    noisy = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    steps = torch.tensor([10, 500])
    states = _states(load(model_folder())).expand(2, -1, -1)
    with torch.no_grad():
        expected = small_model().unet(noisy, steps, states).sample
        prediction = family.predict(noisy, steps, {"encoder_hidden_states": states})
    assert prediction.dtype == dtype
    assert (prediction.float() - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


def _train_once(family: StableDiffusion, pattern: str) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Return the gradients of LoRA on the modules whose path contains ``pattern``, and how often each resnet ran."""
    targets = [t for t in plan_lora(family.denoiser, component="unet", network_dim=2) if pattern in t.path]
    inject_lora(family.denoiser, targets)
    encoder = family.text_encoders["text_encoder"]
    inject_lora(encoder, plan_lora(encoder, component="text_encoder", network_dim=2))
    for network in (family.denoiser.train(), encoder.train()):
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    runs: Counter[str] = Counter()
    for name, module in family.denoiser.named_modules():
        if type(module).__name__ == "ResnetBlock2D":
            # Before, not after: recomputation ends as soon as it has what it needs, in the middle of a module.
            module.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    noisy = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    conditioning = family.encode_text(family.tokenize(["a cat"]))
    if "up_blocks.3" in pattern:
        conditioning = {name: tensor.detach() for name, tensor in conditioning.items()}
    family.predict(noisy, torch.tensor([300]), conditioning).square().sum().backward()
    assert noisy.grad is None
    networks = {"unet": family.denoiser, "text": encoder}
    gradients = {
        f"{part}.{name}": parameter.grad
        for part, network in networks.items()
        for name, parameter in network.named_parameters()
        if parameter.grad is not None
    }
    return gradients, runs


def test_gradient_checkpointing_changes_no_gradient(load: Load) -> None:
    plain, plain_runs = _train_once(load(model_folder()), "attn")
    checkpointed, runs = _train_once(load(model_folder(), gradient_checkpointing=True), "attn")
    assert sum(runs.values()) > sum(plain_runs.values())
    assert plain.keys() == checkpointed.keys()
    assert sum(name.startswith("text.") for name in plain) == 2 * 72
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-6)


def test_with_checkpointing_the_backward_pass_still_stops_at_the_last_trained_block(load: Load) -> None:
    gradients, runs = _train_once(load(model_folder(), gradient_checkpointing=True), "up_blocks.3")
    assert gradients
    assert all(name.startswith("unet.up_blocks.3") for name in gradients)
    assert runs["down_blocks.0.resnets.0"] == runs["mid_block.resnets.0"] == runs["up_blocks.2.resnets.2"] == 1
    assert runs["up_blocks.3.resnets.1"] == 2


def test_the_embeddings_are_not_made_to_require_gradients(load: Load) -> None:
    family = load(model_folder(), gradient_checkpointing=True)
    encoder = family.text_encoders["text_encoder"].train()
    assert not family.encode_text(family.tokenize(["a cat"]))["encoder_hidden_states"].requires_grad
    assert all(layer.gradient_checkpointing for layer in encoder.encoder.layers)


def test_blocks_are_those_of_the_golden_list(load: Load) -> None:
    family = load(model_folder())
    names = list(family.block_names())
    assert (names[0], names[12], names[24], len(names)) == ("IN00", "MID", "OUT11", 25)
    golden = json.loads((GOLDEN / "sd15.json").read_text())["rows"]
    assert [family.block_index(row[0]) for row in golden] == [row[5] for row in golden]
    assert family.block_index("time_embedding.linear_1") is None


def test_components_have_their_names_in_trackers_and_files(load: Load) -> None:
    family = load(model_folder())
    naming, text_naming = family.denoiser_naming, family.text_encoder_naming["text_encoder"]
    assert (naming.component, naming.log_name) == ("unet", "unet")
    assert (text_naming.component, text_naming.log_name) == ("text_encoder", "textencoder")
    assert family.key_names.prefixes == {"unet": "lora_unet", "text_encoder": "lora_te"}
