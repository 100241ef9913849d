"""The documents of the project, cut into their blocks of code."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
COMMAND = re.compile(r"(\$ |\w+=\S+ )*(maulstick|make|accelerate|torchrun|pip|pipx|uv|python3?|git|cd|source)( |$)")
"""The beginning of a line that people would type."""


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is that of its first line, ``language`` what stands behind the fence."""

    document: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str, language: str | None = None) -> list[Block]:
    """Return the document's fenced blocks in their order, those of one language where it is given."""
    found: list[Block] = []
    fence: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate((ROOT / document).read_text(encoding="utf-8").splitlines(), 1):
        # A block inside of a list is indented.
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif fence is None:
            fence, lines = (number, line.lstrip()[3:].strip()), []
        else:
            found.append(Block(document, fence[0] + 1, fence[1], textwrap.dedent("\n".join(lines) + "\n")))
            fence = None
    assert fence is None, f"{document}:{fence} is not closed"
    return [block for block in found if language in (None, block.language)]


def outside_of_blocks(document: str) -> list[tuple[int, str]]:
    """Return number and text of every line that is in no fenced block."""
    inside, found = False, []
    for number, line in enumerate((ROOT / document).read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            found.append((number, line))
    return found


def commands(document: str) -> list[tuple[str, list[str]]]:
    """Return place and words of every command in the document's ``sh`` blocks."""
    found = []
    for block in blocks(document, "sh"):
        joined = block.text.replace("\\\n", " ")
        found += [(block.where, words) for line in joined.splitlines() if (words := shlex.split(line, comments=True))]
    return found
