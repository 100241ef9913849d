"""Reading image files: any picture people have, as 8-bit RGB the right way up, or an error that names the file."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from maulstick.errors import DataError

IMAGE_EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif"})
"""Extensions of files that are looked at, in lower case. What a file holds is told by its content."""

# Only these are tried, whatever the extension says: Pillow's other plugins never see a file (one starts Ghostscript).
_FORMATS = (
    PngImagePlugin.PngImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    AvifImagePlugin.AvifImageFile.format,
    BmpImagePlugin.BmpImageFile.format,
    GifImagePlugin.GifImageFile.format,
)
_SIGNATURES = {
    b"\x89PNG": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"RIFF": "WebP",
    b"BM": "BMP",
    b"GIF8": "GIF",
}
_PIXEL_LIMIT = 2 * (Image.MAX_IMAGE_PIXELS or 0)
_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the transposition that undoes it (Exif 2.32, tag 0x0112)."""

# Large scans are fine up to the limit where Pillow refuses to open a file. Its warnings, here and of broken EXIF data,
# would only tear the progress bar from a worker thread; what matters of it is in our own messages.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", message="Corrupt EXIF data", category=UserWarning)


class ImageError(DataError):
    """An image file cannot be decoded completely.

    Attributes:
        path: the file.
        reason: what is wrong with it, without its name.
    """

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True)
class ImageFacts:
    """What is known of an image file without its pixels.

    Attributes:
        size: (width, height) in pixels, the right way up.
        frames: 1 unless it is animated; the first frame is the one that is used.
        exif_readable: False where an EXIF block is there but broken, so that the image is taken as upright.
    """

    size: tuple[int, int]
    frames: int = 1
    exif_readable: bool = True


def is_image_name(path: Path) -> bool:
    """Tell whether a file has the extension of an image, in any case."""
    return path.suffix.lower() in IMAGE_EXTENSIONS


def image_facts(path: Path, content: bytes | None = None) -> ImageFacts:
    """Read an image's size from its header. ``content``: the file's bytes, if they are at hand. Raises ImageError."""
    with _opened(path, content) as image:
        return _facts(image, path)


def verify_image(path: Path, content: bytes | None = None) -> ImageFacts:
    """Decode an image to its last byte and return its facts. Raises ImageError for anything incomplete or unreadable.

    JPEGs are decoded at an eighth of their size: all their data is still read, in less than half the time.
    """
    with _opened(path, content) as image:
        facts = _facts(image, path)
        if image.format == "JPEG":
            image.draft(None, (max(1, image.width // 8), max(1, image.height // 8)))
        _decode(image, path)
        return facts


def read_rgb(path: Path, content: bytes | None = None) -> NDArray[np.uint8]:
    """Return an image's pixels, uint8 (height, width, 3), the right way up. Raises ImageError.

    Transparent parts are composited on white; 16-bit values are scaled to 8 bits; of an animation the first frame.
    """
    with _opened(path, content) as image:
        transparency = _transparency_in_decoded_range(image)
        orientation = _orientation(image)
        _decode(image, path)
        rgb = _flattened(image, transparency)
        if orientation in _UPRIGHT:
            rgb = rgb.transpose(_UPRIGHT[orientation])
        return np.array(rgb, dtype=np.uint8)


def read_colours_and_alpha(
    path: Path, content: bytes | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Return colours as they are in the file, uint8 (height, width, 3), and alpha (height, width), None without one.

    Nothing is composited: colours below transparent parts are what the file has there. Otherwise as ``read_rgb``.
    """
    with _opened(path, content) as image:
        transparency = _transparency_in_decoded_range(image)
        orientation = _orientation(image)
        _decode(image, path)
        rgb, alpha = _apart(image, transparency)
        if orientation in _UPRIGHT:
            rgb = rgb.transpose(_UPRIGHT[orientation])
            alpha = None if alpha is None else alpha.transpose(_UPRIGHT[orientation])
        return np.array(rgb, dtype=np.uint8), None if alpha is None else np.array(alpha, dtype=np.uint8)


def _opened(path: Path, content: bytes | None) -> ImageFile.ImageFile:
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise DataError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: truncated images would pass as whole. Unset it.")
    try:
        data = path.read_bytes() if content is None else content
    except OSError as error:
        raise ImageError(path, f"cannot be read ({error.strerror or error})") from error
    if not data:
        raise ImageError(path, "is empty (0 bytes)")
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.UnidentifiedImageError as error:
        raise ImageError(path, _what_it_is(data)) from error
    except Image.DecompressionBombError as error:
        raise ImageError(path, f"has more than {_PIXEL_LIMIT // 1_000_000} million pixels; shrink it first") from error
    except (OSError, ValueError, KeyError, OverflowError, EOFError, RuntimeError) as error:
        raise ImageError(path, f"is truncated or damaged ({error})") from error


def _what_it_is(data: bytes) -> str:
    for signature, name in _SIGNATURES.items():
        if data.startswith(signature):
            return f"is a truncated or damaged {name} file"
    if data[4:12] in (b"ftypavif", b"ftypavis"):
        return "is a truncated or damaged AVIF file"
    if not data.strip(b"\0"):
        return "is not an image: it holds only zero bytes"
    head = data[:256]
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<svg")):
        return "is not an image: a web page or SVG was saved under this name"
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        return "is not an image: it holds text"
    return "is not an image of a known format"


def _decode(image: Image.Image, path: Path) -> None:
    try:
        image.load()
    except MemoryError as error:
        raise ImageError(path, f"needs too much memory ({image.width}x{image.height} pixels)") from error
    except Exception as error:  # decoders fail on bad data in whatever way; each of them means the same here
        raise ImageError(path, f"is truncated or damaged ({error})") from error


def _facts(image: ImageFile.ImageFile, path: Path) -> ImageFacts:
    width, height = image.size
    try:
        # Phones write a preview into their JPEGs as a second frame: that is no animation.
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    except (OSError, EOFError, SyntaxError, ValueError) as error:
        raise ImageError(path, f"is truncated or damaged ({error})") from error
    orientation = _orientation(image)
    size = (height, width) if orientation in (5, 6, 7, 8) else (width, height)
    return ImageFacts(size, frames, exif_readable=orientation is not None)


def _orientation(image: Image.Image) -> int | None:
    """Return the EXIF orientation, 1 where there is none, None where the EXIF block is broken."""
    if image.format == "PNG" and "exif" not in image.info and "xmp" not in image.info:
        return 1  # getexif() would decode the whole image to look for a late EXIF chunk that writers don't make
    exif = image.info.get("exif", b"").removeprefix(b"Exif\0\0")
    if exif and exif[:4] not in (b"II*\0", b"MM\0*"):
        return None
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # Pillow's EXIF reader fails in many ways; the picture itself is as good as one without EXIF
        return None


def _transparency_in_decoded_range(image: ImageFile.ImageFile) -> object:
    """Return the PNG's transparent colour in the range that Pillow decodes samples to; it keeps it as in the file."""
    transparency = image.info.get("transparency")
    raw_mode = image.tile[0][3] if image.tile else None
    if isinstance(transparency, tuple) and raw_mode == "RGB;16B":
        return tuple(value >> 8 for value in transparency)
    if isinstance(transparency, int) and raw_mode in ("L;2", "L;4"):
        return transparency * {"L;2": 85, "L;4": 17}[raw_mode]
    return transparency


def _flattened(image: Image.Image, transparency: object) -> Image.Image:
    rgb, alpha = _apart(image, transparency)
    if alpha is None:
        return rgb
    rgb.putalpha(alpha)
    return Image.alpha_composite(Image.new("RGBA", rgb.size, "white"), rgb).convert("RGB")


def _apart(image: Image.Image, transparency: object) -> tuple[Image.Image, Image.Image | None]:
    """Return colours (RGB) and alpha (L), None where nothing is transparent."""
    if image.mode == "I;16":
        return _apart_16_bit_gray(image, transparency)
    if transparency is not None:
        image.info["transparency"] = transparency
    if not image.has_transparency_data:
        return image.convert("RGB"), None
    with_alpha = image.convert("RGBA")
    return with_alpha.convert("RGB"), with_alpha.getchannel("A")


def _apart_16_bit_gray(image: Image.Image, transparency: object) -> tuple[Image.Image, Image.Image | None]:
    """Scale 0..65535 to 0..255 by rounding v / 257; Pillow's own conversion would clip at 255."""
    values = np.asarray(image)
    gray = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if not isinstance(transparency, int):
        return gray, None
    return gray, Image.fromarray(np.where(values == transparency, 0, 255).astype(np.uint8))
