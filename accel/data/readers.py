"""Readers: the items of an epoch from a position on, and a rank's batches."""

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
from .checks import shape_of
from .sampling import Division, Share, divide, length_of, mix, on_cpu, own_generators, parts_of

#: A sampler is read in blocks, because it takes 0.2 ms to change the global generators.
_BLOCK: Final = 1 << 10

#: This rank's share and all items of each global step.
Steps = Iterator[tuple[list[Any], list[Any]]]
Context = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The generators at the start of an epoch, and the number of samples given.

    Without ``seed`` and ``states`` the epoch draws in place, as raw PyTorch does.
    """

    epoch: int
    #: The seed of all epochs.
    seed: int | None = None
    states: Mapping[str, Any] | None = None
    #: The samples given to all ranks, for each worker of a stream. Empty at the start.
    at: tuple[int, ...] = ()
    #: The state of a loader that keeps its own position.
    own: Any = None

    @property
    def in_place(self) -> bool:
        return self.seed is None and self.states is None


@dataclass(frozen=True, slots=True)
class Tag:
    """The origin of a batch. It travels with the batch, because loaders read ahead."""

    #: The number of the worker, and of the samples read from its stream.
    stream: int = 0
    position: int = 0
    #: The checksum of a stream's first items, for a comparison.
    first: int = 0
    own: Any = None
    #: True if another batch follows, None if unknown.
    more: bool | None = None


#: Batches with their tags.
Batches = Iterator[tuple[Tag, Any]]

#: The share of a batch without padding. Its size isn't known.
WHOLE: Final = Share(0, -1, 1)


@dataclass(eq=False)
class SampleSource:
    """The items of a sampler or dataset, in shares."""

    items: Any
    division: Division
    #: The generators of the loader. The items may draw from them and the global ones.
    own: Mapping[str, Any] = field(default_factory=dict)
    start: Position = Position(epoch=0)
    #: The origin of the last share.
    tag: Tag = Tag()
    #: The snapshot before an epoch in place.
    states: Mapping[str, Any] | None = None
    #: The first items of the epoch, for padding.
    head: list[Any] = field(default_factory=list)

    def steps(self, stream: int | None = None) -> Steps:
        """Begin an epoch, for an iterable dataset in the worker ``stream``."""
        start, width = self.start, self.division.width
        context = self._generators(stream)
        with context, on_cpu():
            items = iter(self.items)
        in_blocks = stream is None and not start.in_place
        order = _drawn(items, context, max(width, _BLOCK) if in_blocks else width)
        used = start.at[stream or 0] if start.at else 0
        self.head = list(islice(order, min(used, self.division.world - 1)))
        skipped = len(self.head)
        for _ in islice(order, used - skipped):
            skipped += 1
        # loader.skip() counts full steps, but the last step may have fewer items.
        if used - skipped >= width:
            raise LoaderError(
                f"The {type(self.items).__name__} gives a shorter epoch than the batches to "
                "skip. Use the same dataset and sampler."
            )
        self.tag = Tag(stream or 0, skipped)
        return self._tagged(order)

    def _tagged(self, order: Iterator[Any]) -> Steps:
        for share, items in divide(order, self.division, self.head):
            self.tag = replace(self.tag, position=self.tag.position + len(items))
            yield share, items

    def _generators(self, stream: int | None) -> Context:
        """Return the context of all draws, in place after a snapshot."""
        start = self.start
        generators = Generators({**global_generators(), **self.own})
        if start.in_place:
            self.states = generators.states()
            return nullcontext()
        if start.seed is None:
            # RandomSampler also draws from its own at the end, so they go on to the next epoch.
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
    """A rank's reading of an epoch, by a stand-in for a sampler or dataset."""

    def __init__(
        self, loader: DataLoader[Any], division: Division, source: SampleSource, streams: int = 1
    ) -> None:
        self._loader: Any = loader
        self._division = division
        self._source = source
        self._units = shape_of(loader).units
        self.streams = streams

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

    def open(self, loader: DataLoader[Any]) -> Batches:
        """Return an iterator over the batches and their tags."""
        raise NotImplementedError

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
        if not count:
            return start
        at = list(start.at or (0,) * self.streams)
        for batch in range(count):
            # The loader takes a batch from each worker in turn.
            at[batch % self.streams] += self._source.division.width
        return replace(start, at=tuple(at), own=None)

    def __len__(self) -> int:
        """Return the number of this rank's batches after the start."""
        items, division = self._source.items, self._source.division
        return division.local_steps(max(0, len(items) - sum(self._source.start.at)))


@final
class RawReader(Reader):
    """Reads a loader with ``shard=False`` and its own ``__iter__``.

    The state of a loader such as torchdata's StatefulDataLoader is the position.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        division = Division(rank=0, world=1, batch=1, even=True, drop_last=False)
        super().__init__(loader, division, SampleSource((), division))

    def open(self, loader: DataLoader[Any]) -> Batches:
        raw, used = self._loader, sum(self.start.at)
        if self.start.own is not None:
            raw.load_state_dict(self.start.own)
        batches = iter(raw) if self.start.own is not None else islice(raw, used, None)
        own_state = getattr(raw, "state_dict", lambda: None)
        for number, batch in enumerate(batches, used + 1):
            yield Tag(0, number, own=own_state()), batch

    def position(self) -> Position:
        if self.given and self.tags[0].own is None:
            kind = type(self._loader).__name__
            raise LoaderError(f"{kind} has no state_dict() for its position. Save between epochs.")
        return super().position()

    def __len__(self) -> int:
        return len(self._loader)


@final
class SamplerReader(Reader):
    """The stand-in for the sampler or batch sampler of a map-style loader."""

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        source = SampleSource(shape_of(loader).sampler, division, own_generators(loader))
        super().__init__(loader, division, source)

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    @property
    def sampler(self) -> Any:
        # StatefulDataLoader asks for the length of the batch sampler's sampler.
        return self._source.items.sampler if self._units else self._source.items

    def open(self, loader: DataLoader[Any]) -> Batches:
        return self._tagged(iter(loader))

    def _tagged(self, batches: Iterator[Any]) -> Batches:
        before = sum(self.start.at)
        for batch in batches:
            # The loader has read this step, and perhaps more. The last one may be shorter.
            end = min(before + self._division.width, self._source.tag.position)
            if end <= before:
                # YOLO's InfiniteDataLoader keeps an iterator over its first sampler.
                raise LoaderError(
                    "The loader does not give one batch for each batch of its sampler. "
                    "Use a plain DataLoader or shard=False."
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
