"""Readers: how a rank reads one epoch of a loader, and its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from inspect import isgeneratorfunction
from typing import Any, NamedTuple, final

from torch.utils.data import DataLoader, Sampler

from ..errors import LoaderError
from ..process.rng import Generators, Private
from .checks import length_of, shape_of
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
    #: The checksum of the skipped samples. None after ``loader.skip``.
    checksum: int | None = None
    states: Mapping[str, Any] | None = None
    #: The state of a loader, or the states of datasets, that keep their own position.
    own: Any = None

    @property
    def in_place(self) -> bool:
        return self.seed is None and self.states is None


class RealRows(NamedTuple):
    """The rows of a batch that aren't padding: the first ``real`` of ``rows``.

    If the number of rows isn't known, ``rows`` is None and ``real`` is 1 or 0.
    """

    pads: bool
    rows: int | None
    real: int


WHOLE = RealRows(False, None, 1)


def real_rows(division: Division, units: bool, count: int) -> RealRows:
    """Return the real rows of this rank's batch of a global step of ``count`` samples."""
    share = division.share(count)
    return RealRows(True, None if units else share.size, share.real) if division.pads else WHOLE


class Reader:
    """One rank's reading of one epoch. This class reads a loader that accel can't follow.

    That is a loader with ``shard=False`` and its own ``__iter__``. torchdata's StatefulDataLoader
    keeps its position, which travels with each batch.
    """

    start = Start(0)
    #: The real rows of the last batch, and the number of batches that the loop got.
    rows: RealRows = WHOLE
    given: int = 0
    #: True if another batch follows, None if unknown.
    more: bool | None = None

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader: Any = loader
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    def install(self, loader: DataLoader[Any]) -> None:
        """Replace the sampler or dataset of a copy of the loader."""

    def begin(self, start: Start, in_place: bool) -> None:
        self.start = start
        self.given = 0
        self._at = sum(start.at)
        self._closed = False
        self._own = start.own

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return an iterator over items, which ``take`` makes batches of."""
        if self._own is not None:
            self._loader.load_state_dict(self._own)
        batches = iter(self._loader)
        if self._own is None:
            for _ in range(self._at):
                next(batches, None)
        return ((batch, self._loader.state_dict() if self.stateful else None) for batch in batches)

    def take(self, item: Any) -> Any:
        """Count an item that the loop gets, and return its batch."""
        self.given += 1
        self._at += 1
        batch, self._own = item
        return batch

    def close(self) -> None:
        """Note that the loader's iterator has ended."""
        self._closed = True

    def complete(self) -> bool:
        """True if the epoch has no more batches for any rank."""
        return self._closed or (not self.stateful and self._at == length_of(self._loader))

    def position(self) -> Start:
        """Return the position after the last batch, which counts the samples of all ranks."""
        position = self.start._replace(at=(self._at,), own=self._own)
        self.resume(position)
        return position

    def skip(self, start: Start, count: int) -> Start:
        """Return the position ``count`` batches of each rank after ``start``."""
        return start._replace(at=(sum(start.at) + count,), own=None) if count else start

    def resume(self, start: Start) -> None:
        """Raise LoaderError if an epoch can't continue at a position."""
        if any(start.at) and start.own is None:
            raise LoaderError(
                f"A {type(self._loader).__qualname__} with shard=False has no position in "
                "mid-epoch because it reads in its own way. Save between epochs."
            )

    def __len__(self) -> int:
        """Return the number of this rank's batches, those of a full epoch before ``begin``."""
        return len(self._loader)


@final
class SamplerReader(Reader):
    """The stand-in for the sampler or batch sampler of a map-style loader."""

    stateful = False

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        self._division = division
        self._sampler, *_, self._units = shape_of(loader)
        self._own_generators = Generators(own_generators(loader))
        self._generators = Generators(drawn_from(self._sampler, own_generators(loader)))

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    @property
    def sampler(self) -> Any:
        """The sampler of the replaced batch sampler. StatefulDataLoader asks for its length."""
        return self._sampler.sampler if self._units else self._sampler

    def begin(self, start: Start, in_place: bool) -> None:
        super().begin(start, in_place)
        #: The samples of all ranks, and real rows, of batches that the loop hasn't got yet.
        self._pending: deque[tuple[list[Any], RealRows]] = deque()
        self._had_no_share = False
        self._states = start.states
        # An order in place is drawn when the loader asks for it, as in raw PyTorch.
        self._order = None if start.in_place else self._draw(start)
        if self._order is not None and in_place and start.states is not None:
            # The rest is drawn in place too. rng_state() has restored the global generators.
            self._own_generators.put(self._order.context.states)
            self._order.context = nullcontext()

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return iter(loader)

    def _draw(self, start: Start) -> SampleOrder:
        """Return the order of an epoch at a position."""
        states = start.states or {}
        if start.seed is not None:
            for part in parts_of(self._sampler):
                if part is self._sampler or isinstance(part, Sampler):
                    set_epoch(part, start.epoch)
            states = self._generators.seeded(mix(start.seed, start.epoch))
        elif start.states is None:
            self._states = self._generators.states()
        context = nullcontext() if start.in_place else Private(self._generators, states)
        order = SampleOrder(self._sampler, context)
        count = sum(start.at)
        skipped, self._checksum = order.skip(count, self._division.world - 1)
        is_same = (skipped, self._checksum) == (count, start.checksum)
        if start.checksum is None:
            # loader.skip() counts full steps, but the last step may have fewer samples.
            is_same = count - self._division.width < skipped
        if count and (len(start.at) != 1 or not is_same):
            raise LoaderError(
                f"The {type(self._sampler).__name__} draws a different or shorter order than in "
                "the saved epoch. Use the same dataset and sampler, or leave the loader out."
            )
        self._at = skipped
        return order

    def __iter__(self) -> Iterator[Any]:
        # torch calls iter() of a custom batch sampler before it draws the seed of the workers.
        is_lazy = isgeneratorfunction(type(self._sampler).__iter__)
        if self._order is None and self._units and not is_lazy:
            self._order = self._draw(self.start)
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        if self._order is None:
            self._order = self._draw(self.start)
        for share, items in divide(self._order.read, self._division, self._order.head):
            self._had_no_share = not share
            if share:
                rows = real_rows(self._division, self._units, len(items))
                self._pending.append((items, rows))
                yield share[0] if self._units else share

    def __len__(self) -> int:
        return self._division.local_steps(max(0, len(self._sampler) - sum(self.start.at)))

    def take(self, item: Any) -> Any:
        self._check(bool(self._pending))
        items, self.rows = self._pending.popleft()
        self.given += 1
        self._at += len(items)
        self._checksum = digest(items, self._checksum)
        return item

    def close(self) -> None:
        self._check(not self._pending)

    def _check(self, follows_sampler: bool) -> None:
        if not follows_sampler:
            raise LoaderError(
                "The loader does not give one batch for each batch of its sampler, so padding and "
                "position are unknown. Use a plain DataLoader, or LoaderOptions(shard=False)."
            )

    def complete(self) -> bool:
        # The same on every rank at the same step, also on a rank without a share of the last step.
        if self._pending or self._order is None:
            return False
        length = length_of(self._sampler)
        if length is None:
            return self._order.ended and not self._had_no_share
        least = self._division.width if self._division.drop_last else 1
        return self._at + least > length

    def position(self) -> Start:
        checksum = self._checksum if self._at else None
        return self.start._replace(at=(self._at,), checksum=checksum, states=self._states, own=None)

    def skip(self, start: Start, count: int) -> Start:
        at = sum(start.at) + count * self._division.width
        return start._replace(at=(at,), checksum=None) if count else start

    def resume(self, start: Start) -> None:
        if any(start.at):
            self._draw(start)
