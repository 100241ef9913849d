from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from maulstick.errors import OptionError
from maulstick.options.dataset_config import SubsetSpec, dataset_specs, parse_folder_name, parse_resolution
from maulstick.options.schema import DatasetOptions


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("10_cat", (10, "cat")),
        ("10_cat girl", (10, "cat girl")),
        ("3_my_two_words", (3, "my_two_words")),
        ("10", (10, "")),
        ("0_off", (0, "off")),
        ("-1_off", (-1, "off")),
        ("cat", None),
        ("cat_10", None),
        ("10 cat", None),
        ("_cat", None),
        ("1.5_cat", None),
    ],
)
def test_folder_names_are_read_as_sd_scripts_reads_them(name, expected):
    assert parse_folder_name(name) == expected


def test_resolution():
    assert parse_resolution("512") == (512, 512)
    assert parse_resolution("512,768") == (512, 768)
    for wrong in ("", "0", "512x768", "1,2,3", "-64", "a"):
        with pytest.raises(OptionError, match="resolution is"):
            parse_resolution(wrong)


def test_folder_mode(tmp_path):
    for folder in ("train/2_dog", "train/10_cat girl", "train/notes", "reg/1_girl"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "train/5_file.txt").write_text("no folder")
    (spec,) = dataset_specs(
        DatasetOptions(
            train_data_dir=tmp_path / "train",
            reg_data_dir=tmp_path / "reg",
            resolution="512,768",
            train_batch_size=3,
            caption_extension="tags",
            shuffle_caption=True,
            keep_tokens=2,
            caption_dropout_rate=0.25,
            flip_aug=True,
            enable_bucket=True,
            min_bucket_reso=320,
            prior_loss_weight=0.5,
        )
    )
    shared = {
        "caption_extension": ".tags",
        "shuffle_caption": True,
        "keep_tokens": 2,
        "caption_dropout_rate": 0.25,
        "flip_aug": True,
    }
    assert spec.subsets == (
        SubsetSpec(image_dir=tmp_path / "train/10_cat girl", num_repeats=10, class_tokens="cat girl", **shared),
        SubsetSpec(image_dir=tmp_path / "train/2_dog", num_repeats=2, class_tokens="dog", **shared),
        SubsetSpec(image_dir=tmp_path / "reg/1_girl", num_repeats=1, class_tokens="girl", is_reg=True, **shared),
    )
    assert (spec.resolution, spec.batch_size, spec.min_bucket_reso, spec.max_bucket_reso) == ((512, 768), 3, 320, 1024)
    assert (spec.enable_bucket, spec.bucket_reso_steps, spec.prior_loss_weight) == (True, 64, 0.5)
    assert (spec.train_data_dir, spec.reg_data_dir) == (tmp_path / "train", tmp_path / "reg")


DESCRIPTION = """
[general]
shuffle_caption = true
caption_extension = 'txt'
keep_tokens = 1
color_aug = false
random_crop = false
caption_tag_dropout_rate = 0.0
token_warmup_step = 0

[[datasets]]
resolution = 512
batch_size = 4
keep_tokens = 2
enable_bucket = true
min_bucket_reso = 256
bucket_no_upscale = true

  [[datasets.subsets]]
  image_dir = 'hoge'
  class_tokens = 'hoge girl'
  num_repeats = 7

  [[datasets.subsets]]
  image_dir = 'fuga'
  keep_tokens = 3
  flip_aug = true
  caption_dropout_rate = 1

  [[datasets.subsets]]
  is_reg = true
  image_dir = 'reg'
  shuffle_caption = false

[[datasets]]
resolution = [768, 512]

  [[datasets.subsets]]
  image_dir = 'hoge'
"""


@pytest.fixture
def describe(tmp_path, monkeypatch):
    """Write a description beside its image folders, and return its specs as seen from the same folder."""
    for folder in ("hoge", "fuga", "reg"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)

    def make(text: str, **options):
        file = tmp_path / "data.toml"
        file.write_text(text, encoding="utf-8")
        return dataset_specs(DatasetOptions(dataset_config=file, **options))

    return make


def test_description_inherits_from_dataset_general_and_command_line(describe):
    first, second = describe(DESCRIPTION, train_batch_size=9, caption_dropout_rate=0.5, max_bucket_reso=2048)
    assert [subset.image_dir for subset in first.subsets] == [Path("hoge"), Path("fuga"), Path("reg")]
    hoge, fuga, reg = first.subsets
    assert (hoge.keep_tokens, hoge.shuffle_caption, hoge.caption_extension) == (2, True, ".txt")
    assert (hoge.num_repeats, hoge.class_tokens, hoge.is_reg, hoge.flip_aug) == (7, "hoge girl", False, False)
    assert (fuga.keep_tokens, fuga.flip_aug, fuga.caption_dropout_rate) == (3, True, 1.0)
    assert (fuga.num_repeats, fuga.class_tokens) == (1, None)
    assert (reg.is_reg, reg.shuffle_caption, reg.caption_dropout_rate) == (True, False, 0.5)
    assert (first.resolution, first.batch_size, first.bucket_no_upscale) == ((512, 512), 4, True)
    assert (second.resolution, second.batch_size, second.enable_bucket) == ((768, 512), 9, False)
    assert (second.max_bucket_reso, second.subsets[0].keep_tokens) == (2048, 1)
    assert first.train_data_dir is None
    assert second.source.endswith("data.toml, [[datasets]] number 2")


ONE = "[[datasets]]\n{dataset}\n[[datasets.subsets]]\nimage_dir = 'hoge'\n{subset}\n"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[generl]\n" + ONE, ["unknown table 'generl'", "Did you mean 'general'?"]),
        ("[general]\nkeep_token = 1\n" + ONE, ["[general]: unknown key 'keep_token'", "Did you mean 'keep_tokens'?"]),
        (ONE.replace("{dataset}", "train_batch_size = 2"), ["[[datasets]] number 1", "Did you mean 'batch_size'?"]),
        (
            ONE.replace("{subset}", "num_repeat = 2"),
            ["[[datasets.subsets]] number 1 of dataset 1: unknown key 'num_repeat'", "Did you mean 'num_repeats'?"],
        ),
        (ONE.replace("{subset}", "resolution = 512"), ["resolution belongs in [[datasets]] or [general]"]),
        (ONE.replace("{dataset}", "is_reg = true"), ["is_reg belongs in [[datasets.subsets]]"]),
        (ONE.replace("{subset}", "face_crop_aug_range = [1, 2]"), ["face_crop_aug_range (crops", "cut the faces out"]),
        (ONE.replace("{subset}", "metadata_file = 'a.json'"), ["metadata_file (captions and tags from one JSON file)"]),
        (ONE.replace("{subset}", "num_repeats = '2'"), ["num_repeats is '2'; expected a whole number of at least 0"]),
        (ONE.replace("{subset}", "num_repeats = true"), ["num_repeats is true; expected a whole number"]),
        (ONE.replace("{subset}", "flip_aug = 1"), ["flip_aug is 1; expected true or false"]),
        (ONE.replace("{subset}", "class_tokens = 5"), ["class_tokens is 5; expected text in quotes"]),
        (ONE.replace("{subset}", "caption_dropout_rate = 1.5"), ["caption_dropout_rate is 1.5", "from 0 to 1"]),
        (ONE.replace("{dataset}", "resolution = [1, 2, 3]"), ["resolution is [1, 2, 3]; expected a whole number"]),
        (ONE.replace("{dataset}", "resolution = '512'"), ["resolution is '512'; expected a whole number"]),
        (ONE.replace("{dataset}", "batch_size = 0"), ["batch_size is 0; expected a whole number of at least 1"]),
        (
            ONE.replace("{dataset}", "min_bucket_reso = 2000"),
            ["min_bucket_reso (2000) is above max_bucket_reso (1024)"],
        ),
        ("[[datasets]]\nresolution = 512\n", ["[[datasets]] number 1: there is no [[datasets.subsets]]"]),
        ("[general]\nkeep_tokens = 1\n", ["there is no [[datasets]]"]),
        ("[datasets]\nresolution = 512\n", ["must be a list of tables, each written [[datasets]]"]),
        ("[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 1\n", ["image_dir is missing"]),
        (ONE.replace("'hoge'", "'hogee'"), ["no folder image_dir 'hogee'", "Did you mean 'hoge'?"]),
        (ONE.replace("'hoge'", '"C:\\images"'), ["cannot be read", "single quotes"]),
        ("[general", ["data.toml cannot be read"]),
    ],
)
def test_mistakes_in_a_description_are_named_with_file_table_and_key(describe, text, parts):
    with pytest.raises(OptionError) as caught:
        describe(text.replace("{dataset}", "").replace("{subset}", ""))
    assert "data.toml" in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_json_description(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hoge").mkdir()
    file = tmp_path / "data.json"
    file.write_text('{"datasets": [{"batch_size": 2, "subsets": [{"image_dir": "hoge", "class_tokens": null}]}]}')
    (spec,) = dataset_specs(DatasetOptions(dataset_config=file))
    assert (spec.batch_size, spec.subsets[0].class_tokens, spec.resolution) == (2, None, (512, 512))


def test_folders_are_found_from_the_current_directory_then_beside_the_description(tmp_path, monkeypatch):
    (tmp_path / "here/hoge").mkdir(parents=True)
    (tmp_path / "there/hoge").mkdir(parents=True)
    (tmp_path / "there/fuga").mkdir(parents=True)
    file = tmp_path / "there/data.toml"
    file.write_text(
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'hoge'\n[[datasets.subsets]]\nimage_dir = 'fuga'\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    (spec,) = dataset_specs(DatasetOptions(dataset_config=file))
    hoge, fuga = spec.subsets
    assert hoge.image_dir.resolve() == tmp_path / "here/hoge"
    assert hoge.image_dir_note is None
    assert fuga.image_dir == tmp_path / "there/fuga"
    assert "the one beside data.toml is used" in fuga.image_dir_note


def test_exactly_one_way_to_name_images(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(OptionError, match="dataset_config and train_data_dir are both given"):
        dataset_specs(DatasetOptions(train_data_dir=tmp_path / "train", dataset_config=tmp_path / "data.toml"))
    with pytest.raises(OptionError, match="dataset_config and reg_data_dir are both given"):
        dataset_specs(DatasetOptions(reg_data_dir=tmp_path / "train", dataset_config=tmp_path / "data.toml"))
    with pytest.raises(OptionError, match=r"Give train_data_dir .* or dataset_config"):
        dataset_specs(DatasetOptions())
    with pytest.raises(OptionError, match=r"train_data_dir: there is no folder .*trian. Did you mean 'train'\?"):
        dataset_specs(DatasetOptions(train_data_dir=tmp_path / "trian"))
    with pytest.raises(OptionError, match="there is no file"):
        dataset_specs(DatasetOptions(dataset_config=tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"train_batch_size": 0}, "train_batch_size is 0; expected a whole number of at least 1"),
        ({"caption_dropout_rate": -0.1}, "caption_dropout_rate is -0.1; expected a number from 0 to 1"),
        ({"keep_tokens": -1}, "keep_tokens is -1"),
        ({"min_bucket_reso": 2048}, r"min_bucket_reso \(2048\) is above max_bucket_reso \(1024\)"),
        ({"resolution": "5x5"}, "resolution is '5x5'"),
    ],
)
def test_values_from_the_command_line_are_checked_under_their_own_names(tmp_path, option, message):
    with pytest.raises(OptionError, match=message):
        dataset_specs(DatasetOptions(train_data_dir=tmp_path, **option))


def test_check_starts_without_torch():
    code = (
        "import sys, maulstick.data.index, maulstick.data.summary, maulstick.data.batches\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"}, cwd=Path(__file__).parents[2])


def test_a_relative_folder_is_looked_for_in_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        OptionError, match=r"no folder training/img. Paths are relative to the current folder, "
    ) as raised:
        dataset_specs(DatasetOptions(train_data_dir=Path("training/img")))
    assert str(tmp_path) in str(raised.value)
