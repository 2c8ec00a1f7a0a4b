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
from .checks import LoaderOptions, LoaderPlace, has_own_iter, length_of, shape_of
from .readers import Reader, RealRows, SamplerReader, Start
from .sampling import Division, mix, on_cpu
from .streams import SHARDS, StreamReader, mode_of

if TYPE_CHECKING:
    from . import LoaderHandle

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
    start: Start = field(init=False)
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

    def fresh(self, epoch: int) -> Start:
        return Start(epoch, None if self.in_place else self.seed)

    def current(self) -> Iteration | None:
        """Return the iteration that a loop is in."""
        iteration = self.latest()
        return None if iteration is None or iteration.finished else iteration

    def go_to(self, start: Start, following: int) -> None:
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
        mixes_batches = raw.num_workers > 0 and not raw.in_order
        if not options.shard and (has_own_iter(raw) or mixes_batches):
            return Reader(raw)
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
        vars(loader)["_iterator"] = None
        reader.install(loader)
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
    vars(latest).update(vars(Latest()))


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
        #: Batches and errors that were read before the loop asked for them.
        self._ahead: deque[tuple[Any, Exception | None]] = deque()
        #: Batches of the current group of ``accumulate`` that the loop hasn't got.
        self.group_left = 0
        self.finished = False
        self._begin()

    def _begin(self) -> None:
        state = self._state
        loader, self.reader = state.prepare()
        start = self.reader.skip(state.start, state.skip)
        self.reader.begin(start, state.in_place)
        if not start.in_place:
            loader.generator = self._seeds(start)
        with on_cpu():
            self._batches = self.reader.open(loader)
        self._length = length_of(self._batches)
        state.start = state.fresh(state.following)
        state.following += 1
        state.skip = 0
        state.latest = weakref.ref(self)

    def _seeds(self, start: Start) -> torch.Generator:
        """Return a generator for the seeds of workers, which leaves the program's alone."""
        generator = torch.Generator()
        if start.states and "seeds" in start.states:
            return generator.set_state(start.states["seeds"])
        place = self._state.place.rank
        return generator.manual_seed(mix(self._state.seed, start.epoch, sum(start.at), place))

    def __iter__(self) -> Iteration:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        item, error = self._ahead.popleft() if self._ahead else (self._read(), None)
        if error is not None:
            raise error
        state = self._state
        batch = self.reader.take(item)
        state.rows = latest.rows = self.reader.rows
        latest.replica = state.place[:2]
        state.latest = weakref.ref(self)
        return batch if self._transfer is None else self._transfer(batch)

    def _read(self) -> Any:
        """Return the next item. If a resumed epoch has no batches left, begin the next one."""
        while not self.finished:
            try:
                return next(self._batches)
            except StopIteration:
                self.reader.close()
            is_empty = any(self.reader.start.at) and not self.reader.given
            self.finished = not is_empty or not self.reader.complete()
            if not self.finished:
                self._begin()
        raise StopIteration

    def ready(self) -> bool:
        """Read the next batch, and return False at the end."""
        return bool(self._ahead) or self._read_ahead(self._read)

    def upcoming(self, count: int) -> int:
        """Return how many of the next ``count`` batches there are. Read them if necessary."""
        if self._length is not None:
            return min(count, self._length - self.reader.given)
        if count == 1 and self.reader.more is not None:
            return int(self.reader.more)
        while len(self._ahead) < count and not (self._ahead and self._ahead[-1][1]):
            if not self._read_ahead(lambda: next(self._batches)):
                break
        return min(count, len(self._ahead))

    def _read_ahead(self, read: Callable[[], Any]) -> bool:
        """Read an item, or the error that is raised in its turn. Return False at the end."""
        try:
            self._ahead.append((read(), None))
        except StopIteration:
            return False
        except Exception as error:
            self._ahead.append((None, error))
        return True


# -- Groups ----------------------------------------------------------------------------------------


@final
class Group(Generic[T]):
    """The batches of one optimizer step, which can be iterated once. ``len`` is their number."""

    def __init__(self, iteration: Iteration, size: int, accumulate: Callable[[bool], None]) -> None:
        self._iteration = iteration
        self._size = size
        self._accumulate = accumulate
        #: The number of batches that weren't given, or None before the first.
        self._left: int | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        if self._left is not None:
            raise LoaderError(
                "A group of accel.accumulate gives its batches once, before the next group. Keep "
                "them with list(group) to use them twice."
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
        """Drop the batches that the loop didn't take, so that the ranks stay at one step."""
        left = self._size if self._left is None else self._left
        self._left = self._iteration.group_left = 0
        for _ in range(left):
            next(self._iteration)
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
        state, accumulate = self._loader._accel, self._accumulate
        iteration = iter(self._loader)
        state.release = lambda: accumulate(False)
        # Different numbers of batches would pair the gradients of different steps.
        known = length_of(iteration)
        is_even = state.options.shard and (state.options.even_batches or state.raw.drop_last)
        self._compare("accel.accumulate", known)
        while True:
            size = iteration.upcoming(self._n) if iteration.ready() else 0
            if known is None and not is_even:
                self._compare("a group of accel.accumulate", size)
            if not size:
                return
            group: Group[T] = Group(iteration, size, accumulate)
            try:
                yield group
            except GeneratorExit:
                # A break leaves the epoch, also while a traceback holds the group.
                state.latest = lambda: None
                raise
            group.close()

    def _compare(self, label: str, size: int | None) -> None:
        process = self._loader._accel.place.process
        answers = [] if process is None else agree(label, (self._n, size))
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise RankMismatchError(
                    f"accel.accumulate: rank 0 has {answers[0][1]} batches in groups of "
                    f"{answers[0][0]}, and rank {rank} has {answer[1]} in groups of {answer[0]}. "
                    "Use LoaderOptions(even_batches=True) or drop_last=True."
                )
