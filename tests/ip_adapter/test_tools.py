"""IP-Adapter files in ``generate`` and ``convert``."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from maulstick.adapters.ip_adapter_files import IpAdapterSpec, save_flat, save_nested
from maulstick.cli import main
from maulstick.errors import ModelError, OptionError
from maulstick.families.ip_adapter_sd3 import Sd3IpAdapter
from maulstick.families.ip_adapter_unet import UnetIpAdapter
from maulstick.families.load import load_family
from maulstick.options.generate import GenerateOptions, IpAdapterChoice, LoraOptions, OutputOptions, PictureOptions
from maulstick.options.schema import ModelOptions
from maulstick.tools.generate import generate
from tests.image_encoders import CLIP_PROJECTED, CLIP_WIDTH, SIGLIP_WIDTH, clip_encoder, siglip_encoder
from tests.ip_adapter.test_adapters import shaken, transformer, unet
from tests.models import model_folder
from tests.sd3_models import sd3_folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "look.png")
    return tmp_path / "look.png"


@pytest.fixture
def plus(tmp_path: Path) -> Path:
    path = tmp_path / "plus.safetensors"
    save_flat(path, shaken(UnetIpAdapter(unet(), IpAdapterSpec("plus", 6, CLIP_WIDTH, 64))).file_tensors(), {})
    return path


@pytest.fixture
def sd3(tmp_path: Path) -> Path:
    path = tmp_path / "sd3.safetensors"
    save_flat(path, shaken(Sd3IpAdapter(transformer(), IpAdapterSpec("time", 4, SIGLIP_WIDTH, 64))).file_tensors(), {})
    return path


def draw(tmp_path: Path, file: Path | None, image: Path | None, **more: Any) -> list[Path]:
    encoder = more.pop("image_encoder", clip_encoder())
    options = GenerateOptions(
        model=ModelOptions(pretrained_model_name_or_path=str(more.pop("model", model_folder()))),
        lora=LoraOptions(lora=more.pop("lora", [])),
        ip_adapter=IpAdapterChoice(
            ip_adapter=file, ip_image=image, image_encoder=encoder, ip_scale=more.pop("ip_scale", 1.0)
        ),
        picture=PictureOptions(prompt=["a cat"], seed=5, steps=2, width=64, height=64, **more),
        output=OutputOptions(output_dir=tmp_path / "out", device="cpu", precision="float"),
    )
    return generate(options)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def test_pictures_look_at_the_image_as_the_pipeline_does(tmp_path, plus, image) -> None:
    """Pitfalls 2 and 10: no encoder in the pipeline, and one image for several prompts at once."""
    paths = draw(tmp_path, plus, image, images_per_prompt=2, batch_size=2)
    one, two = map(pixels, paths)
    assert not np.array_equal(one, two)
    assert np.array_equal(pixels(draw(tmp_path, plus, image)[0]), one)
    # diffusers' own way, from pixels to picture.
    from transformers import CLIPVisionModelWithProjection
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    family = load_family(
        ModelOptions(pretrained_model_name_or_path=str(model_folder())), device="cpu", dtype=torch.float32
    )
    pipeline = family.pipeline("euler")
    pipeline.register_modules(
        image_encoder=CLIPVisionModelWithProjection.from_pretrained(clip_encoder()),
        feature_extractor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    )
    pipeline.load_ip_adapter(str(plus.parent), subfolder="", weight_name=plus.name, low_cpu_mem_usage=False)
    with torch.no_grad():
        latents = pipeline(
            **family.pipeline_conditioning(["a cat"], [""]),
            ip_adapter_image=Image.open(image),
            latents=torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5)),
            height=64,
            width=64,
            num_inference_steps=2,
            guidance_scale=7.5,
            output_type="latent",
        ).images
        theirs = pipeline.image_processor.postprocess(family.decode_latents(latents), output_type="pil")[0]
    assert np.abs(np.asarray(theirs).astype(int) - one).max() <= 1


def test_scale_and_what_the_picture_says(tmp_path, plus, image) -> None:
    base = pixels(draw(tmp_path, None, None, image_encoder=None)[0])
    off = draw(tmp_path, plus, image, ip_scale=0.0)[0]
    half, full = draw(tmp_path, plus, image, ip_scale=0.5)[0], draw(tmp_path, plus, image)[0]
    assert np.array_equal(pixels(off), base)
    assert np.abs(pixels(half) - base).sum() > 0
    assert not np.array_equal(pixels(half), pixels(full))
    with Image.open(half) as picture:
        record = json.loads(picture.text["maulstick"])["ip_adapter"]
        assert "IP-Adapter: " in picture.text["parameters"]
    assert (record["name"], record["scale"], record["image"]) == ("plus", 0.5, "look.png")


def test_sd3_draws_with_one_too(tmp_path, sd3, image) -> None:
    more = {"model": sd3_folder(with_t5=False), "image_encoder": siglip_encoder()}
    base = pixels(draw(tmp_path, None, None, model=more["model"], image_encoder=None)[0])
    assert not np.array_equal(pixels(draw(tmp_path, sd3, image, **more)[0]), base)


def test_pitfall_8_a_lora_goes_on_before_and_stays_out_of_the_ip_adapter(tmp_path, plus, image) -> None:
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
    generator = torch.Generator().manual_seed(0)
    lora = {
        f"{name}.lora_down.weight": torch.randn(4, 64, generator=generator),
        f"{name}.lora_up.weight": torch.randn(96, 4, generator=generator),
    }
    save_file(lora, tmp_path / "lora.safetensors")
    both = draw(tmp_path, plus, image, lora=[str(tmp_path / "lora.safetensors")])[0]
    without = draw(tmp_path, plus, image)[0]
    assert not np.array_equal(pixels(both), pixels(without))


def test_a_disk_that_is_full_is_told_as_such(tmp_path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, usual[1]))
        with pytest.raises(OSError, match="File too large"):
            save_nested(tmp_path / "a.bin", {"image_proj.proj.weight": torch.zeros(100, 100)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["ip_adapter", "ip_image", "image_encoder"])
def test_all_three_are_needed(missing: str) -> None:
    given = {"ip_adapter": Path("a"), "ip_image": Path("b"), "image_encoder": Path("c"), missing: None}
    options = GenerateOptions(ip_adapter=IpAdapterChoice(**given), picture=PictureOptions(prompt=["x"]))
    with pytest.raises(OptionError, match=f"there is no --{missing}"):
        generate(options)


def test_files_that_do_not_fit_are_refused(tmp_path, plus, sd3, image) -> None:
    with pytest.raises(ModelError, match=r"is an IP-Adapter for SD3, but the model is SD 1.x"):
        draw(tmp_path, sd3, image)
    with pytest.raises(ModelError, match=r"is an IP-Adapter for SD 1.x, SD 2.x or SDXL, but the model is SD3.5 medium"):
        draw(tmp_path, plus, image, model=sd3_folder(with_t5=False), image_encoder=siglip_encoder())
    with pytest.raises(ModelError, match=r"is a SigLIP model; IP-Adapters for SD 1.x read CLIP"):
        draw(tmp_path, plus, image, image_encoder=siglip_encoder())
    wide = tmp_path / "wide.safetensors"
    save_flat(wide, UnetIpAdapter(unet(), IpAdapterSpec("plain", 4, CLIP_PROJECTED + 8)).file_tensors(), {})
    with pytest.raises(
        ModelError, match=f"reads features {CLIP_PROJECTED + 8} wide, but those .* are {CLIP_PROJECTED}"
    ):
        draw(tmp_path, wide, image)
    tensors = load_file(plus)
    del tensors["ip_adapter.17.to_k_ip.weight"]
    save_file(tensors, tmp_path / "lacking.safetensors")
    with pytest.raises(ModelError, match=r"does not fit this model: 1 tensors are missing"):
        draw(tmp_path, tmp_path / "lacking.safetensors", image)
    assert not list(tmp_path.glob("out/*.png"))


@pytest.mark.parametrize("kind", ["plus", "sd3"])
def test_convert_there_and_back(kind: str, tmp_path, request, capsys) -> None:
    file = request.getfixturevalue(kind)
    layout = "comfyui" if kind == "plus" else "instantx"
    assert main(["convert", str(file), "--to", layout, "--output", str(tmp_path / "n.bin")]) == 0
    nested = torch.load(tmp_path / "n.bin", weights_only=True)
    assert list(nested) == ["image_proj", "ip_adapter"]
    expected = "layers.0.0.to_kv.weight"
    assert expected in nested["image_proj"]
    back = tmp_path / "back.safetensors"
    assert main(["convert", str(tmp_path / "n.bin"), "--to", "diffusers", "--output", str(back)]) == 0
    one, two = load_file(file), load_file(back)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    half = [
        "convert",
        str(file),
        "--to",
        "diffusers",
        "--save_precision",
        "bf16",
        "--output",
        str(tmp_path / "h.safetensors"),
    ]
    assert main(half) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "h.safetensors").values()} == {torch.bfloat16}
    capsys.readouterr()
    assert main(["convert", str(file), "--output", str(tmp_path / "k.safetensors")]) == 2
    assert "--to kohya is for LoRA files, and this is an IP-Adapter" in capsys.readouterr().err
