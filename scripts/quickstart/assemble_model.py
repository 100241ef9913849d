"""Put the shipped model folder together from trained parts, in fp16.

    python scripts/quickstart/assemble_model.py FIRST SECOND VAE TOKENIZER OUTPUT --share 0.5

FIRST and SECOND are two stages of train_base.py, the second trained on from the first: weights between theirs draw as crisply as the
first and generalise nearly as well as the second (weight averaging of fine-tuned models: Wortsman et al. 2022, "Model soups").
TOKENIZER is the folder that build_tokenizer.py wrote. Names of local folders are taken out of the configs.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from base_model import save_pipeline
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


def blend(first: torch.nn.Module, second: torch.nn.Module, share: float) -> None:
    """Moves the weights of `first` by `share` of the way to those of `second`."""
    with torch.no_grad():
        for own, other in zip(first.parameters(), second.parameters(), strict=True):
            own.lerp_(other, share)


def load_models(folder: Path) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", torch_dtype=torch.float32)
    return unet, CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", dtype=torch.float32)


def tidy(output: Path, tokenizer: Path) -> None:
    """CLIP's own tokenizer files instead of the derived one, no local names, readable by everyone."""
    shutil.rmtree(output / "tokenizer")
    (output / "tokenizer").mkdir()
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, output / "tokenizer" / name)
    for path in output.rglob("*.json"):
        if path.parent.name == "tokenizer":
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        config.pop("_name_or_path", None)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in output.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("first", "second", "vae", "tokenizer", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="0 is the first stage, 1 the second")
    given = parser.parse_args()
    unet, encoder = load_models(given.first)
    second_unet, second_encoder = load_models(given.second)
    blend(unet, second_unet, given.share)
    blend(encoder, second_encoder, given.share)
    vae = AutoencoderKL.from_pretrained(given.vae, torch_dtype=torch.float32)
    tokenizer = CLIPTokenizer.from_pretrained(given.tokenizer)
    save_pipeline(given.output, vae.half(), encoder.half(), tokenizer, unet.half())
    tidy(given.output, given.tokenizer)


if __name__ == "__main__":
    main()
