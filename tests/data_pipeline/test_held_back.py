"""Images that are held back for validation: a share by seed, never regularisation images, and trained nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from maulstick.data.held_back import hold_back
from maulstick.data.index import build_index
from maulstick.errors import DataError, OptionError
from maulstick.options.dataset_config import dataset_specs
from maulstick.options.schema import DatasetOptions
from tests.data_pipeline.helpers import one


def paths(records) -> set[str]:
    return {f"{record.path.parent.name}/{record.path.name}" for record in records}


@pytest.fixture
def described(tmp_path: Path):
    """Build the index of a description whose [[datasets]] begins with the given lines."""

    def build(text: str):
        file = tmp_path / "data.toml"
        file.write_text(f"[general]\nresolution = 64\n[[datasets]]\n{text}")
        return build_index(dataset_specs(DatasetOptions(dataset_config=file)))

    return build


def folder(path: Path, *more: str) -> str:
    return "\n".join(["[[datasets.subsets]]", f"image_dir = '{path}'", *more, ""])


def test_a_share_is_held_back_and_the_rest_is_trained(tmp_path, image, index) -> None:
    for number in range(10):
        image(tmp_path / f"train/3_cat/{number}.png")
    whole = index(validation_split=0.3)
    split = hold_back(whole, seed=1)
    assert len(split.held_back) == 3
    assert paths(split.held_back) | paths(split.records) == paths(whole.records)
    assert not paths(split.held_back) & paths(split.records)
    assert split.datasets[0].num_train_images == 21
    assert set(split.in_use) == {*split.records, *split.held_back}
    # As a function of the seed and the contents: names and the order of files do not matter.
    for number in range(10):
        (tmp_path / f"train/3_cat/{number}.png").rename(tmp_path / f"train/3_cat/renamed{9 - number}.png")
    again = hold_back(index(validation_split=0.3), seed=1)
    assert [each.content_hash for each in again.held_back] == [each.content_hash for each in split.held_back]
    others = [hold_back(whole, seed).held_back for seed in range(2, 8)]
    assert len({frozenset(paths(other)) for other in others}) > 1
    own = hold_back(index(validation_split=0.3, validation_seed=1), seed=5)
    assert [each.content_hash for each in own.held_back] == [each.content_hash for each in split.held_back]
    assert hold_back(index(), seed=1).held_back == ()


def test_images_that_are_left_out_later_leave_the_held_back_ones_too(tmp_path, image, index) -> None:
    for number in range(4):
        image(tmp_path / f"train/1_cat/{number}.png")
    split = hold_back(index(validation_split=0.5), seed=1)
    first, second = split.held_back
    assert split.without({first.record_id}).held_back == (second,)


def test_regularisation_images_are_never_held_back(tmp_path, image, described) -> None:
    for number in range(4):
        image(tmp_path / f"cats/{number}.png")
        image(tmp_path / f"reg/{number}.png")
    text = "validation_split = 0.5\n" + folder(tmp_path / "cats") + folder(tmp_path / "reg", "is_reg = true")
    split = hold_back(described(text), seed=1)
    assert {record.path.parent.name for record in split.held_back} == {"cats"}
    # As many as the two images that are trained are matched.
    assert sum(record.is_reg for record in split.records) == 2
    with pytest.raises(OptionError, match="validation_split and is_reg contradict each other"):
        described(folder(tmp_path / "cats") + folder(tmp_path / "reg", "is_reg = true", "validation_split = 0.5"))


def test_a_whole_folder_and_copies_of_its_pictures(tmp_path, image, described) -> None:
    for number in range(3):
        image(tmp_path / f"cats/{number}.png", seed=number)
    for number in (2, 7):
        image(tmp_path / f"unseen/{number}.png", seed=number)
    text = folder(tmp_path / "cats", "num_repeats = 2") + folder(tmp_path / "unseen", "validation_split = 1.0")
    split = hold_back(described(text), seed=1)
    assert paths(split.held_back) == {"unseen/2.png", "unseen/7.png"}
    assert paths(split.records) == {"cats/0.png", "cats/1.png"}
    assert one(split, "copy_of_held_back").paths == (tmp_path / "cats/2.png",)


def test_one_picture_at_two_sizes_is_held_back_at_both(tmp_path, image, described) -> None:
    for number in range(6):
        image(tmp_path / f"cats/{number}.png")
    both = "validation_split = 0.34\n" + folder(tmp_path / "cats")
    split = hold_back(described(f"{both}[[datasets]]\nresolution = 32\n{both}"), seed=1)
    assert [record.dataset for record in sorted(split.held_back, key=lambda each: each.record_id)] == [0, 0, 1, 1]
    assert len(paths(split.held_back)) == 2


def test_too_few_images_are_refused_with_what_is_needed(tmp_path, image, index) -> None:
    for number in range(4):
        image(tmp_path / f"train/1_cat/{number}.png")
    with pytest.raises(DataError, match=r"validation_split = 0\.1 of 4 images .*5 images are needed.*at least 0\.125"):
        hold_back(index(validation_split=0.1), seed=1)
    assert len(hold_back(index(validation_split=0.125), seed=1).held_back) == 1
    with pytest.raises(DataError, match="All 4 training images would be held back"):
        hold_back(index(validation_split=1.0), seed=1)
