"""Iteration over a handle, and groups of batches for one optimizer step."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..errors import LoaderError, RankMismatchError
from ..process import ended, running
from ..process.control import agree
from ..process.transfer import Transfer
from .checks import LoaderOptions, LoaderPlace, has_own_iter, shape_of
from .readers import RawReader, Reader, RealRows, SamplerReader
from .sampling import Division, length_of, mix, on_cpu
from .source import Position
from .streams import SHARDS, StreamReader, mode_of

if TYPE_CHECKING:
    from .handle import LoaderHandle

T = TypeVar("T")


@final
@dataclass(eq=False, kw_only=True)
class LoaderState:
    """The state of a handle: the raw loader, this rank's place, and the next epoch."""

    raw: DataLoader[Any]
    options: LoaderOptions
    place: LoaderPlace
    #: The seed of all epochs, unless they are drawn in place.
    seed: int
    #: True if orders are drawn from the program's generators, as in raw PyTorch.
    in_place: bool
    #: The start of the next iteration, the batches to skip after it, and the epoch that follows.
    start: Position = field(init=False)
    skip: int = 0
    following: int = 1
    #: The real rows of the last batch.
    rows: RealRows | None = None
    #: The iteration that began or gave a batch last, if it is alive.
    latest: Callable[[], Iteration | None] = lambda: None
    #: A copy of the loader whose workers live longer than an epoch.
    persistent: tuple[DataLoader[Any], Reader] | None = None
    #: The serials of the engines with which the loader was set up.
    engines: set[int] = field(default_factory=set)
    #: Ends the accumulation of a group that the loop left.
    release: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.in_place = self.in_place or not self.options.shard
        self.start = self.fresh(0)

    def fresh(self, epoch: int) -> Position:
        return Position(epoch=epoch, seed=None if self.in_place else self.seed)

    def current(self) -> Iteration | None:
        """Return the iteration that a loop is in."""
        iteration = self.latest()
        return None if iteration is None or iteration.finished else iteration

    def go_to(self, start: Position, following: int) -> None:
        """Begin the next iteration at a loaded position."""
        self.start, self.following, self.skip = start, following, 0
        self.latest = lambda: None
        # Workers that are alive can't load the states of their datasets.
        self.persistent = None

    @property
    def mode(self) -> str:
        return mode_of(self.raw.dataset, self.options, self.place)

    @property
    def part(self) -> list[int]:
        """This rank and the number of ranks if each has its own position, otherwise empty."""
        is_alone = not self.options.shard or self.mode == SHARDS
        return list(self.place[:2]) if is_alone else []

    def check_process(self) -> None:
        """Raise LoaderError after ``accel.teardown()``."""
        process = self.place.process
        if process is not None and running() is not process and not ended():
            raise LoaderError(
                f"This LoaderHandle was set up for {self.place.world} ranks, and accel.teardown() "
                "has ended them. Pass the raw DataLoader to accel.setup() again."
            )

    def reader(self) -> Reader:
        raw, options, shape = self.raw, self.options, shape_of(self.raw)
        if not options.shard and has_own_iter(raw):
            return RawReader(raw)
        division = Division(
            rank=self.place.rank if options.shard else 0,
            world=self.place.world if options.shard else 1,
            batch=shape.batch // (self.place.world if options.split_batches else 1),
            even=options.even_batches,
            drop_last=shape.drop_last,
        )
        if isinstance(raw.dataset, IterableDataset):
            return StreamReader(raw, division, self.mode, self.place.process)
        return SamplerReader(raw, division)

    def prepare(self) -> tuple[DataLoader[Any], Reader]:
        """Return a copy of the loader and the reader in it."""
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


@final
@dataclass(eq=False)
class Latest:
    """The last batch of all handles, and the last ``split``, which gather_for_metrics assumes."""

    rows: RealRows | None = None
    #: The replica of the model for which it was, and the number of replicas.
    replica: tuple[int, int] | None = None
    #: The divisions of ``split``, by number of items and padding.
    divisions: dict[tuple[int, bool], Division] = field(default_factory=dict)


latest = Latest()


def forget() -> None:
    """Forget the last batch and the last ``split``, because the process group changes."""
    latest.rows = latest.replica = None
    latest.divisions.clear()


@final
class Iteration:
    """An iterator of a handle. It begins its epoch when it is created, as in raw PyTorch."""

    def __init__(self, state: LoaderState) -> None:
        state.check_process()
        state.release()
        device = state.place.device
        moves = state.options.move and device.type != "cpu"
        self._state = state
        self._transfer = Transfer(device) if moves else None
        #: Batches that were read before the loop asked for them.
        self._ahead: deque[Any] = deque()
        #: Batches of the current group of ``accumulate`` that the loop hasn't got.
        self.group_left = 0
        self.finished = False
        loader, self.reader = state.prepare()
        start = self.reader.skip(state.start, state.skip)
        self.reader.begin(start, state.in_place)
        if not start.in_place:
            loader.generator = _worker_seeds(state, start)
        with on_cpu():
            self._batches = self.reader.open(loader)
        # A stream of several workers may have more batches than its dataset's length tells.
        self.length = length_of(self.reader) if isinstance(self.reader, SamplerReader) else None
        state.start = state.fresh(state.following)
        state.following += 1
        state.skip = 0
        state.latest = weakref.ref(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.reader)

    def __next__(self) -> Any:
        if not self._ahead and not self._read():
            self.finished = True
            raise StopIteration
        state = self._state
        tag, batch = self._ahead.popleft()
        self.reader.take(tag)
        state.rows = latest.rows = self.reader.rows
        latest.replica = state.place[:2]
        state.latest = weakref.ref(self)
        return batch if self._transfer is None else self._transfer(batch)

    def _read(self) -> bool:
        """Read the next item, and return False at the end."""
        for item in self._batches:
            self._ahead.append(item)
            return True
        return False

    def upcoming(self, count: int) -> int:
        """Return how many of the next ``count`` batches there are. Read them if necessary."""
        if self.length is not None:
            return min(count, self.length - self.reader.given)
        if count == 1 and self.reader.more is not None:
            return int(self.reader.more)
        while len(self._ahead) < count and self._read():
            pass
        return min(count, len(self._ahead))


def _worker_seeds(state: LoaderState, start: Position) -> torch.Generator:
    """Return a generator for the seeds of workers, which leaves the program's alone."""
    generator = torch.Generator()
    if start.states and "seeds" in start.states:
        return generator.set_state(start.states["seeds"])
    return generator.manual_seed(mix(state.seed, start.epoch, start.count, state.place.rank))


# -- Groups of batches for one optimizer step -------------------------------------------------------


@final
class Group(Generic[T]):
    """The batches of one optimizer step, which can be iterated once. ``len`` is their number."""

    def __init__(self, iteration: Iteration, size: int, accumulate: Callable[[bool], None]) -> None:
        self._iteration = iteration
        self._size = size
        self._accumulate = accumulate
        self._left = size
        self._is_used = False

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        if self._is_used:
            raise LoaderError(
                "A group of accel.accumulate gives its batches once, before the next group. Keep "
                "them with list(group) to use them twice."
            )
        self._is_used = True
        return self._batches()

    def _batches(self) -> Iterator[T]:
        try:
            while self._left:
                self._left -= 1
                self._iteration.group_left = self._left
                self._accumulate(self._left > 0)
                yield next(self._iteration)
        finally:
            self._accumulate(False)

    def close(self) -> None:
        """Drop the batches that the loop didn't take, so that the ranks stay at one step."""
        self._is_used = True
        for _ in self._batches():
            pass


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
        state, accumulate = self._loader._accel, self._accumulate
        iteration = iter(self._loader)
        state.release = lambda: accumulate(False)
        if state.place.process is not None:
            groups = f"{iteration.length} batches in groups of {self._n}"
            by_rank = agree("accel.accumulate", groups)
            if len(set(by_rank)) > 1:
                # Gradients of different steps would be averaged.
                raise RankMismatchError(
                    f"accel.accumulate: the ranks have different batches: {', '.join(by_rank)}. "
                    "Use LoaderOptions(even_batches=True) or drop_last=True."
                )
        while size := iteration.upcoming(self._n):
            group: Group[T] = Group(iteration, size, accumulate)
            try:
                yield group
            except GeneratorExit:
                # A break leaves the epoch, also while a traceback holds the group.
                state.latest = lambda: None
                raise
            group.close()
