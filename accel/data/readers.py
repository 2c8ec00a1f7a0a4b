"""Readers: the items of one epoch from a position on, and a rank's batches of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from inspect import isgeneratorfunction
from itertools import islice
from typing import Any, Final, NamedTuple, final

from torch.utils.data import DataLoader, Sampler

from ..errors import LoaderError
from ..process.rng import Generators, Private, global_generators
from .checks import shape_of
from .sampling import Division, divide, length_of, mix, on_cpu, own_generators, parts_of

#: A sampler is read in blocks, because it takes 0.2 ms to change the global generators.
_BLOCK: Final = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A snapshot of the generators at the start of an epoch, and the number of samples given.

    The snapshot is the ``seed`` that all epochs share, or ``states``. If both are None, the epoch
    draws in place, from the program's generators as in raw PyTorch.
    """

    epoch: int
    seed: int | None = None
    states: Mapping[str, Any] | None = None
    #: The samples that all ranks were given, for each worker of an iterable dataset. Empty at the
    #: start of an epoch.
    at: tuple[int, ...] = ()
    #: The state of a loader that keeps its own position.
    own: Any = None

    @property
    def in_place(self) -> bool:
        return self.seed is None and self.states is None

    @property
    def epoch_seed(self) -> int | None:
        return None if self.seed is None else mix(self.seed, self.epoch)


@dataclass(frozen=True, slots=True)
class Tag:
    """The origin of a batch. It travels with the batch, because loaders read ahead."""

    #: The number of the worker, and of the samples that were read from its stream.
    stream: int = 0
    position: int = 0
    #: The number of samples in the global step, 0 for padding.
    samples: int = 0
    #: The checksum of the first items of a stream, which the ranks compare.
    first: int = 0
    #: The state of a loader that keeps its own position.
    own: Any = None
    #: True if another batch follows, None if unknown.
    more: bool | None = None


class RealRows(NamedTuple):
    """The rows of a batch that aren't padding: the first ``real`` of ``rows``.

    If the number of rows isn't known, ``rows`` is None and ``real`` is 1 or 0.
    """

    pads: bool
    rows: int | None
    real: int


WHOLE = RealRows(False, None, 1)


class SampleSource:
    """The items of a sampler or dataset in one epoch, and this rank's shares of them."""

    def __init__(self, items: Any, division: Division, own: Mapping[str, Any]) -> None:
        self.items = items
        self.division = division
        self.start = Position(epoch=0)
        self.tag = Tag()
        #: The snapshot of the generators.
        self.states: Mapping[str, Any] | None = None
        #: The first items of the epoch, for padding.
        self.head: list[Any] = []
        #: Generators that the items may draw from besides the global ones.
        self._own = dict(own)
        self._order: Iterator[Any] = iter(())

    def open(self, seed: int | None, stream: int = 0, block: int = 0) -> None:
        """Begin the epoch at its start, and read at least ``block`` items at once."""
        start = self.start
        generators = Generators({**global_generators(), **self._own})
        width = self.division.width
        states = start.states
        if seed is not None:
            for part in parts_of(self.items):
                is_told = part is self.items or isinstance(part, Sampler)
                if is_told and callable(getattr(part, "set_epoch", None)):
                    part.set_epoch(start.epoch)
            states = generators.seeded(seed)
        elif states is not None:
            # The own generators go on to the next epoch. RandomSampler draws from its own at the
            # end of an epoch too.
            Generators(self._own).put(states)
            generators = Generators(global_generators())
        in_place = states is None
        context: Any = nullcontext() if states is None else Private(generators, states)
        self.states = generators.states() if in_place else start.states
        with context, on_cpu():
            items = iter(self.items)
        self._order = _drawn(items, context, width if in_place else max(width, block))
        used = start.at[stream] if start.at else 0
        self.head = list(islice(self._order, min(used, self.division.world - 1)))
        skipped = len(self.head)
        for _ in islice(self._order, used - skipped):
            skipped += 1
        # loader.skip() counts full steps, but the last step may have fewer items.
        if used - skipped >= width:
            raise LoaderError(
                f"The {type(self.items).__name__} gives a shorter epoch than the batches to skip. "
                "Use the same dataset and sampler, or skip fewer batches."
            )
        self.tag = Tag(stream, skipped)

    def shares(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield this rank's share and all items of each global step, and keep their ``tag``."""
        order = self._order
        steps = divide(lambda count: list(islice(order, count)), self.division, self.head)
        for share, items in steps:
            position = self.tag.position + len(items)
            self.tag = replace(self.tag, position=position, samples=len(items))
            yield share, items


def _drawn(items: Iterator[Any], context: AbstractContextManager[Any], block: int) -> Iterator[Any]:
    """Yield items that are drawn in blocks inside a context."""
    while True:
        with context, on_cpu():
            drawn = list(islice(items, block))
        if not drawn:
            return
        yield from drawn


class Reader:
    """One rank's reading of one epoch, of a loader with a stand-in for its sampler or dataset."""

    #: True if the loader keeps its own position.
    stateful = False
    #: The real rows of the last batch.
    rows: RealRows = WHOLE

    def __init__(self, loader: DataLoader[Any], division: Division, streams: int = 1) -> None:
        self._loader: Any = loader
        self._division = division
        #: The samples of a global step that are read from one stream.
        self._width = division.width
        self._streams = streams
        self._units = shape_of(loader).units
        self.start = Position(epoch=0)

    def install(self, loader: DataLoader[Any]) -> None:
        """Replace the sampler or dataset of a copy of the loader."""

    def begin(self, start: Position) -> None:
        self.start = start
        #: The number of batches that the loop got.
        self.given = 0
        #: The tag of the last batch of each worker.
        at = start.at or (0,) * self._streams
        self.tags = [Tag(stream, used, own=start.own) for stream, used in enumerate(at)]
        self.more: bool | None = None

    def open(self, loader: DataLoader[Any]) -> Iterator[tuple[Tag, Any]]:
        """Return an iterator over the tags and the batches."""
        return iter(loader)

    def take(self, tag: Tag) -> None:
        """Count a batch that the loop gets."""
        self.given += 1
        self.more = tag.more
        self.tags[tag.stream] = tag
        self.rows = self.real_rows(tag.samples)

    def real_rows(self, samples: int) -> RealRows:
        """Return the real rows of this rank's batch of a global step."""
        share = self._division.share(samples)
        rows = None if self._units else share.size
        return RealRows(True, rows, share.real) if self._division.pads else WHOLE

    def is_complete(self) -> bool:
        """True if the epoch is known to have no more batches for any rank."""
        return False

    def position(self) -> Position:
        """Return the position after the last batch, which counts the samples of all ranks."""
        if not self.given:
            return self.start
        states = self.states() if self.start.in_place else self.start.states
        at = tuple(tag.position for tag in self.tags)
        return replace(self.start, at=at, states=states, own=self.tags[0].own)

    def states(self) -> Mapping[str, Any] | None:
        """Return the generators at the start of an epoch that draws in place."""
        return None

    def skip(self, start: Position, count: int) -> Position:
        """Return the position ``count`` batches of each rank after ``start``."""
        at = list(start.at or (0,) * self._streams)
        for batch in range(count):
            # The loader takes a batch from each worker in turn.
            at[batch % self._streams] += self._width
        return replace(start, at=tuple(at), own=None) if count else start

    def check(self, position: Position) -> None:
        """Raise LoaderError if an epoch can't continue at a position."""
        if position.at and len(position.at) != self._streams:
            raise LoaderError(
                f"The state was saved in mid-epoch with num_workers={len(position.at)}. Use the "
                "same num_workers, or save between epochs."
            )

    def __len__(self) -> int:
        """Return the number of this rank's batches, those of a full epoch before ``begin``."""
        return len(self._loader)


@final
class RawReader(Reader):
    """Reads a loader with ``shard=False`` and its own ``__iter__``.

    The state of a loader such as torchdata's StatefulDataLoader is the position.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader, Division(rank=0, world=1, batch=1, even=True, drop_last=False))
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    def open(self, loader: DataLoader[Any]) -> Iterator[tuple[Tag, Any]]:
        tag = self.tags[0]
        if tag.own is not None:
            self._loader.load_state_dict(tag.own)
        batches = iter(self._loader)
        if tag.own is None:
            batches = islice(batches, tag.position, None)
        return (
            (self._tag(number), batch) for number, batch in enumerate(batches, tag.position + 1)
        )

    def _tag(self, number: int) -> Tag:
        return Tag(0, number, own=self._loader.state_dict() if self.stateful else None)

    def check(self, position: Position) -> None:
        if position.at and position.own is None:
            raise LoaderError(
                f"A {type(self._loader).__qualname__} with shard=False has no position in "
                "mid-epoch because it reads in its own way. Save between epochs."
            )


@final
class SamplerReader(Reader):
    """The stand-in for the sampler or batch sampler of a map-style loader."""

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        super().__init__(loader, division)
        self._source = SampleSource(shape_of(loader).sampler, division, own_generators(loader))
        #: The tags of batches that the loader hasn't given yet.
        self._pending: deque[Tag] = deque()

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    @property
    def sampler(self) -> Any:
        """The sampler of the replaced batch sampler. StatefulDataLoader asks for its length."""
        return self._source.items.sampler if self._units else self._source.items

    def open(self, loader: DataLoader[Any]) -> Iterator[tuple[Tag, Any]]:
        self._pending.clear()
        batches = iter(loader)
        return ((self._tag(), batch) for batch in batches)

    def _tag(self) -> Tag:
        if not self._pending:
            # YOLO's InfiniteDataLoader keeps an iterator over its first sampler.
            raise LoaderError(
                "The loader does not give one batch for each batch of its sampler, so padding and "
                "position are unknown. Use a plain DataLoader, or LoaderOptions(shard=False)."
            )
        return self._pending.popleft()

    def __iter__(self) -> Iterator[Any]:
        # torch calls iter() of a custom batch sampler before it draws the seed of the workers,
        # and all other samplers draw when the loader asks for the first batch.
        is_eager = self._units and not isgeneratorfunction(type(self._source.items).__iter__)
        if is_eager:
            self._open()
        return self._batches(is_eager)

    def _open(self) -> None:
        self._source.start = self.start
        self._source.open(self.start.epoch_seed, block=_BLOCK)

    def _batches(self, is_open: bool) -> Iterator[Any]:
        if not is_open:
            self._open()
        for share, _ in self._source.shares():
            if share:
                self._pending.append(self._source.tag)
                yield share[0] if self._units else share

    def states(self) -> Mapping[str, Any] | None:
        return self._source.states

    def is_complete(self) -> bool:
        # The same on every rank at the same step, also on a rank without a share of the last step.
        size = length_of(self._source.items)
        least = self._division.width if self._division.drop_last else 1
        return size is not None and self.tags[0].position + least > size

    def __len__(self) -> int:
        used = sum(self.start.at)
        return self._division.local_steps(max(0, len(self._source.items) - used))
