"""The example files load as the comments in them say, and only those of kohya_ss with a word."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from maulstick.options.dataset_config import dataset_specs
from maulstick.options.load import load_train_options

EXAMPLES = Path(__file__).parents[2] / "examples"


def commands(file: Path) -> list[list[str]]:
    """Return the arguments of the `maulstick train` and `maulstick check` commands in the file's comments."""
    lines = [line.partition("maulstick ")[2] for line in file.read_text().splitlines() if line.startswith("#")]
    return [shlex.split(line)[1:] for line in lines if line.startswith(("train ", "check "))]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_commands_in_examples_load(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert len(commands(file)) >= 1
    for arguments in commands(file):
        loaded = load_train_options(arguments)
        assert file in (EXAMPLES / str(loaded.config_file), EXAMPLES / str(loaded.options.dataset.dataset_config))
        if file.name.startswith("kohya_ss"):
            # They are full of keys that nobody has touched.
            assert any(notice.startswith("Without effect here: ") for notice in loaded.notices)
        else:
            assert loaded.notices == []


def test_values_of_the_usual_example() -> None:
    options = load_train_options(["--config_file", str(EXAMPLES / "sd15_lora.toml")]).options
    assert (options.network.network_dim, options.network.network_alpha) == (16, 8.0)
    assert (options.network.conv_dim, options.network.conv_alpha) == (8, 4.0)
    assert options.optimizer.optimizer_args == ["weight_decay=0.01", "betas=0.9,0.99"]
    assert (options.schedule.lr_scheduler, options.schedule.lr_warmup_steps) == ("cosine", "5%")
    assert options.run.max_train_epochs == 10


def test_the_dataset_example_describes_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = ["my_images/portraits", "my_images/uncaptioned", "my_regularisation_images", "my_images/wide"]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    loaded = load_train_options(
        [
            "--pretrained_model_name_or_path",
            "m",
            "--output_dir",
            "o",
            "--dataset_config",
            str(EXAMPLES / "dataset.toml"),
        ]
    )
    first, second = dataset_specs(loaded.options.dataset)
    assert (first.resolution, first.batch_size, second.resolution, second.batch_size) == ((512, 512), 4, (768, 512), 2)
    assert [subset.num_repeats for subset in first.subsets] == [10, 2, 1]
    assert [subset.is_reg for subset in first.subsets] == [False, False, True]
    assert [str(subset.image_dir) for subset in (*first.subsets, *second.subsets)] == folders
