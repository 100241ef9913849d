"""The commands. Each imports what it needs when it is called, so that ``--help`` is instant."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from maulstick import __version__
from maulstick.errors import MaulstickError
from maulstick.garbage import uncollected
from maulstick.options.autopsy import autopsy_app, load_autopsy_options
from maulstick.options.generate import GenerateOptions
from maulstick.options.help_format import PlainHelp
from maulstick.options.load import NO_DRY_STEP, OPTION_STYLE, load_train_options, options_app
from maulstick.options.plot_schedule import load_plot_options, plot_schedule_app
from maulstick.options.probe import load_probe_options, probe_app
from maulstick.tools.commands import COMMANDS as LORA_COMMANDS

TRAIN_SUMMARY = """Train a LoRA, or an IP-Adapter (network_type = ip_adapter), on captioned images.

Options have the names that sd-scripts gives them; a switch is turned off with --name=false. Options that only
sd-scripts has are accepted where they change nothing, and refused with what to use instead where they would."""
CHECK_SUMMARY = """Show what `maulstick train` would do with the same options, without training.

Lists images, captions, repeats, buckets, steps, trained modules, learning rates and their schedule, measures time and
memory on one step, and says what does not fit together. Writes nothing; output_dir need not be given."""

_ADVICE = {
    errno.ENOENT: "Look at how the path is written; relative ones begin in the folder that the command is called in.",
    errno.EACCES: "Change the rights of the file or folder, or name another one.",
    errno.EPERM: "Change the rights of the file or folder, or name another one.",
    errno.EROFS: "Name a folder that can be written into.",
    errno.ENOSPC: "Make room on the disk, or name a folder on another one.",
    errno.EDQUOT: "Make room on the disk, or name a folder on another one.",
    errno.EISDIR: "Name a file, not a folder.",
    errno.ENOTDIR: "Name a folder, not a file.",
    errno.EEXIST: "Name another file or folder, or move this one away.",
}
_LESS_MEMORY = (
    "Use less memory: gradient_checkpointing, mixed_precision bf16, cache_latents, a lower train_batch_size or "
    "resolution; or close what else uses the device."
)

Json = Annotated[bool, Parameter(name="json")]
Modes = tuple[Literal["steady", "stable", "stable_no_threshoff", "gamble", "off"], ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0, 2 after an error of the user's to mend, 130 when interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments) or 0
    except CycloptsError as error:
        error.verbose = False
        command = f" {arguments[0]}" if arguments[0] in _command_names() else ""
        return _fail(f"{str(error).strip()} `maulstick{command} --help` shows what there is.")
    except MaulstickError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # Whoever reads (`| head`) has seen enough; without a new target Python would complain again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}. {_what_to_do(error)}")
    except RuntimeError as error:
        # torch is not imported here only to name its class.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        return _fail(f"{str(error).strip().splitlines()[0]} {_LESS_MEMORY}")
    except KeyboardInterrupt:
        print("maulstick: interrupted", file=sys.stderr)
        return 130


def _command_names() -> list[str]:
    return [name for name in build_app() if not name.startswith("-")]


def _what_to_do(error: OSError) -> str:
    return _ADVICE.get(error.errno or 0, "Look at that file or folder, or name another one.")


def run() -> None:
    """Run as a program: what the installed `maulstick` calls."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of files may hold bytes that are no text, and terminals may lack characters; neither ends a run.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())


def _fail(message: str) -> int:
    print(f"maulstick: error: {message}", file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int | None:
    if not arguments or {"--help", "-h"} & set(arguments):
        return _help(arguments)
    command, rest = arguments[0], arguments[1:]
    if command in OPTION_COMMANDS:
        return OPTION_COMMANDS[command](rest)
    return build_app()(arguments, exit_on_error=False, print_error=False)


def _help(arguments: list[str]) -> int | None:
    app, status = build_app(), None
    if arguments and arguments[0] in OPTION_COMMANDS:
        # Without reading the line first: for hundreds of options that takes longer than to show them.
        app.help_print(arguments[:1])
    else:
        status = app(arguments, exit_on_error=False, print_error=False)
    sys.stdout.flush()
    return status


def build_app() -> App:
    """Return the program with its commands; `train`, `check` and the like are in it for their help only."""
    app = App(
        name="maulstick",
        help="Train LoRA adapters for Stable Diffusion, with runs that finish and say what they did.",
        help_format="plaintext",
        help_formatter=PlainHelp(),
        version=__version__,
        default_parameter=OPTION_STYLE,
        result_action="return_value",
    )
    app.command(options_app("train", TRAIN_SUMMARY))
    app.command(options_app("check", CHECK_SUMMARY, with_json=True))
    app.command(probe_app())
    app.command(plot_schedule_app())
    app.command(autopsy_app())
    app.command(generate)
    app.command(quickstart)
    app.command(report)
    app.command(replay)
    app.command(optimizers)
    for command in LORA_COMMANDS:
        app.command(command)
    lora_commands = [command.__name__ for command in LORA_COMMANDS]
    of_a_run = ["train", "check", "plot-schedule", "probe"]
    order = ["quickstart", *of_a_run, "generate", *lora_commands, "report", "replay", "autopsy", "optimizers"]
    for place, name in enumerate(order):
        app[name].sort_key = place
    return app


def train(arguments: Sequence[str]) -> int:
    """Train a LoRA."""
    loaded = load_train_options(arguments)
    with uncollected(for_good=True):
        from maulstick.train.run import run_training

    return run_training(loaded, _report_when_closed if loaded.options.log.report else None)


def _report_when_closed(log: Path) -> str:
    """Write the report of the run whose event log was just closed."""
    from maulstick.tools.report.command import report_of_finished_run

    return report_of_finished_run(log)


def check(arguments: Sequence[str]) -> int:
    """Show the plan of a run."""
    as_json = "--json" in arguments
    dry_step = NO_DRY_STEP not in arguments
    own = ("--json", NO_DRY_STEP, "--dry_step")
    loaded = load_train_options([argument for argument in arguments if argument not in own], with_output=False)
    with uncollected(for_good=True):
        from maulstick.train.prepare import check_command

    return check_command(loaded, as_json, dry_step)


def probe(arguments: Sequence[str]) -> int:
    """Measure which blocks matter."""
    asked = load_probe_options(arguments)
    with uncollected(for_good=True):
        from maulstick.tools.probe import probe_command

    return probe_command(asked)


def plot_schedule(arguments: Sequence[str]) -> int:
    """Draw the learning rate of a run."""
    plot, loaded = load_plot_options(arguments)
    from maulstick.tools.plot_schedule import plot_schedule_command

    return plot_schedule_command(plot, loaded)


def autopsy(arguments: Sequence[str]) -> int:
    """Show or make an autopsy."""
    asked = load_autopsy_options(arguments)
    from maulstick.tools.autopsy import autopsy_command

    return autopsy_command(asked)


OPTION_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "autopsy": autopsy,
    "train": train,
    "check": check,
    "probe": probe,
    "plot-schedule": plot_schedule,
}


def generate(*, options: GenerateOptions = GenerateOptions()) -> int:  # noqa: B008 (never changed)
    """Draw images from a base model, with or without LoRA files and an IP-Adapter."""
    with uncollected(for_good=True):
        from maulstick.tools.generate import generate_command

    return generate_command(options)


def quickstart(output_dir: Path = Path("maulstick-quickstart")) -> int:
    """Train a LoRA on the small model and the images that ship with Maulstick, and show what it changed.

    Args:
        output_dir: Folder for the LoRA, the pictures and the log.
    """
    with uncollected(for_good=True):
        from maulstick.tools.quickstart import run_quickstart

    return run_quickstart(output_dir)


def replay(log: Path, /, *, grad_norm_mode: Modes = (), plot: Path | None = None, as_json: Json = False) -> int:
    """Show what other modes of the gradient guardian would have done on a recorded gradient log.

    Args:
        log: A gradient_logs+NAME.txt, written by Maulstick or by the original program.
        grad_norm_mode: The modes to judge by; without it all of them.
        plot: Also draw the norms and each mode's skips into this PNG.
        as_json: Print one JSON object instead of a table.
    """
    from maulstick.tools.replay import replay_command

    return replay_command(log, grad_norm_mode, as_json=as_json, plot=plot)


def report(
    runs: list[Path], /, *, output: Path | None = None, json: Annotated[Path | None, Parameter(name="json")] = None
) -> int:
    """Show a run, or several side by side, in one HTML file that needs no network.

    Args:
        runs: Each the output_dir of a run, its NAME.events.jsonl, or a gradient_logs+NAME.txt, of the original program
            too.
        output: File to write (.html); without it NAME.report.html beside the log, or maulstick.report.html for several.
        json: Also write everything, with every step, into this JSON file.
    """
    from maulstick.tools.report.command import report_command

    return report_command(runs, output, json)


def optimizers(*, as_json: Json = False) -> int:
    """List the optimizers that optimizer_type can name.

    Args:
        as_json: Print one JSON object instead of a table.
    """
    from maulstick.train.optim import list_optimizers_command

    return list_optimizers_command(as_json)
