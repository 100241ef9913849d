from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from maulstick.data.scan import suggested_folder_name
from maulstick.errors import DataError
from tests.data_pipeline.helpers import one


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("cat", "10_cat"),
        ("cat_10", "10_cat"),
        ("5-cat", "5_cat"),
        ("7 cat girl", "7_cat girl"),
        ("20x cat", "20_cat"),
        ("cat x3", "3_cat"),
        ("1girl", "10_1girl"),
        ("2024-05-01", "10_2024-05-01"),
        ("_", "10_name"),
    ],
)
def test_suggested_names(name, suggested):
    assert suggested_folder_name(name) == suggested


def test_folder_without_repeats(tmp_path, image, index):
    image(tmp_path / "train/10_dog/a.png")
    for name in ("a.png", "b.jpg", "c.webp"):
        image(tmp_path / "train/cat" / name)
    image(tmp_path / "train/cat/more/d.png")
    (tmp_path / "train/log").mkdir()
    (tmp_path / "train/log/log.txt").write_text("no images here")
    result = index()
    finding = one(result, "folder_without_repeats")
    assert finding.severity == "error"
    assert finding.paths == (tmp_path / "train/cat",)
    assert finding.message == (
        "The folder 'cat' in train_data_dir has no repeat count at the start of its name: its 3 images (and 1 image "
        "in folders below it) are not used. Rename it to '10_cat' (the number says how often each image is used per "
        "epoch)."
    )
    assert len(result.records) == 1


def test_folder_without_repeats_whose_right_name_is_taken(tmp_path, image, index):
    image(tmp_path / "train/10_cat/a.png")
    image(tmp_path / "train/cat/b.png")
    message = one(index(), "folder_without_repeats").message
    assert "its 1 image is not used. Move its images into '10_cat'" in message


def test_folder_with_no_repeats_left(tmp_path, image, index):
    image(tmp_path / "train/10_cat/a.png")
    for name in ("a.png", "b.png"):
        image(tmp_path / "train/0_dog" / name)
    assert one(index(), "no_repeats").message == "The folder '0_dog' has 0 repeats: its 2 images are not used."


def test_images_beside_the_image_folders(tmp_path, image, index):
    image(tmp_path / "train/10_cat/a.png")
    stray = [image(tmp_path / "train/x.png"), image(tmp_path / "train/y.jpg")]
    finding = one(index(), "images_at_top_level")
    assert finding.paths == tuple(stray)
    assert finding.message.startswith(f"2 images (x.png, y.jpg) lie directly in train_data_dir ({tmp_path / 'train'})")
    assert finding.message.endswith(f"Move them to {tmp_path / 'train/10_name'}")


def test_images_below_an_image_folder(tmp_path, image, index):
    image(tmp_path / "train/10_cat/a.png")
    deep = [image(tmp_path / f"train/10_cat/sub/deeper/{number}.png") for number in range(7)]
    finding = one(index(), "images_too_deep")
    assert finding.paths == tuple(deep)
    assert finding.message == (
        "7 images (0.png, 1.png, 2.png, 3.png, 4.png and 2 more) lie in '10_cat/sub/deeper', too deep: "
        f"only images directly in an image folder are used. Move them up into {tmp_path / 'train/10_cat'}"
    )


def test_train_data_dir_is_the_image_folder_itself(tmp_path, image, index, monkeypatch):
    for name in ("a.png", "b.png"):
        image(tmp_path / "data/10_cat" / name)
    expected = (
        f"train_data_dir is {tmp_path / 'data/10_cat'}, which is an image folder itself: 2 images (a.png, b.png) lie "
        f"directly in it and are not used. Give the folder that it lies in: train_data_dir = {tmp_path / 'data'}"
    )
    with pytest.raises(DataError) as caught:
        index(train_data_dir=tmp_path / "data/10_cat")
    assert expected in str(caught.value)
    monkeypatch.chdir(tmp_path / "data/10_cat")
    with pytest.raises(DataError) as caught:
        index(train_data_dir=Path())
    assert expected in str(caught.value)


def test_train_data_dir_holds_the_images_without_a_folder(tmp_path, image, index):
    image(tmp_path / "cat/a.png")
    with pytest.raises(DataError) as caught:
        index(train_data_dir=tmp_path / "cat")
    assert f"No training image can be used in train_data_dir {tmp_path / 'cat'}." in str(caught.value)
    assert f"1 image (a.png) lies directly in train_data_dir ({tmp_path / 'cat'})" in str(caught.value)
    assert f"Move it to {tmp_path / 'cat/10_cat'}" in str(caught.value)


def test_train_data_dir_is_one_level_too_high(tmp_path, image, index):
    image(tmp_path / "project/img/10_cat/a.png")
    image(tmp_path / "project/img/5_dog/a.png")
    (tmp_path / "project/log").mkdir()
    with pytest.raises(DataError) as caught:
        index(train_data_dir=tmp_path / "project")
    assert (
        "'img' in train_data_dir has no repeat count in its name and holds image folders one level too deep: "
        "'10_cat' (1 image), '5_dog' (1 image). They are not used. "
        f"Give train_data_dir = {tmp_path / 'project/img'}, or move them up into {tmp_path / 'project'}"
    ) in str(caught.value)


def test_nothing_at_all(tmp_path, index):
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"There is no image folder in it\. Put images into a folder such as 10_name"):
        index()
    (tmp_path / "train/10_cat").mkdir()
    with pytest.raises(DataError, match=r"The folder '10_cat' has no image \(\.avif, \.bmp"):
        index()


def test_the_same_for_regularisation_images(tmp_path, image, index):
    image(tmp_path / "train/2_cat/a.png")
    image(tmp_path / "reg/animal/r.png")
    with pytest.raises(DataError, match="The folder 'animal' in reg_data_dir has no repeat count"):
        index(reg_data_dir=tmp_path / "reg")
    image(tmp_path / "reg/1_animal/r.png")
    result = index(reg_data_dir=tmp_path / "reg")
    assert "The folder 'animal' in reg_data_dir has no repeat count" in one(result, "folder_without_repeats").message
    shutil.rmtree(tmp_path / "train/2_cat")
    (tmp_path / "train/2_cat").mkdir()
    with pytest.raises(DataError, match="No training image can be used"):
        index(reg_data_dir=tmp_path / "reg")


def test_empty_folder_beside_a_full_one(tmp_path, image, index):
    image(tmp_path / "train/10_cat/a.png")
    (tmp_path / "train/3_dog").mkdir()
    finding = one(index(), "empty_folder")
    assert finding.paths == (tmp_path / "train/3_dog",)
    assert "The folder '3_dog' has no image (.avif, .bmp, .jpeg, .jpg, .png, .webp): nothing of it" in finding.message


def test_other_files_are_counted(tmp_path, image, index):
    folder = image(tmp_path / "train/10_cat/a.png", caption="cat").parent
    for name in ("b.gif", "c.GIF", "d.tiff", "notes.md", "meta.json", "x.npz", "._a.png", ".DS_Store", "noextension"):
        (folder / name).write_bytes(b"?")
    (folder / "a_64x64_0123456789ab.maulstick.safetensors").write_bytes(b"?")
    image(folder / ".hidden/z.png")
    result = index()
    pictures = one(result, "picture_type_not_supported")
    assert pictures.message == (
        "'10_cat': 2 .gif files, 1 .tiff file cannot be read and are not used (b.gif, c.GIF, d.tiff). "
        "Convert to PNG or JPEG."
    )
    rest = one(result, "files_not_used")
    assert rest.message == (
        "'10_cat': 1 file without extension, 1 .json file, 1 .md file, 1 .npz file and 1 hidden file not used."
    )
    assert len(result.findings) == 2
