"""Configuration files: sections are free, nothing is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from maulstick.errors import OptionError
from maulstick.options.config_file import find_config_file, read_config_file


def written(folder: Path, text: str | bytes, name: str = "run.toml") -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_sections_and_top_level_count_alike(tmp_path: Path) -> None:
    file = written(tmp_path, 'seed = 1\n[anything]\nnetwork_dim = 8\n["with space"]\nv2 = true\n')
    options = read_config_file(file)
    assert {name: item.value for name, item in options.items()} == {"seed": 1, "network_dim": 8, "v2": True}
    assert options["seed"].where == str(file)
    assert options["network_dim"].where == f"{file}, section [anything]"


def test_an_empty_text_means_not_given(tmp_path: Path) -> None:
    assert read_config_file(written(tmp_path, 'vae = ""\ntraining_comment = ""\noptimizer_args = []\n')).keys() == {
        "optimizer_args"
    }


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    assert read_config_file(written(tmp_path, b"\xef\xbb\xbfseed = 3\n"))["seed"].value == 3


def test_the_same_name_twice(tmp_path: Path) -> None:
    same = written(tmp_path, "[a]\nseed = 3\n[b]\nseed = 3\n", "same.toml")
    assert read_config_file(same)["seed"].value == 3
    other = written(tmp_path, "[a]\nseed = 3\n[b]\nseed = 4\n", "other.toml")
    with pytest.raises(OptionError, match=r"seed stands twice .* 3 \(.*section \[a\]\) and 4 \(.*section \[b\]\)"):
        read_config_file(other)


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed = 1\nnetwork_dim 8\n", r"run\.toml is not TOML: .*line 2"),
        ("[a.b]\nseed = 1\n", r"'b' \(.*section \[a\]\) is a section inside a section"),
        ('[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "x"\n', "'datasets' .* --dataset_config"),
        ('[data]\nimage_dir = "x"\n', r"'image_dir' \(.*section \[data\]\) describes a dataset"),
        ('train_data_dir = "C:\\images"\n', r"single quotes \('C:\\images'\)"),
        (b"seed = 1 # \xff\xfe\n", "not UTF-8"),
        ('{"train_data_dir": "C:\\images"}', "It is JSON, as .* of kohya_ss' GUI makes .*config_lora-DATE-TIME.toml"),
    ],
)
def test_files_that_cannot_be_meant(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_config_file(written(tmp_path, text))


def test_the_suffix_may_be_left_out(tmp_path: Path) -> None:
    file = written(tmp_path, "seed = 1\n", "v1.0.toml")
    assert find_config_file(tmp_path / "v1.0") == file
    assert find_config_file(file) == file
    without_suffix = written(tmp_path, "seed = 1\n", "plain")
    assert find_config_file(without_suffix) == without_suffix


def test_a_missing_file_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"there is no file .*/none nor .*/none\.toml"):
        find_config_file(tmp_path / "none")
    with pytest.raises(OptionError, match=r"there is no file .*/none\.toml\. "):
        find_config_file(tmp_path / "none.toml")
