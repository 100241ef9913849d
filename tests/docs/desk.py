"""A folder with everything that the documents' commands name, and how each kind of command is run in it."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from maulstick.cli import main
from maulstick.options.load import load_train_options
from tests.docs.conftest import make_pictures
from tests.docs.documents import ROOT, blocks
from tests.image_encoders import clip_encoder
from tests.models import model_folder
from tests.sd3_models import sd3_folder

MODELS: dict[str, Callable[[], Path]] = {
    "MODEL": lambda: model_folder("tiny"),
    "model": lambda: model_folder("tiny"),
    "sd3.5-medium": sd3_folder,
    "clip-vit-h": clip_encoder,
}
"""What the documents' names of models stand for here."""

IMAGES = ("IMAGES/10_mycat", "images/10_mycat")
RUN = """
pretrained_model_name_or_path = "model"
train_data_dir = "images"
output_dir = "output_dir"
network_alpha = 4
resolution = "64"
seed = 1
"""
CONFIGS = ("run.toml", "my.toml")
QUICKSTART = "src/maulstick/assets/quickstart"

_SIZE = ["--resolution", "64", "--min_bucket_reso", "64"]
_SHORT = [*_SIZE, "--max_train_epochs", "0", "--lr_warmup_steps", "0", "--mixed_precision", "no"]
SMALL: dict[str, list[str]] = {
    "train": [*_SHORT, "--max_train_steps", "2", "--console", "plain"],
    "check": [*_SHORT, "--max_train_steps", "2"],
    "probe": [*_SHORT, "--probe_images", "4", "--probe_timesteps", "2", "--probe_steps", "1"],
    "generate": ["--width", "64", "--height", "64", "--steps", "2"],
    "autopsy --step": ["--step", "1", *_SIZE],
}
"""Options that take the place of a command's own, so that it takes a second; half precision is slow on a CPU."""

NOT_RUN = {
    "pip": "installs packages from the network",
    "pipx": "installs packages from the network",
    "uv": "installs packages from the network",
    "git": "fetches from the network",
    "source": "the tests have an environment",
    "cd": "the commands already run where it would lead",
}
"""Programs that no test starts, and why."""


def set_up(desk: Path, document: str = "") -> None:
    """Put models, images and files where the documents expect them, and the document's own TOML files.

    A TOML block whose first line is a comment with a file's name is that file.
    """
    for name, make in MODELS.items():
        (desk / name).symlink_to(make())
    for name in IMAGES:
        make_pictures(desk / name, count=6)
    for name in CONFIGS:
        (desk / name).write_text(RUN)
    for block in blocks(document, "toml") if document else ():
        if named := re.match(r"# ([\w.-]+\.toml)\n", block.text):
            (desk / named[1]).write_text(block.text)
    for name in ("src", "examples"):
        (desk / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / QUICKSTART / "quickstart.toml", desk)
    shutil.copy(desk / IMAGES[1] / "0.png", desk / "cat.png")


def prepare(document: str, desk: Path) -> None:
    """Do what a document takes as done: runs that it looks at, and states that it goes on from."""
    if document == "docs/autopsy.md":
        train = ["train", "--config_file", "run.toml", "--save_state", "--save_every_n_steps", "1"]
        assert main(small(train)) == 0
        (desk / "output_dir" / "last-step00000001-state").rename(desk / "output_dir" / "last-step00000800-state")
        assert main(small(["autopsy", "--config_file", "run.toml", "--step", "1"])) == 0
    if document in ("docs/guardian.md", "docs/troubleshooting.md"):
        assert main(small(["train", "--config_file", "run.toml", "--output_dir", "out", "--save_state"])) == 0
    if document == "docs/blocks.md":
        # Its blocks are those of a full-size model; the smallest of the tests' models has not all of them.
        (desk / "model").unlink()
        (desk / "model").symlink_to(model_folder("sd1"))
        assert main(small(["train", "--config_file", "run.toml", "--output_name", "openmoji"])) == 0
        shutil.copy(desk / "output_dir" / "openmoji.safetensors", desk)
    if document == "docs/report.md":
        for name in ("out", "out-a", "out-b", "out-c"):
            assert main(small(["train", "--config_file", "run.toml", "--output_dir", name])) == 0
        (desk / "runs").mkdir()
        shutil.copy(desk / "out" / "gradient_logs+last.txt", desk / "runs" / "gradient_logs+mycat.txt")


def run_command(words: Sequence[str], where: str) -> None:
    """Run a command of a document in the current folder, in this process; an AssertionError names ``where``."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S+", word)] if "=" in words[0] else list(words)
    program = words[0]
    if program in NOT_RUN:
        return
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= {*targets}, f"{where}: there is no target {words[1:]}"
    elif program in ("torchrun", "accelerate"):
        check_launch(words, where)
    elif program in ("python", "python3"):
        assert words[1] == "-m", f"{where}: {words}"
        # A virtual environment and benchmarks: that the module is there must do.
        assert importlib.util.find_spec(words[2]) is not None, f"{where}: there is no module {words[2]}"
    else:
        assert program == "maulstick", f"{where}: say in tests/docs/desk.py how to test '{program}'"
        assert main(small(words[1:])) == 0, f"{where}: {' '.join(words)}"


def small(arguments: list[str]) -> list[str]:
    """Return a command's arguments with those that make it long replaced."""
    command, rest = arguments[0], arguments[1:]
    if command == "quickstart":
        model, images = f"{QUICKSTART}/model", f"{QUICKSTART}/images"
        paths = ["--pretrained_model_name_or_path", model, "--train_data_dir", images, "--train_batch_size", "1"]
        return small(["train", "--config_file", f"{QUICKSTART}/quickstart.toml", *paths, *rest])
    instead = SMALL.get("autopsy --step" if command == "autopsy" and "--step" in rest else command, [])
    kept: list[str] = []
    skipping = False
    for word in rest:
        skipping = word in instead[::2] or (skipping and not word.startswith("--"))
        if not skipping:
            kept.append(word)
    return [command, *kept, *instead]


def check_launch(words: Sequence[str], where: str) -> None:
    """Read the options behind a launcher's own; tests/docs/test_documents.py starts one on two processes (slow)."""
    place = words.index("maulstick")
    assert words[place - 1] in ("-m", "--module"), where
    assert words[place + 1] == "train", where
    load_train_options(words[place + 2 :])
