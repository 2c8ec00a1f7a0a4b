"""Groups of a loader's batches, each for one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from ..errors import LoaderError
from .handle import LoaderHandle
from .iteration import Iteration

T = TypeVar("T")


@final
@dataclass(eq=False, repr=False)
class Group(Generic[T]):
    """The batches of an optimizer step, for a single loop."""

    _iteration: Iteration
    _size: int
    _accumulate: Callable[[bool], None]
    is_used: bool = False

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        if self.is_used:
            raise LoaderError("A group can be iterated only once. Use list(group).")
        self.is_used = True
        try:
            for left in reversed(range(self._size)):
                self._accumulate(left > 0)
                self._iteration.in_group = left > 0
                yield next(self._iteration)
        finally:
            # A break also runs this block, because only the loop holds the generator.
            self._accumulate(False)
            self._iteration.in_group = False


@final
@dataclass(eq=False, repr=False)
class Accumulation(Generic[T]):
    """A loader's batches in groups of ``n``. The last may be smaller."""

    _loader: LoaderHandle
    _n: int
    _accumulate: Callable[[bool], None]

    def __len__(self) -> int:
        return -(-len(self._loader) // self._n)

    def __iter__(self) -> Iterator[Group[T]]:
        iteration = iter(self._loader)
        self._loader._accel.release = lambda: self._accumulate(False)
        try:
            while size := iteration.upcoming(self._n):
                end = iteration.reader.given + size
                group: Group[T] = Group(iteration, size, self._accumulate)
                yield group
                group.is_used = True
                # Drop the batches that the loop didn't take, so that ranks stay at the same step.
                for _ in range(end - iteration.reader.given):
                    next(iteration)
                self._accumulate(False)
        finally:
            # After a break the epoch is over, even if the program still holds its last group.
            iteration.finished = True
