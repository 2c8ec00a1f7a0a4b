"""Batches that rank 0 reads for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import torch
import torch.distributed as dist

from ..errors import LoaderError, text_of_error
from ..process import Process
from ..process.control import Waiting, agree, raise_together
from ..process.packing import packed, unpacked

_WHAT: Final = "a batch that rank 0 reads"


@final
class Dispatched:
    """Each rank's items of what rank 0 reads, where ``loader`` gives (tag, a batch for each place); every step is collective.

    Rank 0 reads one step ahead, so that each step tells whether another one follows.
    """

    def __init__(self, process: Process, place: int, loader: Iterable[Any]) -> None:
        self._process, self._place, self._loader = process, place, loader
        self._items: Iterator[Any] | None = None
        self._error: Exception | None = None
        self._next = self._read() if process.place.rank == 0 else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def _read(self) -> Any:
        """Rank 0's next step; None at the end, and where it fails, which is told in its turn."""
        try:
            self._items = iter(self._loader) if self._items is None else self._items
            return next(self._items, None)
        except Exception as error:
            self._error = error
            return None

    def __next__(self) -> Any:
        """This rank's (tag, batch); where rank 0 cannot read, its error there and LoaderError on the others."""
        step, error, messages = self._next, self._error, []
        if step is not None:
            try:
                self._next = self._read()
                tag = step[0]._replace(more=self._next is not None or self._error is not None)
                messages = [packed((tag, batch)) for batch in step[1]]
            except Exception as problem:
                error = problem
        told = agree(_WHAT, (self._place, text_of_error(error), list(map(len, messages))))
        raise_together(_WHAT, error, [text for _, text, _ in told], LoaderError)
        if not (sizes := told[0][2]):
            raise StopIteration
        received = torch.empty(max(sizes), dtype=torch.uint8, device="cpu")
        padded = [torch.nn.functional.pad(message, (0, max(sizes) - len(message))) for message in messages]
        with Waiting(self._process, _WHAT):
            sent = [padded[place] for place, *_ in told] if padded else None
            dist.scatter(received, sent, group=self._process.control, group_src=0)
        return unpacked(received[: sizes[self._place]], received.device)
