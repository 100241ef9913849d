"""Masks of the loss: where an image's mask is, whether it fits the image, and what is odd about it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from PIL import Image

from maulstick.data.buckets import Placement, Size, size_text
from maulstick.data.companions import images_by_stem, only_one, refuse_shared
from maulstick.data.findings import Finding, Severity, counted, names
from maulstick.data.image_findings import CheckedFile
from maulstick.data.images import ImageError, read_colours_and_alpha
from maulstick.data.records import ImageRecord, Mask
from maulstick.errors import DataError
from maulstick.options.dataset_spec import SubsetSpec

Channel = Literal["alpha", "red"]
Key = tuple[Path, Path | None]


@dataclass(frozen=True)
class _Wanted:
    """A mask to be looked at: ``size`` is that of its image."""

    image: Path
    file: Path
    channel: Channel
    size: Size
    content_hash: str | None


class Masks:
    """The masks of all images, looked up by image and subset.

    A mask is the alpha channel of its image (``alpha_mask``), or the red channel of the image of the same name in the
    subset's ``conditioning_data_dir``, as in sd-scripts.
    """

    def __init__(
        self, images: Sequence[tuple[Path, SubsetSpec]], checked: Mapping[Path, CheckedFile], workers: int | None = None
    ) -> None:
        """Find and read the masks of these images, as far as those can be read.

        Raises DataError where an image of a subset with a folder of masks has none, two, a damaged one or one of
        another size, and where two images would share one. Files are named.
        """
        wanted: dict[Key, _Wanted] = {}
        listed: dict[Path, Mapping[str, list[Path]]] = {}
        missing: list[Path] = []
        for image, subset in images:
            result = checked[image]
            folder = subset.conditioning_data_dir
            if isinstance(result, ImageError) or (folder is None and not subset.alpha_mask):
                continue
            facts, content_hash = result
            if folder is None:
                wanted[image, None] = _Wanted(image, image, "alpha", facts.size, content_hash)
                continue
            if folder not in listed:
                listed[folder] = images_by_stem(folder)
            file = only_one(image, listed[folder].get(image.stem, []), "mask")
            if file is None:
                missing.append(image)
            else:
                wanted[image, folder] = _Wanted(image, file, "red", facts.size, None)
        if missing:
            raise DataError(
                f"conditioning_data_dir: {counted(len(missing), 'image')} without a mask ({names(missing)}), looked "
                f"for in {', '.join(map(str, listed))}. A mask has the name of its image, with any image extension; a "
                "white one trains the whole image."
            )
        refuse_shared({each.image: each.file for each in wanted.values() if each.channel == "red"}, "mask")
        with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
            found = list(pool.map(_looked_at, wanted.values()))
        self._masks = dict(zip(wanted, found, strict=True))

    def of(self, image: Path, subset: SubsetSpec) -> Mask | None:
        """Return the mask of an image in a subset, None where it has none."""
        return self._masks.get((image, subset.conditioning_data_dir))


def _looked_at(wanted: _Wanted) -> Mask | None:
    """Read a mask and return what is known of it; None for an image without alpha channel."""
    try:
        content = wanted.file.read_bytes()
        colours, alpha = read_colours_and_alpha(wanted.file, content)
    except ImageError as error:
        raise DataError(f"conditioning_data_dir: {error}") from error
    except OSError as error:
        raise DataError(f"{wanted.file} cannot be read ({error.strerror or error}).") from error
    values = alpha if wanted.channel == "alpha" else colours[..., 0]
    if values is None:
        return None
    size = (values.shape[1], values.shape[0])
    if size != wanted.size:
        raise DataError(
            f"conditioning_data_dir: the mask {wanted.file} is {size_text(size)}, but its image {wanted.image} is "
            f"{size_text(wanted.size)}. A mask lies over its image pixel by pixel; make it of the same size."
        )
    return Mask(
        path=wanted.file,
        content_hash=wanted.content_hash or sha256(content).hexdigest(),
        channel=wanted.channel,
        box=Image.fromarray(values).getbbox(),
        whole=bool((values == 255).all()),
    )


# ---------------------------------------------------------------------------------------- what is odd about them


def mask_findings(images: Sequence[ImageRecord]) -> list[Finding]:
    """Return which images have no mask although others have, and which masks leave nothing or everything."""
    if not any(image.mask is not None or image.subset.alpha_mask for image in images):
        return []
    findings = []
    for is_reg, kind in ((False, "image"), (True, "regularisation image")):
        own = [image for image in images if image.is_reg == is_reg]
        severity = Severity.INFO if is_reg else Severity.WARNING
        no_alpha = [image for image in own if image.mask is None and image.subset.alpha_mask]
        findings += _finding(
            severity, "no_alpha_channel", no_alpha, f"{kind} without alpha channel", "trained as a whole", _NO_ALPHA
        )
        no_mask = [image for image in own if image.mask is None and not image.subset.alpha_mask]
        findings += _finding(severity, "no_mask", no_mask, f"{kind} without mask", "trained as a whole", _NO_MASK)
    masked = [(image, image.mask) for image in images if image.mask is not None]
    empty = [image for image, mask in masked if not _leaves_something(mask, image)]
    text = "image whose mask is black wherever it is trained"
    findings += _finding(Severity.WARNING, "mask_empty", empty, text, "used, with a loss of 0", _EMPTY, "images whose "
                         "masks are black wherever they are trained")  # fmt: skip
    whole = [image for image, mask in masked if mask.whole]
    text, texts = "image whose mask is white", "images whose masks are white"
    findings += _finding(Severity.INFO, "mask_whole", whole, text, "trained as a whole", ("", ""), texts)
    return findings


_NO_ALPHA = ("With alpha_mask the alpha channel says what is trained.", "Add one, or set alpha_mask = false for them.")
_NO_MASK = ("Other images have masks.", "Give their subset conditioning_data_dir or alpha_mask, if they should have.")
_EMPTY = ("Nothing is learned from them, but they take part in every mean.", "Remove them, or mend their masks.")


def _finding(
    severity: Severity,
    code: str,
    images: Sequence[ImageRecord],
    what: str,
    outcome: str,
    reasons: tuple[str, str],
    plural: str | None = None,
) -> list[Finding]:
    if not images:
        return []
    paths = tuple(dict.fromkeys(image.path for image in images))
    several = plural or what.replace("image", "images", 1)
    message = f"{counted(len(paths), what, several)} ({names(paths)}): {outcome}."
    return [Finding(severity, code, paths, message, *reasons)]


def _leaves_something(mask: Mask, image: ImageRecord) -> bool:
    """Whether what is not black of a mask touches the part of the image that is trained."""
    if mask.box is None or image.subset.random_crop:
        return mask.box is not None
    part = trained_part(image.placement, image.size)
    left, top, right, bottom = mask.box
    return left < part[2] and right > part[0] and top < part[3] and bottom > part[1]


def trained_part(placement: Placement, size: Size) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of what is trained, in pixels of the image as it is in its file."""
    across, down = size[0] / placement.resized[0], size[1] / placement.resized[1]
    left, top, right, bottom = placement.crop
    return left * across, top * down, right * across, bottom * down
