"""The event log: one JSON object a line, readable while the run goes on and after it died."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maulstick.files_io import set_aside
from maulstick.train.kept_logs import bring_back


def json_value(value: Any) -> Any:
    """Make a value fit for JSON: non-finite floats become the strings "nan", "inf" and "-inf", paths become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


class EventLog:
    """Appends events to a file; every line is on its way to the disk before the call returns.

    A log of an earlier run under the same name is set aside, never overwritten. A disk that cannot take a line does not
    end the run: the lines are held and written when there is room again, and ``on_trouble`` is told once.
    """

    def __init__(
        self,
        path: Path,
        on_trouble: Callable[[str], None] = lambda text: None,
        *,
        keep_bytes: int = 0,
        keep_sha256: str | None = None,
    ) -> None:
        """``keep_bytes``: begin with so many bytes of the earlier log, those that a resumed run goes on from.

        ``keep_sha256`` is their checksum: where no log begins with them, a new one is begun, and ``on_trouble`` told of
        the one that lies there.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        kept = bring_back(path, lambda content: content[:keep_bytes], keep_sha256) if keep_bytes else None
        if kept is None:
            set_aside(path)
        if kept is None and keep_bytes and was_there:
            on_trouble(f"{path} is not the log that the resumed run had written; it is set aside, and a new one begun")
        self._hash = hashlib.sha256(kept or b"")
        self._on_trouble = on_trouble
        self._in_trouble = False
        self._held: list[str] = []
        # Uploads write from a thread of their own.
        self._lock = threading.RLock()
        self._file: Any = path.open("ab", buffering=0)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the current time in seconds since 1970."""
        if self._file is None:
            return
        row = {"event": event, "time": round(time.time(), 3), **json_value(fields)}
        with self._lock:
            self._held.append(json.dumps(row, ensure_ascii=False) + "\n")
            self._write_held()

    def _write_held(self) -> None:
        # Names of files may hold bytes that are no text.
        data = "".join(self._held).encode("utf-8", "replace")
        try:
            start = self._file.tell()
            written = self._file.write(data)
            if written != len(data):
                # Half a line would make the file unreadable from there on.
                self._file.truncate(start)
                raise OSError(28, "No space left on device")
        except OSError as error:
            if not self._in_trouble:
                self._in_trouble = True
                self._on_trouble(f"{self.path} cannot be written ({error.strerror or error}); lines are kept for later")
            return
        self._hash.update(data)
        self._held.clear()
        self._in_trouble = False

    def size(self) -> int:
        """Return the length of the file in bytes, as far as it is written."""
        return 0 if self._file is None else int(self._file.tell())

    def sha256(self) -> str:
        """Return the checksum of the file, as far as it is written."""
        return self._hash.hexdigest()

    def written(self) -> tuple[int, str]:
        """Return length and checksum of the same moment."""
        with self._lock:
            return self.size(), self.sha256()

    def close(self) -> None:
        """Write what is held, if that is possible now, and close the file."""
        if self._file is not None:
            if self._held:
                self._write_held()
            self._file.close()
            self._file = None


class NoLog:
    """Takes the event log's place on all processes but the first."""

    def write(self, event: str, **fields: Any) -> None:
        """Write nothing."""

    def size(self) -> int:
        """Return 0."""
        return 0

    def sha256(self) -> str:
        """Return the checksum of an empty file."""
        return hashlib.sha256().hexdigest()

    def written(self) -> tuple[int, str]:
        """Return both."""
        return self.size(), self.sha256()

    def close(self) -> None:
        """Close nothing."""


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read an event log; a last line cut off by a crash is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events
