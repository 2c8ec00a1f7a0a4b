"""The batches of a loader in groups, each for an optimizer step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar, final

from ..errors import LoaderError, RankMismatchError
from ..process.control import agree
from .handle import LoaderHandle
from .iteration import Iteration

T = TypeVar("T")


@final
class Group(Generic[T]):
    """The batches of an optimizer step, for a single loop. ``len`` is their number."""

    def __init__(self, iteration: Iteration, size: int, accumulate: Callable[[bool], None]) -> None:
        self._iteration = iteration
        self._size = size
        self._accumulate = accumulate
        self.is_used = False

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        if self.is_used:
            raise LoaderError(
                "A group of accel.accumulate gives its batches once, before the next group. "
                "Keep them with list(group) to use them twice."
            )
        self.is_used = True
        try:
            for left in reversed(range(self._size)):
                self._accumulate(left > 0)
                yield next(self._iteration)
        finally:
            # Only the loop holds this generator, so a break ends the accumulation.
            self._accumulate(False)


@final
class Accumulation(Generic[T]):
    """The batches of a loader in groups of ``n``. The last group may be smaller."""

    def __init__(self, loader: LoaderHandle, n: int, accumulate: Callable[[bool], None]) -> None:
        self._loader = loader
        self._n = n
        self._accumulate = accumulate

    def __len__(self) -> int:
        return -(-len(self._loader) // self._n)

    def __iter__(self) -> Iterator[Group[T]]:
        state, iteration = self._loader._accel, iter(self._loader)
        state.release = lambda: self._accumulate(False)
        if state.place.process is not None:
            groups = f"{iteration.length} batches in groups of {self._n}"
            by_rank = agree("accel.accumulate", groups)
            if len(set(by_rank)) > 1:
                # Gradients of different steps would be averaged.
                raise RankMismatchError(
                    "accel.accumulate: the ranks have different batches: "
                    f"{', '.join(by_rank)}. Use even_batches=True or drop_last=True."
                )
        try:
            while size := iteration.upcoming(self._n):
                end = iteration.reader.given + size
                group: Group[T] = Group(iteration, size, self._accumulate)
                yield group
                group.is_used = True
                # The batches that the loop didn't take are dropped, so the ranks stay at one step.
                deque(islice(iteration, end - iteration.reader.given), maxlen=0)
                self._accumulate(False)
        finally:
            # A break leaves the epoch, also while the program holds its last group.
            iteration.finished = True
