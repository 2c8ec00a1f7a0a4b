"""What a loop iterates: a handle's state, its iterations, and the groups of batches of one optimizer step."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, final

import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from ..errors import LoaderError, RankMismatchError
from ..process import ended, running
from ..process.control import agree
from ..process.transfer import Transfer
from .readers import (
    EpochReader,
    Kept,
    LoaderOptions,
    LoaderPlace,
    SamplerReader,
    Start,
    UndividedReader,
    length_of,
    shape_of,
    too_short,
)
from .sampling import Division, mix
from .streams import StreamComparisons, StreamReader

if TYPE_CHECKING:
    from . import LoaderHandle

T = TypeVar("T")


@final
@dataclass(eq=False, kw_only=True)
class LoaderState:
    """What a handle knows: the raw loader, this rank's place, the epoch that comes next, and who iterates."""

    raw: DataLoader[Any]
    options: LoaderOptions
    place: LoaderPlace
    #: That of no other loader of the process, the same on all ranks.
    name: str = ""
    #: Decides the orders of all epochs, unless they are drawn in place.
    seed: int = 0
    #: Orders are drawn from the program's generators, as in raw PyTorch.
    in_place: bool = False
    #: Where the next iteration starts, and the epoch after that.
    start: Start = field(init=False)
    following: int = 1
    batches: int = 0
    kept: Kept | None = None
    live: weakref.WeakSet[Iteration] = field(default_factory=weakref.WeakSet)
    #: The copy whose workers outlive an epoch, and the iteration that has it.
    persistent: tuple[DataLoader[Any], EpochReader] | None = None
    holder: weakref.ref[Iteration] | None = None
    #: The serials of the engines that it was set up with.
    engines: set[int] = field(default_factory=set)
    #: What the ranks tell each other of what they read.
    comparisons: StreamComparisons | None = None
    #: What a loader that keeps its own position said at the end of its last epoch.
    own: Any = None
    #: Ends what a group of ``accumulate`` began and may not have ended.
    release: Callable[[], None] = lambda: None

    def fresh(self, epoch: int) -> Start:
        return Start(epoch, None if self.in_place else self.seed)

    @property
    def part(self) -> list[int]:
        """Whose position a state is: this rank's of so many where each reads by itself, else that of all, which is empty."""
        return [] if self.options.shard else list(self.place[:2])

    def refuse_ended(self) -> None:
        """Refuse (LoaderError) a part of what other ranks had, before ``accel.teardown()``."""
        place = self.place
        if place.process is not None and running() is not place.process and not ended():
            raise LoaderError(
                f"this LoaderHandle gives the part of rank {place.rank} of {place.world} of what accel.teardown() has ended: "
                "use the raw DataLoader, or give it to accel.setup again"
            )

    def begin_anew(self, seed: int, in_place: bool) -> None:
        self.seed, self.in_place = seed, in_place or not self.options.shard
        self.start, self.following = self.fresh(0), 1
        self.live.clear()

    def reader(self) -> EpochReader:
        shard, shape = self.options.shard, shape_of(self.raw)
        if not shard and not _followed(self.raw):
            return UndividedReader(self.raw)
        division = Division(
            rank=self.place.rank if shard else 0,
            world=self.place.world if shard else 1,
            batch=shape.batch // (self.place.world if self.options.split_batches else 1),
            even=self.options.even_batches,
            drop_last=shape.drop_last,
        )
        if isinstance(self.raw.dataset, IterableDataset):
            process = self.place.process
            several = self.options.dispatch and process is not None and process.place.world_size > 1
            return StreamReader(self.raw, shape, division, process if several else None)
        return SamplerReader(self.raw, division)

    def prepare(self, iteration: Iteration) -> tuple[DataLoader[Any], EpochReader]:
        """A copy of the loader and the reader in it; the persistent copy, unless another iteration still reads from it."""
        persists = self.raw.persistent_workers and self.raw.num_workers > 0
        holder = None if self.holder is None else self.holder()
        free = persists and (holder is None or holder is iteration or holder.finished)
        if free:
            self.holder = weakref.ref(iteration)
            if self.persistent is not None:
                return self.persistent
        reader = self.reader()
        if reader.keeps:  # a copy would keep it to itself
            self.holder = weakref.ref(iteration)
            return self.raw, reader
        loader = copy.copy(self.raw)
        vars(loader).update(_iterator=None, persistent_workers=free)
        reader.install(loader)
        if free:
            self.persistent = loader, reader
        return loader, reader

    def current(self) -> Iteration | None:
        running = [iteration for iteration in self.live if not iteration.finished]
        return max(running, key=lambda iteration: iteration.last, default=None)


#: Of all handles that live.
states: weakref.WeakSet[LoaderState] = weakref.WeakSet()


def _followed(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads one batch after the other, from its sampler or its dataset."""
    plain = type(loader).__iter__ is DataLoader.__iter__ and (
        loader.in_order or not loader.num_workers
    )
    return plain and not isinstance(
        loader.dataset, torch_data.IterDataPipe | torch_data.MapDataPipe
    )


@final
@dataclass(eq=False)
class Latest:
    """What is kept of the last batch that any handle gave since a ``split``, and for which replica of the model either was."""

    kept: Kept | None = None
    replica: tuple[int, int] | None = None
    #: How ``split`` has cut, by number of items and whether it padded.
    divisions: dict[tuple[int, bool], Division] = field(default_factory=dict)


latest = Latest()


def forget() -> None:
    """Hear that the ranks are others from now on: what comes next is not of the last batch, nor of what was cut for them."""
    vars(latest).update(vars(Latest()))


class Ahead(NamedTuple):
    """An item of the loader that was read before the loop asked, or the error in its place."""

    item: Any
    error: Exception | None = None
    #: The position before it that the loader keeps, if it does.
    own: Any = None


@final
class Iteration:
    """One iterator of a handle. It begins its epoch when it is made, as in raw PyTorch."""

    def __init__(self, state: LoaderState) -> None:
        state.refuse_ended()
        place = state.place
        self._state = state
        self._transfer = (
            Transfer(place.device) if state.options.move and place.device.type != "cpu" else None
        )
        self.last = 0
        #: The batches that the group of ``accumulate`` has and the loop was not given, once it was given one.
        self.group_left = 0
        self.finished = False
        self._ahead: deque[Ahead] = deque()
        state.release()
        self._begin()
        state.live.add(self)

    def _begin(self) -> None:
        state, start = self._state, self._state.start
        loader, self.reader = state.prepare(self)
        self.reader.begin(start, state.in_place)
        self._comparison = (
            None if state.comparisons is None else state.comparisons.begin(start.epoch, start.at)
        )
        loader.generator = self._seeds(start)
        # Torch draws a seed from the generator, which is the CPU's, on the default device. Workers begin inside this context
        # and stay in it, where each call of torch's takes longer.
        elsewhere = torch.get_default_device().type != "cpu"
        with torch.device("cpu") if elsewhere else contextlib.nullcontext():
            self._batches = self.reader.open(loader)
        for number in range(0 if self.reader.skips else start.skip):
            try:
                self.reader.take(next(self._batches))
            except StopIteration:
                raise too_short(start.skip, number) from None
        state.start, state.following, state.own = (
            state.fresh(state.following),
            state.following + 1,
            None,
        )

    def _seeds(self, start: Start) -> torch.Generator | None:
        """What the loader seeds its workers from: as in raw PyTorch, or nothing that the program draws from."""
        state, states = self._state, start.states or {}
        if start.in_place or isinstance(self.reader, UndividedReader):
            return state.raw.generator  # type: ignore[no-any-return]
        generator = torch.Generator()
        if "seeds" in states:
            generator.set_state(states["seeds"])
        else:
            generator.manual_seed(mix(state.seed, start.epoch, sum(start.at), state.place.rank))
        return generator

    def __iter__(self) -> Iteration:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        item, error, _ = self._ahead.popleft() if self._ahead else (self._read(), None, None)
        if error is not None:
            raise error
        reader, state = self.reader, self._state
        batch = reader.take(item)
        if self._comparison is not None and isinstance(reader, StreamReader):
            self._comparison.gave(reader.given - reader.start.skip, reader.tag.first)
        state.batches = self.last = state.batches + 1
        order = (
            None if reader.first is None or not state.options.shard else (state.name, reader.first)
        )
        state.kept = latest.kept = reader.kept._replace(order=order)
        latest.replica = state.place[:2]
        return batch if self._transfer is None else self._transfer(batch)

    def _read(self) -> Any:
        while True:
            try:
                return next(self._batches)
            except StopIteration:
                if not self._begins_anew():
                    raise

    def ready(self) -> bool:
        """Whether there is another batch, which is read now."""
        return bool(self._ahead) or self._read_ahead(self._read)

    def upcoming(self, count: int) -> int:
        """How many of the next ``count`` batches there are for this rank; where only reading tells, they are read now."""
        known = self.reader.upcoming(count)
        if known is not None:
            return known
        while len(self._ahead) < count and not (self._ahead and self._ahead[-1].error):
            if not self._read_ahead(lambda: next(self._batches)):
                break
        return min(count, len(self._ahead))

    def _read_ahead(self, read: Callable[[], Any]) -> bool:
        """One item more; an error too waits for its turn."""
        own = self.reader.own()
        try:
            self._ahead.append(Ahead(read(), None, own))
        except StopIteration:
            return False
        except Exception as error:
            self._ahead.append(Ahead(None, error, own))
        return True

    def position(self) -> Start:
        holder = self._state.holder
        if self.reader.keeps and holder is not None and holder() is not self:
            raise LoaderError(
                "this loader keeps the position of one iterator, and another has begun since: save before that"
            )
        position = self.reader.position()
        return position._replace(own=self._ahead[0].own) if self._ahead else position

    def _begins_anew(self) -> bool:
        """At the end of the loader's iterator: whether nothing was left of a resumed epoch, so that the next one began."""
        if self.finished:
            return False
        self.reader.close()
        nothing = self.reader.given == self.reader.start.skip
        if self.reader.start.inside and nothing and self.reader.complete():
            self._begin()
            return True
        self.finished, self._state.own = True, self.reader.own()
        return False


# -- Batches in groups of one optimizer step ---------------------------------------------------------------------------


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
            apart = known is None and not (
                state.options.shard and (state.options.even_batches or state.raw.drop_last)
            )
        while True:
            size = iteration.upcoming(self._n) if iteration.ready() else 0
            if apart:
                self._compare(agree("a group of accel.accumulate", (self._n, size)))
            if not size:
                return
            group: Group[T] = Group(iteration, size, self._accumulate)
            try:
                yield group
            except (
                GeneratorExit
            ):  # as where a plain loop is left, also while a traceback holds the group
                state.live.discard(iteration)
                raise
            group.close()

    def _compare(self, told: list[tuple[int, Any]]) -> None:
        for number, (n, left) in enumerate(told):
            if (n, left) != told[0]:
                raise RankMismatchError(
                    f"accel.accumulate: rank 0 has {told[0][1]} batches in groups of {told[0][0]}, and rank {number} has {left} "
                    f"in groups of {n}, so that they would not step together: give all ranks equally many, with "
                    "LoaderOptions(even_batches=True) or drop_last=True"
                )
