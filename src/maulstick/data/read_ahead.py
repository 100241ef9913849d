"""Threads that read the images of the next batches while one is encoded or trained."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Part = TypeVar("Part")
Read = TypeVar("Read")

USUAL_THREADS = 4
_AHEAD = 2
"""Batches that are read while another one is encoded or trained."""


def read_ahead(
    jobs: Iterable[Job],
    read: Callable[[Part], Read],
    parts_of: Callable[[Job], Sequence[Part]],
    threads: int | None = None,
) -> Iterator[tuple[Job, list[Read]]]:
    """Yield each job with what is read of its parts, in order, while threads read those of the next ones.

    ``threads``: at most so many, and no more than processors; 0 reads where it is asked for. None is four at most.
    """
    if threads == 0:
        for job in jobs:
            yield job, [read(part) for part in parts_of(job)]
        return
    pool = ThreadPoolExecutor(min(threads or USUAL_THREADS, os.cpu_count() or 1))
    waiting: deque[tuple[Job, list[Future[Read]]]] = deque()
    try:
        for job in jobs:
            waiting.append((job, [pool.submit(read, part) for part in parts_of(job)]))
            if len(waiting) > _AHEAD:
                first, futures = waiting.popleft()
                yield first, [future.result() for future in futures]
        while waiting:
            first, futures = waiting.popleft()
            yield first, [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
