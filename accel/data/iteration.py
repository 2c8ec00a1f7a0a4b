"""The state of a loader's handle, and an iteration over an epoch."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..errors import LoaderError
from ..process import ended, running
from ..process.transfer import to_device
from .checks import LoaderOptions, LoaderPlace, has_own_iter, shape_of
from .readers import Position, RawReader, Reader, SamplerReader
from .sampling import Division, Share, length_of, mix, on_cpu
from .streams import SHARDS, StreamReader, mode_of


@final
@dataclass(eq=False)
class LoaderState:
    """The raw loader of a handle, this rank's place, and the next epoch."""

    raw: DataLoader[Any]
    options: LoaderOptions
    place: LoaderPlace
    #: The seed of all epochs, unless they are drawn in place.
    seed: int
    #: True if orders are drawn from the program's generators, as in raw PyTorch.
    in_place: bool
    #: The start of the next iteration, and the batches to skip after it.
    start: Position
    skip: int = 0
    #: This rank's rows of the last batch.
    rows: Share | None = None
    #: The iteration that began last, if it is alive.
    latest: Callable[[], Iteration | None] = lambda: None
    #: A copy of the loader with workers that live longer than an epoch.
    persistent: tuple[DataLoader[Any], Reader] | None = None
    #: The serials of the engines with which the loader was set up.
    engines: set[int] = field(default_factory=set)
    #: Ends the accumulation of a group that the loop left.
    release: Callable[[], None] = lambda: None

    def fresh(self, epoch: int) -> Position:
        return Position(epoch=epoch, seed=None if self.in_place else self.seed)

    @property
    def current(self) -> Iteration | None:
        """The iteration of the current loop."""
        iteration = self.latest()
        return None if iteration is None or iteration.finished else iteration

    @property
    def part(self) -> list[int]:
        """This rank and the number of ranks if each has its own position."""
        mode = mode_of(self.raw.dataset, self.options, self.place)
        is_alone = not self.options.shard or mode == SHARDS
        return list(self.place[:2]) if is_alone else []

    def check_process(self) -> None:
        process = self.place.process
        if process is not None and running() is not process and not ended():
            raise LoaderError(
                f"This LoaderHandle is for {self.place.world} ranks, and accel.teardown() has "
                "ended them. Pass the raw DataLoader to accel.setup() again."
            )

    def reader(self) -> Reader:
        raw, options, shape = self.raw, self.options, shape_of(self.raw)
        if not options.shard and has_own_iter(raw):
            return RawReader(raw)
        rank, world = self.place[:2] if options.shard else (0, 1)
        division = Division(
            rank=rank,
            world=world,
            batch=shape.batch // world if options.split_batches else shape.batch,
            even=options.even_batches,
            drop_last=shape.drop_last,
        )
        if isinstance(raw.dataset, IterableDataset):
            mode = mode_of(raw.dataset, options, self.place)
            return StreamReader(raw, division, mode, self.place.process)
        return SamplerReader(raw, division)

    def prepare(self) -> tuple[DataLoader[Any], Reader]:
        if self.persistent is not None:
            return self.persistent
        reader = self.reader()
        loader = copy.copy(self.raw)
        # Positions and padding are counted in the order of the sampler.
        vars(loader).update(_iterator=None, in_order=True)
        reader.install(loader)
        # The workers of a stream learn its seed and position when they start.
        is_stream = isinstance(reader, StreamReader)
        vars(loader)["persistent_workers"] &= self.in_place or not is_stream
        if loader.persistent_workers:
            self.persistent = loader, reader
        return loader, reader

    def worker_seeds(self, start: Position) -> torch.Generator:
        # The program's generators stay as they are.
        generator = torch.Generator()
        if start.states and "seeds" in start.states:
            return generator.set_state(start.states["seeds"])
        used = sum(start.at)
        return generator.manual_seed(mix(self.seed, start.epoch, used, self.place.rank))


@final
@dataclass(eq=False)
class Latest:
    """The last batch of all handles, and the last ``split``."""

    rows: Share | None = None
    #: The replica of the model for which it was, and the number of replicas.
    replica: tuple[int, int] | None = None
    #: The divisions of ``split``, by the numbers of all items and of this rank's.
    divisions: dict[tuple[int, int], Division] = field(default_factory=dict)


latest = Latest()


def forget() -> None:
    """Forget them, because the process group changes."""
    latest.rows = latest.replica = None
    latest.divisions.clear()


@final
class Iteration:
    """An iterator of a handle. It begins its epoch at once, as in raw PyTorch."""

    def __init__(self, state: LoaderState) -> None:
        state.check_process()
        state.release()
        device = state.place.device
        moves = state.options.move and device.type != "cpu"
        self._state = state
        self._device = device if moves else None
        #: Batches that were read before the loop asked for them.
        self._ahead: deque[Any] = deque()
        self.finished = False
        loader, self.reader = state.prepare()
        start = self.reader.skip(state.start, state.skip)
        self.reader.begin(start)
        if not start.in_place:
            loader.generator = state.worker_seeds(start)
        with on_cpu():
            self._batches = self.reader.open(loader)
        # A stream of several workers may have more batches than its dataset's length tells.
        is_sized = isinstance(self.reader, SamplerReader)
        self.length = length_of(self.reader) if is_sized else None
        state.start, state.skip = state.fresh(start.epoch + 1), 0
        state.latest = weakref.ref(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ahead and not self._read_ahead(1):
            self.finished = True
            raise StopIteration
        tag, batch = self._ahead.popleft()
        self._state.rows = latest.rows = self.reader.take(tag)
        latest.replica = self._state.place[:2]
        return batch if self._device is None else to_device(batch, self._device)

    def _read_ahead(self, count: int) -> int:
        self._ahead.extend(islice(self._batches, max(0, count - len(self._ahead))))
        return min(count, len(self._ahead))

    def upcoming(self, count: int) -> int:
        """Return how many of the next ``count`` batches there are."""
        if self.length is not None:
            return min(count, self.length - self.reader.given)
        if count == 1 and self.reader.more is not None:
            return int(self.reader.more)
        return self._read_ahead(count)
