"""One training run of the real trainer on the quickstart's model, with a fault planted in it, and what came of it."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from maulstick.families.load import load_family
from maulstick.options.load import load_train_options
from maulstick.options.schema import ModelOptions
from maulstick.tools.apply_lora import apply_loras, parse_lora_choice
from maulstick.tools.quickstart import ASSETS, HeldOut, read_held_out
from maulstick.train.console import QuietConsole
from maulstick.train.events import read_events
from maulstick.train.run import TrainingRun
from maulstick.train.validate import denoising_loss

STEPS = 28
BARE = ("--grad_norm_mode", "off", "--no-rescue", "--no-autopsy", "--max_skipped_fraction", "1")
"""Arguments of a run without guard, rescue and autopsy."""

Plant = Callable[[TrainingRun], None]
"""Puts a fault into a run that is ready to train."""


class ListeningConsole(QuietConsole):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    result = say


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended.

    Attributes:
        ended: the exit code, or the class of the error that ended the run.
        finite: all values of the last file are finite; None where there is no file.
        loss: held-out loss with that file; infinite where there is no finite one.
        said: everything on the console, and the error's text as the last line.
    """

    ended: str
    step: int
    skipped: int
    path: Path | None
    finite: bool | None
    loss: float
    said: str
    events: list[dict[str, Any]] = field(repr=False)
    run: TrainingRun | None = field(repr=False, default=None)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def rescues(self) -> int:
        """How often the run went back."""
        return len(self.of("rescue"))


class Workshop:
    """What all trials share: a copy of the images with its latent cache, and a pristine model to measure files on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = self.copy_of_images("images")
        self.family = load_family(
            ModelOptions(pretrained_model_name_or_path=str(ASSETS / "model")), device="cpu", dtype=torch.float32
        )
        held_out = read_held_out(self.family, ASSETS / "heldout")
        # Eight of the forty, because all would take longer than a run. Noise and timesteps are always the same.
        self.held_out = HeldOut(held_out.latents[::5], held_out.captions[::5])
        self.untrained = denoising_loss(self.family, self.held_out.latents, self.held_out.captions)
        self._fault_free: dict[tuple[str, ...], Outcome] = {}
        self._made = 0

    def copy_of_images(self, name: str) -> Path:
        """Return a copy of the training images that a test may damage."""
        return Path(shutil.copytree(ASSETS / "images", self.root / name))

    def new_folder(self) -> Path:
        """Return an output folder that nobody has used."""
        self._made += 1
        return self.root / f"out{self._made}"

    def arguments(self, *given: str, images: Path | None = None, output: Path | None = None) -> list[str]:
        """Return the arguments of a run: the quickstart's recipe, shorter and smaller."""
        usual: Mapping[str, object] = {
            "--pretrained_model_name_or_path": ASSETS / "model",
            "--train_data_dir": images or self.images,
            "--output_dir": output or self.new_folder(),
            "--resolution": "64,64",
            "--train_batch_size": 1,
            "--max_train_steps": STEPS,
            "--network_dim": 4,
            "--network_alpha": 4,
            "--learning_rate": "2e-3",
            "--lr_scheduler": "cosine",
            "--lr_warmup_steps": 5,
            "--min_snr_gamma": 5,
            "--seed": 0,
            # A run so much shorter than a usual one has its states that much closer together.
            "--rescue_every": 4,
            "--rescue_lr_restore_after": 8,
            "--autopsy_limit": 1,
        }
        if "--no-rescue" in given:
            usual = {name: value for name, value in usual.items() if not name.startswith(("--rescue", "--autopsy"))}
        pairs = [token for name, value in usual.items() if name not in given for token in (name, str(value))]
        cached = () if "--no-cache" in given else ("--cache_latents", "--cache_latents_to_disk")
        own = [token for token in given if token != "--no-cache"]
        return [*pairs, "--network_train_unet_only", "--cache_text_encoder_outputs", *cached, *own]

    def ready(self, *given: str, images: Path | None = None, output: Path | None = None) -> TrainingRun:
        """Return a run that is ready to train."""
        options = load_train_options(self.arguments(*given, images=images, output=output))
        run = TrainingRun(options, console=ListeningConsole())
        run.prepare()
        return run

    def trained(
        self, *given: str, plant: Plant | None = None, images: Path | None = None, output: Path | None = None
    ) -> Outcome:
        """Train with a fault and look at what is left."""
        run = self.ready(*given, images=images, output=output)
        if plant is not None:
            plant(run)
        return self.finish(run)

    def finish(self, run: TrainingRun) -> Outcome:
        """Train a run that is ready, and look at what is left."""
        console, loop, saver = run.console, run.loop, run.saver
        assert isinstance(console, ListeningConsole)
        assert loop is not None
        assert saver is not None
        try:
            ended, error_text = str(run.train().exit_code), ""
        except Exception as error:
            ended, error_text = type(error).__name__, str(error)
        # The files of this run in the order in which they were begun; one that was not finite was never written.
        files = [path for path in saver.output.written if path.exists()]
        path = files[-1] if files else None
        finite = None if path is None else is_finite(path)
        return Outcome(
            ended=ended,
            step=loop.state.step,
            skipped=loop.state.skipped,
            path=path,
            finite=finite,
            loss=self.loss_with(path) if path is not None and finite else math.inf,
            said="\n".join([*console.lines, error_text]),
            events=events_of(run),
            run=run,
        )

    def fault_free(self, *given: str) -> Outcome:
        """Return the outcome of the run that nothing happens to."""
        if given not in self._fault_free:
            self._fault_free[given] = self.trained(*given)
        return self._fault_free[given]

    def loss_with(self, path: Path) -> float:
        """Return the held-out loss of the model with a LoRA file, on a model that no run has touched."""
        family = copy.deepcopy(self.family)
        apply_loras(family, [parse_lora_choice(f"{path}:1")])
        return denoising_loss(family, self.held_out.latents, self.held_out.captions)


def bad_windows(run: TrainingRun) -> int:
    """Return in how many windows of the run (of its first epoch) an image's latents or text states are not finite."""
    assert run.loop is not None
    parts = run.loop.parts
    assert parts.text_states is not None
    count = 0
    for number in range(parts.total_steps):
        batch = parts.batches.batch(0, number)
        states = parts.text_states.states_for([item.caption for item in batch.items])
        tensors = [parts.latents.latents_for(batch), *states.values()]
        count += not all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
    return count


def events_of(run: TrainingRun) -> list[dict[str, Any]]:
    """Return the event log of a run, as it is on the disk."""
    options = run.options.run
    assert options.output_dir is not None
    return read_events(options.output_dir / f"{options.output_name}.events.jsonl")


def is_finite(path: Path) -> bool:
    """Whether all values of a safetensors file are finite; read without the product's own check."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in load_file(path).values())


def same_weights(first: Path, second: Path) -> bool:
    """Whether two LoRA files hold the same tensors, bit by bit."""
    one, other = load_file(first), load_file(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
