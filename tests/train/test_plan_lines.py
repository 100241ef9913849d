"""What the plan says about several datasets at once."""

from __future__ import annotations

import json
import shutil

from maulstick.cli import main
from tests.models import model_folder


def test_datasets_of_two_sizes_are_both_in_the_plan(images, tmp_path, capsys):
    for name in ("small", "large"):
        shutil.copytree(images / "2_shape", tmp_path / name)
    config = tmp_path / "dataset.toml"
    config.write_text(
        "[[datasets]]\nresolution = 64\nbatch_size = 2\n"
        f'[[datasets.subsets]]\nimage_dir = "{tmp_path / "small"}"\nnum_repeats = 2\n'
        "[[datasets]]\nresolution = [128, 64]\n"
        f'[[datasets.subsets]]\nimage_dir = "{tmp_path / "large"}"\nnum_repeats = 1\n'
    )
    arguments = ["--pretrained_model_name_or_path", str(model_folder("tiny")), "--dataset_config", str(config)]
    arguments += ["--output_dir", str(tmp_path / "out"), "--console", "quiet"]
    assert main(["check", *arguments]) == 0
    assert "sizes      64x64, 128x64; buckets 64x64: 10, 128x64: 5" in capsys.readouterr().out
    assert main(["check", *arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["resolution"], plan["further_resolutions"]) == ([64, 64], [[128, 64]])
    # 10 images in batches of 2, and 5 alone.
    assert (plan["batches_per_epoch"], plan["train_images"]) == (10, 15)
