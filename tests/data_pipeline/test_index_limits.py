"""Repeats beyond any use, and links to nothing: found once, with the folder's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from maulstick.data.index import MOST_IMAGES_PER_EPOCH, build_index
from maulstick.errors import DataError
from maulstick.options.dataset_config import dataset_specs
from maulstick.options.schema import DatasetOptions


def folder_of_images(root: Path, name: str, count: int = 2) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a square")
    return folder


def index_of(root: Path, **options):
    return build_index(dataset_specs(DatasetOptions(train_data_dir=root, resolution="64", **options)))


@pytest.mark.parametrize("repeats", [10**12, 10**400, MOST_IMAGES_PER_EPOCH // 2 + 1])
def test_an_endless_epoch_is_refused_with_the_folders_name(tmp_path, repeats):
    folder_of_images(tmp_path, "3_few")
    # 10^400 is a number, but no file system takes so long a name.
    if repeats == 10**400:
        config = tmp_path / "data.toml"
        folder = folder_of_images(tmp_path / "other", "many")
        config.write_text(f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{folder}"\nnum_repeats = {10**18}\n')
        specs, name = dataset_specs(DatasetOptions(dataset_config=config, resolution="64")), "many"
    else:
        name = folder_of_images(tmp_path, f"{repeats}_many").name
        specs = dataset_specs(DatasetOptions(train_data_dir=tmp_path, resolution="64"))
    with pytest.raises(DataError) as caught:
        build_index(specs)
    assert f"the folder '{name}' repeats each of its images" in str(caught.value)
    assert "more than 10,000,000" in str(caught.value)


def test_a_long_epoch_is_still_an_epoch(tmp_path):
    folder_of_images(tmp_path, f"{MOST_IMAGES_PER_EPOCH // 2}_many")
    assert index_of(tmp_path).datasets[0].num_train_images == MOST_IMAGES_PER_EPOCH


def test_a_regularisation_folder_is_counted_too(tmp_path):
    folder_of_images(tmp_path / "train", "1_few")
    folder_of_images(tmp_path / "reg", f"{10**9}_reg")
    with pytest.raises(DataError, match="'1000000000_reg'"):
        index_of(tmp_path / "train", reg_data_dir=tmp_path / "reg")


def test_links_to_nothing_are_reported_once(tmp_path):
    folder = folder_of_images(tmp_path, "2_few")
    (folder / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (folder / "0.caption").symlink_to(tmp_path / "nowhere.caption")
    (tmp_path / "3_gone").symlink_to(tmp_path / "nowhere", target_is_directory=True)
    (folder / "linked.png").symlink_to(folder / "0.png")
    (folder / "linked.txt").write_text("the same square")
    index = index_of(tmp_path)
    about = [finding for finding in index.findings if any("gone" in path.name for path in finding.paths)]
    assert [finding.code for finding in about] == ["dangling_link", "dangling_link"]
    assert [finding.message for finding in about] == [
        f"'{tmp_path.name}': 1 link (3_gone) points to something that is not there: not used. Mend or remove it.",
        "'2_few': 2 links (0.caption, gone.png) point to things that are not there: not used. Mend or remove them.",
    ]
    assert [record.path.name for record in index.records] == ["0.png", "1.png", "linked.png"]
