"""What a loader handle does when it is iterated: an epoch begins, a copy of the loader is read, its batches are counted."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from ..errors import LoaderError
from ..process import Process, ended, running
from ..trees import move
from .readers import EpochReader, Kept, SamplerReader, Start, UndividedReader, shape_of
from .sampling import Division, mix
from .streams import StreamComparisons, StreamReader


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How ``setup`` distributes dataloaders.

    Args:
        shard: each rank gets its own part of every epoch; False is the off switch, samplers and datasets stay untouched.
        even_batches: all ranks get equally many samples, the last batch being padded from the start of the epoch;
            False divides the last batch as it is, so that ranks may differ by one sample, or by one batch.
        move: batches are moved to the rank's device.
        seed: decides the order of every epoch; None takes the seed of rank 0's torch, and in one process draws as raw
            PyTorch does.
    """

    shard: bool = True
    even_batches: bool = True
    move: bool = True
    seed: int | None = None


class LoaderPlace(NamedTuple):
    """For whom a loader is divided: a place among the replicas of a model, and where its batches go."""

    rank: int
    world: int
    device: torch.device
    #: The process in which the division holds; None holds everywhere.
    process: Process | None = None


@final
@dataclass(eq=False, kw_only=True)
class LoaderState:
    """What a handle knows: the raw loader, this rank's place, the epoch that comes next, and who iterates."""

    raw: DataLoader[Any]
    options: LoaderOptions
    place: LoaderPlace
    #: Decides the orders of all epochs, unless they are drawn in place.
    seed: int
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

    def __post_init__(self) -> None:
        self.start = self.fresh(0)

    def fresh(self, epoch: int) -> Start:
        """The start of a whole epoch."""
        return Start(epoch, None if self.in_place else self.seed)

    @property
    def part(self) -> list[int]:
        """Whose position a state is: this rank's of so many where each reads by itself, else that of all, which is empty."""
        return [] if self.options.shard else list(self.place[:2])

    def begin_anew(self, seed: int, in_place: bool) -> None:
        """As just set up."""
        self.seed, self.in_place = seed, in_place or not self.options.shard
        self.start, self.following = self.fresh(0), 1
        self.live.clear()

    def reader(self) -> EpochReader:
        """A new reader for the loader as it is now."""
        shard, shape = self.options.shard, shape_of(self.raw)
        if not shard and not _followed(self.raw):
            return UndividedReader(self.raw)
        division = Division(
            rank=self.place.rank if shard else 0,
            world=self.place.world if shard else 1,
            batch=shape.batch,
            even=self.options.even_batches,
            drop_last=shape.drop_last,
        )
        if isinstance(self.raw.dataset, IterableDataset):
            return StreamReader(self.raw, shape, division)
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
        loader, reader = copy.copy(self.raw), self.reader()
        vars(loader).update(_iterator=None, persistent_workers=free)
        reader.install(loader)
        if free:
            self.persistent = loader, reader
        return loader, reader

    def advance(self) -> None:
        """The next epoch has begun: the one after it comes next."""
        self.start, self.following = self.fresh(self.following), self.following + 1

    def current(self) -> Iteration | None:
        """The iteration that gave the last batch, of those that may still give one."""
        running = [iteration for iteration in self.live if not iteration.finished]
        return max(running, key=lambda iteration: iteration.last, default=None)


def _followed(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads one batch after the other, from its sampler or its dataset."""
    plain = type(loader).__iter__ is DataLoader.__iter__ and (loader.in_order or not loader.num_workers)
    return plain and not isinstance(loader.dataset, torch_data.IterDataPipe | torch_data.MapDataPipe)


@final
class Latest:
    """What is kept of the last batch that any handle gave, and the replica of the model that it was for; None before."""

    kept: Kept | None = None
    replica: tuple[int, int] | None = None


latest = Latest()


@final
class Iteration:
    """One iterator of a handle. It begins its epoch when it is made, as in raw PyTorch."""

    __slots__ = ("__weakref__", "_batches", "_device", "_comparison", "_state", "reader", "finished", "last")

    def __init__(self, state: LoaderState) -> None:
        place = state.place
        if place.process is not None and running() is not place.process and not ended():
            raise LoaderError(
                f"this LoaderHandle gives the part of rank {place.rank} of {place.world} of what accel.teardown() has ended: "
                "use the raw DataLoader, or give it to accel.setup again"
            )
        self._state = state
        self._device = place.device if state.options.move and place.device.type != "cpu" else None
        self.last = 0
        self.finished = False
        self._begin()
        state.live.add(self)

    def _begin(self) -> None:
        """Begins the next epoch, or the rest of a resumed one."""
        state, start = self._state, self._state.start
        loader, self.reader = state.prepare(self)
        self.reader.begin(start, state.in_place)
        state.advance()
        self._comparison = None if state.comparisons is None else state.comparisons.begin(start.epoch, start.at)
        loader.generator = self._seeds(start)
        self._batches = iter(loader)

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
        return len(self._batches)

    def __next__(self) -> Any:
        reader, state = self.reader, self._state
        try:
            item = next(self._batches)
        except StopIteration:
            if not self._begins_anew():
                raise
            return next(self)
        batch = reader.take(item)
        if self._comparison is not None and isinstance(reader, StreamReader):
            self._comparison.gave(reader.given, reader.tag.first)
        state.batches = self.last = state.batches + 1
        state.kept = latest.kept = reader.kept
        latest.replica = state.place[:2]
        return batch if self._device is None else move(batch, self._device)

    def _begins_anew(self) -> bool:
        """At the end of the loader's iterator: whether nothing was left of a resumed epoch, so that the next one began."""
        if self.finished:
            return False
        self.reader.close()
        if self._comparison is not None:
            self._comparison.end(self.reader.given)
        if any(self.reader.start.at) and not self.reader.given and self.reader.complete():
            self._begin()
            return True
        self.finished = True
        return False
