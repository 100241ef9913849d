"""TensorBoard and W&B, through accelerate's trackers, under the names that dashboards for sd-scripts look for."""

from __future__ import annotations

import inspect
import os
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from maulstick.data.images import read_rgb
from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.log_schema import LogOptions

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

WANDB_PROJECT = "maulstick"
Name = Literal["tensorboard", "wandb"]
_CALLED: Mapping[Name, str] = {"tensorboard": "TensorBoard", "wandb": "W&B"}
_OURS: Mapping[Name, Mapping[str, str]] = {
    "tensorboard": {"log_dir": "logging_dir", "self": "nothing"},
    "wandb": {"project": "log_tracker_name", "config": "nothing: all options are logged"},
}
"""Arguments of the trackers that options of their own give."""
Say = Callable[[str], None]
Sample = tuple[Path, str]
"""A file with a sample picture, and its prompt."""


@dataclass
class _Open:
    """A tracker that takes values, and how often it did not."""

    name: Name
    tracker: GeneralTracker
    failures: int = 0
    calls: int = 0
    last_failure: str = ""


@dataclass
class Trackers:
    """The trackers of a run. One that fails is named once and tried again each time; it never ends the run."""

    opened: list[_Open] = field(default_factory=list)
    say: Say = lambda text: None

    def log(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Send the values of a step."""
        self._log(values, step=step, epoch=epoch, place=step)

    def log_epoch(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Send the values of an epoch (from 1), which TensorBoard has over epochs, as with sd-scripts."""
        self._log(values, step=step, epoch=epoch, place=epoch)

    def _log(self, values: Mapping[str, float], *, step: int, epoch: int, place: int) -> None:
        for each in self.opened:
            if each.name == "wandb":
                # The two that sd-scripts sends there, for the axes of its charts.
                self._attempt(each, _send_values, {**values, "global_step": step, "epoch": epoch}, step)
            else:
                self._attempt(each, _send_values, dict(values), place)

    def log_samples(self, samples: Sequence[Sample], *, step: int) -> None:
        """Send the pictures in these files as ``sample_0`` and so on, in W&B with their prompts below them."""
        for each in self.opened:
            send = _send_to_wandb if each.name == "wandb" else _send_to_tensorboard
            self._attempt(each, send, samples, step)

    def finish(self) -> None:
        """Close all; say of each that failed how often it did."""
        for each in self.opened:
            self._attempt(each, _finish)
            if each.failures:
                self.say(
                    f"{_CALLED[each.name]} did not take {each.failures} of {each.calls} calls, the last time because "
                    f"of {each.last_failure}. Everything is in the event log."
                )
        self.opened = []

    def _attempt(self, each: _Open, call: Callable[..., None], *arguments: Any) -> None:
        each.calls += 1
        try:
            call(each.tracker, *arguments)
        except Exception as error:  # whatever a tracker raises, the run is worth more
            each.failures += 1
            text = str(error).strip().splitlines()
            each.last_failure = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
            if each.failures == 1:
                self.say(f"{_CALLED[each.name]} fails ({each.last_failure}); training goes on, and it is tried again")


def _send_values(tracker: Any, values: dict[str, float], step: int) -> None:
    tracker.log(values, step=step)


def _finish(tracker: Any) -> None:
    tracker.finish()


def _send_to_wandb(tracker: Any, samples: Sequence[Sample], step: int) -> None:
    import wandb

    images = {f"sample_{place}": wandb.Image(str(path), caption=text) for place, (path, text) in enumerate(samples)}
    tracker.log(images, step=step)


def _send_to_tensorboard(tracker: Any, samples: Sequence[Sample], step: int) -> None:
    images = {f"sample_{place}": read_rgb(path)[None] for place, (path, _) in enumerate(samples)}
    tracker.log_images(images, step=step, dataformats="NHWC")
    tracker.writer.flush()


def tracker_names(options: LogOptions) -> list[Name]:
    """Return the trackers that ``log_with`` names."""
    if options.log_with is None:
        return []
    return ["tensorboard", "wandb"] if options.log_with == "all" else [options.log_with]


def check_trackers(options: LogOptions) -> None:
    """Raise OptionError when a tracker's package is missing, or log_tracker_config says what no tracker takes."""
    for name in tracker_names(options):
        if find_spec(name) is None:
            raise OptionError(
                f"log_with '{name}' needs a package that is not installed: pip install 'maulstick[{name}]'."
            )
    _tracker_arguments(options)


def open_trackers(
    options: LogOptions, *, output_dir: Path, output_name: str, started_at: float, config: Mapping[str, Any], say: Say
) -> Trackers:
    """Start the trackers that ``log_with`` names, on this process.

    Raises:
        OptionError: one cannot be started; before training that is better said than borne.
    """
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(started_at))
    folder = options.logging_dir or output_dir / "logs"
    arguments = _tracker_arguments(options)
    opened = []
    for name in tracker_names(options):
        try:
            if name == "tensorboard":
                prefix = f"{output_name}-" if options.log_prefix is None else options.log_prefix
                tracker = _tensorboard(folder / f"{prefix}{stamp}", options.log_tracker_name, arguments[name])
            else:
                tracker = _wandb(options, folder, f"{output_name}-{stamp}", arguments[name])
            tracker.store_init_configuration(dict(config))
        except Exception as error:  # of whatever package the tracker is made
            advice = (
                "Run `wandb login` once, or set WANDB_MODE=offline to send it later, or leave log_with out."
                if name == "wandb"
                else f"Name a folder that can be written with logging_dir (it is {folder}), or leave log_with out."
            )
            raise OptionError(f"{_CALLED[name]} cannot be started ({error}). {advice}") from error
        opened.append(_Open(name, tracker))
    return Trackers(opened, say)


def _tensorboard(folder: Path, inner: str | None, arguments: Mapping[str, Any]) -> GeneralTracker:
    from accelerate.tracking import TensorBoardTracker

    outer, name = (folder.parent, folder.name) if inner is None else (folder, inner)
    tracker: GeneralTracker = TensorBoardTracker(name, logging_dir=str(outer), **arguments)
    tracker.start()
    return tracker


def _wandb(options: LogOptions, folder: Path, run_name: str, arguments: Mapping[str, Any]) -> GeneralTracker:
    from accelerate.tracking import WandBTracker

    # What moves the cursor of a live bar is no text for a log.
    os.environ.setdefault("WANDB_CONSOLE", "off")
    usual: dict[str, Any] = {"name": options.wandb_run_name or run_name}
    if "WANDB_DIR" not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        usual["dir"] = str(folder)
    tracker: GeneralTracker = WandBTracker(options.log_tracker_name or WANDB_PROJECT, **{**usual, **arguments})
    tracker.start()
    return tracker


def _tracker_arguments(options: LogOptions) -> dict[Name, dict[str, Any]]:
    """Read ``log_tracker_config``; return the arguments of each tracker in use."""
    names = tracker_names(options)
    arguments: dict[Name, dict[str, Any]] = {name: {} for name in names}
    path = options.log_tracker_config
    if path is None or not names:
        return arguments
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(
            f"log_tracker_config: {path} cannot be read ({reason}). Name a TOML file with a table for each tracker, "
            "such as [wandb]."
        ) from error
    for table, given in tables.items():
        if table not in arguments or not isinstance(given, dict):
            known = " and ".join(f"[{name}]" for name in names)
            raise OptionError(
                f"log_tracker_config: {path} has '{table}', which is no table of a tracker in use."
                f"{nearest_name_hint(table, names)} log_with = {options.log_with} reads {known}."
            )
        _refuse_unknown(path, table, given)
        arguments[table] = given
    return arguments


def _refuse_unknown(path: Path, table: Name, given: Mapping[str, Any]) -> None:
    if table == "wandb":
        import wandb

        function: Callable[..., Any] = wandb.init
    else:
        from torch.utils.tensorboard import SummaryWriter

        function = SummaryWriter.__init__
    known = [name for name in inspect.signature(function).parameters if name not in _OURS[table]]
    for key in given:
        if key in _OURS[table]:
            raise OptionError(f"log_tracker_config: [{table}] {key} is not set in {path}; use {_OURS[table][key]}.")
        if key not in known:
            raise OptionError(
                f"log_tracker_config: [{table}] has no argument '{key}' ({path}).{nearest_name_hint(key, known)} "
                f"There are {', '.join(known)}."
            )
