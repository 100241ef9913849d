"""``--help`` as plain text: names are never split over lines, so that they can be searched for and copied."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

NAME_COLUMN = 34
WIDEST = 110
UNBROKEN = "\N{NO-BREAK SPACE}"


class PlainHelp:
    """Two columns, name and description; a name too long for its column gets a line of its own."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one group of commands or options."""
        if not panel.entries:
            return
        width = min(console.width, WIDEST)
        _write(console, [f"{panel.title}:"])
        for entry in panel.entries:
            _write(console, _entry_lines(entry, width))
        _write(console, [""])

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the line that shows how the command is called."""
        text = _plain(usage).removeprefix("Usage:").strip()
        if text:
            _write(console, [f"Usage: {text}", ""])

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print what the command is for."""
        paragraphs = [_wrapped(part, min(console.width, WIDEST)) for part in _plain(description).split("\n\n") if part]
        for lines in paragraphs:
            _write(console, [*lines, ""])


def _entry_lines(entry: HelpEntry, width: int) -> list[str]:
    name = "  " + " ".join(_labels(entry))
    # A doc string over several lines brings its indentation along.
    description = " ".join(filter(None, [" ".join(_plain(entry.description).split()), _facts(entry)]))
    if width < 2 * NAME_COLUMN:
        return [name, *_wrapped(description, width, indent=6)]
    lines = _wrapped(description, width, indent=NAME_COLUMN)
    if len(name) + 2 > NAME_COLUMN or not lines:
        return [name, *lines]
    return [name.ljust(NAME_COLUMN) + lines[0][NAME_COLUMN:], *lines[1:]]


def _labels(entry: HelpEntry) -> Iterable[str]:
    if entry.choices and entry.metavar:
        return [*entry.display_labels, "{" + ",".join(entry.choices) + "}"]
    return entry.display_labels_with_metavar


def _facts(entry: HelpEntry) -> str:
    if entry.required:
        return "[required]"
    if entry.default is None or "Required." in _plain(entry.description):
        return ""
    default = {"False": "off", "True": "on", "None": "not set", "[]": "none"}.get(entry.default, entry.default)
    return f"[default: {default}]".replace(" ", UNBROKEN)


def _plain(renderable: Any) -> str:
    """Return the text of what cyclopts hands over: a string, a rich Text, or its own InlineText around one."""
    if renderable is None:
        return ""
    inner = getattr(renderable, "primary_renderable", renderable)
    return str(getattr(inner, "plain", inner)).strip()


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    space = " " * indent
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(UNBROKEN, " ") for line in lines]


def _write(console: Console, lines: Iterable[str]) -> None:
    # Not console.print: rich would wrap once more, and split long names.
    for line in lines:
        console.file.write(line.rstrip() + "\n")
