"""The handle of a dataloader, its iteration, and groups of batches for one optimizer step."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..errors import LoaderError, RankMismatchError, described, whole_number
from ..process import ended, running, world_size
from ..process.control import agree
from ..process.rng import Generators, from_plain, to_plain
from ..process.transfer import to_device
from .checks import LoaderOptions, LoaderPlace, check, has_own_iter, shape_of
from .readers import Position, RawReader, Reader, RealRows, SamplerReader
from .sampling import Division, length_of, mix, on_cpu, own_generators
from .streams import SHARDS, StreamReader, mode_of

T = TypeVar("T")


@final
@dataclass(eq=False)
class LoaderState:
    """The state of a handle: the raw loader, this rank's place, and the next epoch."""

    raw: DataLoader[Any]
    options: LoaderOptions
    place: LoaderPlace
    #: The seed of all epochs, unless they are drawn in place.
    seed: int
    #: True if orders are drawn from the program's generators, as in raw PyTorch.
    in_place: bool
    #: The start of the next iteration, and the batches to skip after it.
    start: Position = field(init=False)
    skip: int = 0
    #: The real rows of the last batch.
    rows: RealRows | None = None
    #: The iteration that began last, if it is alive.
    latest: Callable[[], Iteration | None] = lambda: None
    #: A copy of the loader whose workers live longer than an epoch.
    persistent: tuple[DataLoader[Any], Reader] | None = None
    #: The serials of the engines with which the loader was set up.
    engines: set[int] = field(default_factory=set)
    #: Ends the accumulation of a group that the loop left.
    release: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.start = self.fresh(0)

    def fresh(self, epoch: int) -> Position:
        return Position(epoch=epoch, seed=None if self.in_place else self.seed)

    @property
    def current(self) -> Iteration | None:
        """The iteration that a loop is in."""
        iteration = self.latest()
        return None if iteration is None or iteration.finished else iteration

    @property
    def mode(self) -> str:
        return mode_of(self.raw.dataset, self.options, self.place)

    @property
    def part(self) -> list[int]:
        """This rank and the number of ranks if each has its own position, otherwise empty."""
        is_alone = not self.options.shard or self.mode == SHARDS
        return list(self.place[:2]) if is_alone else []

    def check_process(self) -> None:
        """Raise LoaderError after ``accel.teardown()``."""
        process = self.place.process
        if process is not None and running() is not process and not ended():
            raise LoaderError(
                f"This LoaderHandle was set up for {self.place.world} ranks, and accel.teardown() "
                "has ended them. Pass the raw DataLoader to accel.setup() again."
            )

    def reader(self) -> Reader:
        raw, options, shape = self.raw, self.options, shape_of(self.raw)
        if not options.shard and has_own_iter(raw):
            return RawReader(raw)
        rank, world = self.place[:2] if options.shard else (0, 1)
        division = Division(
            rank=rank,
            world=world,
            batch=shape.batch // world if options.split_batches else shape.batch,
            even=options.even_batches,
            drop_last=shape.drop_last,
        )
        if isinstance(raw.dataset, IterableDataset):
            return StreamReader(raw, division, self.mode, self.place.process)
        return SamplerReader(raw, division)

    def prepare(self) -> tuple[DataLoader[Any], Reader]:
        """Return a copy of the loader and the reader in it."""
        if self.persistent is not None:
            return self.persistent
        reader = self.reader()
        loader = copy.copy(self.raw)
        # Positions and padding are counted in the order of the sampler.
        vars(loader).update(_iterator=None, in_order=True)
        reader.install(loader)
        # The workers of a stream learn its seed and position when they start.
        is_stream = isinstance(reader, StreamReader)
        vars(loader)["persistent_workers"] &= self.in_place or not is_stream
        if loader.persistent_workers:
            self.persistent = loader, reader
        return loader, reader

    def worker_seeds(self, start: Position) -> torch.Generator:
        """Return a generator for the seeds of workers, which leaves the program's alone."""
        generator = torch.Generator()
        if start.states and "seeds" in start.states:
            return generator.set_state(start.states["seeds"])
        used = sum(start.at)
        return generator.manual_seed(mix(self.seed, start.epoch, used, self.place.rank))


class LoaderHandle:
    """A distributed dataloader. All other attributes are those of the ``DataLoader``.

    ``seed`` decides the order of every epoch, and is the same on all ranks. ``in_place`` draws the
    order from the program's generators instead, as raw PyTorch does.
    """

    __slots__ = ("__weakref__", "_accel")
    _accel: LoaderState

    def __init__(
        self,
        loader: DataLoader[Any],
        options: LoaderOptions,
        place: LoaderPlace,
        seed: int,
        in_place: bool = False,
    ) -> None:
        check(loader, options, place.world)
        in_place = in_place or not options.shard
        state = LoaderState(loader, options, place, seed, in_place)
        object.__setattr__(self, "_accel", state)

    def __iter__(self) -> Any:
        return Iteration(self._accel)

    def __len__(self) -> int:
        """Return the number of this rank's batches in a full epoch."""
        return len(self._accel.reader())

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at epoch ``epoch``. A resumed epoch continues at its position.

        Args:
            epoch: its number. Without this call each iteration is the next epoch.
        """
        state, number = self._accel, whole_number(epoch)
        is_chosen = state.options.shard and state.start.in_place
        if is_chosen:
            # The program's generators can't give the order of an epoch by its number.
            state.in_place = False
        if is_chosen or number != state.start.epoch:
            state.start = state.fresh(number)

    def skip(self, n: int) -> None:
        """Start the next iteration after ``n`` batches, for the step number of another library.

        The samples of a map-style dataset are not read. Call it on every rank, before or after
        ``set_epoch``, and after ``load_state_dict``. A second call replaces the first.

        Args:
            n: batches of each rank. The next iteration raises LoaderError if the epoch has fewer.
                Use ``set_epoch(step // len(loader))`` and ``skip(step % len(loader))``.
        """
        self._accel.skip = whole_number(n)

    @property
    def is_last(self) -> bool:
        """True during this rank's last batch of an epoch.

        An iterable dataset has to read the next batch to know.
        """
        current = self._accel.current
        return current is not None and current.reader.given > 0 and not current.upcoming(1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values. It is the same on all ranks at the same step.

        At the end of an epoch and after a ``break`` it is the start of the next epoch.

        Raises:
            LoaderError: the position isn't known.
        """
        state, current = self._accel, self._accel.current
        if current is not None and current.group_left:
            raise LoaderError(
                f"The state is inside a group of accel.accumulate, {current.group_left} batches "
                "before its end. Save after the optimizer step."
            )
        if current is None or current.reader.is_complete():
            position = state.reader().skip(state.start, state.skip)
        else:
            position = current.reader.position()
            current.reader.check(position)
        generators = None
        if position.seed is None:
            own_states = Generators(own_generators(state.raw)).states()
            generators = {"order": to_plain(position.states), "own": to_plain(own_states)}
        return {
            "epoch": position.epoch,
            "consumed": sum(position.at),
            "streams": list(position.at or (0,)),
            "seed": state.seed if position.seed is None else position.seed,
            "generators": generators,
            "length": length_of(state.raw.dataset),
            "part": state.part,
            "own": position.own,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the next iteration at a saved position, at any world size and batch size.

        If each rank has its own position, as with ``shard=False``, the number of ranks must be the
        same.

        Args:
            state_dict: the result of ``state_dict``.

        Raises:
            LoaderError: it isn't such a state, or was saved with a different dataset. Nothing has
                changed.
        """
        state = self._accel
        saved = _checked(state, state_dict)
        generators, own = saved["generators"], saved["own"]
        at = tuple(saved["streams"]) if saved["consumed"] else ()
        position = replace(state.fresh(saved["epoch"]), at=at)
        is_seeded = generators is None and state.options.shard
        if is_seeded:
            position = replace(position, seed=saved["seed"])
        elif generators is not None and generators["order"] is not None:
            position = replace(position, seed=None, states=from_plain(generators["order"]))
        reader = state.reader()
        if reader.stateful:
            # Older states have a list, for the workers of a stream.
            position = replace(position, own=own[0] if isinstance(own, list) else own)
        reader.check(position)
        if is_seeded:
            state.seed, state.in_place = saved["seed"], False
        elif state.in_place and generators is not None:
            Generators(own_generators(state.raw)).put(from_plain(generators["own"]))
        state.start, state.skip = position, 0
        state.latest = lambda: None
        # Workers that are alive can't skip to the position.
        state.persistent = None

    # A type checker knows the attributes of the loader's class, and no others.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._accel.raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accel.raw, name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LoaderError(
            "A LoaderHandle can't be pickled or copied. Pickle its state_dict(), or the DataLoader "
            "that you passed to accel.setup()."
        )


def _checked(state: LoaderState, state_dict: Any) -> dict[str, Any]:
    """Return a saved state that fits a loader, or raise LoaderError."""
    keys = {"epoch", "consumed", "streams", "seed", "generators", "length", "part", "own"}
    if not isinstance(state_dict, Mapping) or not keys <= state_dict.keys():
        raise LoaderError(f"Expected a state of LoaderHandle.state_dict(), found {state_dict!r}.")
    saved, length = dict(state_dict), length_of(state.raw.dataset)
    if saved["length"] != length:
        raise LoaderError(
            f"The state is of a dataset of length {saved['length']}, and this one has {length}."
        )
    if saved["consumed"] and saved["part"] != state.part:
        owners = []
        for part in (saved["part"], state.part):
            owners.append(f"rank {part[0]} of {part[1]}" if part else "all ranks")
        raise LoaderError(
            f"The state was saved in mid-epoch by {owners[0]} and can't be loaded by {owners[1]}. "
            "Use as many ranks, the same loader class and options, or save between epochs."
        )
    return saved


def raw_loader(loader: LoaderHandle | DataLoader[Any]) -> DataLoader[Any]:
    """Return the user's loader behind a handle, or the loader itself."""
    return loader._accel.raw if isinstance(loader, LoaderHandle) else loader


def effective_batch_size(loader: LoaderHandle | DataLoader[Any]) -> int:
    """Return the number of samples in a step of all ranks together. Local.

    Args:
        loader: a loader's handle, or a raw ``DataLoader``, which counts for all ranks.

    Raises:
        LoaderError: the loader has no batch size.
    """
    raw = raw_loader(loader)
    size: int | None = getattr(raw, "batch_size", None)
    if size is None:
        size = getattr(getattr(raw, "batch_sampler", None), "batch_size", None)
    if size is None:
        raise LoaderError(
            f"effective_batch_size: {described(raw)} has no batch_size. Multiply the size of a "
            "rank's batch by accel.world_size()."
        )
    if not isinstance(loader, LoaderHandle):
        return size * world_size()
    state = loader._accel
    return size if state.options.split_batches else size * state.place.world


# -- Iteration -------------------------------------------------------------------------------------


@final
@dataclass(eq=False)
class Latest:
    """The last batch of all handles, and the last ``split``, which gather_for_metrics assumes."""

    rows: RealRows | None = None
    #: The replica of the model for which it was, and the number of replicas.
    replica: tuple[int, int] | None = None
    #: The divisions of ``split``, by number of items and padding.
    divisions: dict[tuple[int, bool], Division] = field(default_factory=dict)


latest = Latest()


def forget() -> None:
    """Forget the last batch and the last ``split``, because the process group changes."""
    latest.rows = latest.replica = None
    latest.divisions.clear()


@final
class Iteration:
    """An iterator of a handle. It begins its epoch when it is created, as in raw PyTorch."""

    def __init__(self, state: LoaderState) -> None:
        state.check_process()
        state.release()
        device = state.place.device
        moves = state.options.move and device.type != "cpu"
        self._state = state
        self._device = device if moves else None
        #: Batches that were read before the loop asked for them.
        self._ahead: deque[Any] = deque()
        #: Batches of the current group of ``accumulate`` that the loop hasn't got.
        self.group_left = 0
        self.finished = False
        loader, self.reader = state.prepare()
        start = self.reader.skip(state.start, state.skip)
        self.reader.begin(start)
        if not start.in_place:
            loader.generator = state.worker_seeds(start)
        with on_cpu():
            self._batches = self.reader.open(loader)
        # A stream of several workers may have more batches than its dataset's length tells.
        self.length = length_of(self.reader) if isinstance(self.reader, SamplerReader) else None
        state.start, state.skip = state.fresh(start.epoch + 1), 0
        state.latest = weakref.ref(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.reader)

    def __next__(self) -> Any:
        if not self._ahead and not self._read_ahead(1):
            self.finished = True
            raise StopIteration
        tag, batch = self._ahead.popleft()
        self.reader.take(tag)
        self._state.rows = latest.rows = self.reader.rows
        latest.replica = self._state.place[:2]
        return batch if self._device is None else to_device(batch, self._device)

    def _read_ahead(self, count: int) -> int:
        """Read until ``count`` batches are ahead of the loop, and return their number."""
        self._ahead.extend(islice(self._batches, max(0, count - len(self._ahead))))
        return min(count, len(self._ahead))

    def upcoming(self, count: int) -> int:
        """Return how many of the next ``count`` batches there are. Read them if necessary."""
        if self.length is not None:
            return min(count, self.length - self.reader.given)
        if count == 1 and self.reader.more is not None:
            return int(self.reader.more)
        return self._read_ahead(count)


# -- Groups of batches for one optimizer step ------------------------------------------------------


@final
class Group(Generic[T]):
    """The batches of one optimizer step, which can be iterated once. ``len`` is their number."""

    def __init__(self, batches: Callable[[], Iterator[T]], size: int) -> None:
        self._batches = batches
        self._size = size
        self.is_used = False

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        if self.is_used:
            raise LoaderError(
                "A group of accel.accumulate gives its batches once, before the next group. Keep "
                "them with list(group) to use them twice."
            )
        self.is_used = True
        # Only the loop holds the iterator, so a break ends the accumulation.
        return self._batches()


@final
class Accumulation(Generic[T]):
    """The batches of a loader in groups of ``n``. The last group may be smaller."""

    def __init__(self, loader: LoaderHandle, n: int, accumulate: Callable[[bool], None]) -> None:
        self._loader = loader
        self._n = n
        self._accumulate = accumulate

    def __len__(self) -> int:
        return -(-len(self._loader) // self._n)

    def __iter__(self) -> Iterator[Group[T]]:
        state, accumulate = self._loader._accel, self._accumulate
        iteration = iter(self._loader)
        state.release = lambda: accumulate(False)
        if state.place.process is not None:
            groups = f"{iteration.length} batches in groups of {self._n}"
            by_rank = agree("accel.accumulate", groups)
            if len(set(by_rank)) > 1:
                # Gradients of different steps would be averaged.
                raise RankMismatchError(
                    f"accel.accumulate: the ranks have different batches: {', '.join(by_rank)}. "
                    "Use LoaderOptions(even_batches=True) or drop_last=True."
                )
        try:
            while size := iteration.upcoming(self._n):
                group: Group[T] = Group(partial(self._batches, iteration, size), size)
                end = iteration.reader.given + size
                yield group
                group.is_used = True
                # The batches that the loop didn't take are dropped, so the ranks stay at one step.
                deque(islice(iteration, end - iteration.reader.given), maxlen=0)
                iteration.group_left = 0
                accumulate(False)
        finally:
            # A break leaves the epoch, also while the program holds its last group.
            iteration.finished = True

    def _batches(self, iteration: Iteration, size: int) -> Iterator[T]:
        try:
            for left in reversed(range(size)):
                iteration.group_left = left
                self._accumulate(left > 0)
                yield next(iteration)
        finally:
            self._accumulate(False)
