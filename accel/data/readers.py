"""Readers of an epoch's items from any position, and of a rank's batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import isgeneratorfunction
from itertools import islice
from typing import Any, Final, final

from torch.utils.data import DataLoader, Sampler

from ..errors import LoaderError
from ..process.rng import Generators, Private, global_generators
from .sampling import Division, Share, length_of, mix, on_cpu, parts_of, portion

#: A sampler is read in blocks, because swapping the global generators takes 0.2 ms.
_BLOCK: Final = 1 << 10

Context = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The generators at the start of an epoch, and the number of samples given.

    Without ``seed`` and ``states``, the program's generators draw, as in raw PyTorch.
    """

    epoch: int
    #: The seed of all epochs.
    seed: int | None = None
    states: Mapping[str, Any] | None = None
    #: The number of samples given to all ranks, by worker of a stream. Empty at the start.
    at: tuple[int, ...] = ()
    #: The state of a loader that keeps its own position.
    own: Any = None
    #: The number of batches of each rank to skip from here.
    skip: int = 0

    @property
    def in_place(self) -> bool:
        return self.seed is None and self.states is None


@dataclass(frozen=True, slots=True)
class Tag:
    """The origin of a batch, sent along with it because loaders read ahead."""

    #: The worker's number, and the number of samples in the global step (0 for padding).
    stream: int = 0
    samples: int = 0
    #: The checksum of a stream's first items, to compare between ranks.
    first: int = 0
    own: Any = None
    #: True if more batches follow, None if unknown.
    more: bool | None = None


Batches = Iterator[tuple[Tag, Any]]


@dataclass(eq=False)
class SampleSource:
    """The items of a sampler or dataset, in global steps."""

    items: Any
    division: Division
    #: The loader's own generators. The items may draw from these and the global generators.
    own: Mapping[str, Any]
    start: Position = Position(epoch=0)
    #: The number of samples that were read, and the tag of the last step.
    read: int = 0
    tag: Tag = Tag()
    #: The generators' states before an epoch that draws in place.
    states: Mapping[str, Any] | None = None
    #: The first items of the epoch, for padding.
    head: list[Any] = field(default_factory=list)

    def chunks(self, stream: int | None = None) -> Iterator[list[Any]]:
        """Return the items of each global step. ``stream`` is a stream's worker."""
        start, width, world = self.start, self.division.width, self.division.world
        context = self._generators(stream)
        if stream is not None:
            # A persistent worker starts its next epoch from the beginning, not from this position.
            self.start = Position(epoch=start.epoch + 1)
        with context, on_cpu():
            items = iter(self.items)
        is_lazy = stream is not None or start.in_place
        order = _drawn(items, context, width if is_lazy else max(width, _BLOCK))
        used = start.at[stream or 0] if start.at else 0
        self.head = list(islice(order, min(used, world - 1)))
        self.read = len(self.head) + sum(1 for _ in islice(order, used - len(self.head)))
        # loader.skip() counts full steps, so ``used`` may exceed a shorter last step.
        if used - self.read >= width:
            raise LoaderError("The position is past the end of a shorter epoch. Use the same data.")
        return self._cut(order, stream or 0)

    def _cut(self, order: Iterator[Any], stream: int) -> Iterator[list[Any]]:
        while chunk := list(islice(order, self.division.width)):
            self.head += chunk[: self.division.world - 1 - len(self.head)]
            self.read += len(chunk)
            self.tag = Tag(stream, len(chunk))
            yield chunk

    def _generators(self, stream: int | None) -> Context:
        """Return a context for all draws, empty for draws in place."""
        start = self.start
        generators = Generators({**global_generators(), **self.own})
        if start.in_place:
            self.states = generators.states()
            return nullcontext()
        if start.seed is None:
            # Not private, because RandomSampler's own generator continues into the next epoch.
            Generators(self.own).put(start.states or {})
            return Private(Generators(global_generators()), start.states or {})
        for part in parts_of(self.items):
            is_told = part is self.items or isinstance(part, Sampler)
            if is_told and callable(getattr(part, "set_epoch", None)):
                part.set_epoch(start.epoch)
        seed = mix(start.seed, start.epoch)
        if stream is not None:
            seed = mix(seed, stream)
        return Private(generators, generators.seeded(seed))


def _drawn(items: Iterator[Any], context: Context, block: int) -> Iterator[Any]:
    drawn = [None]
    while drawn:
        with context, on_cpu():
            drawn = list(islice(items, block))
        yield from drawn


class Reader:
    """A reader of a rank's epoch, as a stand-in for the sampler or dataset."""

    def __init__(self, loader: Any, source: SampleSource, streams: int = 1) -> None:
        self._loader = loader
        self._source = source
        self.streams = streams

    def begin(self, start: Position) -> None:
        #: The number of samples given to all ranks, by worker.
        self.at = list(start.at or (0,) * self.streams)
        for batch in range(start.skip):
            # The loader takes a batch from each worker in turn.
            self.at[batch % self.streams] += self._source.division.width
        if start.skip:
            start = replace(start, at=tuple(self.at), own=None, skip=0)
        self.start = self._source.start = start
        #: The number of batches that the loop got, and the last batch's tag.
        self.given = 0
        self.tag = Tag()

    def open(self, loader: DataLoader[Any]) -> Batches:
        """Iterate over a copy of the loader that reads this stand-in."""
        raise NotImplementedError

    def take(self, tag: Tag) -> Share:
        """Count a batch that the loop gets, and return this rank's rows."""
        self.given += 1
        self.tag = tag
        self.at[tag.stream] += tag.samples
        return self._source.division.rows(tag.samples)

    def is_complete(self) -> bool:
        """True if the epoch is known to have no more batches for any rank."""
        return False

    def position(self) -> Position:
        """Return the position after the last batch, in samples of all ranks."""
        start = self.start
        if not self.given:
            return start
        states = self._source.states if start.in_place else start.states
        return replace(start, at=tuple(self.at), states=states, own=self.tag.own)

    def __len__(self) -> int:
        """Return the number of this rank's batches after the start."""
        items, division = self._source.items, self._source.division
        return division.local_steps(max(0, len(items) - sum(self._source.start.at)))


@final
class RawReader(Reader):
    """A reader for loaders with their own ``__iter__``, such as StatefulDataLoader."""

    def open(self, loader: DataLoader[Any]) -> Batches:
        raw, used = self._loader, self.at[0]
        if self.start.own is not None:
            raw.load_state_dict(self.start.own)
            used = 0
        own_state = getattr(raw, "state_dict", lambda: None)
        for batch in islice(raw, used, None):
            yield Tag(0, 1, own=own_state()), batch

    def position(self) -> Position:
        if self.given and self.tag.own is None:
            raise LoaderError("The loader has no state_dict(). Save between epochs.")
        return super().position()

    def __len__(self) -> int:
        return len(self._loader)


@final
class SamplerReader(Reader):
    """The stand-in for the sampler or batch sampler of a map-style loader."""

    def open(self, loader: DataLoader[Any]) -> Batches:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(loader)[name] = self
        return self._tagged(iter(loader))

    def _tagged(self, batches: Iterator[Any]) -> Batches:
        source, before = self._source, self.at[0]
        for batch in batches:
            # The loader has read this step, and maybe more steps. The last step may be shorter.
            samples = min(source.division.width, source.read - before)
            if samples <= 0:
                # YOLO's InfiniteDataLoader keeps an iterator over its first sampler.
                raise LoaderError("The loader doesn't read its own sampler. Use shard=False.")
            yield Tag(0, samples), batch
            before += samples

    def __iter__(self) -> Iterator[Any]:
        # Draw in torch's order: torch calls iter() on a custom batch sampler before it draws the
        # workers' seed, and all other samplers draw at the first batch.
        is_generator = isgeneratorfunction(type(self._source.items).__iter__)
        is_eager = self._source.division.units and not is_generator
        return self._batches(self._source.chunks() if is_eager else None)

    def _batches(self, chunks: Iterator[list[Any]] | None) -> Iterator[Any]:
        source, division = self._source, self._source.division
        for chunk in chunks or source.chunks():
            share = portion(chunk, division, source.head)
            if share:
                yield share[0] if division.units else share

    def is_complete(self) -> bool:
        # Count all ranks' samples, so that a rank without a share of the last step agrees.
        size, division = length_of(self._source.items), self._source.division
        least = division.width if division.drop_last else 1
        return size is not None and self.at[0] + least > size
