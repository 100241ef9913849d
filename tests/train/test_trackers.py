"""TensorBoard and W&B: what sd-scripts' dashboards look for, read back; and trackers that fail."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from maulstick.errors import OptionError
from maulstick.options.log_schema import LogOptions
from maulstick.train.events import read_events
from maulstick.train.loop import learning_rates
from maulstick.train.trackers import check_trackers, open_trackers
from tests.train.test_loop import UNET_ONLY

VALUES = {"loss/current": 0.5, "loss/average": 0.25, "lr/unet": 1e-3}


class Wandb(ModuleType):
    """Stands in for wandb: keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("wandb", None)
        self.started: dict[str, Any] = {}
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = 0
        self.refuses = False
        self.config = self

    def init(self, project: Any = None, name: Any = None, dir: Any = None, tags: Any = None) -> Wandb:
        self.started = {"project": project, "name": name, "dir": dir, "tags": tags}
        return self

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.started["config"] = values

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if self.refuses:
            raise ConnectionError("no network\nmore")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1

    def Image(self, path: str, caption: str) -> tuple[str, str]:
        return Path(path).name, caption


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return module


def tensorboard_folder(root: Path) -> Path:
    """The one folder below root that holds scalars; accelerate puts the options beside them."""
    [folder] = {file.parent for file in root.rglob("events.out.tfevents*") if not _is_number(file.parent.name)}
    return folder


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and "." in text


def read_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0}).Reload()


def test_a_run_gives_tensorboard_what_dashboards_of_sd_scripts_show(make_run: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red shape --w 64 --h 64 --s 1\na blue shape --w 64 --h 64 --s 1\n")
    sampling = ("--sample_prompts", str(prompts), "--sample_every_n_steps", "6")
    where = ("--logging_dir", str(tmp_path / "tb"), "--log_prefix", "mine_", "--log_tracker_name", "shapes")
    make_run("--scale_weight_norms", "1", *sampling, *where).train()
    folder = tensorboard_folder(tmp_path / "tb")
    assert folder.name == "shapes"
    assert folder.parent.name.startswith("mine_20")
    log = read_events(tmp_path / "out" / "last.events.jsonl")
    steps = [event for event in log if event["event"] == "step"]
    board = read_tensorboard(folder)
    names = {"loss/current", "loss/average", "lr/unet", "lr/textencoder"}
    names |= {"max_norm/keys_scaled", "max_norm/max_key_norm", "norm/avg_key_norm"}
    assert names | {"norm/grad", "norm/threshold", "train/skipped_steps"} <= set(board.Tags()["scalars"])
    for name in names:
        assert [(row.step, row.value) for row in board.Scalars(name)] == [
            (event["train/steps"], pytest.approx(event[name])) for event in steps
        ]
    # Five windows an epoch: one whole epoch, over which the x axis counts.
    [average] = board.Scalars("loss/epoch_average")
    assert average.step == 1
    assert average.value == pytest.approx(np.mean([event["loss/current"] for event in steps[:5]]))
    [event] = [event for event in log if event["event"] == "epoch"]
    assert (event["epoch"], event["step"]) == (1, 5)
    assert event["loss/epoch_average"] == pytest.approx(average.value)
    [drawn] = [event for event in log if event["event"] == "sample"]
    for place, file in enumerate(drawn["files"]):
        [image] = board.Images(f"sample_{place}")
        assert image.step == 6
        (tmp_path / "image.png").write_bytes(image.encoded_image_string)
        assert (np.asarray(Image.open(tmp_path / "image.png")) == np.asarray(Image.open(file))).all()


def test_without_a_prefix_tensorboard_folders_have_the_runs_name(tmp_path: Path) -> None:
    options = LogOptions(log_with="tensorboard")
    made = open_trackers(options, output_dir=tmp_path, output_name="cat", started_at=0.0, config={}, say=print)
    made.log(VALUES, step=3, epoch=0)
    made.finish()
    folder = tensorboard_folder(tmp_path / "logs")
    assert folder.name.startswith("cat-19")
    assert [row.step for row in read_tensorboard(folder).Scalars("lr/unet")] == [3]


def test_wandb_is_given_values_axes_pictures_and_names(wandb: Wandb, tmp_path: Path) -> None:
    config = tmp_path / "trackers.toml"
    config.write_text('[wandb]\ntags = ["a", "b"]\n')
    options = LogOptions(
        log_with="wandb",
        logging_dir=tmp_path / "logs",
        log_tracker_name="shapes",
        wandb_run_name="first",
        log_tracker_config=config,
    )
    check_trackers(options)
    made = open_trackers(
        options, output_dir=tmp_path, output_name="cat", started_at=0.0, config={"seed": "1"}, say=print
    )
    made.log(VALUES, step=4, epoch=0)
    made.log_epoch({"loss/epoch_average": 0.5}, step=5, epoch=1)
    made.log_samples([(tmp_path / "one.png", "a cat"), (tmp_path / "two.png", "a dog")], step=5)
    made.finish()
    assert wandb.started == {
        "project": "shapes",
        "name": "first",
        "dir": str(tmp_path / "logs"),
        "tags": ["a", "b"],
        "config": {"seed": "1"},
    }
    assert wandb.rows == [
        (4, {**VALUES, "global_step": 4, "epoch": 0}),
        (5, {"loss/epoch_average": 0.5, "global_step": 5, "epoch": 1}),
        (5, {"sample_0": ("one.png", "a cat"), "sample_1": ("two.png", "a dog")}),
    ]
    assert wandb.finished == 1


def test_a_tracker_that_fails_is_named_once_and_counted(
    wandb: Wandb, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(*UNET_ONLY, "--log_with", "wandb")
    said: list[str] = []
    monkeypatch.setattr(run.console, "say", said.append)
    run.prepare()
    wandb.refuses = True
    assert run.train().exit_code == 0
    about = [line for line in said if line.startswith("W&B")]
    # Six steps, an epoch, a look for alarms at step 5, and the end, which it takes.
    assert about == [
        "W&B fails (ConnectionError: no network); training goes on, and it is tried again",
        "W&B did not take 8 of 9 calls, the last time because of ConnectionError: no network. Everything is in the "
        "event log.",
    ]
    log = read_events(tmp_path / "out" / "last.events.jsonl")
    assert [event["text"] for event in log if event["event"] == "tracker_failed"] == about
    assert wandb.finished == 1


def test_a_tracker_that_cannot_be_started_is_an_error_before_training(
    wandb: Wandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_logged_in(**_: Any) -> None:
        raise RuntimeError("no API key configured")

    monkeypatch.setattr(wandb, "init", not_logged_in)
    blocked = tmp_path / "file"
    blocked.write_text("")
    for options, said in (
        (LogOptions(log_with="wandb"), "W&B cannot be started .no API key configured.. Run `wandb login`"),
        (LogOptions(log_with="tensorboard", logging_dir=blocked), "TensorBoard cannot be started .*logging_dir"),
    ):
        with pytest.raises(OptionError, match=said):
            open_trackers(options, output_dir=tmp_path, output_name="cat", started_at=0.0, config={}, say=print)


@pytest.mark.parametrize(
    ("text", "log_with", "said"),
    [
        ("[wandb", "wandb", "cannot be read"),
        ('[wadnb]\nname = "x"', "wandb", "has 'wadnb', which is no table of a tracker in use. Did you mean 'wandb'?"),
        ('[tensorboard]\ncomment = "x"', "wandb", "log_with = wandb reads .wandb."),
        ('[wandb]\nproject = "x"', "all", "project is not set in .*; use log_tracker_name"),
        ('[wandb]\ntasg = ["x"]', "all", "no argument 'tasg' .*Did you mean 'tags'"),
        ("[tensorboard]\nflush_sec = 3", "all", "no argument 'flush_sec' .*Did you mean 'flush_secs'"),
        ("name = 3", "wandb", "has 'name', which is no table"),
    ],
)
def test_mistakes_in_log_tracker_config_are_named(
    wandb: Wandb, tmp_path: Path, text: str, log_with: Any, said: str
) -> None:
    path = tmp_path / "trackers.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=said):
        check_trackers(LogOptions(log_with=log_with, log_tracker_config=path))


def test_real_wandb_takes_a_run_offline(make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    said: list[str] = []
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red shape --w 64 --h 64 --s 1\n")
    sampling = ("--sample_prompts", str(prompts), "--sample_every_n_steps", "6")
    run = make_run(*UNET_ONLY, "--log_with", "wandb", *sampling)
    monkeypatch.setattr(run.console, "say", said.append)
    run.train()
    assert not [line for line in said if line.startswith("W&B")]
    [written] = (tmp_path / "out" / "logs" / "wandb").glob("offline-run-*")
    [database] = written.glob("*.wandb")
    content = database.read_bytes()
    for name in (b"loss/average", b"loss/epoch_average", b"lr/unet", b"sample_0", b"a red shape"):
        assert name in content
    assert list(written.glob("files/media/images/sample_0_*.png"))


def test_prodigy_plus_has_sd_scripts_name_for_its_step_too() -> None:
    optimizer_class = pytest.importorskip("prodigyplus.prodigy_plus_schedulefree").ProdigyPlusScheduleFree
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "name": name} for name in ("textencoder", "unet")]
    rates = learning_rates(optimizer_class(groups, lr=0.5, d0=1e-4, split_groups=False))
    of_each = {
        f"lr/{kind}{name}": rate for kind, rate in (("", 0.5), ("d*lr/", 5e-5)) for name in ("textencoder", "unet")
    }
    assert rates == pytest.approx({**of_each, "lr/d*lr": 5e-5})
