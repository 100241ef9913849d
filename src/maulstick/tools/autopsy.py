"""``maulstick autopsy``: shows stored reports, or re-runs one step with probes."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from maulstick.autopsy.report import Report
from maulstick.errors import DataError, OptionError
from maulstick.options.autopsy import AskedAutopsy
from maulstick.options.load import LoadedOptions

MOST_SHOWN = 20


def autopsy_command(asked: AskedAutopsy) -> int:
    """Print reports, or make one; return 0 where everything was finite, 1 where a report names a fault."""
    if asked.loaded is not None:
        report, file = _run_again(asked.loaded, asked.step, quiet=asked.as_json)
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False) if asked.as_json else report.text(table=True))
        if not asked.as_json:
            print(f"report: {file}")
        return 0 if report.healthy else 1
    files = find_reports((asked.path or Path()).expanduser())
    reports = [read_report(file) for file in files[:MOST_SHOWN]]
    if asked.as_json:
        stored = [report.as_json() for report in reports]
        print(json.dumps(stored[0] if len(stored) == 1 else stored, indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(report.text() for report in reports))
        if len(files) > MOST_SHOWN:
            print(f"\n{len(files) - MOST_SHOWN} more reports lie in {asked.path}.")
    return 0 if all(report.healthy for report in reports) else 1


def find_reports(path: Path) -> list[Path]:
    """Return the report that ``path`` is, or those in the folder, in the order of their steps.

    Raises DataError where there is none.
    """
    if path.is_file():
        json_file = path.with_suffix(".json")
        return [json_file if path.suffix == ".txt" and json_file.is_file() else path]
    found = sorted(path.glob("*-autopsy-step*.json"))
    found = [file for file in found if ".old-" not in file.name]
    if not found:
        raise DataError(
            f"There is no autopsy report in {path}. A run writes NAME-autopsy-stepN.json into its output_dir at the "
            "first step with a NaN or infinite gradient; --step N runs a step again."
        )
    return found


def read_report(file: Path) -> Report:
    """Read a stored report. Raises DataError where the file is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an autopsy report")
        return Report.from_json(content)
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is no autopsy report ({error}).") from error


def _run_again(loaded: LoadedOptions, step: int, *, quiet: bool) -> tuple[Report, Path]:
    """Prepare the run without writing into its folder, run one step with probes, and store the report."""
    from maulstick.train.autopsy import examine_window, report_name, write_report
    from maulstick.train.console import SilentConsole, make_console
    from maulstick.train.run import TrainingRun

    options = loaded.options
    output_dir = options.run.output_dir
    if output_dir is None:
        raise OptionError("No folder for the report was named. Give output_dir.")
    with tempfile.TemporaryDirectory(prefix="maulstick-autopsy-") as scratch:
        # One step again is no run that a tracker should show.
        unlogged = replace(options.log, log_with=None)
        elsewhere = replace(options, run=replace(options.run, output_dir=Path(scratch)), log=unlogged)
        run = TrainingRun(
            replace(loaded, options=elsewhere), SilentConsole() if quiet else make_console(options.log.console)
        )
        run.prepare()
        loop = run.loop
        if loop is None:
            raise RuntimeError("prepare() builds the loop")
        epoch, number = divmod(step - 1, loop.windows_per_epoch)
        loop.train_mode()
        window, images = next(iter(loop.windows(epoch, number)))
        scale = loop.parts.scaler.get_scale() if loop.parts.scaler.is_enabled() else 1.0
        report = examine_window(loop, window, images, step - 1, loss_scale=scale, try_step=True)
        run.records.close("end", step=0)
    return report, write_report(output_dir / f"{report_name(options.run.output_name, step)}-again", report)
