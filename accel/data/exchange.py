"""What the ranks read of one iterable dataset, compared through the store that they share.

Nobody waits for a rank that does not read, as where rank 0 alone looks at a batch: a collective would.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch.distributed.distributed_c10d import Store

from ..errors import LoaderError
from ..process import Process, end_groups, ended

# -- What the first items of a stream are, in a few bytes that are the same in every process ---------------------------


class Fingerprint(NamedTuple):
    """Checksums of what names an item (integers, text), and of its other numbers; None where there are none.

    Two readers of one sample have the same names, also where each adds noise of its own to the other numbers.
    """

    names: int | None
    numbers: int | None

    def differs(self, other: Fingerprint) -> bool:
        """Whether these are other items, as far as that can be told."""
        if self.names is None and other.names is None:
            return self.numbers != other.numbers
        return self.names != other.names


def fingerprint(items: list[Any]) -> Fingerprint:
    """The fingerprint of items of any kind; what is neither a tensor, an array nor plain counts by its type."""
    crcs: dict[bool, int] = {}
    for is_name, content in _leaves(items):
        crcs[is_name] = zlib.crc32(content, crcs.get(is_name, 0))
    return Fingerprint(crcs.get(True), crcs.get(False))


def _leaves(value: Any) -> Iterator[tuple[bool, bytes]]:
    """The leaves of a nested value: whether each names the item, and its content."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(key if isinstance(key, str) else None)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, int | str | bytes):
        yield True, repr(value).encode()
    elif isinstance(value, torch.Tensor):
        yield _counts(value.dtype), repr((tuple(value.shape), _plain(value))).encode()
    elif hasattr(value, "dtype") and hasattr(value, "tolist"):
        yield value.dtype.kind in "iuSU" and value.dtype.itemsize > 1, repr(value.tolist()).encode()
    else:
        yield False, (repr(value) if isinstance(value, float | complex) else type(value).__qualname__).encode()


def _counts(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are labels or tokens; bytes are most often pixels."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype.itemsize > 1


def _plain(tensor: torch.Tensor) -> Any:
    """The values of a tensor, where it has them."""
    return None if tensor.device.type == "meta" or tensor.layout is not torch.strided else tensor.tolist()


_PATIENCE = 2.0  # seconds that the first batch of a loader waits for the other ranks' first ones
_PAUSE = 0.005


@final
class Exchange:
    """What the ranks tell each other of one loader.

    Args:
        process: whose store is used.
        name: of the loader, the same on all ranks and in this process no other loader's.
        dataset: what the errors call it.
        even: whether all ranks must get equally many batches.
    """

    def __init__(self, process: Process, name: str, dataset: str, even: bool) -> None:
        self.process, self.name, self.dataset, self.even = process, name, dataset, even
        self._begun: Counter[tuple[int, ...]] = Counter()

    def begin(self, epoch: int, at: tuple[int, ...]) -> Readings:
        """One iteration begins, of an epoch from a position."""
        place = (epoch, *at)
        self._begun[place] += 1
        return Readings(self, f"{place} {self._begun[place]}", _PATIENCE if self._begun.total() == 1 else 0.0)


@final
class Readings:
    """What the ranks read in one iteration."""

    def __init__(self, exchange: Exchange, name: str, patience: float) -> None:
        place = exchange.process.place
        self._exchange, self._rank, self._patience = exchange, place.rank, patience
        self._others = [r for r in range(place.world_size) if r != place.rank]
        self._unknown = list(self._others)
        self._name = name
        self._started = time.monotonic()
        self._silent = False

    @cached_property
    def _store(self) -> Store:
        return self._exchange.process.store("loader", self._exchange.name, self._name)

    def gave(self, given: int, first: Fingerprint | None) -> None:
        """The loop gets its batch ``given`` now; ``first`` is of the first items of the whole stream.

        Raises:
            LoaderError: another rank read other items first.
        """
        with self._if_reached():
            if self._exchange.even:
                self._store.set(f"given {self._rank}", str(given))
            if given == 1:
                self._mine = first
                self._store.set(f"first {self._rank}", json.dumps(first))
            self._ask(self._unknown, self._agrees, self._patience if given == 1 else 0.0)

    def end(self, given: int) -> None:
        """This rank's iterator has ended after ``given`` batches.

        Raises:
            LoaderError: another rank has more or fewer of them; the process groups are ended, since that rank may wait in
                a collective that this one does not come to.
        """
        if not self._exchange.even:
            return
        with self._if_reached():
            self._store.set(f"end {self._rank}", str(given))
            per_batch = (time.monotonic() - self._started) / max(1, given)
            reading = [rank for rank in self._others if self._store.check([f"first {rank}"])]
            # A rank that is slower than this, or has left its loop, is no error.
            self._ask(reading, lambda rank: self._ended_alike(rank, given), 5.0 + 3 * per_batch)

    @contextlib.contextmanager
    def _if_reached(self) -> Iterator[None]:
        """What needs the store; without it, as when rank 0 has ended, the ranks compare nothing more."""
        if self._silent or ended():
            return
        try:
            yield
        except (RuntimeError, ValueError):
            self._silent = True

    def _ask(self, ranks: list[int], is_known: Callable[[int], bool], patience: float) -> None:
        """Asks after each of ``ranks`` until it is known, but not for longer than ``patience`` seconds."""
        until = time.monotonic() + patience
        while ranks:
            ranks[:] = [rank for rank in ranks if not is_known(rank)]
            if time.monotonic() >= until:
                return
            time.sleep(_PAUSE if ranks else 0.0)

    def _agrees(self, rank: int) -> bool:
        """Whether a rank is known to have read what this one did."""
        if not self._store.check([f"first {rank}"]):
            return False
        theirs = json.loads(self._store.get(f"first {rank}"))
        if self._mine is not None and theirs is not None and self._mine.differs(Fingerprint(*theirs)):
            raise LoaderError(
                f"rank {self._rank} and rank {rank} read other items first from {self._exchange.dataset}: it divides itself over "
                "the ranks, or shuffles differently on each, and dividing it once more would lose most samples. Use "
                "accel.LoaderOptions(shard=False), with which each rank reads its own part, or let it give every rank the same "
                "whole stream"
            )
        return True

    def _ended_alike(self, rank: int, given: int) -> bool:
        """Whether a rank is known to have ended where this one did."""
        over = self._store.check([f"end {rank}"])
        theirs = int(self._store.get(f"end {rank}" if over else f"given {rank}"))
        if theirs > given or (over and theirs != given):
            message = (
                f"{self._exchange.dataset} gave rank {self._rank} {given} batches and rank {rank} {'' if over else 'at least '}"
                f"{theirs}: its stream is not the same on all ranks. It must give every rank the same items; where each rank has "
                "a stream of its own, use accel.LoaderOptions(shard=False)"
            )
            end_groups(message)
            raise LoaderError(message)
        return over
