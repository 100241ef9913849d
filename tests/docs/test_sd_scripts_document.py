"""docs/sd-scripts.md is what the options themselves say."""

from __future__ import annotations

import json
from pathlib import Path

from maulstick.options.sd_scripts_table import (
    MAULSTICK_ONLY,
    SD_SCRIPTS_OPTIONS,
    SUPPORTED_NETWORK_ARGUMENTS,
    Renamed,
)
from maulstick.options.values import option_types
from scripts.sd_scripts_document import DOCUMENT, document

NAMES = json.loads((Path(__file__).parents[1] / "options" / "sd_scripts_names.json").read_text())


def rows() -> dict[str, tuple[str, str]]:
    """Return verdict and line of every option in the document's tables; those of other programs' keys are not in it."""
    tables = document().partition("## network_args")[0].splitlines()
    cells = [line.strip("| ").split(" | ", 2) for line in tables if line.startswith("| `")]
    found = {name.strip("`").partition("`")[0]: (verdict, line) for name, verdict, line in cells}
    assert len(found) == len(cells), "no option twice"
    return found


def test_the_committed_document_is_what_the_generator_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "the options have changed: run `make docs` and commit"


def test_every_option_has_a_row_that_says_something() -> None:
    found = rows()
    assert set(found) == {name for names in NAMES.values() for name in names} | MAULSTICK_ONLY
    ours = {
        "config_file",
        *option_types(),
        *(n for n, entry in SD_SCRIPTS_OPTIONS.items() if isinstance(entry, Renamed)),
    }
    assert {name for name, (verdict, _) in found.items() if verdict in ("no effect", "refused")} == set(found) - ours
    assert min(len(line) for _, line in found.values()) > 10


def test_options_of_some_scripts_are_marked() -> None:
    text = document()
    theirs = [set(NAMES[script]) for script in ("train_network", "sdxl_train_network", "sd3_train_network", "kohya_ss")]
    for name in sorted(set.union(*theirs)):
        sd, sdxl, sd3, _ = (name in names for names in theirs)
        scripts = " (SDXL, SD3)" if sdxl else " (SD3)" if sd3 else "" if sd else " (kohya_ss)"
        assert f"| `{name}`{scripts} |" in text


def test_counts() -> None:
    lines = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in document().splitlines() if " | " in line
    }
    counts = {verdict: int(lines[verdict]) for verdict in ("same", "no effect", "refused", "network_args", "only here")}
    assert sum(counts.values()) == len(rows())
    assert counts["network_args"] == len(SUPPORTED_NETWORK_ARGUMENTS) - 1  # block_lr is only ours
