"""The wheel: everything that the package needs is in it, nothing else, and it runs from where it is unpacked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST_WHEEL = 20 * 10**6
"""In bytes; README states the size. Most of it is the quickstart's model."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it with the build backend alone: no network, no environment of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [built] = folder.glob("maulstick-*.whl")
    return built


def test_all_of_the_package_is_in_it_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    source = ROOT / "src"
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    package = {Path(line).relative_to("src").as_posix() for line in tracked.stdout.splitlines()}
    assert len(package) > 400
    in_package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert in_package == package
    assert not [name for name in in_package if (source / name).suffix in (".pyc", ".safetensors.tmp")]
    for part in ("report/report.html", "clip_tokenizer/vocab.json", "quickstart/model/unet/config.json"):
        assert f"maulstick/assets/{part}" in in_package
    licenses = {name.split("/licenses/")[1] for name in names if "/licenses/" in name}
    assert {"LICENSE"} < licenses
    assert any(name.endswith("CC-BY-SA-4.0.txt") for name in licenses)


def test_it_is_small_enough(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST_WHEEL


def test_it_names_its_program_its_python_and_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        facts = message_from_bytes(archive.read(metadata))
        [entries] = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert "maulstick = maulstick.cli:run" in archive.read(entries).decode()
    assert facts["Requires-Python"] == ">=3.11"
    needed = [line for line in facts.get_all("Requires-Dist") if "extra ==" not in line]
    assert {line.split(">")[0].split("<")[0].strip() for line in needed} >= {"torch", "diffusers", "peft", "rich"}
    assert not [line for line in needed if line.startswith(("pytest", "hatchling", "tensorboard"))]


def test_it_runs_from_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    """The quickstart's plan with its model and images, the report's page and the tokenizer, without the checkout."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assets = tmp_path / "site" / "maulstick" / "assets" / "quickstart"
    options = ["--pretrained_model_name_or_path", str(assets / "model"), "--train_data_dir", str(assets / "images")]
    options += ["--config_file", str(assets / "quickstart.toml"), "--max_train_steps", "1", "--lr_warmup_steps", "0"]
    options += ["--output_dir", str(tmp_path / "out")]
    program = (
        "import sys, maulstick\n"
        f"assert maulstick.__file__.startswith({str(tmp_path)!r}), maulstick.__file__\n"
        "from maulstick.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "quickstart" in run("--help")
    plan = json.loads(run("check", *options, "--json", "--no-dry_step"))
    assert plan
    run("train", *options)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"openmoji.safetensors", "openmoji.report.html"}
