"""The options of ``maulstick plot-schedule``: those of a training run, and a few of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App, CycloptsError, Group, Parameter

from maulstick.errors import OptionError
from maulstick.options.load import OPTION_STYLE, ConfigFile, Json, LoadedOptions, load_train_options
from maulstick.options.schema import TrainOptions

COMMAND = "plot-schedule"
SUMMARY = """Draw the learning rate over the steps of a run (PNG), from the options of `maulstick train`.

Needs no model and no images: the length of training is max_train_steps, or max_train_epochs times --steps_per_epoch.
Also prints the rate at some steps, and the sums of rate and squared rate over all of them."""


@Parameter(name="*", negative=(), group=Group("Picture", sort_key=(-1, 1)))
@dataclass(frozen=True, kw_only=True)
class PlotScheduleOptions:
    output: Path = Path("schedule.png")
    """File to draw into (.png). An earlier one is renamed, not overwritten."""
    steps_per_epoch: int | None = None
    """Steps (updates) in an epoch, for max_train_epochs; `maulstick check` shows it."""
    as_json: Json = False
    """Print one JSON object instead of a table."""


def plot_schedule_app() -> App:
    """Return the command, for its help."""
    app = App(
        name=COMMAND,
        help=SUMMARY,
        help_format="plaintext",
        default_parameter=OPTION_STYLE,
        result_action="return_value",
    )

    def collect(
        *,
        plot: PlotScheduleOptions = PlotScheduleOptions(),
        config_file: ConfigFile = None,
        options: TrainOptions = TrainOptions(),  # noqa: B008 (frozen)
    ) -> None:
        """Collect the options.

        Args:
            config_file: TOML file with any of the options below; sections are free. The command line beats it.
        """

    app.default(collect)
    return app


def load_plot_options(arguments: Sequence[str]) -> tuple[PlotScheduleOptions, LoadedOptions]:
    """Read the command's own options, and those of the run from what is left of the command line.

    Raises:
        OptionError: as for ``maulstick train``, or the picture's options cannot be used.
    """
    app = App(name=COMMAND, default_parameter=OPTION_STYLE, result_action="return_value", help_flags=[])
    app.version_flags = []

    def collect(*, plot: PlotScheduleOptions = PlotScheduleOptions()) -> PlotScheduleOptions:
        return plot

    app.default(collect)
    try:
        _, bound, rest, _ = app.parse_known_args(list(arguments))
    except CycloptsError as error:
        error.verbose = False
        raise OptionError(str(error)) from error
    plot = collect(**bound.arguments)
    if plot.output.suffix.lower() != ".png":
        raise OptionError(f"--output {plot.output} should end in .png.")
    if plot.steps_per_epoch is not None and plot.steps_per_epoch < 1:
        raise OptionError(f"--steps_per_epoch {plot.steps_per_epoch}: expected at least 1.")
    return plot, load_train_options(rest, with_files=False)
