"""Sample pictures, small enough to travel inside the report."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from maulstick.pictures.picture_files import JSON_KEY, PARAMETERS_KEY
from maulstick.tools.report.run_data import RunData, SampleSet

SIDE, SMALLER_SIDE = 288, 192
QUALITY = 72
MOST_PICTURES = 96
MOST_BYTES = 1_600_000
"""Of all pictures of a report, as they stand in the file."""
MOST_PIXELS = 60_000_000


@dataclass(frozen=True)
class Thumbnail:
    """A picture as a data URI, and its prompt where the file tells it."""

    uri: str
    width: int
    height: int
    prompt: str


@dataclass(frozen=True)
class Film:
    """The samples of a run: for each prompt its pictures over the steps. ``left_out``: sets that had no room."""

    sets: Sequence[SampleSet]
    rows: Sequence[Sequence[Thumbnail | None]]
    prompts: Sequence[str]
    left_out: int


def film_of(run: RunData, *, most_bytes: int = MOST_BYTES, most_pictures: int = MOST_PICTURES) -> Film | None:
    """Return the pictures of a run, evenly over its steps where there are too many; None where there are none."""
    sets = [each for each in run.samples if any(each.files)]
    if not sets:
        return None
    prompts = max(len(each.files) for each in sets)
    chosen = evenly(sets, max(2, most_pictures // prompts))
    side = SIDE
    while True:
        film = _film(chosen, prompts, side, len(sets) - len(chosen))
        size = sum(len(picture.uri) for row in film.rows for picture in row if picture is not None)
        if size <= most_bytes:
            return film
        if side > SMALLER_SIDE:
            side = SMALLER_SIDE
        elif len(chosen) > 1:
            chosen = evenly(sets, min(len(chosen) - 1, int(len(chosen) * most_bytes / size)) or 1)
        else:
            return Film(chosen, [], [], len(sets))


def evenly(sets: Sequence[SampleSet], most: int) -> list[SampleSet]:
    """Return at most so many of the sets, evenly spaced, the first and the last among them where there are two."""
    if len(sets) <= most:
        return list(sets)
    if most == 1:
        return [sets[-1]]
    return [sets[round(number * (len(sets) - 1) / (most - 1))] for number in range(most)]


def _film(sets: Sequence[SampleSet], prompts: int, side: int, left_out: int) -> Film:
    rows: list[list[Thumbnail | None]] = []
    for place in range(prompts):
        files = [each.files[place] if place < len(each.files) else None for each in sets]
        rows.append([None if file is None else thumbnail(file, side) for file in files])
    names = [next((picture.prompt for picture in row if picture and picture.prompt), "") for row in rows]
    return Film(sets, rows, names, left_out)


def thumbnail(path: Path, side: int) -> Thumbnail | None:
    """Return the picture with its longer side at most ``side``; None where the file is no usable picture."""
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                return None
            prompt = _prompt(picture)
            small = picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    small.save(data, format="WEBP", quality=QUALITY)
    uri = "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode("ascii")
    return Thumbnail(uri, small.width, small.height, prompt)


def _prompt(picture: Image.Image) -> str:
    text = getattr(picture, "text", {})
    try:
        return str(json.loads(text[JSON_KEY])["prompt"])
    except (KeyError, ValueError, TypeError):
        return str(text.get(PARAMETERS_KEY, "")).partition("\n")[0]
