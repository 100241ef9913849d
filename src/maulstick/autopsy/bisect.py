"""Which samples of a batch bring NaN or infinity in: each on its own, or only some of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSearch:
    """The answer. ``alone``: samples that are bad on their own. ``together``: a smallest set that is bad only as such.

    ``runs`` counts how often the batch was tried; both are empty where the whole batch is healthy.
    """

    size: int
    alone: tuple[int, ...]
    together: tuple[int, ...]
    runs: int

    @property
    def all_of_them(self) -> bool:
        """Whether every sample is bad on its own: then it is hardly the data."""
        return len(self.alone) == self.size


def bisect_batch(is_bad: Callable[[Sequence[int]], bool], size: int) -> BatchSearch:
    """Find the bad samples among ``size``; ``is_bad`` runs those with the given places and tells.

    It must run them exactly as in the whole batch, with the same noise for each. Halves are tried first, so that one
    bad sample of n takes about 2 log2(n) runs.
    """
    search = _Search(is_bad)
    everything = tuple(range(size))
    if not search.bad(everything):
        return BatchSearch(size, (), (), search.runs)
    alone = sorted(search.bad_alone(everything))
    together = () if alone else search.smallest(everything)
    return BatchSearch(size, tuple(alone), together, search.runs)


class _Search:
    def __init__(self, is_bad: Callable[[Sequence[int]], bool]) -> None:
        self._is_bad = is_bad
        self._known: dict[tuple[int, ...], bool] = {}

    @property
    def runs(self) -> int:
        return len(self._known)

    def bad(self, places: tuple[int, ...]) -> bool:
        if places not in self._known:
            self._known[places] = self._is_bad(places)
        return self._known[places]

    def bad_alone(self, places: tuple[int, ...]) -> list[int]:
        if not self.bad(places):
            return []
        if len(places) == 1:
            return list(places)
        middle = len(places) // 2
        return self.bad_alone(places[:middle]) + self.bad_alone(places[middle:])

    def smallest(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """Return a set that is bad and of which no sample can be left out."""
        for place in places:
            rest = tuple(other for other in places if other != place)
            if rest and self.bad(rest):
                return self.smallest(rest)
        return places
