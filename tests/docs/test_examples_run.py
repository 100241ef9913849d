"""The examples that users of kohya_ss and sd-scripts know are trained as they are, on small models of their kinds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from maulstick.adapters.files import read_lora_file
from maulstick.cli import main
from tests.docs.conftest import make_pictures
from tests.models import single_file
from tests.sdxl_models import sdxl_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(desk: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Train in a copy of the examples with the models that they name; pictures of 64 pixels stay so small."""
    for file in EXAMPLES.glob("*.*"):
        shutil.copy(file, desk)
    (desk / "sample_prompts.txt").write_text("my_cat on a sofa --w 64 --h 64 --s 2\n")
    models = {"v1-5-pruned-emaonly": single_file, "sd_xl_base_1.0": sdxl_file}
    (desk / "models").mkdir()
    for name, make in models.items():
        if any(name in (desk / token).read_text() for token in arguments if token.endswith(".toml")):
            (desk / "models" / f"{name}.safetensors").symlink_to(make())
    monkeypatch.chdir(desk)
    # Half precision is slow on a CPU, and a report of two steps says nothing.
    assert main(["train", *arguments, "--mixed_precision", "no", "--console", "plain", "--no-report"]) == 0


def test_a_file_of_kohya_ss_for_sd15(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make_pictures(tmp_path / "training" / "img" / "2_my_cat")
    run_example(
        tmp_path, monkeypatch, "--config_file", "kohya_ss_sd15.toml", "--max_train_steps", "2", "--lr_warmup_steps", "0"
    )
    file = read_lora_file(tmp_path / "training" / "model" / "my_cat.safetensors")
    assert len(file.modules) == 192 + 72
    assert (file.metadata["ss_network_dim"], file.metadata["ss_network_alpha"]) == ("32", "16.0")
    assert file.metadata["ss_text_encoder_lr"] == "[5e-05]"
    assert list((tmp_path / "training" / "img" / "2_my_cat").glob("*.safetensors")), "latents cached beside the images"
    assert list((tmp_path / "training" / "log").rglob("events.out.tfevents.*"))
    assert [picture.name for picture in (tmp_path / "training" / "model" / "sample").glob("*.png")] == [
        "my_cat_epoch000001_00.png"
    ]
    shown = capsys.readouterr().out
    assert "Without effect here: epoch (kohya_ss makes max_train_steps of it); " in shown
    assert "xformers (PyTorch's own attention is always used)" in shown


@pytest.mark.slow
def test_a_file_of_kohya_ss_for_sdxl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_pictures(tmp_path / "training" / "img" / "2_my_cat")
    run_example(tmp_path, monkeypatch, "--config_file", "kohya_ss_sdxl.toml", "--max_train_steps", "2")
    file = read_lora_file(tmp_path / "training" / "model" / "my_style.safetensors")
    assert {name.split("_")[1] for name in file.modules} == {"unet"}
    assert file.metadata["ss_base_model_version"] == "sdxl_base_v1-0"
    assert file.metadata["ss_optimizer"].startswith("Adafactor(scale_parameter=False")


@pytest.mark.slow
def test_options_and_a_dataset_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("my_images/portraits", "my_images/uncaptioned", "my_regularisation_images"):
        make_pictures(tmp_path / name, count=1)
    make_pictures(tmp_path / "my_images" / "wide", count=1, size=(128, 64))
    for caption in (tmp_path / "my_images" / "uncaptioned").glob("*.txt"):
        caption.unlink()
    options = ["--config_file", "sd_scripts_lora.toml", "--dataset_config", "dataset.toml", "--max_train_epochs", "1"]
    run_example(tmp_path, monkeypatch, *options)
    file = read_lora_file(tmp_path / "output" / "my_cat" / "my_cat.safetensors")
    assert not any("_down_blocks_0_" in name or "_down_blocks_1_" in name for name in file.modules), (
        "weight 0: no module"
    )
    assert any("_down_blocks_2_" in name for name in file.modules)
    assert file.metadata["ss_num_epochs"] == "1"
    assert list((tmp_path / "output" / "my_cat").glob("*-state"))
