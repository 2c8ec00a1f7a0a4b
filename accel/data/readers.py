"""Readers: how a rank reads one epoch of a loader, and the position in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple, final

from torch.utils.data import DataLoader, Sampler

from ..errors import LoaderError
from ..process.rng import Generators, Private
from .checks import has_own_iter, length_of, shape_of
from .sampling import (
    Division,
    SampleOrder,
    digest,
    divide,
    drawn_from,
    mix,
    own_generators,
    parts_of,
    set_epoch,
)


class Start(NamedTuple):
    """The start of an epoch, or a position in it.

    ``seed`` decides the order, or else ``states``, a snapshot of the generators. If both are None,
    the order is drawn in place, from the program's generators as in raw PyTorch.
    """

    epoch: int
    seed: int | None = None
    #: The number of samples to skip, for each stream of an iterable dataset.
    at: tuple[int, ...] = ()
    #: The checksum of the skipped samples of an order.
    checksum: int | None = None
    states: Mapping[str, Any] | None = None
    #: The state of a loader or of datasets that keep their own position.
    own: Any = None

    @property
    def in_place(self) -> bool:
        return self.seed is None and self.states is None


class RealRows(NamedTuple):
    """The rows of a batch that aren't padding: the first ``real`` of ``rows``.

    If the number of rows is unknown (``rows`` is None), all rows are real if ``real`` is 1.
    """

    pads: bool
    rows: int | None
    real: int


WHOLE = RealRows(False, None, 1)


def real_rows(division: Division, units: bool, count: int) -> RealRows:
    """Return the real rows of this rank's batch of a global step of ``count`` samples."""
    if not division.pads:
        return WHOLE
    share = division.share(count)
    return RealRows(True, None if units else share.size, share.real)


class EpochReader:
    """One rank's reading of one epoch, and the position of the loop in it."""

    start: Start
    #: The real rows of the batch that the loop got last.
    rows: RealRows = WHOLE
    #: The number of batches that the loop got.
    given: int = 0
    #: True if the loader keeps its own position.
    stateful: bool = False

    def skip(self, start: Start, count: int) -> Start:
        """Return the position ``count`` batches of each rank after ``start``."""
        return start

    def install(self, loader: DataLoader[Any]) -> None:
        """Replace the sampler or dataset of a copy of the loader."""

    def begin(self, start: Start, in_place: bool) -> None:
        self.start = start
        self.given = 0
        self._closed = False

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return iter(loader)

    def take(self, item: Any) -> Any:
        """Count an item of the loader's iterator and return the batch in it."""
        self.given += 1
        return item

    def close(self) -> None:
        """Note that the loader's iterator has ended."""
        self._closed = True

    def upcoming(self, count: int) -> int | None:
        """Return how many of the next ``count`` batches there are, or None if unknown."""
        return None

    def complete(self) -> bool:
        """True if the epoch has no more batches for any rank."""
        return self._closed

    def position(self) -> Start:
        """Return the position after the last batch, which counts the samples of all ranks."""
        return self.start

    def resume(self, start: Start) -> None:
        """Raise LoaderError if the epoch can't continue at a saved position."""

    def length(self) -> int:
        """Return the number of this rank's batches in a whole epoch."""
        return 0


@final
class RawReader(EpochReader):
    """The reader of a loader with ``shard=False`` whose class accel can't follow."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader: Any = loader
        self._skip = 0
        # torchdata's StatefulDataLoader
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    def begin(self, start: Start, in_place: bool) -> None:
        super().begin(start, in_place)
        if start.own is not None:
            self._loader.load_state_dict(start.own)

    def skip(self, start: Start, count: int) -> Start:
        self._skip = count
        return start

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        batches = iter(loader)
        for _ in islice(batches, self._skip):
            self.given += 1
        return batches

    def complete(self) -> bool:
        length = None if self.stateful else length_of(self._loader)
        return self._closed or (length is not None and self.given >= length)

    def position(self) -> Start:
        if self.stateful:
            at = (sum(self.start.at) + self.given,)
            return self.start._replace(at=at, own=self._loader.state_dict())
        self._check_start(self.given)
        return self.start._replace(at=(0,))

    def resume(self, start: Start) -> None:
        if not self.stateful:
            self._check_start(sum(start.at))

    def _check_start(self, at: int) -> None:
        if at:
            raise LoaderError(
                f"A {type(self._loader).__qualname__} with shard=False has no position in "
                "mid-epoch because it reads in its own way. Save between epochs."
            )

    def length(self) -> int:
        return len(self._loader)


@final
class SamplerReader(EpochReader):
    """The stand-in for the sampler or batch sampler of a map-style loader."""

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        self._shape = shape_of(loader)
        self._division = division
        self._own = own_generators(loader)
        self._generators = Generators(drawn_from(self._shape.sampler, self._own))

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    @property
    def sampler(self) -> Any:
        """The sampler of the replaced batch sampler. StatefulDataLoader asks for its length."""
        return self._shape.sampler.sampler if self._shape.units else self._shape.sampler

    def _draw(self, start: Start) -> SampleOrder:
        """Return the order of an epoch at a position, drawn from a seed or a snapshot."""
        sampler = self._shape.sampler
        states = start.states or {}
        if start.seed is not None:
            for part in parts_of(sampler):
                if part is sampler or isinstance(part, Sampler):
                    set_epoch(part, start.epoch)
            states = self._generators.seeded(mix(start.seed, start.epoch))
        order = SampleOrder(sampler, Private(self._generators, states))
        return self._at_position(order, start)

    def _at_position(self, order: SampleOrder, start: Start) -> SampleOrder:
        """Skip the samples before a position. A position of ``skip`` has no checksum."""
        count = sum(start.at)
        skipped, checksum = order.skip(count, self._division.world - 1)
        is_same = skipped == count and start.checksum in (checksum, None)
        if count and (len(start.at) != 1 or not is_same):
            raise LoaderError(
                f"The {type(self._shape.sampler).__name__} draws a different or shorter order than "
                "in the saved epoch. Use the same dataset and sampler, or leave the loader out."
            )
        self._checksum = checksum
        return order

    def skip(self, start: Start, count: int) -> Start:
        if not count:
            return start
        at = sum(start.at) + count * self._division.width
        length = length_of(self._shape.sampler)
        return start._replace(at=(at if length is None else min(at, length),), checksum=None)

    def resume(self, start: Start) -> None:
        if any(start.at):
            self._draw(start)

    def begin(self, start: Start, in_place: bool) -> None:
        super().begin(start, in_place)
        #: True if the last step had no samples for this rank.
        self._had_no_share = False
        #: The samples of all ranks, and real rows, of batches that the loop hasn't got yet.
        self._pending: deque[tuple[list[Any], RealRows]] = deque()
        self._at = sum(start.at)
        self._checksum = 0
        self._states = start.states
        self._order: SampleOrder | None = None
        if start.in_place:
            # The order is drawn when the loader asks for it, as in raw PyTorch.
            return
        self._order = self._draw(start)
        if in_place and start.states is not None:
            # The rest is drawn in place too. rng_state() has restored the global generators.
            Generators(self._own).put(self._order.context.states)
            self._order.context = nullcontext()

    def __iter__(self) -> Iterator[Any]:
        # torch calls iter() of a custom batch sampler now, and of other samplers at the first batch.
        if self._order is None and self._shape.units:
            self._draw_in_place()
        return self._batches()

    def _draw_in_place(self) -> SampleOrder:
        self._states = self._generators.states()
        order = SampleOrder(self._shape.sampler, nullcontext())
        self._order = self._at_position(order, self.start)
        return self._order

    def _batches(self) -> Iterator[Any]:
        order = self._order or self._draw_in_place()
        units = self._shape.units
        for share, items in divide(order.read, self._division, order.head):
            self._had_no_share = not share
            if share:
                self._pending.append((items, real_rows(self._division, units, len(items))))
                yield share[0] if units else share

    def __len__(self) -> int:
        rest = len(self._shape.sampler) - sum(self.start.at)
        return self._division.local_steps(max(0, rest))

    def take(self, item: Any) -> Any:
        self.given += 1
        self._check_pending(bool(self._pending))
        items, self.rows = self._pending.popleft()
        self._at += len(items)
        self._checksum = digest(items, self._checksum)
        return item

    def close(self) -> None:
        self._check_pending(not self._pending)

    def _check_pending(self, right: bool) -> None:
        if not right:
            raise LoaderError(
                "The loader does not give one batch for each batch of its sampler, so padding and "
                "position are unknown. Use a plain DataLoader, or LoaderOptions(shard=False)."
            )

    def upcoming(self, count: int) -> int | None:
        if self._order is None:
            return None
        waiting = len(self._pending)
        items = self._order.peek(max(0, count - waiting) * self._division.width)
        return min(count, waiting + self._division.local_steps(items))

    def complete(self) -> bool:
        # The same on every rank at the same step, also if a rank has no share of the last one.
        if self._pending or self._order is None:
            return False
        width, length = self._division.width, length_of(self._shape.sampler)
        if length is None:
            return self._order.ended and not self._had_no_share
        least = width if self._division.drop_last else 1
        return self._at + least > length and self._order.peek(width) < least

    def position(self) -> Start:
        checksum = self._checksum if self._at else None
        return self.start._replace(at=(self._at,), checksum=checksum, states=self._states, own=None)

    def length(self) -> int:
        return self._division.local_steps(len(self._shape.sampler))


def is_followed(loader: DataLoader[Any]) -> bool:
    """True if a loader reads one batch after the other, from its sampler or its dataset."""
    return not has_own_iter(loader) and (loader.in_order or not loader.num_workers)
