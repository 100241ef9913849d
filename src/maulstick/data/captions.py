"""Captions: read from files in whatever state they are in, and varied in training by an explicit random generator."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Moment:
    """When a caption is used: epoch and step count from 0; ``total_steps`` is None where no length is planned."""

    epoch: int = 0
    step: int = 0
    total_steps: int | None = None


@dataclass(frozen=True)
class _Tags:
    """A caption's tags: those that stay at the start, those that may move or go, those that stay at the end."""

    first: list[str]
    free: list[str]
    last: list[str]


def caption_for(image: Captioned, rng: Random, moment: Moment = Moment()) -> str:
    """Return the caption to train an image with at this moment: dropped (""), or varied as its subset says.

    In sd-scripts' order: prefix and suffix are part of the caption; dropping is decided first; then one of several
    lines and of each ``{a|b}`` is chosen; then tags are held back (warm-up), shuffled and dropped, all but those that
    are kept in place, and joined with ", "; the secondary separator becomes the separator last.
    """
    subset = image.subset
    if subset.caption_dropout_rate > 0 and rng.random() < subset.caption_dropout_rate:
        return ""
    every = subset.caption_dropout_every_n_epochs
    if every and (moment.epoch + 1) % every == 0:
        return ""
    lines = image.captions if subset.enable_wildcard else image.captions[:1]
    line = lines[int(rng.random() * len(lines))] if len(lines) > 1 else "".join(lines)
    caption = _framed(line, subset)
    if subset.enable_wildcard:
        caption = _with_choices(caption, rng)
    if subset.shuffle_caption or subset.token_warmup_step or subset.caption_tag_dropout_rate > 0:
        tags = _tags(caption, subset)
        free = tags.free[: _tags_so_far(len(tags.free), subset, moment)]
        if subset.shuffle_caption:
            free = shuffled(free, rng)
        if subset.caption_tag_dropout_rate > 0:
            free = [tag for tag in free if rng.random() >= subset.caption_tag_dropout_rate]
        caption = ", ".join(tags.first + free + tags.last)
    return _without_marks(caption, subset)


def steady_caption(image: Captioned, rng: Random) -> str:
    """Return the caption to judge an image with: all of it in its order; only wildcards are chosen, from ``rng``."""
    certain = replace(
        image.subset,
        caption_dropout_rate=0.0,
        caption_dropout_every_n_epochs=0,
        caption_tag_dropout_rate=0.0,
        token_warmup_step=0.0,
        shuffle_caption=False,
    )
    return caption_for(_Certain(image.captions, certain), rng)


def whole_caption(image: Captioned) -> str:
    """Return the caption with everything that it can hold: nothing dropped, and the first of all choices."""
    return _without_marks(_framed(image.captions[0] if image.captions else "", image.subset), image.subset)


def _framed(caption: str, subset: SubsetSpec) -> str:
    return " ".join(part for part in (subset.caption_prefix, caption, subset.caption_suffix) if part)


def _with_choices(caption: str, rng: Random) -> str:
    """Replace each ``{a|b}`` by one of its alternatives; ``{{`` and ``}}`` stand for braces."""
    return _CHOICE.sub(lambda match: match[0][0] if match[1] is None else _one_of(match[1].split("|"), rng), caption)


_CHOICE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


def _one_of(alternatives: Sequence[str], rng: Random) -> str:
    return alternatives[int(rng.random() * len(alternatives))]


def _tags(caption: str, subset: SubsetSpec) -> _Tags:
    def split(text: str) -> list[str]:
        return [tag.strip() for tag in text.split(subset.caption_separator)]

    mark = subset.keep_tokens_separator
    if mark and mark in caption:
        first, free, *last = caption.split(mark, 2)
        return _Tags(*([tag for tag in split(part) if tag] for part in (first, free, "".join(last))))
    tags = split(caption)
    return _Tags(tags[: subset.keep_tokens], tags[subset.keep_tokens :], [])


def _tags_so_far(count: int, subset: SubsetSpec, moment: Moment) -> int:
    """Return how many of ``count`` tags the warm-up of tags allows by now; it grows linearly."""
    length = subset.token_warmup_step
    if 0 < length < 1:
        length = math.floor(length * (moment.total_steps or 0))
    if moment.step >= length:
        return count
    least = subset.token_warmup_min
    return max(0, math.floor(moment.step * (count - least) / length) + least)


def _without_marks(caption: str, subset: SubsetSpec) -> str:
    """Turn the marks that a caption still holds into separators of tags: they were never meant as words."""
    if subset.keep_tokens_separator and subset.keep_tokens_separator in caption:
        parts = (part.strip().strip(subset.caption_separator) for part in caption.split(subset.keep_tokens_separator))
        caption = f"{subset.caption_separator} ".join(part.strip() for part in parts if part.strip())
    if subset.secondary_separator:
        caption = caption.replace(subset.secondary_separator, subset.caption_separator)
    return caption


def shuffled(items: Sequence[Item], rng: Random) -> list[Item]:
    """Return the items in random order.

    Sorting by ``random()`` instead of ``Random.shuffle``: Python promises the same ``random()`` for a seed in every
    version, but not the same shuffle, and a resumed run must see the order it was stopped in.
    """
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=lambda pair: pair[0])]


def possible_captions(images: Iterable[Captioned]) -> set[str] | None:
    """Return every caption that training can ask for, or None where varying makes them too many to list."""
    captions: set[str] = set()
    for image in images:
        if _varies(image):
            return None
        subset = image.subset
        # What does not vary needs no chance; dropping is added below.
        certain = replace(subset, caption_dropout_rate=0.0, caption_dropout_every_n_epochs=0)
        captions.add(caption_for(_Certain(image.captions, certain), Random(0)))
        if subset.caption_dropout_rate > 0 or subset.caption_dropout_every_n_epochs:
            captions.add("")
    return captions


@dataclass(frozen=True)
class _Certain:
    captions: tuple[str, ...]
    subset: SubsetSpec


def _varies(image: Captioned) -> bool:
    """Whether an image can have more captions than one and none."""
    subset = image.subset
    caption = _framed(image.captions[0] if image.captions else "", subset)
    if subset.enable_wildcard and (len(image.captions) > 1 or "{" in caption):
        return True
    free = _tags(caption, subset).free
    some_go = subset.caption_tag_dropout_rate > 0 or subset.token_warmup_step > 0
    return (some_go and bool(free) and free != [""]) or (subset.shuffle_caption and len(free) > 1)


def tag_counts(captions: Iterable[str]) -> dict[str, int]:
    """Count tags (between commas, in lower case), as sd-scripts' ``ss_tag_frequency`` counts them: once per image."""
    counts: dict[str, int] = {}
    for caption in captions:
        for tag in caption.split(","):
            tag = tag.strip().lower()
            if tag:
                counts[tag] = counts.get(tag, 0) + 1
    return counts
