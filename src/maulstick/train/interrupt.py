"""Ctrl-C and SIGTERM as a request to stop after the current step, so that the adapter can be saved."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While active, the first SIGINT or SIGTERM asks for a stop; a second, or the first with ``at_once``, interrupts.

    Outside the main thread, where Python cannot take signals, it does nothing.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._reason: str | None = None
        self._earlier: dict[int, Any] = {}

    def requested(self) -> str | None:
        """Return the reason to stop, None while there is none."""
        return self._reason

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._at_once or self._reason is not None:
            raise KeyboardInterrupt(name)
        self._reason = name
        # Straight to the descriptor: printing could meet a print that the signal interrupted. The live bar goes up a
        # line before it draws itself anew, and would take the message away without an empty line behind it.
        ending = "\n\n" if os.isatty(2) else "\n"
        os.write(2, f"\n{name}: finishing this step, then saving ...{ending}".encode())
