"""Captions: read from files in whatever state they are in, and varied in training by an explicit random generator."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

from maulstick.errors import DataError
from maulstick.options.dataset_config import SubsetSpec

CAPTION_EXTENSIONS = (".txt", ".caption")
"""Extensions that are looked for in any case, in this order, after the one that the user names."""

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

Item = TypeVar("Item")


class CaptionError(DataError):
    """A caption file cannot be read as text. ``reason`` says why, without the file's name."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class CaptionText:
    """The content of a caption file.

    Attributes:
        lines: its lines without surrounding space, blank ones left out; none for an empty file.
        encoding: how it was read; "utf-8" unless a byte order mark says otherwise.
        had_mark: a byte order mark stood in front, and was left out.
    """

    lines: tuple[str, ...]
    encoding: str = "utf-8"
    had_mark: bool = False


def read_caption(path: Path) -> CaptionText:
    """Read a caption file: UTF-8, or what its byte order mark says. Raises CaptionError for anything else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CaptionError(path, f"cannot be read ({error.strerror or error})") from error
    mark, encoding = next(
        ((mark, encoding) for mark, encoding in _BYTE_ORDER_MARKS if content.startswith(mark)), (b"", "utf-8")
    )
    try:
        text = content[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper()
        raise CaptionError(path, f"is not {name} text (byte {len(mark) + error.start})") from error
    if "\0" in text:
        raise CaptionError(path, "is not text (it holds zero bytes)")
    lines = (line.strip() for line in text.splitlines())
    return CaptionText(tuple(line for line in lines if line), encoding, bool(mark))


class Captioned(Protocol):
    """What a caption is drawn for."""

    @property
    def captions(self) -> tuple[str, ...]:
        """Caption lines; the first is the one that is used."""

    @property
    def subset(self) -> SubsetSpec:
        """The options of its folder."""


def caption_for(image: Captioned, rng: Random) -> str:
    """Return the caption to train an image with this time: dropped ("") or with its tags shuffled, as its subset says.

    As in sd-scripts: dropping is decided first; tags are what stands between commas, the first ``keep_tokens`` of them
    stay in place, and shuffled captions are joined with ", ".
    """
    subset = image.subset
    caption = image.captions[0] if image.captions else ""
    if subset.caption_dropout_rate > 0 and rng.random() < subset.caption_dropout_rate:
        return ""
    if not subset.shuffle_caption:
        return caption
    tags = [tag.strip() for tag in caption.split(",")]
    return ", ".join(tags[: subset.keep_tokens] + shuffled(tags[subset.keep_tokens :], rng))


def shuffled(items: Sequence[Item], rng: Random) -> list[Item]:
    """Return the items in random order.

    Sorting by ``random()`` instead of ``Random.shuffle``: Python promises the same ``random()`` for a seed in every
    version, but not the same shuffle, and a resumed run must see the order it was stopped in.
    """
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=lambda pair: pair[0])]


def possible_captions(images: Iterable[Captioned]) -> set[str] | None:
    """Return every caption that training can ask for, or None where shuffling makes them too many to list."""
    captions: set[str] = set()
    for image in images:
        subset = image.subset
        caption = image.captions[0] if image.captions else ""
        if subset.shuffle_caption and caption.count(",") > subset.keep_tokens:
            return None
        if subset.shuffle_caption:
            caption = ", ".join(tag.strip() for tag in caption.split(","))
        captions.add(caption)
        if subset.caption_dropout_rate > 0:
            captions.add("")
    return captions


def tag_counts(captions: Iterable[str]) -> dict[str, int]:
    """Count tags (between commas, in lower case), as sd-scripts' ``ss_tag_frequency`` counts them: once per image."""
    counts: dict[str, int] = {}
    for caption in captions:
        for tag in caption.split(","):
            tag = tag.strip().lower()
            if tag:
                counts[tag] = counts.get(tag, 0) + 1
    return counts
