"""What a run logs, and where to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from maulstick.options import groups


@Parameter(name="*", group=groups.LOG)
@dataclass(frozen=True, kw_only=True)
class LogOptions:
    logging_dir: Path | None = None
    """Folder for the files of trackers; without it they go into output_dir/logs."""
    log_with: Literal["tensorboard", "wandb", "all"] | None = None
    """Also send values to these trackers; the JSONL log in output_dir is always written."""
    log_prefix: str | None = None
    """What the name of a run's TensorBoard folder begins with, before the time; without it output_name."""
    log_tracker_name: str | None = None
    """Project in W&B (maulstick without it), and a folder of this name inside a run's TensorBoard folder."""
    log_tracker_config: Path | None = None
    """TOML file with further arguments of the trackers: [wandb] for wandb.init, [tensorboard] for SummaryWriter."""
    wandb_run_name: str | None = None
    """Name of the run in W&B; without it output_name and the time."""
    log_details_every_n_steps: int = 50
    """Log norms by block and the loss by timestep every so many steps; 0 never does."""
    report: Annotated[bool, Parameter(negative="--no-report")] = True
    """Write output_dir/NAME.report.html when the run ends, however it ends."""
    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """Terminal output: a live bar, plain lines for log files, or nothing but results and errors."""
