"""The part of a log that a resumed run goes on with: known by its checksum, so that no other run's log is cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from maulstick.files_io import atomic_write, copy_aside, set_aside, set_aside_earlier


def bring_back(path: Path, cut: Callable[[bytes], bytes], sha256: str | None) -> bytes | None:
    """Let the file at ``path`` hold what a state knew of it, and nothing else; return that.

    ``cut`` returns the beginning of a file's content that the state knew, ``sha256`` is its checksum (None in a state
    of an early version, which takes the file as it lies). The file is looked for under its own name and where a later
    run has set it aside. What lies at ``path`` and would be lost is set aside. Returns None, and leaves no file at
    ``path``, where it is nowhere to be found.
    """
    if path.parent.is_dir():
        for candidate in [path, *(set_aside_earlier(path) if sha256 else [])]:
            if not candidate.exists():
                continue
            content = candidate.read_bytes()
            kept = cut(content)
            if sha256 is not None and hashlib.sha256(kept).hexdigest() != sha256:
                continue
            if candidate != path:
                set_aside(path)
            elif len(content) > len(kept):
                # Copied and replaced, not renamed: a run killed in between would leave no log to go on with.
                copy_aside(path)
            atomic_write(path, kept)
            return kept
    set_aside(path)
    return None
