"""The state of a loader's handle, and an iteration over an epoch."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..errors import LoaderError
from ..process import ended, running
from ..process.transfer import to_device
from .checks import LoaderOptions, LoaderPlace, shape_of
from .readers import Position, RawReader, Reader, SamplerReader, SampleSource
from .sampling import Division, Share, length_of, mix, on_cpu, own_generators
from .streams import SHARDS, StreamReader, mode_of


class Rows(NamedTuple):
    """This rank's rows of a batch, and its place among replicas."""

    share: Share
    replica: int
    replicas: int


@final
@dataclass(eq=False)
class Latest:
    """This rank's rows of the last batch, and of each ``split``."""

    rows: Rows | None = None
    #: By the number of all items, and the number of this rank's items.
    split: dict[tuple[int, ...], Rows] = field(default_factory=dict)


latest = Latest()


@final
@dataclass(eq=False)
class LoaderState:
    """The loader of a handle, this rank's place, and the next epoch."""

    raw: DataLoader[Any]
    options: LoaderOptions
    place: LoaderPlace
    #: The seed of all epochs. With ``in_place``, the program's generators draw instead.
    seed: int
    in_place: bool = False
    #: The start of the next iteration.
    start: Position = field(init=False)
    #: This rank's rows of the last batch.
    rows: Rows | None = None
    #: Returns the latest iteration, or None after it was garbage collected.
    latest: Callable[[], Iteration | None] = lambda: None
    #: A copy of the loader with persistent workers, and its reader.
    persistent: tuple[DataLoader[Any], Reader] | None = None
    #: The serials of the engines with which the loader was set up.
    engines: set[int] = field(default_factory=set)
    #: Ends the accumulation of a group that the loop left early.
    release: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.in_place = self.in_place or not self.options.shard
        self.start = self.fresh(0)

    def fresh(self, epoch: int, skip: int = 0) -> Position:
        seed = None if self.in_place else self.seed
        return Position(epoch=epoch, seed=seed, skip=skip)

    @property
    def current(self) -> Iteration | None:
        """The iteration of the current loop, or None."""
        iteration = self.latest()
        return None if iteration is None or iteration.finished else iteration

    @property
    def part(self) -> list[int]:
        """This rank and the world size if ranks have separate positions, or []."""
        mode = mode_of(self.raw.dataset, self.options, self.place)
        is_alone = not self.options.shard or mode == SHARDS
        return list(self.place[:2]) if is_alone else []

    def reader(self) -> Reader:
        """Return a reader of a full epoch."""
        raw, options, shape = self.raw, self.options, shape_of(self.raw)
        rank, world = self.place[:2] if options.shard else (0, 1)
        division = Division(
            rank=rank,
            world=world,
            batch=shape.batch // world if options.split_batches else shape.batch,
            even=options.even_batches,
            drop_last=shape.drop_last,
            units=shape.units,
        )
        source = SampleSource(shape.sampler, division, own_generators(raw))
        reader: Reader = SamplerReader(raw, source)
        if not options.shard and type(raw).__iter__ is not DataLoader.__iter__:
            reader = RawReader(raw, source)
        elif isinstance(raw.dataset, IterableDataset):
            mode = mode_of(raw.dataset, options, self.place)
            reader = StreamReader(raw, division, mode, self.place.process)
        return reader

    def prepare(self) -> tuple[DataLoader[Any], Reader]:
        if self.persistent is not None:
            return self.persistent
        loader, reader = copy.copy(self.raw), self.reader()
        # Positions and padding are counted, so batches must have the order of the sampler.
        vars(loader).update(_iterator=None, in_order=True)
        # The workers of a stream get its seed and position only when they start.
        is_stream = isinstance(reader, StreamReader)
        vars(loader)["persistent_workers"] &= self.in_place or not is_stream
        if loader.persistent_workers:
            self.persistent = loader, reader
        return loader, reader


@final
class Iteration:
    """An iterator over an epoch. It starts the epoch at once, as in raw PyTorch."""

    def __init__(self, state: LoaderState) -> None:
        process = state.place.process
        if process is not None and running() is not process and not ended():
            raise LoaderError("accel.teardown() ended this loader. Set up the raw loader again.")
        state.release()
        self._state = state
        self._moves = state.options.move and state.place.device.type != "cpu"
        #: Batches that were read ahead of the loop.
        self._ahead: deque[Any] = deque()
        self.finished = False
        #: True in a group of ``accumulate``, except at its last batch.
        self.in_group = False
        loader, self.reader = state.prepare()
        self.reader.begin(state.start)
        start = self.reader.start
        if not start.in_place:
            # Seed the workers without a draw from the program's generators.
            seed = mix(state.seed, start.epoch, sum(start.at), state.place.rank)
            loader.generator = torch.Generator().manual_seed(seed)
        if start.states and "seeds" in start.states:
            loader.generator.set_state(start.states["seeds"])
        with on_cpu():
            self._batches = self.reader.open(loader)
        # A stream with several workers may have more batches than its length says.
        is_map = isinstance(self.reader, SamplerReader)
        self.length = length_of(self.reader) if is_map else None
        state.start = state.fresh(start.epoch + 1)
        state.latest = weakref.ref(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else next(self._batches, None)
        if item is None:
            self.finished = True
            raise StopIteration
        tag, batch = item
        place = self._state.place
        rows = Rows(self.reader.take(tag), place.rank, place.world)
        self._state.rows = latest.rows = rows
        return to_device(batch, place.device) if self._moves else batch

    def upcoming(self, count: int) -> int:
        """Return the number of batches left, at most ``count``."""
        if self.length is not None:
            return min(count, self.length - self.reader.given)
        if count == 1 and self.reader.tag.more is not None:
            return int(self.reader.tag.more)
        self._ahead.extend(islice(self._batches, max(0, count - len(self._ahead))))
        return min(count, len(self._ahead))
