"""Readers: the items of an epoch from a position on, and a rank's batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from inspect import isgeneratorfunction
from itertools import islice
from typing import Any, Final, final

from torch.utils.data import DataLoader, Sampler

from ..errors import LoaderError
from ..process.rng import Generators, Private, global_generators
from .checks import shape_of
from .sampling import (
    Division,
    Share,
    divide,
    length_of,
    mix,
    on_cpu,
    own_generators,
    parts_of,
)

#: A sampler is read in blocks, because it takes 0.2 ms to change the global generators.
_BLOCK: Final = 1 << 10

#: This rank's share and all items of each global step.
Steps = Iterator[tuple[list[Any], list[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A snapshot of the generators at the start of an epoch, and the number of samples given.

    The snapshot is the ``seed`` of all epochs, or ``states``. If both are None, the epoch draws in
    place, from the program's generators as in raw PyTorch.
    """

    epoch: int
    seed: int | None = None
    states: Mapping[str, Any] | None = None
    #: The samples given to all ranks, for each worker of an iterable dataset. Empty at the start.
    at: tuple[int, ...] = ()
    #: The state of a loader that keeps its own position.
    own: Any = None

    @property
    def in_place(self) -> bool:
        return self.seed is None and self.states is None


@dataclass(frozen=True, slots=True)
class Tag:
    """The origin of a batch. It travels with the batch, because loaders read ahead."""

    #: The number of the worker, and of the samples that were read from its stream.
    stream: int = 0
    position: int = 0
    #: The checksum of the first items of a stream, which the ranks compare.
    first: int = 0
    #: The state of a loader that keeps its own position.
    own: Any = None
    #: True if another batch follows, None if unknown.
    more: bool | None = None


#: The share of a batch without padding. Its size isn't known.
WHOLE: Final = Share(0, -1, 1)


class SampleSource:
    """The items of a sampler or dataset, and this rank's share of each global step."""

    def __init__(self, items: Any, division: Division, own: Mapping[str, Any]) -> None:
        self.items = items
        self.division = division
        self.start = Position(epoch=0)
        #: The origin of the last share.
        self.tag = Tag()
        #: The snapshot of generators from which an epoch in place was drawn.
        self.states: Mapping[str, Any] | None = None
        #: The first items of the epoch, for padding.
        self.head: list[Any] = []
        #: Generators of the loader, from which the items may draw besides the global ones.
        self._own = dict(own)

    def __len__(self) -> int:
        """Return the number of this rank's batches after the start."""
        used = sum(self.start.at)
        return self.division.local_steps(max(0, len(self.items) - used))

    def steps(self, stream: int | None = None) -> Steps:
        """Begin an epoch. ``stream`` is the worker of an iterable dataset."""
        width = self.division.width
        context = self._generators(stream)
        with context, on_cpu():
            items = iter(self.items)
        in_blocks = stream is None and not self.start.in_place
        order = _drawn(items, context, max(width, _BLOCK) if in_blocks else width)
        used = self.start.at[stream or 0] if self.start.at else 0
        self.head = list(islice(order, min(used, self.division.world - 1)))
        skipped = len(self.head)
        for _ in islice(order, used - skipped):
            skipped += 1
        # loader.skip() counts full steps, but the last step may have fewer items.
        if used - skipped >= width:
            raise LoaderError(
                f"The {type(self.items).__name__} gives a shorter epoch than the batches to "
                "skip. Use the same dataset and sampler, or skip fewer batches."
            )
        self.tag = Tag(stream or 0, skipped)
        return self._tagged(order)

    def _tagged(self, order: Iterator[Any]) -> Steps:
        for share, items in divide(order, self.division, self.head):
            self.tag = replace(self.tag, position=self.tag.position + len(items))
            yield share, items

    def _generators(self, stream: int | None) -> AbstractContextManager[Any]:
        """Return the context of all draws. In place take the snapshot."""
        start = self.start
        generators = Generators({**global_generators(), **self._own})
        if start.in_place:
            self.states = generators.states()
            return nullcontext()
        if start.seed is None:
            # The own generators go on to the next epoch. RandomSampler draws from its own at the
            # end of an epoch too.
            Generators(self._own).put(start.states or {})
            return Private(Generators(global_generators()), start.states or {})
        for part in parts_of(self.items):
            is_told = part is self.items or isinstance(part, Sampler)
            if is_told and callable(getattr(part, "set_epoch", None)):
                part.set_epoch(start.epoch)
        seed = mix(start.seed, start.epoch)
        if stream is not None:
            seed = mix(seed, stream)
        return Private(generators, generators.seeded(seed))


def _drawn(items: Iterator[Any], context: AbstractContextManager[Any], block: int) -> Iterator[Any]:
    """Yield items, drawn in blocks inside a context."""
    while True:
        with context, on_cpu():
            drawn = list(islice(items, block))
        if not drawn:
            return
        yield from drawn


class Reader:
    """A rank's reading of an epoch, by a stand-in for a sampler or dataset."""

    def __init__(
        self, loader: DataLoader[Any], division: Division, source: SampleSource, streams: int = 1
    ) -> None:
        self._loader: Any = loader
        self._division = division
        self._source = source
        self.streams = streams
        self._units = shape_of(loader).units

    def install(self, loader: DataLoader[Any]) -> None:
        """Put the stand-in into a copy of the loader."""

    def begin(self, start: Position) -> None:
        self.start = self._source.start = start
        #: The number of batches that the loop got.
        self.given = 0
        #: The tag of the last batch of each worker.
        self.tags = []
        for stream, used in enumerate(start.at or (0,) * self.streams):
            self.tags.append(Tag(stream, used, own=start.own))
        self.more: bool | None = None

    def open(self, loader: DataLoader[Any]) -> Iterator[tuple[Tag, Any]]:
        """Return an iterator over the tags and the batches."""
        return iter(loader)

    def take(self, tag: Tag) -> Share:
        """Count a batch that the loop gets, and return this rank's rows of it."""
        self.given += 1
        self.more = tag.more
        # A batch for padding repeats the tag before it.
        samples = tag.position - self.tags[tag.stream].position
        self.tags[tag.stream] = tag
        return self.real_rows(samples)

    def real_rows(self, samples: int) -> Share:
        if not self._division.pads:
            return WHOLE
        share = self._division.share(samples)
        return share._replace(size=-1) if self._units else share

    def is_complete(self) -> bool:
        """True if the epoch is known to have no more batches for any rank."""
        return False

    def position(self) -> Position:
        """Return the position after the last batch, in samples of all ranks."""
        if not self.given:
            return self.start
        states = self._source.states if self.start.in_place else self.start.states
        at = tuple(tag.position for tag in self.tags)
        return replace(self.start, at=at, states=states, own=self.tags[0].own)

    def skip(self, start: Position, count: int) -> Position:
        """Return the position ``count`` batches of each rank after ``start``."""
        at = list(start.at or (0,) * self.streams)
        for batch in range(count):
            # The loader takes a batch from each worker in turn.
            at[batch % self.streams] += self._source.division.width
        return replace(start, at=tuple(at), own=None) if count else start

    def __len__(self) -> int:
        """Return the number of this rank's batches from the start of the epoch on."""
        return len(self._source)


@final
class RawReader(Reader):
    """Reads a loader with ``shard=False`` and its own ``__iter__``.

    The state of a loader such as torchdata's StatefulDataLoader is the position.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        division = Division(rank=0, world=1, batch=1, even=True, drop_last=False)
        super().__init__(loader, division, SampleSource((), division, {}))

    def open(self, loader: DataLoader[Any]) -> Iterator[tuple[Tag, Any]]:
        own, used = self.tags[0].own, self.tags[0].position
        if own is not None:
            self._loader.load_state_dict(own)
        batches = iter(self._loader)
        return self._tagged(batches if own is not None else islice(batches, used, None), used)

    def _tagged(self, batches: Iterator[Any], used: int) -> Iterator[tuple[Tag, Any]]:
        own_state = getattr(self._loader, "state_dict", lambda: None)
        for number, batch in enumerate(batches, used + 1):
            yield Tag(0, number, own=own_state()), batch

    def __len__(self) -> int:
        return len(self._loader)


@final
class SamplerReader(Reader):
    """The stand-in for the sampler or batch sampler of a map-style loader."""

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        sampler = shape_of(loader).sampler
        source = SampleSource(sampler, division, own_generators(loader))
        super().__init__(loader, division, source)

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    @property
    def sampler(self) -> Any:
        # StatefulDataLoader asks for the length of the batch sampler's sampler.
        return self._source.items.sampler if self._units else self._source.items

    def open(self, loader: DataLoader[Any]) -> Iterator[tuple[Tag, Any]]:
        return self._tagged(iter(loader))

    def _tagged(self, batches: Iterator[Any]) -> Iterator[tuple[Tag, Any]]:
        before = sum(self.start.at)
        for batch in batches:
            # The loader has read this step, and perhaps more. The last one may be shorter.
            end = min(before + self._division.width, self._source.tag.position)
            if end <= before:
                # YOLO's InfiniteDataLoader keeps an iterator over its first sampler.
                raise LoaderError(
                    "The loader does not give one batch for each batch of its sampler. Use a plain "
                    "DataLoader, or LoaderOptions(shard=False)."
                )
            yield Tag(0, end), batch
            before = end

    def __iter__(self) -> Iterator[Any]:
        # torch calls iter() of a custom batch sampler before it draws the seed of the workers,
        # and all other samplers draw when the loader asks for the first batch.
        is_eager = self._units and not isgeneratorfunction(type(self._source.items).__iter__)
        return self._batches(self._source.steps() if is_eager else None)

    def _batches(self, steps: Steps | None) -> Iterator[Any]:
        for share, _ in steps or self._source.steps():
            if share:
                yield share[0] if self._units else share

    def is_complete(self) -> bool:
        # The same on every rank at the same step, also on a rank without a share of the last step.
        size = length_of(self._source.items)
        least = self._division.width if self._division.drop_last else 1
        return size is not None and self.tags[0].position + least > size
