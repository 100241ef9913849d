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


def open_trackers(
    options: LogOptions, *, output_dir: Path, run_name: str, config: Mapping[str, Any]
) -> list[GeneralTracker]:
    """Start the trackers that ``log_with`` names.

    Raises:
        OptionError: the package of a tracker is not installed.
    """
    names = {None: [], "all": ["tensorboard", "wandb"]}.get(options.log_with, [options.log_with])
    trackers: list[GeneralTracker] = []
    for name in names:
        if find_spec(str(name)) is None:
            raise OptionError(
                f"log_with '{name}' needs a package that is not installed: pip install 'maulstick[{name}]'."
            )
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        if name == "tensorboard":
            tracker: GeneralTracker = TensorBoardTracker(
                run_name, logging_dir=str(options.logging_dir or output_dir / "logs")
            )
        else:
            tracker = WandBTracker(run_name)
        tracker.start()
        tracker.store_init_configuration(dict(config))
        trackers.append(tracker)
    return trackers
