"""TensorBoard and W&B, through accelerate's trackers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maulstick.errors import OptionError
from maulstick.options.schema import LogOptions

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

WANDB_PROJECT = "maulstick"


def _names(options: LogOptions) -> list[str]:
    if options.log_with is None:
        return []
    return ["tensorboard", "wandb"] if options.log_with == "all" else [options.log_with]


def check_trackers(options: LogOptions) -> None:
    """Raise OptionError when the package of a tracker that ``log_with`` names is not installed."""
    for name in _names(options):
        if find_spec(name) is None:
            raise OptionError(
                f"log_with '{name}' needs a package that is not installed: pip install 'maulstick[{name}]'."
            )


def open_trackers(
    options: LogOptions, *, output_dir: Path, run_name: str, config: Mapping[str, Any]
) -> list[GeneralTracker]:
    """Start the trackers that ``log_with`` names, on this process."""
    trackers: list[GeneralTracker] = []
    for name in _names(options):
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        if name == "tensorboard":
            folder = options.logging_dir or output_dir / "logs"
            tracker: GeneralTracker = TensorBoardTracker(run_name, logging_dir=str(folder))
        else:
            # accelerate takes its first argument for the project, which all runs share; the run's name goes beside it.
            tracker = WandBTracker(WANDB_PROJECT, name=run_name)
        tracker.start()
        tracker.store_init_configuration(dict(config))
        trackers.append(tracker)
    return trackers
