"""Every option of ``maulstick probe``: those of a training run, and how much is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from cyclopts import App, CycloptsError, Group, Parameter

from maulstick.errors import OptionError, nearest_name_hint
from maulstick.options.load import OPTION_STYLE, ConfigFile, Json, LoadedOptions, load_train_options
from maulstick.options.schema import TrainOptions

PROBE_SUMMARY = """Measure which blocks matter for your data and model, before training.

Takes the options of `maulstick train`. For each block: its gradient and how far images and timesteps agree on it, what
a short trial update of that block alone does to the loss, and what its training costs; then a suggested block_lr."""


@Parameter(name="*", group=Group("Probe", sort_key=(-1, 1)))
@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    probe_images: int = 16
    """Training images to measure on; half of them are kept from the trial updates, which are judged on these."""
    probe_timesteps: int = 8
    """Parts that the timesteps are cut into; each image is measured once in each."""
    probe_steps: int = 10
    """Updates of each trial."""
    probe_batch_size: int = 8
    """Images per trial update, run in micro-batches of train_batch_size."""
    probe_lr: float | None = None
    """Learning rate of the trial updates (Adam); without it that of the run."""
    probe_output: Path | None = None
    """Folder for probe.json and probe.png; without it output_dir."""


class LoadedProbe(NamedTuple):
    """The options of a run to be probed, and those of the probe itself."""

    loaded: LoadedOptions
    probe: ProbeOptions
    as_json: bool


def probe_app() -> App:
    """Return the command with all its options; it is there for its help only."""
    app = _app("probe", PROBE_SUMMARY)
    app.default(_all_options)
    return app


def load_probe_options(arguments: Sequence[str]) -> LoadedProbe:
    """Read the command line of ``maulstick probe``. The probe's own options cannot stand in a configuration file.

    Raises:
        OptionError: an option of the probe or of the run is unknown, malformed or out of range.
    """
    app = _app("probe", "")
    app.default(_own_options)
    app.help_flags, app.version_flags = [], []
    try:
        _, bound, rest, _ = app.parse_known_args(list(arguments))
    except CycloptsError as error:
        error.verbose = False
        raise OptionError(str(error)) from error
    as_json, probe = _own_options(**bound.arguments)
    _check(probe)
    names = [option.name for option in fields(ProbeOptions)]
    for token in rest:
        name = token.removeprefix("--").partition("=")[0]
        if token.startswith("--probe"):
            raise OptionError(
                f"'{name}' is not an option of probe.{nearest_name_hint(name, names)} Its own are: {', '.join(names)}."
            )
    loaded = load_train_options(rest)
    if loaded.options.network.network_type == "ip_adapter":
        raise OptionError("The probe measures a LoRA, block by block; it says nothing about an IP-Adapter.")
    return LoadedProbe(loaded, probe, as_json)


def _app(name: str, summary: str) -> App:
    return App(
        name=name,
        help=summary,
        help_format="plaintext",
        default_parameter=OPTION_STYLE,
        result_action="return_value",
    )


def _own_options(
    *,
    as_json: Json = False,
    probe: ProbeOptions = ProbeOptions(),
) -> tuple[bool, ProbeOptions]:
    return as_json, probe


def _all_options(
    *,
    as_json: Json = False,
    config_file: ConfigFile = None,
    probe: ProbeOptions = ProbeOptions(),
    options: TrainOptions = TrainOptions(),  # noqa: B008 (frozen)
) -> None:
    """Show the options.

    Args:
        as_json: Print one JSON object instead of a table.
        config_file: TOML file with any options of a training run; sections are free. The command line beats it.
    """


def _check(probe: ProbeOptions) -> None:
    for name in ("probe_images", "probe_timesteps", "probe_steps", "probe_batch_size"):
        value = getattr(probe, name)
        if value < 1:
            raise OptionError(f"{name} = {value}: expected at least 1.")
    if probe.probe_lr is not None and not (math.isfinite(probe.probe_lr) and probe.probe_lr > 0):
        raise OptionError(f"probe_lr = {probe.probe_lr:g}: expected a number above 0.")
