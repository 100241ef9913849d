"""The SDXL family: two text encoders, pooled text, sizes, the VAE's precision, blocks and names."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import save_file

from maulstick.adapters.blocks import sdxl_block_index
from maulstick.adapters.files import lora_tensors
from maulstick.adapters.key_names import SDXL_KEY_NAMES
from maulstick.adapters.lora import inject_lora, lora_state
from maulstick.adapters.targets import plan_lora
from maulstick.errors import ModelError, OptionError
from maulstick.families.base import Family, Framing
from maulstick.families.configs import shipped_config
from maulstick.families.load import load_family
from maulstick.options.schema import ModelOptions
from tests.models import model_folder, single_file
from tests.sdxl_models import CLIP_WIDTH, SCALING, original_sdxl, sdxl_file, sdxl_folder, small_sdxl

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "blocks" / "sdxl.json").read_text())
START, END = 49406, 49407
CONVOLUTIONS = ("ResnetBlock2D", "Downsample2D", "Upsample2D")


def load(
    path: Path, dtype: torch.dtype = torch.float32, vae_dtype: torch.dtype | None = None, **options: object
) -> Family:
    model = ModelOptions(pretrained_model_name_or_path=str(path), **options)
    return load_family(model, device="cpu", dtype=dtype, vae_dtype=vae_dtype)


@pytest.fixture(scope="module")
def family() -> Family:
    return load(sdxl_folder())


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline.from_pretrained(sdxl_folder(), local_files_only=True, add_watermarker=False)


def noisy(count: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


# --- what it is -------------------------------------------------------------------------------------------------------


def test_it_says_what_it_is(family: Family) -> None:
    assert (family.name, family.base_model_version) == ("SDXL", "sdxl_base_v1-0")
    assert family.architecture == "stable-diffusion-xl-v1-base/lora"
    assert (family.vae_scale, family.latent_channels, family.native_size) == (8, 4, 64)
    assert {name: naming.log_name for name, naming in family.text_encoder_naming.items()} == {
        "text_encoder": "textencoder1",
        "text_encoder_2": "textencoder2",
    }
    assert list(family.text_encoders) == ["text_encoder", "text_encoder_2"]
    assert load(sdxl_folder("v_prediction")).prediction_type == "v_prediction"


def test_blocks_and_key_names_are_those_of_the_golden_list(family: Family) -> None:
    rows = GOLDEN["rows"]
    assert [family.block_index(row[0]) for row in rows] == [row[5] for row in rows]
    assert [family.key_names.name("unet", row[0]) for row in rows] == [row[1] for row in rows]
    assert {part: len(places) for part, places in family.block_parts().items()} == {"down": 9, "mid": 3, "up": 9}
    names = family.block_names()
    assert (names[0], names[1], names[11], names[21], len(names)) == ("EMB", "IN00", "MID1", "OUT08", 23)


def test_the_full_size_model_has_the_golden_modules_and_shapes() -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(shipped_config("sdxl-base", "unet"))
    assert sum(parameter.numel() for parameter in unet.parameters()) == 2_567_463_684  # as published
    with_conv = plan_lora(unet, component="unet", network_dim=1, conv_dim=1, block_of=sdxl_block_index)
    assert {target.path: (target.kind, list(target.shape), target.block) for target in with_conv} == {
        path: (kind, shape, block) for path, _, kind, _, shape, block in GOLDEN["rows"]
    }
    plain = plan_lora(unet, component="unet", network_dim=1)
    assert (len(plain), len(with_conv)) == (722, 788)
    assert sum(target.parameter_count for target in plain) == 2_659_840
    assert sum(target.parameter_count for target in with_conv) == 3_074_240


def test_the_small_model_has_as_many_modules(family: Family) -> None:
    small = Counter(
        target.block
        for target in plan_lora(
            family.denoiser, component="unet", network_dim=1, conv_dim=1, block_of=family.block_index
        )
    )
    assert small == Counter(row[5] for row in GOLDEN["rows"])
    text = {n: len(plan_lora(e, component=n, network_dim=1)) for n, e in family.text_encoders.items()}
    assert text == {"text_encoder": 72, "text_encoder_2": 192}


# --- captions and sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [sdxl_folder, sdxl_file])
def test_the_second_tokenizer_pads_with_token_zero(source) -> None:
    tokens = load(source()).tokenize(["a cat", ""])
    assert tokens["text_encoder"].tolist() == [[START, 320, 2368, END] + [END] * 73, [START, END] + [END] * 75]
    assert tokens["text_encoder_2"].tolist() == [[START, 320, 2368, END] + [0] * 73, [START, END] + [0] * 75]


def test_text_is_what_diffusers_own_pipeline_gives(family: Family, pipeline: StableDiffusionXLPipeline) -> None:
    prompts = ["a photo of a cat", ""]
    ours = family.encode_text(family.tokenize(prompts))
    with torch.no_grad():
        theirs, _, pooled, _ = pipeline.encode_prompt(prompts, device="cpu", do_classifier_free_guidance=False)
    torch.testing.assert_close(ours["encoder_hidden_states"], theirs, rtol=0, atol=0)
    torch.testing.assert_close(ours["text_embeds"], pooled, rtol=0, atol=0)


def test_long_captions_are_joined_window_by_window_and_pooled_from_the_first() -> None:
    family = load(sdxl_folder(), max_token_length=150)
    caption = " ".join(["cat"] * 80)
    encoded = family.encode_text(family.tokenize([caption]))
    one_window = load(sdxl_folder()).encode_text(load(sdxl_folder()).tokenize([" ".join(["cat"] * 75)]))
    assert encoded["encoder_hidden_states"].shape == (1, 152, 192)
    torch.testing.assert_close(
        encoded["encoder_hidden_states"][:, :76], one_window["encoder_hidden_states"][:, :76], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(encoded["text_embeds"], one_window["text_embeds"], rtol=1e-4, atol=1e-5)


def test_sizes_are_heights_first(family: Family) -> None:
    framings = [Framing((1081, 2000), (5, 7), (832, 1216)), Framing.whole(64, 48)]
    assert family.image_conditioning(framings)["time_ids"].tolist() == [
        [2000, 1081, 7, 5, 1216, 832],
        [48, 64, 0, 0, 48, 64],
    ]


def test_a_prediction_is_that_of_the_unet_with_all_its_conditioning(family: Family) -> None:
    text = family.encode_text(family.tokenize(["a cat", "a dog"]))
    sizes = family.image_conditioning([Framing((640, 480), (16, 0), (64, 64)), Framing.whole(64, 64)])
    steps = torch.tensor([10, 700])
    with torch.no_grad():
        expected = (
            small_sdxl()
            .unet(
                noisy(),
                steps,
                text["encoder_hidden_states"],
                added_cond_kwargs={
                    "text_embeds": text["text_embeds"],
                    "time_ids": torch.tensor([[480, 640, 0, 16, 64, 64], [64, 64, 0, 0, 64, 64]]),
                },
            )
            .sample
        )
        found = family.predict(noisy(), steps, {**text, **sizes})
        untold = family.predict(noisy(), steps, text)
    assert torch.equal(found, expected)
    assert not torch.allclose(untold[0], expected[0], atol=1e-4)  # the first is no whole picture
    torch.testing.assert_close(untold[1], expected[1])


def test_sizes_are_not_rounded_in_half_precision() -> None:
    family = load(sdxl_folder(), dtype=torch.bfloat16)
    text = family.encode_text(family.tokenize(["a cat"] * 2))
    sizes = family.image_conditioning(
        [Framing((1080, 1080), (0, 0), (64, 64)), Framing((1081, 1080), (0, 0), (64, 64))]
    )
    seen: list[torch.Tensor] = []
    family.denoiser.add_time_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    family.predict(noisy(), torch.tensor([500, 500]), {**text, **sizes})
    assert seen[0].reshape(2, 6)[:, 1].tolist() == [1080, 1081]


def test_other_families_are_told_nothing_about_sizes() -> None:
    assert load(model_folder()).image_conditioning([Framing.whole(64, 64)]) == {}


def test_another_layer_is_refused_and_its_own_is_not() -> None:
    with pytest.raises(OptionError, match=r"clip_skip 3: SDXL always takes .* Leave clip_skip out"):
        load(sdxl_folder(), clip_skip=3)
    # kohya_ss writes 1 into every file.
    for clip_skip in (1, 2):
        assert load(sdxl_folder(), clip_skip=clip_skip).text_identity == load(sdxl_folder()).text_identity


# --- images -----------------------------------------------------------------------------------------------------------


def test_latents_are_scaled_as_sdxl_scales_them_and_have_their_own_identity(family: Family) -> None:
    pixels = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(3)) * 2 - 1
    expected = small_sdxl().vae.encode(pixels).latent_dist.mean * SCALING
    torch.testing.assert_close(family.encode_images(pixels), expected, rtol=1e-4, atol=1e-5)
    assert family.latent_identity.startswith("sdxl-vae:")
    assert family.latent_identity != load(model_folder()).latent_identity


@pytest.mark.parametrize(
    ("dtype", "asked", "vae"),
    [
        (torch.float16, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float16),
    ],
)
def test_the_vae_stays_out_of_fp16_unless_asked_otherwise(
    dtype: torch.dtype, asked: torch.dtype | None, vae: torch.dtype
) -> None:
    family = load(sdxl_folder(), dtype=dtype, vae_dtype=asked)
    assert family.vae.dtype == vae
    assert family.denoiser.dtype == family.text_encoders["text_encoder_2"].dtype == dtype
    assert load(model_folder(), dtype=torch.float16).vae.dtype == torch.float16


def test_another_vae_must_scale_its_latents_alike(tmp_path: Path) -> None:
    own = load(sdxl_folder(), vae=str(sdxl_folder()))
    assert own.latent_identity == load(sdxl_folder()).latent_identity
    assert load(sdxl_file(), vae=str(sdxl_file())).vae.config.scaling_factor == SCALING
    with pytest.raises(OptionError, match=r"scales its latents by 0\.18215, but the model's own VAE by 0\.13025"):
        load(sdxl_folder(), vae=str(model_folder()))


# --- a single file ----------------------------------------------------------------------------------------------------


def test_a_file_in_the_original_layout_is_the_same_model(family: Family) -> None:
    from_file = load(sdxl_file())
    assert from_file.notes == ()
    assert from_file.latent_identity == family.latent_identity
    assert from_file.text_identity == family.text_identity
    text = family.encode_text(family.tokenize(["a cat"]))
    again = from_file.encode_text(from_file.tokenize(["a cat"]))
    assert all(torch.equal(text[name], again[name]) for name in text)
    steps = torch.tensor([300])
    assert torch.equal(from_file.predict(noisy(1), steps, again), family.predict(noisy(1), steps, text))
    for name, network in small_sdxl().networks().items():
        ours = {"unet": from_file.denoiser, "vae": from_file.vae, **from_file.text_encoders}[name].state_dict()
        assert ours.keys() == network.state_dict().keys()
        assert all(torch.equal(tensor, ours[key]) for key, tensor in network.state_dict().items()), name
    assert from_file.text_encoders["text_encoder"].config.hidden_size == CLIP_WIDTH


# --- what is refused --------------------------------------------------------------------------------------------------


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(sdxl_folder(), tmp_path / "model", copy_function=lambda a, b: Path(b).symlink_to(a)))


def replace_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(content))


def test_unsuitable_folders_are_called_what_they_are(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "tokenizer_2").rename(folder / "away")
    with pytest.raises(ModelError, match=r"lacks tokenizer_2\. A diffusers folder for SDXL has"):
        load(folder)
    (folder / "away").rename(folder / "tokenizer_2")
    replace_json(folder / "scheduler" / "scheduler_config.json", _class_name="EDMEulerScheduler")
    with pytest.raises(ModelError, match=r"another kind of noise .*EDMEulerScheduler"):
        load(folder)
    replace_json(folder / "unet" / "config.json", in_channels=9)
    with pytest.raises(ModelError, match="inpainting"):
        load(folder)
    (folder / "text_encoder").rename(folder / "away")
    with pytest.raises(ModelError, match="SDXL refiner"):
        load(folder)
    with pytest.raises(OptionError, match=r"--v2 contradicts .* an SDXL model"):
        load(sdxl_folder(), v2=True)


def test_convolutions_load_into_diffusers_with_equal_changes() -> None:
    """The 66 modules outside of transformers; all the others are loaded in the test of a whole run."""
    unet = load(sdxl_folder()).denoiser
    targets = [t for t in plan_lora(unet, component="unet", network_dim=2, conv_dim=3) if t.container in CONVOLUTIONS]
    inject_lora(unet, targets)
    generator = torch.Generator().manual_seed(3)
    for key, parameter in unet.named_parameters():
        if "lora_" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    tensors = lora_tensors({"unet": lora_state(unet)}, SDXL_KEY_NAMES, torch.float32)
    pipeline = StableDiffusionXLPipeline.from_pretrained(sdxl_folder(), local_files_only=True, add_watermarker=False)
    pipeline.load_lora_weights(tensors, adapter_name="it")
    loaded = {n: m.get_delta_weight("it") for n, m in pipeline.unet.named_modules() if hasattr(m, "get_delta_weight")}
    assert len(loaded) == 66
    for name, module in unet.named_modules():
        if name in loaded:
            ours = module.get_delta_weight(next(iter(module.scaling)))
            torch.testing.assert_close(loaded[name], ours, rtol=1e-5, atol=1e-7)


def test_single_files_of_sd1_are_still_sd1() -> None:
    assert load(single_file()).name == "SD 1.x"


# --- v-prediction -----------------------------------------------------------------------------------------------------


def test_a_file_that_says_it_predicts_v_is_taken_at_its_word(tmp_path: Path) -> None:
    """Published v-prediction fine-tunes carry two empty tensors that say so."""
    path = tmp_path / "v.safetensors"
    save_file(original_sdxl(small_sdxl()) | {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}, path)
    with pytest.raises(OptionError, match=r"v_pred.*--v_parameterization is not given"):
        load(path)
    family = load(path, v_parameterization=True)
    assert family.prediction_type == "v_prediction"
    assert family.notes == ()
    last = torch.tensor([999, 999])
    # The last step of its schedule is pure noise, which is the input whatever the picture is.
    assert torch.equal(family.add_noise(noisy(), noisy(seed=1), last), noisy(seed=1))
    torch.testing.assert_close(family.target(noisy(), noisy(seed=1), last), -noisy())
    assert not torch.equal(load(sdxl_folder()).add_noise(noisy(), noisy(seed=1), last), noisy(seed=1))
