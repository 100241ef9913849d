"""The options of ``maulstick autopsy``: a report to show, or a step to re-run with the options of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import App, CycloptsError, Group, Parameter

from maulstick.errors import OptionError
from maulstick.options.load import OPTION_STYLE, ConfigFile, Json, LoadedOptions, load_train_options
from maulstick.options.schema import TrainOptions

COMMAND = "autopsy"
SUMMARY = """Show what made a step NaN or infinite: `maulstick autopsy RUN_OR_FILE`, or re-run one with --step.

RUN_OR_FILE is a report (NAME-autopsy-stepN.json) or the output_dir it lies in. With --step N and the options of
`maulstick train`, step N is run again with probes, from the weights that the options give (the initial LoRA,
network_weights, or the state named by resume), and the modules with the largest values are listed."""


@Parameter(name="*", negative=(), group=Group("A step again", sort_key=(-1, 1)))
@dataclass(frozen=True, kw_only=True)
class AutopsyCommandOptions:
    step: int | None = None
    """Step to run again, counted from 1 as in the log; needs the options of the run."""
    as_json: Json = False
    """Print one JSON object instead of text."""


class AskedAutopsy(NamedTuple):
    """What is asked for: ``path`` to show, or ``step`` of a run with ``loaded`` options."""

    path: Path | None
    step: int
    loaded: LoadedOptions | None
    as_json: bool


def autopsy_app() -> App:
    """Return the command with all its options; it is there for its help only."""
    app = _app(SUMMARY)

    def collect(
        run_or_file: Path | None = None,
        /,
        *,
        own: AutopsyCommandOptions = AutopsyCommandOptions(),
        config_file: ConfigFile = None,
        options: TrainOptions = TrainOptions(),  # noqa: B008 (frozen)
    ) -> None:
        """Collect the options.

        Args:
            run_or_file: Report to show, or the folder of a run.
            config_file: TOML file with any of the options below; sections are free. The command line beats it.
        """

    app.default(collect)
    return app


def load_autopsy_options(arguments: Sequence[str]) -> AskedAutopsy:
    """Read the command line of ``maulstick autopsy``.

    Raises:
        OptionError: as for ``maulstick train``; or neither a report nor a step is named, or both are.
    """
    re_run = any(token == "--step" or token.startswith("--step=") for token in arguments)
    app = _app("")
    app.help_flags, app.version_flags = [], []
    try:
        if not re_run:
            app.default(_stored)
            return AskedAutopsy(*app(list(arguments), exit_on_error=False, print_error=False))
        app.default(_again)
        _, bound, rest, _ = app.parse_known_args(list(arguments))
    except CycloptsError as error:
        error.verbose = False
        raise OptionError(f"{error} Without --step, one report or folder of a run is expected.") from error
    own = _again(**bound.arguments)
    if own.step is None or own.step < 1:
        raise OptionError(f"step = {own.step}: expected a step of the run, from 1 on.")
    if rest and not rest[0].startswith("-"):
        raise OptionError(f"{rest[0]}: with --step, give the options of the run (such as --config_file), not a report.")
    return AskedAutopsy(None, own.step, load_train_options(rest), own.as_json)


def _app(summary: str) -> App:
    return App(
        name=COMMAND,
        help=summary,
        help_format="plaintext",
        default_parameter=OPTION_STYLE,
        result_action="return_value",
    )


def _stored(
    run_or_file: Path, /, *, as_json: Annotated[bool, Parameter(name="json")] = False
) -> tuple[Path, int, None, bool]:
    return run_or_file, 0, None, as_json


def _again(*, own: AutopsyCommandOptions = AutopsyCommandOptions()) -> AutopsyCommandOptions:
    return own
