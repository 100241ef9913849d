from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from maulstick.data.index import build_index
from maulstick.errors import DataError, OptionError
from maulstick.options.dataset_config import dataset_specs
from maulstick.options.schema import DatasetOptions
from tests.data_pipeline.helpers import found, one


def test_records_of_a_clean_folder(tmp_path, image, index):
    first = image(tmp_path / "train/10_cat girl/b.png", (64, 96), caption="a cat, sitting\n")
    second = image(tmp_path / "train/10_cat girl/a.JPG", (100, 50))
    second.with_suffix(".CAPTION").write_text("a dog")
    result = index(enable_bucket=True)
    assert [finding.code for finding in result.findings] == []
    (dataset,) = result.datasets
    a, b = dataset.images
    assert (a.path, b.path) == (second, first)
    assert (a.captions, b.captions) == (("a dog",), ("a cat, sitting",))
    assert (a.size, b.size) == ((100, 50), (64, 96))
    assert (a.repeats, a.is_reg, a.dataset, b.record_id) == (10, False, 0, 1)
    assert b.content_hash == hashlib.sha256(first.read_bytes()).hexdigest()
    # resolution 64² = 4096; 64/96 = 0.667 is nearest to 48/80 = 0.6 or 56/72 = 0.778: 0.067 against 0.111
    assert b.placement.bucket == (48, 80)
    assert dataset.num_train_images == 20


def test_size_is_that_after_exif_orientation(tmp_path, index):
    path = tmp_path / "train/1_cat/a.jpg"
    path.parent.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (96, 64)).save(path, exif=exif)
    for verify in (True, False):
        (record,) = index(enable_bucket=True, verify=verify).records
        assert record.size == (64, 96)


# ------------------------------------------------------------------------------- images


def test_images_that_cannot_be_read_are_left_out_by_name(tmp_path, image, index):
    folder = image(tmp_path / "train/10_cat/good.png", caption="cat").parent
    for name, kind in (("half.jpg", "JPEG"), ("half.png", "PNG")):
        Image.effect_noise((90, 90), 60).convert("RGB").save(folder / name, kind)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
    (folder / "zeros.png").write_bytes(b"\0" * 400)
    (folder / "empty.webp").write_bytes(b"")
    (folder / "text.png").write_text("this is a caption")
    for path in folder.iterdir():
        path.with_suffix(".txt").write_text("cat")
    result = index()
    assert [record.path.name for record in result.records] == ["good.png"]
    messages = {finding.paths[0].name: finding.message for finding in found(result, "image_unreadable")}
    assert set(messages) == {"half.jpg", "half.png", "zeros.png", "empty.webp", "text.png"}
    assert messages["zeros.png"] == "10_cat/zeros.png is not an image: it holds only zero bytes: it is not used."
    assert messages["empty.webp"] == "10_cat/empty.webp is empty (0 bytes): it is not used."
    assert messages["text.png"] == "10_cat/text.png is not an image: it holds text: it is not used."
    assert messages["half.jpg"].startswith("10_cat/half.jpg is truncated or damaged (")
    # Their captions have an image, if a bad one: they are no orphans.
    assert not [finding for finding in result.findings if finding.code == "caption_without_image"]


def test_only_bad_images_is_an_error_that_says_so(tmp_path, index):
    folder = tmp_path / "train/10_cat"
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(b"\0" * 40)
    with pytest.raises(DataError, match=r"(?s)No training image can be used.*10_cat/a\.png is not an image"):
        index()


def test_forbidden_file_and_folder(tmp_path, image, index):
    folder = image(tmp_path / "train/10_cat/a.png").parent
    locked = image(folder / "b.png")
    image(tmp_path / "train/private/c.png")
    locked.chmod(0)
    if os.access(locked, os.R_OK):
        pytest.skip("this user may read everything (root)")
    (tmp_path / "train/private").chmod(0)
    try:
        result = index()
    finally:
        (tmp_path / "train/private").chmod(0o700)
    assert "10_cat/b.png cannot be read (Permission denied)" in one(result, "image_unreadable").message
    assert "Nothing in it is used." in one(result, "folder_unreadable").message


def test_a_file_that_fails_while_reading(tmp_path, image, index, monkeypatch):
    image(tmp_path / "train/10_cat/a.png")
    bad = image(tmp_path / "train/10_cat/b.png")
    read = Path.read_bytes

    def failing(path):
        if path == bad:
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    result = index()
    assert one(result, "image_unreadable").message == (
        "10_cat/b.png cannot be read (Input/output error): it is not used."
    )
    assert len(result.records) == 1


def test_images_far_below_the_training_size(tmp_path, image, index):
    image(tmp_path / "train/10_cat/small.png", (20, 25))
    image(tmp_path / "train/10_cat/almost.png", (40, 33))
    finding = one(index(), "image_far_below_bucket")
    assert [path.name for path in finding.paths] == ["small.png"]
    assert "'10_cat': 1 image is far smaller" in finding.message
    assert "small.png 20x25 by 3.2 for 64x64" in finding.message


def test_image_too_narrow_without_enlarging(tmp_path, image, index):
    image(tmp_path / "train/10_cat/line.png", (500, 7))
    image(tmp_path / "train/10_cat/good.png", (64, 64))
    result = index(enable_bucket=True, bucket_no_upscale=True)
    assert "10_cat/line.png (500x7) is too small or too narrow" in one(result, "image_too_small").message
    assert [record.path.name for record in result.records] == ["good.png"]


def test_animation_and_duplicates(tmp_path, image, index):
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    folder = image(tmp_path / "train/10_cat/a.png", caption="cat").parent
    frames[0].save(folder / "moving.webp", save_all=True, append_images=frames[1:])
    shutil.copy(folder / "a.png", image(tmp_path / "train/5_dog/copy.png", caption="dog"))
    result = index()
    assert "moving.webp" in one(result, "image_animated").message
    assert one(result, "duplicate_content").message == (
        "10_cat/a.png, 5_dog/copy.png are the same picture, with different captions: each of them is used."
    )
    assert len(result.records) == 3


def test_headers_only(tmp_path, image, index):
    path = image(tmp_path / "train/10_cat/a.png")
    path.write_bytes(path.read_bytes()[:200])
    (record,) = index(verify=False).records
    assert record.size == (64, 64)
    with pytest.raises(DataError, match="truncated"):
        index()


def test_progress_and_vae_scale(tmp_path, image, index):
    for number in range(5):
        image(tmp_path / f"train/10_cat/{number}.png")
    calls = []
    index(progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    with pytest.raises(OptionError, match="resolution is 60x60"):
        index(resolution="60")
    assert index(resolution="60", vae_scale=4).records[0].placement.bucket == (60, 60)


# ------------------------------------------------------------------------------- captions


def test_images_without_caption(tmp_path, image, index):
    image(tmp_path / "train/10_cat girl/a.png", caption="written")
    lonely = [image(tmp_path / f"train/10_cat girl/{name}.png") for name in "bc"]
    result = index()
    finding = one(result, "image_without_caption")
    assert finding.paths == tuple(lonely)
    assert finding.message == (
        "'10_cat girl': 2 of 3 images have no caption file (.txt, .caption) and are trained with the caption "
        "'cat girl' (the class tokens of the folder): b.png, c.png"
    )
    assert [record.captions for record in result.records] == [("written",), ("cat girl",), ("cat girl",)]
    assert [record.caption_file is None for record in result.records] == [False, True, True]


def test_images_without_caption_and_class_tokens(tmp_path, image, index):
    image(tmp_path / "train/10/a.png")
    result = index()
    assert result.records[0].captions == ("",)
    assert "'10': 1 of 1 image has no caption file (.txt, .caption) and is trained with an empty caption" in (
        one(result, "image_without_caption").message
    )


def test_captions_without_image(tmp_path, image, index):
    folder = image(tmp_path / "train/10_cat/a.png").parent
    for name in ("a.png.txt", "z.caption"):
        (folder / name).write_text("cat")
    finding = one(index(), "caption_without_image")
    assert finding.message == (
        "'10_cat': 2 caption files without an image of the same name (a.png.txt, z.caption): not used. "
        "Leave out the image's extension: 'a.png.txt' must be 'a.txt'."
    )


def test_odd_caption_files(tmp_path, image, index):
    folder = tmp_path / "train/10_cat"
    contents = {
        "empty": b"",
        "blank": b" \n\t\n",
        "lines": b"\n  first, one \nsecond\n",
        "mark": b"\xef\xbb\xbfmarked",
        "utf16": "sixteen ✓".encode("utf-16"),
        "latin": "café".encode("latin-1"),
        "binary": b"a\0b",
        "plain": "日本語".encode(),
    }
    for name, content in contents.items():
        image(folder / f"{name}.png").with_suffix(".txt").write_bytes(content)
    result = index()
    captions = {record.path.stem: record.captions for record in result.records}
    assert captions == {
        "empty": ("",),
        "blank": ("",),
        "lines": ("first, one", "second"),
        "mark": ("marked",),
        "utf16": ("sixteen ✓",),
        "latin": ("cat",),
        "binary": ("cat",),
        "plain": ("日本語",),
    }
    assert "2 caption files without text: trained as an empty caption (blank.txt, empty.txt)" in (
        one(result, "caption_empty").message
    )
    assert "only the first line that has text is used (lines.txt)" in one(result, "caption_lines").message
    assert "(mark.txt, utf16.txt)" in one(result, "caption_byte_order_mark").message
    unreadable = {finding.paths[0].name: finding.message for finding in found(result, "caption_unreadable")}
    assert unreadable["latin.txt"] == (
        "'10_cat': the caption file latin.txt is not UTF-8 text (byte 3): its image is trained with the caption 'cat' "
        "(the class tokens of the folder). Save the file as UTF-8."
    )
    assert "binary.txt is not text (it holds zero bytes)" in unreadable["binary.txt"]


def test_two_images_share_a_caption_and_two_captions_an_image(tmp_path, image, index):
    folder = image(tmp_path / "train/10_cat/a.png", caption="shared").parent
    image(folder / "a.jpg")
    (folder / "a.caption").write_text("second")
    (folder / "a.tags").write_text("named")
    result = index()
    assert [record.captions for record in result.records] == [("shared",), ("shared",)]
    assert one(result, "shared_caption").message == (
        "'10_cat': a.jpg, a.png differ in their extension only and share the caption file a.txt: all of them are used, "
        "with the same caption."
    )
    assert "'10_cat': a.caption not used" in one(result, "second_caption_file").message
    assert index(caption_extension=".tags").records[0].captions == ("named",)
    assert index(caption_extension="caption").records[0].captions == ("second",)


# ------------------------------------------------------------------------------- descriptions


def describe(tmp_path, text, **options):
    file = tmp_path / "data.toml"
    file.write_text(text)
    return build_index(dataset_specs(DatasetOptions(dataset_config=file, resolution="64", **options)))


def test_description_with_images_too_deep_and_a_number_in_the_name(tmp_path, image, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image(tmp_path / "10_cat/a.png", caption="cat")
    image(tmp_path / "parent/10_dog/a.png")
    text = "[[datasets]]\n" + "".join(
        f"[[datasets.subsets]]\nimage_dir = '{name}'\n" for name in ("10_cat", "parent", "10_cat")
    )
    result = describe(tmp_path, text)
    assert [(record.path, record.repeats) for record in result.records] == [(Path("10_cat/a.png"), 1)]
    assert "'10_cat' is repeated 1 time: in a dataset description num_repeats counts, not the 10" in (
        one(result, "repeats_not_from_name").message
    )
    assert one(result, "images_too_deep").message == (
        "1 image (a.png) lies in 'parent/10_dog', too deep: only images directly in an image folder are used. "
        "Move it up into parent, or name parent/10_dog instead"
    )
    assert "'parent' has no image directly in it" in one(result, "empty_folder").message
    assert "the folder 10_cat is named twice" in one(result, "duplicate_subset").message


def test_the_same_images_in_two_datasets(tmp_path, image, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image(tmp_path / "cat/a.png", caption="cat")
    (tmp_path / "void").mkdir()
    subset = "[[datasets.subsets]]\nimage_dir = 'cat'\n"
    text = f"[[datasets]]\n{subset}[[datasets]]\nresolution = 32\n{subset}"
    result = describe(tmp_path, text)
    assert [(record.dataset, record.placement.bucket) for record in result.records] == [(0, (64, 64)), (1, (32, 32))]
    assert result.findings == ()
    result = describe(tmp_path, text.replace("'cat'", "'void'", 1))
    assert "[[datasets]] number 1: no training image of this dataset can be used" in (
        one(result, "empty_dataset").message
    )


# ------------------------------------------------------------------------------- regularisation images


@pytest.mark.parametrize(
    ("train", "reg", "expected"),
    [
        # folders (repeats, images); the repeats of each regularisation image that training will use
        ((10, 2), (1, 3), [7, 7, 6]),
        ((1, 2), (1, 5), [1, 1, 0, 0, 0]),
        # the last image of the first round comes with its folder's repeats, even past the number wanted
        ((5, 1), (3, 3), [3, 3, 0]),
        ((4, 2), (3, 2), [4, 4]),
        ((3, 3), (9, 1), [9]),
    ],
)
def test_regularisation_images_are_matched_as_sd_scripts_does(tmp_path, image, index, train, reg, expected):
    for number in range(train[1]):
        image(tmp_path / f"train/{train[0]}_cat/{number}.png", caption="cat")
    for number in range(reg[1]):
        image(tmp_path / f"reg/{reg[0]}_animal/{number}.png", caption="animal")
    result = index(reg_data_dir=tmp_path / "reg")
    (dataset,) = result.datasets
    assert [image.repeats for image in dataset.images if image.is_reg] == expected
    assert dataset.num_train_images == train[0] * train[1]
    assert dataset.num_reg_images == reg[0] * reg[1]
    unused = expected.count(0)
    if unused:
        assert one(result, "reg_images_not_used").message == (
            f"{unused} regularisation image{'s' * (unused > 1)} not used: there are {reg[0] * reg[1]} with repeats, "
            f"more than the {train[0] * train[1]} training images they are matched to."
        )
    else:
        assert result.findings == ()


def test_leaving_images_out_balances_again(tmp_path, image, index):
    for number in range(3):
        image(tmp_path / f"train/2_cat/{number}.png", caption="cat")
    for number in range(2):
        image(tmp_path / f"reg/1_animal/{number}.png", caption="animal")
    result = index(reg_data_dir=tmp_path / "reg")
    assert [record.repeats for record in result.records] == [2, 2, 2, 3, 3]
    less = result.without({0, 3})
    assert [(record.record_id, record.repeats) for record in less.records] == [(1, 2), (2, 2), (4, 4)]
    with pytest.raises(DataError, match="No training image is left"):
        result.without({0, 1, 2})


# ------------------------------------------------------------------------------- what would be ignored or hang


def test_a_pipe_among_the_images_is_named_and_not_waited_for(tmp_path, image, index):
    folder = image(tmp_path / "train/1_cat/good.png", caption="cat").parent
    os.mkfifo(folder / "pipe.png")
    result = index()
    assert [record.path.name for record in result.records] == ["good.png"]
    assert any("pipe.png" in finding.message and "not a regular file" in finding.message for finding in result.findings)


def test_regularisation_images_that_are_not_there_are_an_error(tmp_path, image, options):
    image(tmp_path / "train/1_cat/good.png", caption="cat")
    (tmp_path / "reg").mkdir()
    with pytest.raises(DataError, match=r"reg_data_dir: no image in .*reg can be used"):
        build_index(dataset_specs(options(reg_data_dir=tmp_path / "reg")))
