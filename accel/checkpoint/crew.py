"""Threads that read and hash, as many as this rank's share of the host's cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar, final

from ..process import running
from .header import CHUNK

T = TypeVar("T")
_MOST: Final = 8  # each has a buffer of one chunk, and a rank takes at most 64 MiB for a load


def share() -> int:
    """How many threads a rank may use, so that the ranks of a host do not take each other's cores."""
    process = running()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, cores // (1 if process is None else process.place.local_world_size)))


@final
class Crew:
    """Does many pieces of work. Its threads start with the first that has several pieces, and end with the object."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()

    def each(self, act: Callable[[T], object], items: Sequence[T]) -> None:
        """Do ``act`` for all items.

        Raises:
            Exception: that of the first item, in their order, that failed; what had not begun is not done.
        """
        threads = share()
        if threads == 1 or len(items) < 2:
            for item in items:
                act(item)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, "accel.read")
        futures = [self._pool.submit(act, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            # Nobody may write to the caller's memory, or read from its file, once the caller goes on.
            for future in futures:
                future.cancel()
            wait(futures)

    @property
    def buffer(self) -> memoryview:
        """Memory for one chunk, of the thread that asks."""
        found: memoryview | None = getattr(self._own, "buffer", None)
        if found is None:
            found = self._own.buffer = memoryview(bytearray(CHUNK))
        return found
