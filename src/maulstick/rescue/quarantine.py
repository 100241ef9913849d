"""Which images to leave out for the rest of a run. Pure Python, no torch; the same answer on every process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .judge import Cause


class Quarantine:
    """Remembers which images were in the windows that a run was lost by.

    An image is a suspect of a rollback when it was in one of the refused windows that led to it, or, where weights or
    optimizer state had turned non-finite, in a window trained since they were last seen finite. Whoever was trained on
    and found the state finite afterwards is cleared. An image that is a suspect of two rollbacks without being cleared
    in between is left out. Where that would be more than ``most`` images in all, none is: then it is not the images.
    """

    STRIKES = 2

    def __init__(self, most: int) -> None:
        self.most = most
        self.strikes: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.trained: set[str] = set()
        self.images: frozenset[str] = frozenset()

    def note(self, images: Iterable[str], *, bad: bool, stepped: bool) -> None:
        """Take the images of one window, on all processes. ``stepped``: the weights were changed by them."""
        if stepped:
            self.trained.update(images)
        if bad:
            self.refused.update(images)
        else:
            self.refused.clear()

    def clear(self) -> None:
        """The state was seen to be finite: everything trained so far has done no harm."""
        for image in self.trained:
            self.strikes.pop(image, None)
        self.trained.clear()

    def note_rescue(self, cause: Cause) -> tuple[str, ...]:
        """The run was rolled back; return the images that are left out from now on, in order of their names."""
        suspects = {Cause.BAD_WINDOWS: self.refused, Cause.NON_FINITE_STATE: self.trained}.get(cause, set())
        self.strikes.update(sorted(suspects - self.images))
        found = tuple(sorted(image for image, strikes in self.strikes.items() if strikes >= self.STRIKES))
        self.refused.clear()
        self.trained.clear()
        if len(self.images) + len(found) > self.most:
            return ()
        self.images |= set(found)
        for image in found:
            del self.strikes[image]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything later answers depend on."""
        return {
            "strikes": dict(self.strikes),
            "refused": sorted(self.refused),
            "trained": sorted(self.trained),
            "images": sorted(self.images),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the quarantine that gave ``state`` stood."""
        self.strikes = Counter(state["strikes"])
        self.refused = set(state["refused"])
        self.trained = set(state["trained"])
        self.images = frozenset(state["images"])
