"""The quickstart's shipped material: complete, loadable offline, licensed, within its size, as good as it says."""

import hashlib
import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from PIL import Image
from safetensors import safe_open
from transformers import CLIPTokenizer

ASSETS = Path(str(files("maulstick"))) / "assets"
QUICKSTART = ASSETS / "quickstart"
MODEL = QUICKSTART / "model"
TRAIN = QUICKSTART / "images" / "10_openmoji"
HELD_OUT = QUICKSTART / "heldout"
SCRIPTS = Path(__file__).parents[2] / "scripts" / "quickstart"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    torch.set_num_threads(1)  # two wait for each other on a busy machine
    loaded = StableDiffusionPipeline.from_pretrained(
        MODEL, torch_dtype=torch.float32, safety_checker=None, local_files_only=True
    )
    loaded.set_progress_bar_config(disable=True)
    return loaded


def captioned(folder: Path) -> dict[str, str]:
    """Caption by file name without suffix."""
    return {path.stem: path.read_text(encoding="utf-8").strip() for path in sorted(folder.glob("*.txt"))}


def pixel_hash(path: Path) -> str:
    with Image.open(path) as image:
        return hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()


def test_assets_stay_within_32_megabytes():
    total = sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file())
    assert 20 * MEGABYTE < total <= 32 * MEGABYTE


@pytest.mark.parametrize("part", ["unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model"])
def test_weights_are_finite_halves(part: str):
    with safe_open(MODEL / f"{part}.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.float16, name
            assert torch.isfinite(tensor).all(), name


def test_text_encoder_file_keeps_the_text_model_prefix():
    with safe_open(MODEL / "text_encoder/model.safetensors", "pt") as weights:
        names = list(weights.keys())
    assert "text_model.embeddings.token_embedding.weight" in names
    assert all(name.startswith("text_model.") for name in names)


def test_unet_has_every_block_of_sd_1(pipeline: StableDiffusionPipeline):
    unet = pipeline.unet
    resnets_down = sum(len(block.resnets) for block in unet.down_blocks)
    samplers_down = sum(bool(getattr(block, "downsamplers", None)) for block in unet.down_blocks)
    assert 1 + resnets_down + samplers_down == 12
    assert sum(len(block.resnets) for block in unet.up_blocks) == 12
    inside = re.compile(r"attentions\.\d+\..*")
    targets = [
        name
        for name, module in unet.named_modules()
        if inside.search(name) and isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    ]
    assert len(targets) == 192


def test_vae_is_sd_1_shaped(pipeline: StableDiffusionPipeline):
    assert pipeline.vae.config.latent_channels == 4
    assert pipeline.vae.config.scaling_factor == 0.18215


@pytest.mark.parametrize("folder", [ASSETS / "clip_tokenizer", MODEL / "tokenizer"])
def test_tokenizer_is_clips(folder: Path):
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == 49408
    assert tokenizer.model_max_length == 77
    assert tokenizer("a photo of a cat").input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]
    assert tokenizer("Grinning FACE").input_ids == tokenizer("grinning face").input_ids


def test_both_tokenizers_are_one():
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        assert (ASSETS / "clip_tokenizer" / name).read_bytes() == (MODEL / "tokenizer" / name).read_bytes()


@pytest.mark.parametrize(("folder", "least", "most"), [(TRAIN, 30, 60), (HELD_OUT, 40, 40)])
def test_every_picture_has_its_caption(folder: Path, least: int, most: int):
    captions = captioned(folder)
    pictures = {path.stem for path in folder.glob("*.png")}
    assert least <= len(pictures) <= most
    assert pictures == set(captions)
    for stem, caption in captions.items():
        assert caption
        assert "\n" not in caption
        with Image.open(folder / f"{stem}.png") as image:
            assert (image.size, image.mode) == ((64, 64), "RGB")


def test_held_out_pictures_are_not_trained_on():
    trained, held_out = captioned(TRAIN), captioned(HELD_OUT)
    assert not set(trained) & set(held_out)
    assert not set(trained.values()) & set(held_out.values())
    assert not {pixel_hash(path) for path in TRAIN.glob("*.png")} & {
        pixel_hash(path) for path in HELD_OUT.glob("*.png")
    }


def test_recipe_is_plain_sd_scripts_toml():
    recipe = tomllib.loads((QUICKSTART / "quickstart.toml").read_text(encoding="utf-8"))
    options = {}
    for key, value in recipe.items():
        options.update(value if isinstance(value, dict) else {key: value})
    filled_in_by_the_command = {"pretrained_model_name_or_path", "train_data_dir", "output_dir"}
    assert not filled_in_by_the_command & set(options)
    assert options["resolution"] == "64,64"
    assert options["enable_bucket"] is False
    assert options["network_train_unet_only"] is True
    assert options["mixed_precision"] == "no"
    assert 100 <= options["max_train_steps"] <= 1500
    assert 0 < options["network_alpha"] <= options["network_dim"]


def test_prompts_have_size_steps_guidance_and_a_seed():
    lines = [line for line in (QUICKSTART / "prompts.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [line for line in lines if not line.startswith("#")]
    assert 8 <= len(prompts) <= 16
    for prompt in prompts:
        text, *options = prompt.split(" --")
        given = dict(option.split(" ", 1) for option in options)
        assert text.strip()
        assert not set(given) - set("whsldn")
        assert (given["w"], given["h"]) == ("64", "64")
        assert 10 <= int(given["s"]) <= 50
        assert 1 < float(given["l"]) <= 10
        assert int(given["d"]) >= 0


def test_attribution_is_beside_the_files():
    readme = (QUICKSTART / "README.md").read_text(encoding="utf-8")
    for credit in (
        "Twemoji",
        "CC-BY 4.0",
        "OpenMoji",
        "CC-BY-SA 4.0",
        "openmoji.org",
        "emojibase",
        "MIT",
        "OpenAI",
        "Noto",
        "Fluent",
    ):
        assert credit in readme
    licences = {path.name for path in (QUICKSTART / "LICENSES").iterdir()}
    assert {"CC-BY-4.0.txt", "CC-BY-SA-4.0.txt", "MIT-emojibase.txt", "MIT-CLIP.txt"} <= licences


def test_base_model_measures_as_the_readme_says(pipeline: StableDiffusionPipeline, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from denoising_loss import denoising_losses, latents_of, read_folder, text_states

    figures = json.loads((QUICKSTART / "figures.json").read_text(encoding="utf-8"))
    images, captions = read_folder(HELD_OUT)
    losses = denoising_losses(
        pipeline.unet,
        latents_of(pipeline, images),
        text_states(pipeline, captions),
        DDPMScheduler.from_config(pipeline.scheduler.config),
    )
    assert losses.mean().item() == pytest.approx(figures["held_out_before"], abs=2e-4)
    assert figures["held_out_after"] <= 0.0736
    assert f"{figures['held_out_before']:.4f}" in (QUICKSTART / "README.md").read_text(encoding="utf-8")
    assert f"{figures['held_out_after']:.4f}" in (QUICKSTART / "README.md").read_text(encoding="utf-8")


def test_colour_words_choose_the_colour(pipeline: StableDiffusionPipeline):
    prompts = ["red heart", "green heart", "blue heart"]
    pictures = pipeline(
        prompts,
        num_inference_steps=12,
        guidance_scale=3.0,
        height=64,
        width=64,
        generator=[torch.Generator().manual_seed(5) for _ in prompts],
        output_type="np",
    ).images
    centres = pictures[:, 20:40, 20:44].mean((1, 2))
    assert [int(centre.argmax()) for centre in centres] == [0, 1, 2]
