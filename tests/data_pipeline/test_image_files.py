from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from maulstick.data.images import ImageError, image_facts, is_image_name, read_rgb, verify_image
from maulstick.errors import DataError


def png(width: int, height: int, depth: int, colour_type: int, rows: list[bytes], extra=()) -> bytes:
    """Make a PNG from raw samples, for kinds that Pillow cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = [(b"IHDR", header), *extra, (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in chunks)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def rgb(tmp_path):
    """Write bytes to a file and read it back as a list of rows of pixels."""

    def read(content: bytes, name: str = "a.png"):
        path = tmp_path / name
        path.write_bytes(content)
        pixels = read_rgb(path)
        assert pixels.dtype == np.uint8
        assert pixels.flags.writeable
        assert image_facts(path).size == verify_image(path).size == (pixels.shape[1], pixels.shape[0])
        return pixels.tolist()

    return read


def gray(*values: int) -> list[list[list[int]]]:
    return [[[value] * 3 for value in values]]


def test_kinds_of_gray(rgb):
    # 16 bits are scaled by rounding v / 257; Pillow's convert() would give 255 for everything from 256 on.
    assert rgb(png(4, 1, 16, 0, [struct.pack(">4H", 385, 386, 0x8080, 0xFFFF)])) == gray(1, 2, 128, 255)
    assert rgb(png(3, 1, 16, 0, [struct.pack(">3H", 0, 300, 301)], [(b"tRNS", struct.pack(">H", 300))])) == gray(
        0, 255, 1
    )
    assert rgb(png(2, 1, 8, 0, [bytes([1, 2])])) == gray(1, 2)
    assert rgb(png(2, 1, 8, 0, [bytes([1, 2])], [(b"tRNS", struct.pack(">H", 2))])) == gray(1, 255)
    assert rgb(png(2, 1, 4, 0, [b"\x1f"])) == gray(17, 255)
    assert rgb(png(2, 1, 4, 0, [b"\x1e"], [(b"tRNS", struct.pack(">H", 1))])) == gray(255, 238)
    assert rgb(png(4, 1, 2, 0, [b"\x1b"], [(b"tRNS", struct.pack(">H", 0))])) == gray(255, 85, 170, 255)
    assert rgb(png(8, 1, 1, 0, [b"\x0f"])) == gray(0, 0, 0, 0, 255, 255, 255, 255)
    assert rgb(png(2, 1, 1, 0, [b"\x40"], [(b"tRNS", struct.pack(">H", 0))])) == gray(255, 255)
    # gray 100 at alpha 128 on white: (100 * 128 + 255 * 127) / 255
    assert rgb(png(1, 1, 8, 4, [bytes([100, 128])])) == gray(177)
    assert rgb(png(1, 1, 16, 4, [struct.pack(">2H", 0x6464, 0x8080)])) == gray(177)


def test_kinds_of_colour_and_transparency(rgb):
    assert rgb(png(1, 1, 16, 2, [struct.pack(">3H", 0x0102, 0x80FF, 0xFFFF)])) == [[[1, 128, 255]]]
    key = [(b"tRNS", struct.pack(">3H", 1, 2, 3))]
    assert rgb(png(2, 1, 8, 2, [bytes([1, 2, 3, 4, 5, 6])], key)) == [[[255, 255, 255], [4, 5, 6]]]
    key = [(b"tRNS", struct.pack(">3H", 0x0102, 0x0304, 0x0506))]
    deep = struct.pack(">6H", 0x0102, 0x0304, 0x0506, 0xA000, 0xB000, 0xC000)
    assert rgb(png(2, 1, 16, 2, [deep], key)) == [[[255, 255, 255], [160, 176, 192]]]
    # (10 * 51 + 255 * 204) / 255 = 206 for alpha 51
    assert rgb(png(2, 1, 8, 6, [bytes([10, 20, 30, 51, 10, 20, 30, 255])])) == [[[206, 208, 210], [10, 20, 30]]]
    palette = (b"PLTE", bytes([10, 20, 30, 40, 50, 60]))
    assert rgb(png(2, 1, 8, 3, [bytes([0, 1])], [palette])) == [[[10, 20, 30], [40, 50, 60]]]
    for alphas, expected in ((b"\xff\0", [255, 255, 255]), (b"\xff\x33", [212, 214, 216])):
        assert rgb(png(2, 1, 8, 3, [bytes([0, 1])], [palette, (b"tRNS", alphas)])) == [[[10, 20, 30], expected]]
    half = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert rgb(saved(half, "WEBP", lossless=True), "a.webp")[0][0] == [255, 255, 255]


def test_formats_and_extensions(rgb):
    picture = Image.fromarray(np.full((8, 16, 3), (200, 60, 20), np.uint8))
    for kind, name, slack in (
        ("PNG", "a.PNG", 0),
        ("BMP", "a.bmp", 0),
        ("JPEG", "a.JPG", 3),
        ("WEBP", "a.webp", 6),
        ("AVIF", "a.Avif", 6),
        ("PNG", "really-a-png.jpg", 0),
    ):
        pixels = np.array(rgb(saved(picture, kind), name))
        assert pixels.shape == (8, 16, 3)
        assert np.abs(pixels - (200, 60, 20)).max() <= slack, kind
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = np.array(rgb(saved(cmyk, "JPEG", quality=95), "cmyk.jpg"))
    assert np.abs(red[0, 0] - (255, 0, 0)).max() <= 4
    assert rgb(saved(Image.new("1", (8, 2), 1), "BMP"), "one-bit.bmp")[0][0] == [255, 255, 255]


def test_image_names(tmp_path):
    assert [is_image_name(tmp_path / name) for name in ("a.PNG", "a.b.jpeg", "a.avif")] == [True] * 3
    assert [is_image_name(tmp_path / name) for name in ("a.gif", "a.txt", "png", "a.png.npz")] == [False] * 4


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_orientation(tmp_path, kind):
    picture = Image.fromarray(
        np.kron(np.array([[[250, 0, 0], [0, 250, 0], [0, 0, 250]]] * 2, np.uint8), np.ones((16, 16, 1), np.uint8))
    )
    path = tmp_path / "a"
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path.write_bytes(saved(picture, kind, exif=exif))
        pixels = read_rgb(path)
        with Image.open(path) as image:
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        assert np.array_equal(pixels, expected)
        assert image_facts(path).size == ((48, 32) if orientation < 5 else (32, 48))
        assert verify_image(path).size == image_facts(path).size


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_leaves_the_image_upright_and_is_told(tmp_path, kind):
    path = tmp_path / "a"
    for exif, readable in ((b"MM\0*\0\0\0\xff", True), (b"no TIFF header", False), (b"", True)):
        head = b"Exif\0\0" if kind == "JPEG" and exif else b""
        path.write_bytes(saved(Image.new("RGB", (16, 8)), kind, exif=head + exif))
        assert verify_image(path).exif_readable is readable
        assert verify_image(path).size == (16, 8)
        assert read_rgb(path).shape == (8, 16, 3)


def test_only_the_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    for kind in ("WEBP", "PNG", "GIF"):
        path = tmp_path / f"{kind}.png"
        frames[0].save(path, kind, save_all=True, append_images=frames[1:], duration=10)
        assert image_facts(path).frames == verify_image(path).frames == 3
        assert np.abs(read_rgb(path)[4, 4].astype(int) - (255, 0, 0)).max() <= 4


def test_a_phones_preview_is_no_animation(tmp_path):
    path = tmp_path / "phone.jpg"
    Image.new("RGB", (32, 16), "red").save(path, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 4))])
    assert verify_image(path).frames == 1
    assert read_rgb(path).shape == (16, 32, 3)


PHOTO = Image.fromarray(np.random.default_rng(5).integers(0, 256, (90, 120, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["JPEG", "PROGRESSIVE", "PNG", "WEBP", "AVIF", "BMP"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_truncated_images_are_found(tmp_path, kind, share):
    whole = saved(PHOTO, "JPEG", progressive=True) if kind == "PROGRESSIVE" else saved(PHOTO, kind)
    path = tmp_path / "a.jpg"
    path.write_bytes(whole)
    assert verify_image(path).size == (120, 90)
    path.write_bytes(whole[: int(len(whole) * share)])
    for read in (verify_image, read_rgb):
        with pytest.raises(ImageError, match=r"a\.jpg: .*(truncated|damaged)") as caught:
            read(path)
        assert caught.value.path == path


def test_a_jpeg_that_pillows_verify_lets_pass_is_found(tmp_path):
    path = tmp_path / "a.jpg"
    whole = saved(PHOTO, "JPEG")
    path.write_bytes(whole[: len(whole) // 2])
    with Image.open(path) as image:
        image.verify()
    with pytest.raises(ImageError, match="truncated"):
        verify_image(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"\0" * 500, "not an image: it holds only zero bytes"),
        (b"a cat, sitting\n", "not an image: it holds text"),
        (b"  <!DOCTYPE html><html></html>", "a web page or SVG was saved under this name"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n\x80\x01", "is not an image of a known format"),
        (b"\x89PNG\r\n\x1a\nrubbish", "is a truncated or damaged PNG file"),
    ],
)
def test_what_is_no_image_is_told(tmp_path, content, reason):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for read in (verify_image, read_rgb, image_facts):
        with pytest.raises(ImageError, match=reason):
            read(path)


def test_decompression_bomb(tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png(20000, 20000, 8, 0, [b"\0" * 10]))
    with pytest.raises(ImageError, match=r"bomb\.png: has more than 178 million pixels"):
        verify_image(path)


def test_missing_file_and_lenient_decoding_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ImageError, match="cannot be read"):
        verify_image(tmp_path / "none.png")
    path = tmp_path / "a.png"
    path.write_bytes(saved(PHOTO, "PNG"))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(DataError, match="LOAD_TRUNCATED_IMAGES"):
        verify_image(path)
