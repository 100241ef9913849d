"""``maulstick replay``: what other modes of the guardian would have done on a recorded gradient log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from maulstick.errors import MaulstickError
from maulstick.files_io import set_aside
from maulstick.guard.errors import GuardError
from maulstick.guard.log import read_gradient_log
from maulstick.guard.presets import PRESETS
from maulstick.guard.replay import format_replay_table, replay


def replay_command(log: Path, modes: Sequence[str], *, as_json: bool, plot: Path | None) -> int:
    """Judge the log by each mode (all of them where none is named); print a table or JSON, and draw a PNG."""
    try:
        rows = read_gradient_log(log)
        result = replay(rows, modes or list(PRESETS))
    except GuardError as error:
        raise MaulstickError(str(error)) from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise MaulstickError(f"{log} is not a gradient log.") from error
    except FileNotFoundError as error:
        raise MaulstickError(
            f"There is no gradient log {log}. A run writes one as gradient_logs+NAME.txt into its output_dir."
        ) from error
    if plot is not None:
        from maulstick.guard.replay_plot import plot_replay

        set_aside(plot)
        plot_replay(rows, result, plot)
    print(json.dumps(result, indent=2) if as_json else format_replay_table(result))
    return 0
