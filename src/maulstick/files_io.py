"""Writing files so that a crash or a full disk never leaves a half-written one under its final name."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def atomic_write(path: Path, write: Callable[[Path], None] | bytes | str) -> None:
    """Create or replace ``path`` in one step.

    ``write`` is the content, or a function that writes it to the temporary path it is given. The data is flushed to
    the disk before the rename, so that after a power cut either the old or the new content is there. On any failure
    the old file stays and the temporary one is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary_name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(temporary_name)
    try:
        if isinstance(write, str):
            # Names of files may hold bytes that are no text.
            temporary.write_text(write, encoding="utf-8", errors="replace")
        elif isinstance(write, bytes):
            temporary.write_bytes(write)
        else:
            write(temporary)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        # mkstemp makes files private; the result should follow the user's umask like any other file they write.
        temporary.chmod(0o666 & ~current_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def disk_error_behind(error: BaseException) -> OSError | None:
    """Return the disk's own error that ``error`` was raised in the course of, None where there is none."""
    earlier: BaseException | None = error
    while earlier is not None and not isinstance(earlier, OSError):
        earlier = earlier.__cause__ or earlier.__context__
    return earlier


def current_umask() -> int:
    """Return the rights that new files of this process lack; temporary files and folders are made with fewer still."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def set_aside(path: Path) -> Path | None:
    """Rename an existing file to ``name.old-N.suffix``, a folder to ``name.old-N``, with the first free N.

    Returns the new path, None where there was nothing.
    """
    if not path.exists():
        return None
    target = _free_old_name(path)
    path.rename(target)
    return target


def copy_aside(path: Path) -> Path:
    """Copy a file to the name ``set_aside`` would give it; the file stays where it is."""
    target = _free_old_name(path)
    shutil.copyfile(path, target)
    return target


def set_aside_earlier(path: Path) -> list[Path]:
    """Return the files that ``set_aside`` and ``copy_aside`` have made of ``path``, the latest first."""
    pattern = re.compile(rf"{re.escape(path.stem)}\.old-(\d+){re.escape(path.suffix)}")
    found = [(int(match[1]), each) for each in path.parent.iterdir() if (match := pattern.fullmatch(each.name))]
    return [each for _, each in sorted(found, reverse=True)]


def _free_old_name(path: Path) -> Path:
    # A folder has no suffix: what follows a dot in its name is part of a run's name.
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (target := path.with_name(f"{stem}.old-{number}{suffix}")).exists():
        number += 1
    return target
