"""Choose and write the LoRA's image folders.

    python scripts/quickstart/choose_images.py rank IMAGES MODEL OUTPUT [--styles openmoji] [--exclude FOLDER]
    python scripts/quickstart/choose_images.py write IMAGES LIST FOLDER [--style openmoji]

`rank` measures how well the base model knows each concept that the new style has too: the denoising loss on its Twemoji picture
with its own label. It writes OUTPUT/ranking.csv, best known first, and OUTPUT/sheet_NN.png: a column a concept, with what the model draws,
the Twemoji picture and the picture of each style. The choice itself is made by eye from those, one label a line in LIST.
`write` writes KEY.png and KEY.txt (the label is the caption) for every label in LIST.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from concepts import Concept, drawing_weight, held_out_keys, load_concepts, load_store, plain_caption
from PIL import Image

COLUMNS_OF_A_SHEET = 24


def candidates(images: Path, styles: list[str], excluded: set[str]) -> list[Concept]:
    """Concepts the base model was trained on, in all styles, without the excluded keys."""
    concepts = load_concepts(images)
    stores = [load_store(images, style) for style in ("twitter", *styles)]
    unseen = set(held_out_keys(concepts, list(stores[0])))
    common = set.intersection(*(set(store) for store in stores)) - unseen - excluded
    return [concepts[key] for key in sorted(common) if drawing_weight(concepts[key]) > 0]


def folder_keys(folder: Path) -> set[str]:
    return {path.stem.upper() for path in folder.glob("*.png")}


def rank(arguments: argparse.Namespace) -> None:
    import torch
    from denoising_loss import denoising_losses, draw, grid, latents_of, text_states
    from diffusers import DDPMScheduler, StableDiffusionPipeline

    torch.set_num_threads(arguments.threads)
    excluded = set().union(*(folder_keys(folder) for folder in arguments.exclude))
    known = candidates(arguments.images, arguments.styles, excluded)
    stores = {style: load_store(arguments.images, style) for style in ("twitter", *arguments.styles)}
    pipeline = StableDiffusionPipeline.from_pretrained(arguments.model, torch_dtype=torch.float32, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    captions = [plain_caption(concept) for concept in known]
    pictures = np.stack([stores["twitter"][concept.key] for concept in known])
    losses = denoising_losses(
        pipeline.unet,
        latents_of(pipeline, pictures),
        text_states(pipeline, captions),
        DDPMScheduler.from_config(pipeline.scheduler.config),
    )
    order = losses.argsort().tolist()[: arguments.count]
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / "ranking.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sheet", "column", "key", "label", "loss"])
        for place, index in enumerate(order):
            sheet, column = divmod(place, COLUMNS_OF_A_SHEET)
            writer.writerow([sheet, column, known[index].key, captions[index], f"{losses[index]:.5f}"])
    for start in range(0, len(order), COLUMNS_OF_A_SHEET):
        chunk = order[start : start + COLUMNS_OF_A_SHEET]
        drawn = draw(pipeline, [captions[index] for index in chunk], [100 + index for index in chunk], 20, 4.0)
        rows = [list(drawn), *([store[known[index].key] for index in chunk] for store in stores.values())]
        grid(rows, scale=1).save(arguments.output / f"sheet_{start // COLUMNS_OF_A_SHEET:02}.png")


def write(arguments: argparse.Namespace) -> None:
    by_label = {plain_caption(concept): concept for concept in load_concepts(arguments.images).values()}
    store = load_store(arguments.images, arguments.style)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for line in arguments.list.read_text(encoding="utf-8").splitlines():
        label = line.strip()
        if not label:
            continue
        key = by_label[label].key
        Image.fromarray(store[key]).save(arguments.folder / f"{key.lower()}.png", optimize=True)
        (arguments.folder / f"{key.lower()}.txt").write_text(label + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    ranking = commands.add_parser("rank")
    ranking.set_defaults(run=rank)
    for name in ("images", "model", "output"):
        ranking.add_argument(name, type=Path)
    ranking.add_argument("--styles", nargs="+", default=["openmoji"])
    ranking.add_argument(
        "--exclude", nargs="*", type=Path, default=[], help="folders whose pictures must not be chosen"
    )
    ranking.add_argument("--count", type=int, default=240)
    ranking.add_argument("--threads", type=int, default=2)
    writing = commands.add_parser("write")
    writing.set_defaults(run=write)
    for name in ("images", "list", "folder"):
        writing.add_argument(name, type=Path)
    writing.add_argument("--style", default="openmoji")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
