"""Emoji pictures of several styles, from npm packages, as 64 px arrays.

    npm install --prefix WORK --ignore-scripts emoji-datasource-twitter@16.0.0 emoji-datasource-google@16.0.0 \\
        @lobehub/fluent-emoji-3d@1.1.0 openmoji@17.0.0 emojibase-data@17.0.0
    pip install cairosvg
    python scripts/quickstart/fetch_images.py WORK/node_modules WORK/images

Writes `STYLE.npz` for twitter, google, fluent3d and openmoji, and `concepts.json` with label, tags and group of each.
Transparent pixels become white.
"""

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 64
VARIATION_SELECTOR = "FE0F"


def normal_key(hexcode: str) -> str:
    """A Unicode sequence in capitals, without the variation selector that only some packages write."""
    return "-".join(part for part in hexcode.upper().split("-") if part != VARIATION_SELECTOR)


def read_concepts(packages: Path) -> dict[str, dict]:
    """Label, tags, group, subgroup and key without skin tone, by key, from emojibase-data."""
    english = packages / "emojibase-data" / "en"
    messages = json.loads((english / "messages.json").read_text(encoding="utf-8"))
    groups = {entry["order"]: entry["message"] for entry in messages["groups"]}
    subgroups = {entry["order"]: entry["message"] for entry in messages["subgroups"]}
    concepts = {}
    for emoji in json.loads((english / "data.json").read_text(encoding="utf-8")):
        for variant in (emoji, *emoji.get("skins", [])):
            concepts[normal_key(variant["hexcode"])] = {
                "base_key": normal_key(emoji["hexcode"]),
                "label": variant["label"],
                "tags": emoji.get("tags", []),
                "group": groups.get(emoji.get("group"), ""),
                "subgroup": subgroups.get(emoji.get("subgroup"), ""),
            }
    return concepts


def on_white(image: Image.Image) -> np.ndarray:
    """uint8 [64, 64, 3], composited on white."""
    image = image.convert("RGBA")
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    page = Image.new("RGBA", image.size, "white")
    page.alpha_composite(image)
    return np.asarray(page.convert("RGB"))


def raster_svg(path: Path) -> Image.Image:
    import cairosvg

    png = cairosvg.svg2png(bytestring=path.read_bytes(), output_width=SIZE, output_height=SIZE)
    return Image.open(io.BytesIO(png))


def read_style(
    folder: Path, suffix: str, reader: Callable[[Path], Image.Image], known: set[str]
) -> dict[str, np.ndarray]:
    images = {}
    for path in sorted(folder.glob(f"*{suffix}")):
        key = normal_key(path.stem)
        if key in known:
            images[key] = on_white(reader(path))
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="the node_modules folder")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    concepts = read_concepts(arguments.packages)
    (arguments.output / "concepts.json").write_text(json.dumps(concepts), encoding="utf-8")
    styles = {
        "twitter": (arguments.packages / "emoji-datasource-twitter/img/twitter/64", ".png", Image.open),
        "google": (arguments.packages / "emoji-datasource-google/img/google/64", ".png", Image.open),
        "fluent3d": (arguments.packages / "@lobehub/fluent-emoji-3d/assets", ".webp", Image.open),
        "openmoji": (arguments.packages / "openmoji/color/svg", ".svg", raster_svg),
    }
    for style, (folder, suffix, reader) in styles.items():
        images = read_style(folder, suffix, reader, set(concepts))
        np.savez(
            arguments.output / f"{style}.npz",
            keys=np.array(sorted(images)),
            images=np.stack([images[k] for k in sorted(images)]),
        )
        print(f"{style}: {len(images)} images")


if __name__ == "__main__":
    main()
