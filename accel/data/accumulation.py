"""Batches in groups of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from ..errors import LoaderError, RankMismatchError
from ..process.control import agree
from .readers import length_of

if TYPE_CHECKING:
    from . import Iteration, LoaderHandle

T = TypeVar("T")


@final
class Group(Generic[T]):
    """The batches of one optimizer step, which come as they are asked for, once; ``len`` is their number."""

    def __init__(self, iteration: Iteration, size: int, accumulate: Callable[[bool], None]) -> None:
        self._iteration, self._size, self._accumulate = iteration, size, accumulate
        #: How many were not given yet; None before the first.
        self._left: int | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        if self._left is not None:
            raise LoaderError(
                "a group of accel.accumulate gives its batches once, and before the next group: to use them twice keep them, "
                "batches = list(group)"
            )
        self._left = self._size
        return self._batches()

    def _batches(self) -> Iterator[T]:
        try:
            while self._left:
                self._left = self._iteration.group_left = self._left - 1
                self._accumulate(self._left > 0)
                yield next(self._iteration)
        finally:
            self._accumulate(False)

    def close(self) -> None:
        """Leave out what the loop did not take, so that the ranks stay at one step."""
        left, self._left = self._size if self._left is None else self._left, 0
        self._iteration.group_left = 0
        for _ in range(left):
            next(self._iteration)
        self._accumulate(False)


@final
class Accumulation(Generic[T]):
    """The batches of a loader in groups of ``n``, of which the last may be smaller; ``len`` is the number of groups."""

    def __init__(self, loader: LoaderHandle, n: int, accumulate: Callable[[bool], None]) -> None:
        self._loader, self._n, self._accumulate = loader, n, accumulate

    def __len__(self) -> int:
        return -(-len(self._loader) // self._n)

    def __iter__(self) -> Iterator[Group[T]]:
        state, accumulate = self._loader._accel, self._accumulate
        iteration = iter(self._loader)
        state.release = lambda: accumulate(False)
        known = length_of(iteration)
        apart = state.place.process is not None and state.place.process.place.world_size > 1
        if apart:
            self._compare(agree("accel.accumulate", (self._n, known)))
            apart = known is None and not (state.options.shard and (state.options.even_batches or state.raw.drop_last))
        while True:
            size = iteration.upcoming(self._n) if iteration.ready() else 0
            if apart:
                self._compare(agree("a group of accel.accumulate", (self._n, size)))
            if not size:
                return
            group: Group[T] = Group(iteration, size, self._accumulate)
            try:
                yield group
            except GeneratorExit:  # as where a plain loop is left, also while a traceback holds the group
                state.live.discard(iteration)
                raise
            group.close()

    def _compare(self, told: list[tuple[int, Any]]) -> None:
        """The ranks step equally often, or all raise."""
        for number, (n, left) in enumerate(told):
            if (n, left) != told[0]:
                raise RankMismatchError(
                    f"accel.accumulate: rank 0 has {told[0][1]} batches in groups of {told[0][0]}, and rank {number} has {left} "
                    f"in groups of {n}, so that they would not step together: give all ranks equally many, with "
                    "LoaderOptions(even_batches=True) or drop_last=True"
                )
