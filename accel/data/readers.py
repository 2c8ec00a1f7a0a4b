"""What one copy of a loader reads in one epoch: this rank's part of a sampler's order, or all of it; and which loaders can be
read so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, final

import torch
import torch.utils.data as torch_data
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from ..errors import LoaderError, described, refuse_unknown
from ..process import Process, world_size
from ..process.collectives import ORDER
from ..process.rng import Generators, InPlace, Private
from .sampling import (
    TORCHS,
    Division,
    SampleOrder,
    copied,
    digest,
    divide,
    drawn_from,
    draws_alone,
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
    if type(batcher) is BatchSampler or (
        isinstance(batcher, BatchSampler) and loader.batch_size is not None
    ):
        return Shape(batcher.sampler, batcher.batch_size, batcher.drop_last, False)
    return Shape(batcher, 1, False, True)


class Start(NamedTuple):
    """Where an epoch starts, and what decides its order.

    ``at`` counts the samples to skip of each stream, ``checksum`` is of those of an order. The order is decided by ``seed``, or
    where that is None by ``states`` of the generators; where both are None they are the program's, which are drawn from in place.
    """

    epoch: int
    seed: int | None = None
    at: tuple[int, ...] = ()
    checksum: int | None = None
    states: Mapping[str, Any] | None = None
    #: The order, where it is drawn to this position already.
    order: SampleOrder | None = None
    #: The batches of each rank to leave out after the samples of ``at``.
    skip: int = 0
    #: What a loader that keeps its own position said of it.
    own: Any = None

    @property
    def in_place(self) -> bool:
        return self.seed is None and self.states is None

    @property
    def inside(self) -> bool:
        return any(self.at) or self.skip > 0


class Kept(NamedTuple):
    """What of a batch is no padding: the first ``real`` of ``rows``; all or nothing where ``rows`` is None."""

    pads: bool
    rows: int | None
    real: int
    #: What is the same on all ranks whose batches belong together: their loader's name and how its order began.
    order: Any = None
    #: What ``order`` is, for messages.
    about: str = ORDER


WHOLE = Kept(False, None, 1)


def kept_of(division: Division, units: bool, count: int) -> Kept:
    """What is kept of this rank's batch of a global step of ``count`` samples."""
    if not division.pads:
        return WHOLE
    share = division.share(count)
    return Kept(True, None if units else share.size, share.real)


def length_of(sized: Any) -> int | None:
    """The length of a dataset, sampler or loader that has one."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def keeps_position(loader: DataLoader[Any]) -> bool:
    """Whether its class knows a position of its own, as torchdata's StatefulDataLoader does."""
    methods = [getattr(type(loader), name, None) for name in ("state_dict", "load_state_dict")]
    return type(loader).__iter__ is not DataLoader.__iter__ and all(map(callable, methods))


def too_short(skip: int, found: int) -> LoaderError:
    """That an epoch has fewer batches than are to be left out."""
    return LoaderError(
        f"loader.skip({skip}): what is left of the epoch has {found} batches. For the number of a step write "
        "loader.set_epoch(step // len(loader)) and loader.skip(step % len(loader))"
    )


class EpochReader(ABC):
    """One rank's reading of one epoch, and how much of it was handed to the loop."""

    start: Start
    kept: Kept = WHOLE
    #: A digest of the first samples of all ranks that this epoch's loop was given; None where that tells nothing, as
    #: where ranks may get different numbers of batches and begin an epoch at different steps.
    first: int | None = None
    #: The batches that the loop was given, and before them those to leave out.
    given: int = 0
    #: What is left out is not read.
    skips: bool = False
    #: The loader keeps a position of its own.
    keeps: bool = False

    def install(self, loader: DataLoader[Any]) -> None:
        return

    def begin(self, start: Start, in_place: bool) -> None:
        self.start, self.given, self._closed = start, 0, False

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return iter(loader)

    def take(self, item: Any) -> Any:
        """Counts one item of the loader's iterator; returns the user's batch in it."""
        self.given += 1
        return item

    def close(self) -> None:
        """The loader's iterator has ended: checks that it gave what was planned."""
        self._closed = True

    def own(self) -> Any:
        """The position that the loader keeps, if it does."""
        return None

    def upcoming(self, count: int) -> int | None:
        """How many of the next ``count`` batches there are for this rank; None where only reading them tells."""
        return None

    @abstractmethod
    def complete(self) -> bool:
        """Whether this epoch is known to have nothing more, for any rank."""

    @abstractmethod
    def position(self) -> Start:
        """Where the loops of all ranks stand: ``at`` counts the samples that they were given."""

    @abstractmethod
    def resume(self, start: Start) -> Start:
        """A saved start, checked against what would be read now, as far as that is known now."""

    @abstractmethod
    def length(self) -> int:
        """This rank's batches of a whole epoch."""


@final
class UndividedReader(EpochReader):
    """A loader that accel cannot follow, with the off switch; where it keeps its own position, that is what is saved."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader: Any = loader
        self.keeps = keeps_position(loader)

    def begin(self, start: Start, in_place: bool) -> None:
        super().begin(start, in_place)
        if start.own is not None:
            self._loader.load_state_dict(start.own)

    def own(self) -> Any:
        return self._loader.state_dict() if self.keeps else None

    def complete(self) -> bool:
        length = None if self.keeps else length_of(self._loader)
        return self._closed or (length is not None and self.given >= length)

    def position(self) -> Start:
        if self.keeps:
            at = (sum(self.start.at) + self.given,)
            return self.start._replace(at=at, checksum=None, states=None, own=self.own())
        if self.given:
            raise LoaderError(
                "the position of a loader with LoaderOptions(shard=False) was asked for in mid-epoch, after "
                f"{self.given} batches. Its class reads in a way of its own ({type(self._loader).__qualname__}, over a "
                f"{type(self._loader.dataset).__qualname__}), which accel could not resume there: save between epochs, or use a "
                "plain DataLoader over a plain dataset, with in_order=True."
            )
        return self.start._replace(at=(0,), checksum=None, states=None, own=None)

    def resume(self, start: Start) -> Start:
        if any(start.at) and start.own is None:
            raise LoaderError(
                f"the state is {sum(start.at)} samples into epoch {start.epoch}, and this loader with "
                "LoaderOptions(shard=False) reads in a way of its own, so that it can only resume between epochs."
            )
        return start

    def length(self) -> int:
        return len(self._loader)


@final
class SamplerReader(EpochReader):
    """Stands in for the sampler, or batch sampler, of a map-style loader."""

    skips = True

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        self._shape = shape_of(loader)
        self._division = division
        self._own = own_generators(loader)

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self

    @property
    def sampler(self) -> Any:
        """That of the batch sampler in whose place this is, whose length some classes of loaders ask for."""
        return self._shape.sampler.sampler if self._shape.units else self._shape.sampler

    def _open(self, start: Start) -> SampleOrder:
        sampler, generators = (
            self._shape.sampler,
            Generators(drawn_from(self._shape.sampler, self._own)),
        )
        if start.seed is not None:
            for part in parts(sampler):
                if part is sampler or isinstance(part, Sampler):
                    notify(part, start.epoch)
            rng = Private(generators, generators.seeded(mix(start.seed, start.epoch)))
        else:
            rng = Private(generators, start.states or {})
        order = SampleOrder(sampler, rng, ahead=start.seed is not None and draws_alone(sampler))
        wanted = sum(start.at)
        found, checksum = order.skip(wanted, self._division.world - 1)
        if wanted and (len(start.at) != 1 or (found, checksum) != (wanted, start.checksum)):
            raise LoaderError(
                f"the state is {wanted} samples into epoch {start.epoch}, and the sampler {type(sampler).__name__} now draws "
                f"another order for that epoch ({found} of them), so that its rest cannot be known. Expected the same "
                "dataset, sampler and weights as when the state was saved, a sampler that draws from global generators or from "
                "one among its attributes, and a version of accel that draws alike. To go on without it, load the state "
                "without the loader: its epoch begins anew."
            )
        return order

    def begin(self, start: Start, in_place: bool) -> None:
        """Opens the order, unless it is drawn in place, from the moment when the loader asks."""
        super().begin(start, in_place)
        self._asked, self.first = False, None
        #: The last step that was read has nothing for this rank.
        self._left_out = False
        #: What the loader has asked for and the loop has not been given yet: the items of all ranks, and what this one keeps.
        self._pending: deque[tuple[list[Any], Kept]] = deque()
        self._at, self._checksum = sum(start.at), start.checksum or 0
        self._states, self.given = start.states, start.skip
        order = self._order = None if start.in_place else start.order or self._open(start)
        if order is None:
            return
        self._leave_out(order)
        if start.states is not None and in_place and isinstance(order.rng, Private):
            order.rng = order.rng.settled(start.states, self._own)
        if start.seed is not None:
            order.peek(1)  # a sampler that cannot be read fails before the epoch has begun

    def _open_in_place(self) -> SampleOrder:
        sampler = self._shape.sampler
        rng = InPlace(
            Generators(drawn_from(sampler, self._own)),
            once=type(sampler) in TORCHS and sampler.generator is None,
        )
        self._states = rng.states
        self._order = SampleOrder(sampler, rng, ahead=False)
        self._leave_out(self._order)
        return self._order

    def _leave_out(self, order: SampleOrder) -> None:
        division, skip = self._division, self.start.skip
        found, self._checksum = order.skip(
            skip * division.width, division.world - 1, self._checksum
        )
        self._at += found
        if division.steps(found) < skip:
            raise too_short(skip, division.steps(found))

    def __iter__(self) -> Iterator[Any]:
        self._asked = True
        # A batch sampler of the user's own begins here, torch's with the first batch; the order of draws is raw PyTorch's.
        return self._divide(
            self._open_in_place() if self.start.in_place and self._shape.units else None
        )

    def _divide(self, order: SampleOrder | None) -> Iterator[Any]:
        order = order or (self._open_in_place() if self.start.in_place else self._order)
        assert order is not None
        for mine, items in divide(order.read, self._division, order.head):
            self._left_out = not mine
            if mine:
                self._pending.append(
                    (items, kept_of(self._division, self._shape.units, len(items)))
                )
                yield mine[0] if self._shape.units else mine

    def __len__(self) -> int:
        return self._division.local_steps(
            max(
                0,
                len(self._shape.sampler)
                - sum(self.start.at)
                - self.start.skip * self._division.width,
            )
        )

    def take(self, item: Any) -> Any:
        self.given += 1
        if not self._pending:
            self._refuse()
        items, self.kept = self._pending.popleft()
        if self.first is None and not self._division.ragged:
            self.first = digest(items)
        self._at += len(items)
        self._checksum = digest(items, self._checksum)
        return item

    def close(self) -> None:
        """A loader that gives fewer batches would shift every position."""
        if (
            self._pending
            or self._order is None
            or self._division.local_steps(self._order.peek(self._division.width))
        ):
            self._refuse()

    def _refuse(self) -> None:
        raise LoaderError(
            f"epoch {self.start.epoch}: the sampler of the loader gave {self.given + len(self._pending)} batches or more for "
            f"this rank, and the loader gave {self.given}{'' if self._asked else ' without asking its sampler'}. Its class or "
            "dataset does not give one batch for each batch of its sampler, so that accel can know neither padding nor "
            "position. Use a plain DataLoader, or LoaderOptions(shard=False)."
        )

    def upcoming(self, count: int) -> int | None:
        if self._order is None:
            return None
        waiting, division = len(self._pending), self._division
        return min(
            count,
            waiting + division.local_steps(self._order.peek((count - waiting) * division.width)),
        )

    def complete(self) -> bool:
        """On every rank at the same step, also where this one has no share in the last."""
        if self._pending or self._order is None:
            return False
        width, length = self._division.width, length_of(self._shape.sampler)
        if length is None:
            return self._order.ended and not self._left_out
        least = width if self._division.drop_last else 1
        return self._at + least > length and self._order.peek(width) < least

    def position(self) -> Start:
        if self.given and self._order is not None and not self._order.rng.again:
            raise LoaderError(
                f"the position of this loader in mid-epoch could not be resumed: its {type(self._shape.sampler).__name__} draws "
                "random numbers while the loop does, from the same generator. Give it a generator of its own, or use "
                "LoaderOptions(seed=...), or save between epochs."
            )
        checksum = self._checksum if self._at else None
        return self.start._replace(at=(self._at,), checksum=checksum, states=self._states, own=None)

    def resume(self, start: Start) -> Start:
        """Draws the order and compares it with the saved one; without a seed, only when it is iterated."""
        return (
            start._replace(order=self._open(start))
            if start.seed is not None and any(start.at)
            else start
        )

    def length(self) -> int:
        return self._division.local_steps(len(self._shape.sampler))


# -- Which loaders can be distributed, and what of them must be equal on all ranks -------------------------------------

_OFF: Final = "use LoaderOptions(shard=False)"
_COMPARED: Final = 1 << 16  # items of a sampler's order


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How ``setup`` distributes dataloaders.

    Args:
        shard: each rank gets its own part of every epoch; False is the off switch, samplers and datasets stay untouched.
        even_batches: all ranks get equally many samples, the last batch being padded from the start of the epoch;
            False divides the last batch as it is, so that ranks may differ by one sample, or by one batch.
        dispatch: rank 0 alone reads an iterable dataset, and sends each rank its batches; the others' datasets are not read.
        split_batches: a loader's ``batch_size`` is that of all ranks together, and each gets its part of it.
        move: batches are moved to the rank's device.
        seed: decides the order of every epoch; None takes the seed of rank 0's torch, and in one process draws as raw
            PyTorch does.
    """

    shard: bool = True
    even_batches: bool = True
    dispatch: bool = False
    split_batches: bool = False
    move: bool = True
    seed: int | None = None

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuse (LoaderError) other options than there are."""
        refuse_unknown(cls, args, options, LoaderError)
        return object.__new__(cls)


class LoaderPlace(NamedTuple):
    """For whom a loader is divided: a place among the replicas of a model, and where its batches go."""

    rank: int
    world: int
    device: torch.device
    #: The process in which the division holds; None holds everywhere.
    process: Process | None = None


def check(loader: Any, options: Any, world_size: int) -> None:
    """Refuses (LoaderError) a ``DataLoader`` that is distributed already, or reads in a way that cannot be shared."""
    check_options(options)
    if options.dispatch and not options.shard:
        raise LoaderError(
            "LoaderOptions(dispatch=True, shard=False): with shard=False each rank reads by itself; choose one"
        )
    if options.dispatch and not isinstance(loader.dataset, IterableDataset):
        raise LoaderError(
            "LoaderOptions(dispatch=True) is for iterable datasets, which rank 0 reads for all ranks: each rank reads its own "
            "samples of a map-style dataset"
        )
    if options.dispatch and not options.even_batches:
        raise LoaderError(
            "LoaderOptions(dispatch=True): all ranks get equally many batches, leave even_batches=False out"
        )
    if options.split_batches:
        _check_split(loader, options, world_size)
    if options.shard:
        _check_divisible(loader)


def _check_divisible(loader: DataLoader[Any]) -> None:
    if keeps_position(loader) and getattr(loader, "next_iter_state", None) is not None:
        raise LoaderError(
            f"A state was loaded into this {type(loader).__qualname__} before accel.setup. Load it through the handle "
            f"instead, or {_OFF}."
        )
    if isinstance(loader.dataset, torch_data.IterDataPipe | torch_data.MapDataPipe):
        raise LoaderError(f"torch shards DataPipes by itself, with their sharding_filter: {_OFF}")
    if loader.num_workers and not loader.in_order:
        raise LoaderError(
            "in_order=False gives batches in another order than they were drawn, so that neither the padding nor the "
            f"position of a batch is known: use in_order=True, or {_OFF}"
        )
    if isinstance(loader.dataset, IterableDataset):
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise LoaderError(
                f"{type(loader).__qualname__} has an __iter__ of its own, which accel cannot feed from an iterable "
                f"dataset: use a plain DataLoader, or {_OFF}"
            )
        return
    _check_sampler(loader)


def _check_split(loader: DataLoader[Any], options: LoaderOptions, world_size: int) -> None:
    batch, units = shape_of(loader).batch, shape_of(loader).units
    problem = ""
    if not options.shard:
        problem = "with shard=False each rank reads by itself, so that there is nothing to split"
    elif units:
        problem = "the loader has no batch_size of its own (batch_size=None, or a custom batch_sampler): leave split_batches out"
    elif batch % world_size:
        problem = f"batch_size={batch} does not divide over {world_size} ranks: use a multiple of {world_size}"
    if problem:
        raise LoaderError(f"LoaderOptions(split_batches=True): {problem}")


def check_options(options: Any) -> None:
    """Refuses other things than LoaderOptions, and bad values in them."""
    if not isinstance(options, LoaderOptions):
        raise LoaderError(
            f"loader_options: expected accel.LoaderOptions(...), found {described(options)}"
        )
    for name in ("shard", "even_batches", "dispatch", "split_batches", "move"):
        if not isinstance(getattr(options, name), bool):
            raise LoaderError(
                f"LoaderOptions({name}=...): expected a bool, found {getattr(options, name)!r}"
            )
    if options.seed is not None and type(options.seed) is not int:
        raise LoaderError(
            f"LoaderOptions(seed=...): expected an int or None, found {options.seed!r}"
        )


def _check_sampler(loader: DataLoader[Any]) -> None:
    for part in (
        p for p in (*parts(loader.batch_sampler), *parts(loader.sampler)) if isinstance(p, Sampler)
    ):
        ranks = {getattr(part, name, None) for name in ("num_replicas", "num_processes")}
        if isinstance(part, torch_data.DistributedSampler) or ranks - {None, 1}:
            raise LoaderError(
                f"the loader is distributed already, by a {type(part).__qualname__}: give accel the loader that one "
                f"process would use, or {_OFF}"
            )


def describe(loader: DataLoader[Any], options: LoaderOptions | None = None) -> dict[str, Any]:
    """What must be equal on all ranks for their parts to fit together, by name. Local."""
    options = options or LoaderOptions()
    facts = asdict(options)
    if not options.shard:
        return facts
    dataset, shape = loader.dataset, shape_of(loader)
    facts |= {
        "dataset": type(dataset).__qualname__,
        "length": length_of(dataset),
        "sampler": type(shape.sampler).__qualname__,
        "batch size": shape.batch,
        "drop_last": shape.drop_last,
        "custom batches": shape.units,
    }
    if isinstance(dataset, torch_data.Subset):
        # A random_split with another seed on each rank would mix training and validation data.
        facts["checksum of the Subset's indices"] = digest(dataset.indices)
    if isinstance(dataset, IterableDataset):
        facts["num_workers"] = loader.num_workers
    elif (
        type(shape.sampler) not in (torch_data.SequentialSampler, torch_data.RandomSampler)
        and world_size() > 1
    ):
        facts["checksum of the sampler's order"] = _order_of(loader, shape)
    return facts


def _order_of(loader: DataLoader[Any], shape: Shape) -> str:
    """The beginning of what a sampler draws from fixed seeds; the error where it cannot, which iterating will raise."""
    if any(
        isinstance(part, Iterator) and not isinstance(part, Sampler)
        for part in parts(shape.sampler)
    ):
        return ""  # it gives its items once
    generators = Generators(drawn_from(shape.sampler, own_generators(loader)))
    try:
        order = SampleOrder(
            copied(shape.sampler), Private(generators, generators.seeded(0)), ahead=True
        )
        return str(digest(order.read(_COMPARED)))
    except Exception as error:
        return f"{type(error).__qualname__}"
