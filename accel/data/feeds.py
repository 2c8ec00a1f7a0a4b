"""Feeds: what one copy of a loader reads in one epoch, in the place of what it shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info

from ..errors import LoaderError
from .exchange import Fingerprint, fingerprint
from .sampling import (
    Generators,
    InPlace,
    Plan,
    Private,
    Source,
    deal,
    digest,
    drawn_from,
    draws_once,
    global_generators,
    mix,
    notify,
    own_generators,
    parts,
)


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


class Opened(NamedTuple):
    """An order that was opened at a position: what comes next in it, and its first items, which padding may take."""

    source: Source
    head: list[Any]


class Start(NamedTuple):
    """Where an epoch starts, and what decides its order.

    ``at`` counts the samples to skip of each stream. The order is decided by ``seed``, or where that is None by ``states``
    of the generators; where both are None they are the program's, which are drawn from in place.
    """

    epoch: int
    seed: int | None = None
    at: tuple[int, ...] = ()
    checksum: int | None = None
    states: Mapping[str, Any] | None = None
    opened: Opened | None = None

    @property
    def in_place(self) -> bool:
        """Whether the order is drawn now, as in raw PyTorch."""
        return self.seed is None and self.states is None


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
    """Where the loops of all ranks stand.

    ``at`` counts the samples of each stream that they were given, ``checksum`` is of those of an order. ``states`` are the
    generators' where the order began, if it was drawn in place.
    """

    at: tuple[int, ...]
    checksum: int | None = None
    states: Mapping[str, Any] | None = None


class Feed(ABC):
    """One rank's reading of one epoch, and how much of it was handed to the loop."""

    start: Start
    kept: Kept = WHOLE
    given: int = 0

    @abstractmethod
    def install(self, loader: DataLoader[Any]) -> None:
        """Takes its place in a copy of the user's loader."""

    @abstractmethod
    def begin(self, start: Start, in_place: bool) -> None:
        """Starts an epoch, of a loader whose orders are drawn in place or not."""

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
    def resume(self, start: Start) -> Start:
        """A saved start, checked against what would be read now, as far as that is known now."""

    @abstractmethod
    def length(self) -> int:
        """This rank's batches of a whole epoch."""


@final
class Whole(Feed):
    """A loader that accel cannot follow, with the off switch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def install(self, loader: DataLoader[Any]) -> None:
        """The loader keeps its sampler and dataset."""

    def begin(self, start: Start, in_place: bool) -> None:
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
                f"{self.given} batches. Its class reads in a way of its own ({type(self._loader).__qualname__}, over a "
                f"{type(self._loader.dataset).__qualname__}), which accel could not resume there: save between epochs, or use a "
                "plain DataLoader over a plain dataset, with in_order=True."
            )
        return Position((0,))

    def resume(self, start: Start) -> Start:
        """Between epochs only."""
        if any(start.at):
            raise LoaderError(
                f"the state is {sum(start.at)} samples into epoch {start.epoch}, and this loader with "
                "LoaderOptions(shard=False) reads in a way of its own, so that it can only resume between epochs."
            )
        return start

    def length(self) -> int:
        """As the loader says."""
        return len(self._loader)


class _Dealt(NamedTuple):
    """What the loader has asked for and the loop has not been given yet: the items of all ranks, and this rank's share."""

    items: list[Any]
    kept: Kept


@final
class Shard(Feed):
    """Stands in for the sampler, or batch sampler, of a map-style loader."""

    def __init__(self, loader: DataLoader[Any], plan: Plan) -> None:
        self._shape = shape_of(loader)
        self._plan = plan
        self._own = own_generators(loader)

    def install(self, loader: DataLoader[Any]) -> None:
        """Becomes the loader's index sampler."""
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    def _generators(self) -> Generators:
        return Generators(drawn_from(self._shape.sampler, self._own))

    def _open(self, start: Start) -> Opened:
        """The order from a position, drawn from private generators."""
        sampler, generators = self._shape.sampler, self._generators()
        if start.seed is not None:
            for part in parts(sampler):
                if part is sampler or isinstance(part, Sampler):
                    notify(part, start.epoch)
            rng = Private(generators, generators.seeded(mix(start.seed, start.epoch)))
        else:
            rng = Private(generators, start.states or {})
        source = Source(sampler, rng, ahead=start.seed is not None)
        wanted = sum(start.at)
        head, found, checksum = source.skip(wanted, self._plan.world - 1)
        if wanted and (len(start.at) != 1 or (found, checksum) != (wanted, start.checksum)):
            raise LoaderError(
                f"the state is {wanted} samples into epoch {start.epoch}, and the sampler {type(sampler).__name__} now draws "
                f"another order for that epoch ({found} of them), so that its rest cannot be known. Expected the same "
                "dataset, sampler and weights as when the state was saved, a sampler that draws from global generators or from "
                "one among its attributes, and a version of accel that draws alike. To go on without it, load the state "
                "without the loader: its epoch begins anew."
            )
        return Opened(source, head)

    def begin(self, start: Start, in_place: bool) -> None:
        """Opens the order, unless it is drawn in place, from the moment when the loader asks."""
        self.start, self.given, self._asked = start, 0, False
        self._dealt: deque[_Dealt] = deque()
        self._at, self._checksum = sum(start.at), start.checksum or 0
        self._states = start.states
        self._opened = None if start.in_place else start.opened or self._open(start)
        if self._opened is None:
            return
        source = self._opened.source
        if start.states is not None and in_place and isinstance(source.rng, Private):
            source.rng = source.rng.settled(start.states, self._own)
        if start.seed is not None:
            source.peek(1)  # a sampler that cannot be read fails before the epoch has begun

    def _open_in_place(self) -> Opened:
        rng = InPlace(self._generators(), once=draws_once(self._shape.sampler))
        self._states = rng.states
        self._opened = Opened(Source(self._shape.sampler, rng, ahead=False), [])
        return self._opened

    def __iter__(self) -> Iterator[Any]:
        self._asked = True
        # A batch sampler of the user's own begins here, torch's with the first batch; the order of draws is raw PyTorch's.
        opened = self._open_in_place() if self.start.in_place and self._shape.units else None
        return self._deal(opened)

    def _deal(self, opened: Opened | None) -> Iterator[Any]:
        if opened is None:
            opened = self._open_in_place() if self.start.in_place else self._opened
        assert opened is not None
        for mine, items in deal(opened.source.read, self._plan, opened.head):
            if mine:
                self._dealt.append(_Dealt(items, kept_of(self._plan, self._shape.units, len(items))))
                yield mine[0] if self._shape.units else mine

    def __len__(self) -> int:
        return self._plan.local_steps(max(0, len(self._shape.sampler) - sum(self.start.at)))

    def take(self, item: Any) -> Any:
        """Counts one batch."""
        self.given += 1
        if not self._dealt:
            self._refuse()
        items, self.kept = self._dealt.popleft()
        self._at += len(items)
        self._checksum = digest(items, self._checksum)
        return item

    def close(self) -> None:
        """A loader that gives fewer batches would shift every position."""
        if self._dealt or not self._exhausted():
            self._refuse()

    def _refuse(self) -> None:
        """Raises for a loader that does not give one batch for each batch of indices."""
        raise LoaderError(
            f"epoch {self.start.epoch}: the sampler of the loader gave {self.given + len(self._dealt)} batches or more for "
            f"this rank, and the loader gave {self.given}{'' if self._asked else ' without asking its sampler'}. Its class or "
            "dataset does not give one batch for each batch of its sampler, so that accel can know neither padding nor "
            "position. Use a plain DataLoader, or LoaderOptions(shard=False)."
        )

    def _exhausted(self) -> bool:
        """Whether the order has no further batch for this rank, which may mean to draw its next items."""
        if self._opened is None:
            return False
        width = self._plan.width
        left = self._opened.source.peek(width)
        return left < width if self._plan.drop_last else not self._plan.share(left).size

    def complete(self) -> bool:
        """On every rank at the same step, also where this one has no share in the last."""
        if self._dealt or self._opened is None:
            return False
        try:
            due = self._at + (self._plan.width if self._plan.drop_last else 1) > len(self._shape.sampler)
        except (TypeError, NotImplementedError):
            return self._opened.source.ended
        left = self._opened.source.peek(self._plan.width) if due else self._plan.width
        return left < self._plan.width if self._plan.drop_last else not left

    def position(self) -> Position:
        """One stream: the order."""
        if self.given and self._opened is not None and not self._opened.source.rng.again:
            raise LoaderError(
                f"the position of this loader in mid-epoch could not be resumed: its {type(self._shape.sampler).__name__} draws "
                "random numbers while the loop does, from the same generator. Give it a generator of its own, or use "
                "LoaderOptions(seed=...), or save between epochs."
            )
        return Position((self._at,), self._checksum if self._at else None, self._states)

    def resume(self, start: Start) -> Start:
        """Draws the order and compares it with the saved one; without a seed, only when it is iterated."""
        return start._replace(opened=self._open(start)) if start.seed is not None and any(start.at) else start

    def length(self) -> int:
        """As the sampler says."""
        return self._plan.local_steps(len(self._shape.sampler))


# -- iterable datasets -------------------------------------------------------------------------------------------------
# The feed of an iterable dataset: every rank reads the whole stream in chunks of a global step and keeps its part.
# It works inside worker processes, each with its copy of the dataset; what a batch is made of travels with the batch.


class Tag(NamedTuple):
    """What a batch is made of.

    ``stream`` is its worker, ``position`` that after it there, ``samples`` are those of its global step. ``again`` says
    whether the stream would come out the same once more, ``first`` what its first items are.
    """

    stream: int
    position: int
    samples: int
    again: bool = True
    first: Fingerprint | None = None


@final
class _Reader:
    """Reads a stream. ``control`` (in place, epoch, seed, samples to skip) is shared with workers that outlive an epoch."""

    def __init__(self, dataset: Any, plan: Plan, control: torch.Tensor) -> None:
        self.dataset = dataset
        self.plan = plan
        self.control = control
        self.tag = Tag(0, 0, 0)
        #: Where the generators were when the stream began, if it is read in this process.
        self.states: Mapping[str, Any] = {}
        #: Whether a stream that was resumed goes on in place.
        self.settles = False
        self._epochs = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        stream = info.id if info else 0
        in_place, epoch, seed, *skips = self.control.tolist()
        self._rng = self._open(bool(in_place), epoch, seed, stream, bool(info))
        self._epochs += 1
        with self._rng:
            self._source = iter(self.dataset)
        return self._deal(stream, skips[stream])

    def _open(self, in_place: bool, epoch: int, seed: int, stream: int, worker: bool) -> Private | InPlace:
        """In one process the stream draws from the program's generators, as in raw PyTorch.

        Over several ranks it has generators of its own, apart from the loop's: every rank must see the same stream.
        """
        generators = Generators(global_generators())
        if not in_place:
            notify(self.dataset, epoch)
            return Private(generators, generators.seeded(mix(seed, stream)))
        if self.states and not worker:
            return Private(generators, self.states)
        rng = InPlace(generators)
        self.states = rng.states
        return rng

    def _deal(self, stream: int, skipped: int) -> Iterator[Any]:
        self.tag = Tag(stream, skipped, 0)
        head, first = self._skip(skipped), None
        if self.settles and self.states and isinstance(self._rng, Private):
            self._rng = self._rng.settled(self.states, ())
        for mine, chunk in deal(self._read, self.plan, head):
            first = fingerprint(chunk) if first is None and self.plan.world > 1 else first
            self.tag = Tag(stream, self.tag.position + len(chunk), len(chunk), self._again(), first)
            yield from mine

    def _again(self) -> bool:
        """Whether what was read can be read again; workers that outlive an epoch have generators in a state that nobody knows."""
        if isinstance(self._rng, Private):
            return True
        return self._rng.again and not (self._epochs > 1 and self._rng.drew and get_worker_info() is not None)

    def _read(self, count: int) -> list[Any]:
        """The next items of the stream, at most ``count``."""
        with self._rng:
            return list(islice(self._source, count))

    def _skip(self, count: int) -> list[Any]:
        """Reads and drops ``count`` items, all but the first ones: those that padding may need."""
        head = self._read(min(count, self.plan.world - 1))
        with self._rng:
            read = len(head) + sum(1 for _ in islice(self._source, count - len(head)))
        if read < count:
            raise LoaderError(
                f"{type(self.dataset).__name__} ended after {read} items where the saved position is {count} items into "
                "it: expected the same dataset, giving the same stream, as when the state was saved."
            )
        return head


@final
class _View(IterableDataset[Any]):
    """One rank's part of an iterable dataset; its attributes are those of the user's dataset, as in get_worker_info()."""

    def __init__(self, reader: _Reader) -> None:
        vars(self)["_accel_reader"] = reader

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self)["_accel_reader"])

    def __len__(self) -> int:
        return len(vars(self)["_accel_reader"].dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_accel_reader"].dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_accel_reader"].dataset, name, value)


@final
class _Tagging:
    """The user's collate function, with the reader's tag beside each batch."""

    def __init__(self, collate: Callable[[Any], Any], reader: _Reader) -> None:
        self.collate = collate
        self.reader = reader

    def __call__(self, items: Any) -> tuple[Tag, Any]:
        return self.reader.tag, self.collate(items)


@final
class Stream(Feed):
    """Stands in for the dataset of an iterable loader."""

    def __init__(self, loader: DataLoader[Any], shape: Shape, plan: Plan) -> None:
        self._plan = plan
        self._units = shape.units
        self._workers = loader.num_workers
        # What a loader with workers seeds them from; the stream is drawn again where they get the same seeds.
        self._seeding = Generators({"seeds": loader.generator or torch.default_generator})
        self._control = torch.zeros(3 + max(1, self._workers), dtype=torch.int64)
        if self._workers:
            self._control.share_memory_()
        self._reader = _Reader(loader.dataset, plan, self._control)
        self.tag = Tag(0, 0, 0)
        self._again = True

    def install(self, loader: DataLoader[Any]) -> None:
        """Its dataset reads this rank's part, and its batches carry their tags."""
        vars(loader)["dataset"] = _View(self._reader)
        loader.collate_fn = _Tagging(loader.collate_fn, self._reader)

    def begin(self, start: Start, in_place: bool) -> None:
        """Tells the readers, in this process or in workers that live on."""
        self._at = list(start.at) or [0] * max(1, self._workers)
        seed = 0 if start.seed is None else mix(start.seed, start.epoch)
        self._control.copy_(torch.tensor([start.seed is None, start.epoch, seed, *self._at]))
        self._reader.states, self._reader.settles = start.states or {}, in_place
        self._seeds = self._seeding.states()
        self.start, self.given, self._closed, self._again = start, 0, False, True

    def take(self, item: Any) -> Any:
        """Counts one batch; its tag says of which stream."""
        self.tag, batch = item
        self.given += 1
        self._again = self._again and self.tag.again
        if self._plan.world > 1:
            self._check_again()  # the other ranks may read another stream
        self._at[self.tag.stream] = self.tag.position
        self.kept = kept_of(self._plan, self._units, self.tag.samples)
        return batch

    def close(self) -> None:
        """How much there was is known now."""
        self._closed = True

    def complete(self) -> bool:
        """Known at the end only; a rank without a share in the last batch still had an epoch."""
        return self._closed and (self._plan.pads or self._reader.tag.position == sum(self.start.at))

    def position(self) -> Position:
        """In the stream of each worker."""
        if self.given:
            self._check_known()
        states = self.start.states
        if self.start.in_place and self.given:
            states = self._seeds if self._workers else self._reader.states
        return Position(tuple(self._at), None, states)

    def resume(self, start: Start) -> Start:
        """The items are skipped when the epoch starts."""
        if not any(start.at):
            return start
        self._check_known()
        expected = max(1, self._workers)
        seeded = start.states is None or ("seeds" in start.states) == bool(self._workers)
        if len(start.at) != expected or start.checksum is not None or not seeded:
            raise LoaderError(
                f"the state is {sum(start.at)} samples into epoch {start.epoch}, read from {len(start.at)} streams (one "
                f"for each worker), and this loader has an iterable dataset with {expected}: use the same dataset and "
                "num_workers as when the state was saved, or save between epochs."
            )
        return start

    def _check_known(self) -> None:
        """With uneven batches each worker's tail makes the ranks' loops shift against each other."""
        if self._workers and self._plan.ragged:
            raise LoaderError(
                "the position of an iterable dataset in mid-epoch cannot be known with num_workers="
                f"{self._workers} and even_batches=False: the ranks' loops are at different samples. Use "
                "even_batches=True, drop_last=True or num_workers=0, or save between epochs."
            )
        self._check_again()

    def _check_again(self) -> None:
        """A stream that would come out otherwise has no position."""
        if not self._again:
            raise LoaderError(
                f"the position of {type(self._reader.dataset).__name__} in mid-epoch could not be resumed: it draws random "
                "numbers from a generator that others draw from too while it is read, or whose state outlives an epoch in "
                "persistent workers. Give it a generator of its own, or use LoaderOptions(seed=...), or save between epochs."
            )

    def length(self) -> int:
        """As the dataset says, as if one process read it."""
        return self._plan.local_steps(len(self._reader.dataset))
