"""Feeds: what one copy of a loader reads in one epoch, in the place of what it shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from torch.utils.data import BatchSampler, DataLoader

from .errors import LoaderError
from .sampling import Plan, batches, digest, draw, unpack


class Shape(NamedTuple):
    """What a loader batches; with ``units`` each item of its sampler, such as a custom batch, stays whole."""

    sampler: Any
    batch: int
    drop_last: bool
    units: bool


def shape_of(loader: DataLoader[Any]) -> Shape:
    """The shape of a loader now; its batch sampler is an object that the user may change."""
    batcher = loader.batch_sampler
    if batcher is None:
        return Shape(loader.sampler, 1, False, True)
    if type(batcher) is BatchSampler:
        return Shape(batcher.sampler, batcher.batch_size, batcher.drop_last, False)
    return Shape(batcher, 1, False, True)


class Start(NamedTuple):
    """Where an epoch starts: the samples to skip of each stream, if any, and its order where it was drawn already."""

    epoch: int
    at: tuple[int, ...] = ()
    order: Sequence[Any] | None = None


class Kept(NamedTuple):
    """What of a batch is no padding: the first ``real`` of ``rows``; all or nothing where ``rows`` is None."""

    pads: bool
    rows: int | None
    real: int


WHOLE = Kept(False, None, 1)


def kept_of(plan: Plan, units: bool, count: int) -> Kept:
    """What is kept of this rank's batch of a global step of ``count`` samples."""
    if not plan.pads:
        return WHOLE
    share = plan.share(count)
    return Kept(True, None if units else share.size, share.real)


class Position(NamedTuple):
    """The samples of each stream that the loops of all ranks were given, and a checksum of the order."""

    at: tuple[int, ...]
    checksum: int | None


class Feed(ABC):
    """One rank's reading of one epoch, and how much of it was handed to the loop."""

    start: Start
    kept: Kept = WHOLE
    given: int = 0

    @abstractmethod
    def install(self, loader: DataLoader[Any]) -> None:
        """Takes its place in a copy of the user's loader."""

    @abstractmethod
    def begin(self, seed: int, start: Start) -> None:
        """Starts an epoch."""

    @abstractmethod
    def take(self, item: Any) -> Any:
        """Counts one item of the loader's iterator; returns the user's batch in it."""

    @abstractmethod
    def close(self) -> None:
        """The loader's iterator has ended: checks that it gave what was planned."""

    @abstractmethod
    def complete(self) -> bool:
        """Whether this epoch is known to have nothing more, for any rank."""

    @abstractmethod
    def position(self) -> Position:
        """Where the loops of all ranks stand."""

    @abstractmethod
    def resume(self, seed: int, epoch: int, position: Position) -> Start:
        """The start at a saved position, checked against what would be read now."""

    @abstractmethod
    def length(self) -> int:
        """This rank's batches of a whole epoch."""


@final
class Whole(Feed):
    """The off switch: the loader reads as in raw PyTorch, every rank by itself."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def install(self, loader: DataLoader[Any]) -> None:
        """The loader keeps its sampler and dataset."""

    def begin(self, seed: int, start: Start) -> None:
        """Starts an epoch."""
        self.start, self.given = start, 0

    def take(self, item: Any) -> Any:
        """Counts one batch."""
        self.given += 1
        return item

    def close(self) -> None:
        """Nothing was planned."""

    def complete(self) -> bool:
        """Where the loader has a length."""
        try:
            return self.given >= len(self._loader)
        except TypeError:
            return False

    def position(self) -> Position:
        """Known at the start of an epoch only."""
        if self.given:
            raise LoaderError(
                "the position of a loader with LoaderOptions(shard=False) was asked for in mid-epoch, after "
                f"{self.given} batches. accel does not draw its order and could not resume there: save between epochs, "
                "or leave the sharding to accel."
            )
        return Position((0,), None)

    def resume(self, seed: int, epoch: int, position: Position) -> Start:
        """Between epochs only."""
        if any(position.at):
            raise LoaderError(
                f"the state is {sum(position.at)} samples into epoch {epoch}, and a loader with "
                "LoaderOptions(shard=False) can only resume between epochs: accel does not draw its order."
            )
        return Start(epoch)

    def length(self) -> int:
        """As the loader says."""
        return len(self._loader)


@final
class Shard(Feed):
    """Stands in for the sampler, or batch sampler, of a map-style loader."""

    def __init__(self, shape: Shape, plan: Plan) -> None:
        self._shape = shape
        self._plan = plan

    def install(self, loader: DataLoader[Any]) -> None:
        """Becomes the loader's index sampler."""
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    def _draw(self, seed: int, epoch: int) -> Sequence[Any]:
        """The order of an epoch."""
        return draw(self._shape.sampler, self._shape.units, seed, epoch)

    def begin(self, seed: int, start: Start) -> None:
        """Draws the order, where it is not drawn yet."""
        self._order = self._draw(seed, start.epoch) if start.order is None else start.order
        self.start, self.given, self._asked = start, 0, False
        self._first = sum(start.at)
        remaining = len(self._order) - self._first
        self._full, tail = self._plan.steps(remaining)
        self._steps, self._global_steps = self._plan.local_steps(remaining), self._plan.global_steps(remaining)
        self._whole = kept_of(self._plan, self._shape.units, self._plan.width)
        self._last = kept_of(self._plan, self._shape.units, tail)

    def __iter__(self) -> Iterator[Any]:
        self._asked = True
        lists = batches(self._order, self._first, self._plan)
        return (unpack(batch[0]) for batch in lists) if self._shape.units else lists

    def __len__(self) -> int:
        return self._steps

    def take(self, item: Any) -> Any:
        """Counts one batch."""
        self.given += 1
        if self.given > self._steps or not self._asked:
            self._refuse()
        self.kept = self._whole if self.given <= self._full else self._last
        return item

    def close(self) -> None:
        """A loader that gives fewer batches would shift every position."""
        if self.given < self._steps:
            self._refuse()

    def _refuse(self) -> None:
        """Raises for a loader that does not give one batch for each batch of indices."""
        raise LoaderError(
            f"epoch {self.start.epoch}: the sampler of the loader has {self._steps} batches for this rank, and the loader "
            f"gave {self.given}{'' if self._asked else ' without asking its sampler'}. Its class or dataset does not give "
            "one batch for each batch of its sampler, so that accel can know neither padding nor position. Use a plain "
            "DataLoader, or LoaderOptions(shard=False)."
        )

    def complete(self) -> bool:
        """On every rank at the same step, also where this one has no share in the last."""
        return self.given == self._global_steps

    def position(self) -> Position:
        """One stream: the order."""
        consumed = self._first + self.given * self._plan.width
        return Position((consumed,), digest(self._order) if consumed else None)

    def resume(self, seed: int, epoch: int, position: Position) -> Start:
        """Draws the order and compares it with the saved one."""
        if not any(position.at):
            return Start(epoch)
        order = self._draw(seed, epoch)
        if digest(order) != position.checksum or len(position.at) != 1 or position.at[0] > len(order):
            raise LoaderError(
                f"the state is {sum(position.at)} samples into epoch {epoch}, and the sampler "
                f"{type(self._shape.sampler).__name__} now draws another order for that epoch ({len(order)} items), so "
                "that its rest cannot be known. Expected the same dataset, sampler and weights as when the state was "
                "saved, and a sampler that draws from global generators or from one among its attributes."
            )
        return Start(epoch, position.at, order)

    def length(self) -> int:
        """As the sampler says."""
        return self._plan.local_steps(len(self._shape.sampler))
