"""Readers: how a rank reads one epoch of a loader, and its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from inspect import isgeneratorfunction
from itertools import islice
from typing import Any, Final, NamedTuple, final

from torch.utils.data import DataLoader

from ..errors import LoaderError
from .checks import shape_of
from .sampling import Division, digest, length_of, own_generators
from .source import Position, Source, Tag

#: A seeded order is drawn in blocks, because it takes 0.2 ms to change the global generators.
_BLOCK: Final = 1 << 10


class RealRows(NamedTuple):
    """The rows of a batch that aren't padding: the first ``real`` of ``rows``.

    If the number of rows isn't known, ``rows`` is None and ``real`` is 1 or 0.
    """

    pads: bool
    rows: int | None
    real: int


WHOLE = RealRows(False, None, 1)


class Reader:
    """One rank's reading of one epoch, of a loader with a stand-in for its sampler or dataset."""

    #: True if the dataset or loader keeps its own position.
    stateful = False
    #: The real rows of the last batch.
    rows: RealRows = WHOLE

    def __init__(self, loader: DataLoader[Any], division: Division, streams: int = 1) -> None:
        self._loader: Any = loader
        self._division = division
        self._streams = streams
        self._units = shape_of(loader).units
        self.start = Position(epoch=0)

    def install(self, loader: DataLoader[Any]) -> None:
        """Replace the sampler or dataset of a copy of the loader."""

    def begin(self, start: Position, in_place: bool) -> None:
        self.start = start
        #: The number of batches that the loop got.
        self.given = 0
        #: A snapshot of the generators.
        self.states = start.states
        #: The tag of the last batch of each worker.
        self.tags = [start.tag(stream) for stream in range(self._streams)]
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

    def complete(self) -> bool:
        """True if the epoch is known to have no more batches for any rank."""
        return False

    def position(self) -> Position:
        """Return the position after the last batch, which counts the samples of all ranks."""
        at = tuple(tag.position for tag in self.tags)
        own = [tag.state for tag in self.tags] if self.stateful and self.given else self.start.own
        return replace(self.start, at=at, states=self.states, own=own)

    def skip(self, start: Position, count: int) -> Position:
        """Return the position ``count`` batches of each rank after ``start``."""
        at = list(start.at if start.count else (0,) * self._streams)
        for batch in range(count):
            # The loader takes a batch from each worker in turn.
            at[batch % self._streams] += self._division.width
        return replace(start, at=tuple(at), checksum=None, own=None) if count else start

    def check(self, position: Position) -> None:
        """Raise LoaderError if an epoch can't continue at a position."""

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
        if tag.state is not None:
            self._loader.load_state_dict(tag.state)
        batches = iter(self._loader)
        if tag.state is None:
            batches = islice(batches, tag.position, None)
        return (
            (self._tag(number), batch) for number, batch in enumerate(batches, tag.position + 1)
        )

    def _tag(self, number: int) -> Tag:
        return Tag(0, number, state=self._loader.state_dict() if self.stateful else None)

    def position(self) -> Position:
        position = super().position()
        self.check(position)
        return position

    def check(self, position: Position) -> None:
        if position.count and position.own is None:
            raise LoaderError(
                f"A {type(self._loader).__qualname__} with shard=False has no position in "
                "mid-epoch because it reads in its own way. Save between epochs."
            )


@final
class SamplerReader(Reader):
    """The stand-in for the sampler or batch sampler of a map-style loader."""

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        super().__init__(loader, division)
        sampler = shape_of(loader).sampler
        self._source = Source(sampler, division, own_generators(loader), digest)

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    @property
    def sampler(self) -> Any:
        """The sampler of the replaced batch sampler. StatefulDataLoader asks for its length."""
        return self._source.items.sampler if self._units else self._source.items

    def begin(self, start: Position, in_place: bool) -> None:
        super().begin(start, in_place)
        #: The tags of batches that the loader hasn't given yet.
        self._pending: deque[Tag] = deque()
        self._is_open = not start.in_place
        if self._is_open:
            self._open(start, 0 if in_place else _BLOCK)

    def _open(self, start: Position, block: int) -> None:
        self._source.open(start, start.epoch_seed, start.tag(0), block=block)
        self._is_open = True
        self.states, self.tags = self._source.states, [self._source.tag]

    def open(self, loader: DataLoader[Any]) -> Iterator[tuple[Tag, Any]]:
        batches = iter(loader)
        return ((self._tag(), batch) for batch in batches)

    def _tag(self) -> Tag:
        if not self._pending:
            raise LoaderError(
                "The loader does not give one batch for each batch of its sampler, so padding and "
                "position are unknown. Use a plain DataLoader, or LoaderOptions(shard=False)."
            )
        return self._pending.popleft()

    def __iter__(self) -> Iterator[Any]:
        # torch calls iter() of a custom batch sampler before it draws the seed of the workers.
        is_lazy = isgeneratorfunction(type(self._source.items).__iter__)
        if self._units and not is_lazy and not self._is_open:
            self._open(self.start, 0)
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        # Raw PyTorch draws the order when the loader asks for the first batch.
        if not self._is_open:
            self._open(self.start, 0)
        for share, _ in self._source.shares():
            if share:
                self._pending.append(self._source.tag)
                yield share[0] if self._units else share

    def complete(self) -> bool:
        # The same on every rank at the same step, also on a rank without a share of the last step.
        size = length_of(self._source.items)
        least = self._division.width if self._division.drop_last else 1
        return size is not None and self.tags[0].position + least > size

    def position(self) -> Position:
        tag = self.tags[0]
        return replace(super().position(), checksum=tag.checksum if tag.position else None)

    def check(self, position: Position) -> None:
        if position.count and len(position.at) > 1:
            raise LoaderError("The state was saved in mid-epoch of a different dataset.")
        if position.count:
            self._open(position, _BLOCK)

    def __len__(self) -> int:
        return self._division.local_steps(max(0, len(self._source.items) - self.start.count))
