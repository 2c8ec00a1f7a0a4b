"""Dataloaders: each rank gets its part of every epoch, on its device, and the position can be saved.

__init__ (the handle, and its iterations) > accumulation (groups of batches) > transfer (to the device) > streams > dispatch (by
rank 0) > readers (what stands in the loader, and which loaders there can be) > sampling (who gets what, in which order)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, final

import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from ..errors import LoaderError, RankMismatchError
from ..process import ended, rank, running, world_size
from ..process.collectives import all_gather
from ..process.control import agree, locked, raise_together
from ..process.rng import Generators, from_plain, to_plain
from ..process.transfer import Prints, Read, Transfer, other_values
from ..trees import walk
from .accumulation import Accumulation as Accumulation
from .readers import (
    WHOLE,
    EpochReader,
    Kept,
    Position,
    SamplerReader,
    Start,
    UndividedReader,
    keeps_alone,
    length_of,
    shape_of,
    too_short,
)
from .readers import LoaderOptions as LoaderOptions
from .readers import LoaderPlace as LoaderPlace
from .readers import check as check
from .readers import check_options as check_options
from .readers import describe as describe
from .sampling import Division, mix, own_generators
from .sampling import loader_seed as loader_seed
from .streams import StreamComparisons, StreamReader

T = TypeVar("T")


def distribute(
    loader: DataLoader[Any],
    options: LoaderOptions,
    place: LoaderPlace,
    *,
    seed: int,
    in_place: bool = False,
    name: str = "",
) -> LoaderHandle:
    """The handle of a loader, which itself stays as it is, on one rank; it ends with the process of ``place``. Local.

    Args:
        seed: decides the order of every epoch; the same on all ranks, and another for each loader, since loaders of
            one length and one seed are shuffled alike.
        in_place: orders are drawn from the program's generators instead, as raw PyTorch draws them.
        name: of this loader among all of the process, the same on all ranks.

    Raises:
        LoaderError: as ``check``.
    """
    check(loader, options, place.world)
    if keeps_alone(loader):
        options = replace(options, shard=False)
    comparisons = None
    compared = options.shard and not options.dispatch and isinstance(loader.dataset, IterableDataset)
    if place.process is not None and place.world > 1 and compared:
        even = options.even_batches or loader.drop_last
        comparisons = StreamComparisons(place.process, name, type(loader.dataset).__qualname__, even)
    loaded = getattr(loader, "next_iter_state", None)  # what torchdata calls a state that was loaded and not begun
    state = LoaderState(raw=loader, options=options, place=place, comparisons=comparisons, own=loaded)
    state.begin_anew(seed, in_place)
    _states.add(state)
    return LoaderHandle(state)


# -- One iteration -----------------------------------------------------------------------------------------------------


@final
@dataclass(eq=False, kw_only=True)
class LoaderState:
    """What a handle knows: the raw loader, this rank's place, the epoch that comes next, and who iterates."""

    raw: DataLoader[Any]
    options: LoaderOptions
    place: LoaderPlace
    #: Decides the orders of all epochs, unless they are drawn in place.
    seed: int = 0
    #: Orders are drawn from the program's generators, as in raw PyTorch.
    in_place: bool = False
    #: Where the next iteration starts, and the epoch after that.
    start: Start = field(init=False)
    following: int = 1
    batches: int = 0
    kept: Kept | None = None
    live: weakref.WeakSet[Iteration] = field(default_factory=weakref.WeakSet)
    #: The copy whose workers outlive an epoch, and the iteration that has it.
    persistent: tuple[DataLoader[Any], EpochReader] | None = None
    holder: weakref.ref[Iteration] | None = None
    #: The serials of the engines that it was set up with.
    engines: set[int] = field(default_factory=set)
    #: What the ranks tell each other of what they read.
    comparisons: StreamComparisons | None = None
    #: What a loader that keeps its own position said at the end of its last epoch.
    own: Any = None
    #: Ends what a group of ``accumulate`` began and may not have ended.
    release: Callable[[], None] = lambda: None

    def fresh(self, epoch: int) -> Start:
        """The start of a whole epoch."""
        return Start(epoch, None if self.in_place else self.seed)

    @property
    def part(self) -> list[int]:
        """Whose position a state is: this rank's of so many where each reads by itself, else that of all, which is empty."""
        return [] if self.options.shard else list(self.place[:2])

    def begin_anew(self, seed: int, in_place: bool) -> None:
        """As just set up."""
        self.seed, self.in_place = seed, in_place or not self.options.shard
        self.start, self.following = self.fresh(0), 1
        self.live.clear()

    def reader(self) -> EpochReader:
        shard, shape = self.options.shard, shape_of(self.raw)
        if not shard and not _followed(self.raw):
            return UndividedReader(self.raw)
        division = Division(
            rank=self.place.rank if shard else 0,
            world=self.place.world if shard else 1,
            batch=shape.batch // (self.place.world if self.options.split_batches else 1),
            even=self.options.even_batches,
            drop_last=shape.drop_last,
        )
        if isinstance(self.raw.dataset, IterableDataset):
            process = self.place.process
            several = self.options.dispatch and process is not None and process.place.world_size > 1
            return StreamReader(self.raw, shape, division, process if several else None)
        return SamplerReader(self.raw, division)

    def prepare(self, iteration: Iteration) -> tuple[DataLoader[Any], EpochReader]:
        """A copy of the loader and the reader in it; the persistent copy, unless another iteration still reads from it."""
        persists = self.raw.persistent_workers and self.raw.num_workers > 0
        holder = None if self.holder is None else self.holder()
        free = persists and (holder is None or holder is iteration or holder.finished)
        if free:
            self.holder = weakref.ref(iteration)
            if self.persistent is not None:
                return self.persistent
        reader = self.reader()
        if reader.keeps:  # a copy would keep it to itself
            self.holder = weakref.ref(iteration)
            return self.raw, reader
        loader = copy.copy(self.raw)
        vars(loader).update(_iterator=None, persistent_workers=free)
        reader.install(loader)
        if free:
            self.persistent = loader, reader
        return loader, reader

    def current(self) -> Iteration | None:
        """The iteration that gave the last batch, of those that may still give one."""
        running = [iteration for iteration in self.live if not iteration.finished]
        return max(running, key=lambda iteration: iteration.last, default=None)


#: Of all handles that live.
_states: weakref.WeakSet[LoaderState] = weakref.WeakSet()


def remember() -> Callable[[], list[LoaderState]]:
    """Where all handles stand. What is returned puts them back there, on all ranks together, and tells which came since."""
    names = ("seed", "in_place", "start", "following", "batches", "kept", "own")
    then = {state: {name: getattr(state, name) for name in names} for state in _states}
    live = {state: list(state.live) for state in then}
    generators = {state: Generators(own_generators(state.raw)) for state in then}
    drawn = {state: own.states() for state, own in generators.items()}
    last = latest.kept, latest.replica

    def put_back() -> list[LoaderState]:
        for state, values in then.items():
            vars(state).update(values, live=weakref.WeakSet(live[state]))
            generators[state].put(drawn[state])
            if state.comparisons is not None:
                state.comparisons.begin_anew()
        latest.kept, latest.replica = last
        return [state for state in _states if state not in then]

    return put_back


def _followed(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads one batch after the other, from its sampler or its dataset."""
    plain = type(loader).__iter__ is DataLoader.__iter__ and (loader.in_order or not loader.num_workers)
    return plain and not isinstance(loader.dataset, torch_data.IterDataPipe | torch_data.MapDataPipe)


@final
class Latest:
    """What is kept of the last batch that any handle gave, and the replica of the model that it was for; None before."""

    kept: Kept | None = None
    replica: tuple[int, int] | None = None


latest = Latest()


class Ahead(NamedTuple):
    """An item of the loader that was read before the loop asked, or the error in its place."""

    item: Any
    error: Exception | None = None
    #: The position before it that the loader keeps, if it does.
    own: Any = None


@final
class Iteration:
    """One iterator of a handle. It begins its epoch when it is made, as in raw PyTorch."""

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_batches",
        "_comparison",
        "_state",
        "_transfer",
        "finished",
        "group_left",
        "last",
        "reader",
    )

    def __init__(self, state: LoaderState) -> None:
        place = state.place
        if place.process is not None and running() is not place.process and not ended():
            raise LoaderError(
                f"this LoaderHandle gives the part of rank {place.rank} of {place.world} of what accel.teardown() has ended: "
                "use the raw DataLoader, or give it to accel.setup again"
            )
        self._state = state
        self._transfer = Transfer(place.device) if state.options.move and place.device.type != "cpu" else None
        self.last = 0
        #: The batches that the group of ``accumulate`` has and the loop was not given, once it was given one.
        self.group_left = 0
        self.finished = False
        self._ahead: deque[Ahead] = deque()
        state.release()
        self._begin()
        state.live.add(self)

    def _begin(self) -> None:
        """Begins the next epoch, or the rest of a resumed one."""
        state, start = self._state, self._state.start
        loader, self.reader = state.prepare(self)
        self.reader.begin(start, state.in_place)
        self._comparison = None if state.comparisons is None else state.comparisons.begin(start.epoch, start.at)
        loader.generator = self._seeds(start)
        # Torch draws a seed from the generator, which is the CPU's, on the default device. Workers begin inside this context
        # and stay in it, where each call of torch's takes longer.
        elsewhere = torch.get_default_device().type != "cpu"
        with torch.device("cpu") if elsewhere else contextlib.nullcontext():
            self._batches = self.reader.open(loader)
        for number in range(0 if self.reader.skips else start.skip):
            try:
                self.reader.take(next(self._batches))
            except StopIteration:
                raise too_short(start.skip, number) from None
        state.start, state.following, state.own = state.fresh(state.following), state.following + 1, None

    def _seeds(self, start: Start) -> torch.Generator | None:
        """What the loader seeds its workers from: as in raw PyTorch, or nothing that the program draws from."""
        state, states = self._state, start.states or {}
        if start.in_place or isinstance(self.reader, UndividedReader):
            return state.raw.generator  # type: ignore[no-any-return]
        generator = torch.Generator()
        if "seeds" in states:
            generator.set_state(states["seeds"])
        else:
            generator.manual_seed(mix(state.seed, start.epoch, sum(start.at), state.place.rank))
        return generator

    def __iter__(self) -> Iteration:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        item, error, _ = self._ahead.popleft() if self._ahead else (self._read(), None, None)
        if error is not None:
            raise error
        reader, state = self.reader, self._state
        batch = reader.take(item)
        if self._comparison is not None and isinstance(reader, StreamReader):
            self._comparison.gave(reader.given - reader.start.skip, reader.tag.first)
        state.batches = self.last = state.batches + 1
        state.kept = latest.kept = reader.kept
        latest.replica = state.place[:2]
        return batch if self._transfer is None else self._transfer(batch)

    def _read(self) -> Any:
        """The loader's next item; StopIteration at the end of the epoch."""
        while True:
            try:
                return next(self._batches)
            except StopIteration:
                if not self._begins_anew():
                    raise

    def ready(self) -> bool:
        """Whether there is another batch, which is read now."""
        return bool(self._ahead) or self._read_ahead(self._read)

    def upcoming(self, count: int) -> int:
        """How many of the next ``count`` batches there are for this rank; where only reading tells, they are read now."""
        known = self.reader.upcoming(count)
        if known is not None:
            return known
        while len(self._ahead) < count and not (self._ahead and self._ahead[-1].error):
            if not self._read_ahead(lambda: next(self._batches)):
                break
        return min(count, len(self._ahead))

    def _read_ahead(self, read: Callable[[], Any]) -> bool:
        """One item more; an error too waits for its turn."""
        own = self.reader.own()
        try:
            self._ahead.append(Ahead(read(), None, own))
        except StopIteration:
            return False
        except Exception as error:
            self._ahead.append(Ahead(None, error, own))
        return True

    def position(self) -> Position:
        """Where the loops of all ranks stand."""
        holder = self._state.holder
        if self.reader.keeps and holder is not None and holder() is not self:
            raise LoaderError(
                "this loader keeps the position of one iterator, and another has begun since: save before that"
            )
        position = self.reader.position()
        return position._replace(own=self._ahead[0].own) if self._ahead else position

    def _begins_anew(self) -> bool:
        """At the end of the loader's iterator: whether nothing was left of a resumed epoch, so that the next one began."""
        if self.finished:
            return False
        self.reader.close()
        if self._comparison is not None:
            self._comparison.end(self.reader.given - self.reader.start.skip)
        nothing = self.reader.given == self.reader.start.skip
        if self.reader.start.inside and nothing and self.reader.complete():
            self._begin()
            return True
        self.finished, self._state.own = True, self.reader.own()
        return False


# -- The handle --------------------------------------------------------------------------------------------------------


class _UnlessOwn:
    """An attribute of a handle whose loader has none of this name."""

    def __init__(self, made: Any) -> None:
        self._made = made
        functools.update_wrapper(self, made)  # type: ignore[arg-type]

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, handle: LoaderHandle | None, owner: type | None = None) -> Any:
        raw = None if handle is None else handle._accel.raw
        return getattr(raw, self._name) if hasattr(raw, self._name) else self._made.__get__(handle, owner)


@final
class LoaderHandle:
    """A distributed dataloader. Everything else about it is the ``DataLoader``: attributes are read and set there."""

    __slots__ = ("__weakref__", "_accel")
    _accel: LoaderState

    def __init__(self, state: LoaderState) -> None:
        object.__setattr__(self, "_accel", state)

    def __iter__(self) -> Iteration:
        return Iteration(self._accel)

    def __len__(self) -> int:
        """This rank's batches of a whole epoch, also while the rest of a resumed one is next."""
        return self._accel.reader().length()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch ``epoch``, from its start; or from where it was, when just that epoch is resumed.

        Args:
            epoch: the epoch, at least 0. Without this call each iteration is the next epoch.

        Raises:
            LoaderError: not an epoch.
        """
        if type(epoch) is not int or epoch < 0:
            raise LoaderError(f"set_epoch: expected an int of at least 0, found {epoch!r}")
        state = self._accel
        chosen = state.options.shard and state.start.in_place
        if chosen:
            state.in_place = False  # an epoch that is chosen by number can only be drawn from the seed
        if chosen or epoch != state.start.epoch:
            state.start, state.following = state.fresh(epoch)._replace(skip=state.start.skip), epoch + 1

    @_UnlessOwn
    def skip(self, n: int) -> None:
        """The next iteration starts after ``n`` batches, as if they had been read: for a step number of another library.

        Of a map-style dataset their samples are not read. Every rank calls it; ``set_epoch`` may follow or come before.

        Args:
            n: batches of each rank, at least 0; after those that a loaded state leaves out. A second call replaces the first.

        Raises:
            LoaderError: not a number of batches, or more than an epoch has; where that is not known now, the iteration raises.
            RankMismatchError: the ranks leave out different numbers.
        """
        state, process = self._accel, self._accel.place.process
        # The streams of several workers have more batches than the dataset's length tells.
        problem, length = None, None if isinstance(state.raw.dataset, IterableDataset) else length_of(self)
        if type(n) is not int or n < 0:
            problem = LoaderError(f"loader.skip({n!r}): expected a number of batches, at least 0")
        elif length is not None and n > length:
            problem = too_short(n, length)
        told = agree("loader.skip", (n, str(problem or ""))) if process is not None and state.options.shard else []
        raise_together("loader.skip", problem, [text for _, text in told], LoaderError)
        if any(theirs != n for theirs, _ in told):
            raise RankMismatchError(
                f"loader.skip: the ranks leave out different numbers of batches: {[theirs for theirs, _ in told]}"
            )
        state.start = state.start._replace(skip=n, order=None)

    @_UnlessOwn  # type: ignore[prop-decorator]
    @property
    def is_last(self) -> bool:
        """Whether the batch that the loop was given last is this rank's last one of the epoch; False outside of a loop.

        With an iterable dataset, which alone knows, the next batch is read now.
        """
        current = self._accel.current()
        return current is not None and current.last > 0 and not current.upcoming(1)

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks at the same step, as plain values.

        It is that of the iterator that gave the last batch, of those still alive, and counts the samples that the loops
        of all ranks were given. At the end of an epoch, and after a ``break``, it is the start of the next one.

        Raises:
            LoaderError: the position is not known; see docs/dataloaders.md.
        """
        state, current = self._accel, self._accel.current()
        if current is not None and current.group_left:
            raise LoaderError(
                f"a state inside of a group of accel.accumulate, {current.group_left} batches before its end: a run that resumes "
                "from it would have other groups, and not the gradients of this one. Save between groups, after the step"
            )
        if current is None or current.reader.complete():
            start, following = state.start, state.following
            position = Position(
                start.at or (0,), start.checksum, start.states, state.own if start.own is None else start.own
            )
        else:
            start, following = current.reader.start, state.start.epoch
            position = current.position()
        if start.skip and (current is None or current.reader.given == start.skip):
            raise LoaderError(
                f"the position of this loader is not known between skip({start.skip}) and the first batch after it: save later"
            )
        generators = None
        if start.seed is None:
            own = Generators(own_generators(state.raw)).states()
            generators = {"order": to_plain(position.states), "own": to_plain(own)}
        return {
            "epoch": start.epoch,
            "next": following,
            "consumed": sum(position.at),
            "streams": list(position.at),
            "checksum": position.checksum,
            "seed": state.seed if start.seed is None else start.seed,
            "generators": generators,
            "length": length_of(state.raw.dataset),
            "part": state.part,
            "own": position.own,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iteration continues at a saved position, at any world size and batch size.

        With ``shard=False`` each rank has a position of its own, which only the same rank of as many can continue.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            LoaderError: it is not such a state, or it was saved with another dataset or sampler; nothing is changed.
        """
        state, saved = self._accel, _read(state_dict)
        length, epoch = length_of(state.raw.dataset), saved["epoch"]
        if saved["length"] != length:
            raise LoaderError(f"the state was saved with a dataset of length {saved['length']}; this one has {length}")
        if (saved["consumed"] or saved["own"] is not None) and saved["part"] != state.part:
            raise LoaderError(
                f"the state is {saved['consumed']} samples into epoch {epoch}, {_part(saved['part'])}, and this loader reads "
                f"{_part(state.part)}: what a rank reads by itself cannot be divided anew. Resume with as many ranks and the "
                "same options, or save between epochs"
            )
        reader = state.reader()
        if saved["own"] is not None and not reader.keeps:
            raise LoaderError(
                f"the state is of a loader that keeps its own position, which a {type(state.raw).__qualname__} does not"
            )
        generators = saved["generators"]
        states = None if generators is None else generators["order"]
        seed = saved["seed"] if generators is None and state.options.shard else None
        wanted = Start(epoch, seed, tuple(saved["streams"]), saved["checksum"], states, own=saved["own"])
        if seed is None and not any(wanted.at) and states is None:
            wanted = state.fresh(epoch)._replace(own=saved["own"])
        start = reader.resume(wanted)
        if seed is not None:
            state.seed, state.in_place = seed, False
        elif state.in_place:
            Generators(own_generators(state.raw)).put(generators["own"] if generators else {})
        state.start, state.following, state.own = start, saved["next"], None
        state.live.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accel.raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accel.raw, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._accel.raw, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._accel.raw)})

    def __repr__(self) -> str:
        return f"LoaderHandle({self._accel.raw!r}, rank {self._accel.place.rank} of {self._accel.place.world})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DataLoader[Any]:
        return copy.deepcopy(self._accel.raw, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LoaderError(
            "a LoaderHandle cannot be pickled, nor copied by copy.copy: it belongs to this process. Pickle its state_dict(), "
            "which is the position, or copy.deepcopy(handle), which is a plain DataLoader"
        )


def _part(part: list[int]) -> str:
    """Whose position it is, in words."""
    return f"as rank {part[0]} of {part[1]} with LoaderOptions(shard=False)" if part else "divided by accel"


def raw_loader(loader: LoaderHandle | DataLoader[Any]) -> DataLoader[Any]:
    """The user's own loader behind a handle, or itself."""
    return loader._accel.raw if isinstance(loader, LoaderHandle) else loader


#: What a state dict need not have.
_NONE: Final = dict.fromkeys(("checksum", "length", "generators", "own"))
_OPTIONAL: Final[Mapping[str, Any]] = {"streams": [], "part": [], **_NONE}


def _read(state: Any) -> dict[str, Any]:
    """A state dict whose form is right, with all of its keys."""
    saved = {**_OPTIONAL, **state} if isinstance(state, Mapping) else {}
    numbers = [saved.get(name) for name in ("epoch", "next", "consumed")]
    numbers += [number for number in (saved.get("checksum"), saved.get("length")) if number is not None]
    streams, part, generators = (saved.get(name) for name in ("streams", "part", "generators"))
    if type(saved.get("seed")) is int and isinstance(streams, list) and isinstance(part, list):
        plain = all(type(n) is int and n >= 0 for n in (*numbers, *streams, *part))
        known = generators is None or (isinstance(generators, Mapping) and {"order", "own"} <= generators.keys())
        if plain and known and sum(streams) == saved["consumed"] and len(part) in (0, 2):
            return {**saved, "generators": from_plain(generators)}
    raise LoaderError(f"expected what LoaderHandle.state_dict() returns, found {state!r}")


def effective_batch_size(loader: LoaderHandle | DataLoader[Any]) -> int:
    """The samples of one step of all ranks together: the loader's batch size times the number of ranks. Local.

    Args:
        loader: a loader's handle; a raw ``DataLoader`` counts for all ranks that run now.

    Raises:
        LoaderError: the loader does not say how large its batches are.
    """
    raw = raw_loader(loader)
    if not isinstance(raw, DataLoader):
        raise LoaderError(f"effective_batch_size: expected a DataLoader or its handle, found a {type(loader).__name__}")
    size = raw.batch_size if raw.batch_size is not None else getattr(raw.batch_sampler, "batch_size", None)
    if type(size) is not int:
        raise LoaderError(
            "effective_batch_size: neither the loader nor its batch sampler has a batch_size: multiply what each rank's "
            "batches hold by accel.world_size()"
        )
    if isinstance(loader, LoaderHandle):
        return size * (1 if loader._accel.options.split_batches else loader._accel.place.world)
    return size * world_size()


@locked
def gather_for_metrics(
    data: T,
    loader: LoaderHandle | DataLoader[Any] | None = None,
    *,
    pad: float | None = None,
    objects: bool = False,
) -> T:
    """``data`` of all ranks, in the order of the dataset and without the padding of the last batch. Collective.

    Ranks that hold one model together, as the stages of a pipeline do, have the same rows, which come once.

    Args:
        data: nested tensors whose dim 0 is this rank's batch; on one process it comes back as it is.
        loader: the loader that gave the batch; by default the one that gave the last batch.
        pad: fills the other dimensions to the longest of all ranks, as in ``all_gather``.
        objects: takes lists of anything that can be pickled too, such as texts, with one item for each sample; as in
            ``all_gather``.

    Raises:
        LoaderError: no loader gave a batch, or dim 0 is not the batch, so that its padding is not known.
    """
    if loader is not None and not isinstance(loader, LoaderHandle):
        raise LoaderError(f"gather_for_metrics: expected the loader's handle, found a {type(loader).__qualname__}")
    kept = latest.kept if loader is None else loader._accel.kept
    if kept is None and world_size() == 1:
        kept = WHOLE
    if kept is None:
        raise LoaderError(
            "gather_for_metrics: no loader of accel has given a batch yet, so that its padding is not known: pass the "
            "loader to accel.setup, or use accel.all_gather"
        )

    def trim(leaf: Any) -> Any:
        return leaf if leaf is None and not objects else _trim(leaf, kept)

    rows = _map_rows(trim, data, objects) if kept.pads else data
    replica = latest.replica if loader is None else loader._accel.place[:2]
    if replica is not None and replica[1] < world_size():
        rows = _once(rows, replica[0], objects)
    gathered: T = all_gather(rows, pad=pad, objects=objects)
    return gathered


def _map_rows(fn: Callable[[Any], Any], data: Any, objects: bool) -> Any:
    """The data with ``fn`` of each leaf; a list is one where it has ``objects``."""
    return walk(lambda path, leaf: fn(leaf), data, "data", lambda tree: objects and isinstance(tree, list))


def _once(data: Any, replica: int, objects: bool) -> Any:
    """No rows on all but the first rank of each replica, since its ranks all have the same rows. Collective."""
    mine: list[Any] = []
    _map_rows(mine.append, data, objects)
    texts = [repr(leaf) for leaf in mine if isinstance(leaf, list) and all(isinstance(x, str | float) for x in leaf)]
    tensors = [leaf for leaf in mine if isinstance(leaf, torch.Tensor)]
    told = agree("gather_for_metrics", (replica, Prints(tensors).read(), texts))
    together: dict[int, dict[int, Read]] = {}
    for number, (theirs, sums, _) in enumerate(told):
        together.setdefault(theirs, {})[number] = sums
    words = {(theirs, str(read)) for theirs, _, read in told}
    if len(words) > len(together) or any(map(other_values, together.values())):
        raise LoaderError(
            "gather_for_metrics: ranks that read one batch have other rows, and those of one of them would be taken. "
            "Where each has a part of the sequence, reduce over it first, or use accel.all_gather"
        )
    stop = None if next(iter(together[replica])) == rank() else 0

    def keep(leaf: Any) -> Any:
        rows = leaf[None] if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf
        return rows[:stop] if isinstance(rows, torch.Tensor | list) else rows

    return _map_rows(keep, data, objects)


def _trim(leaf: Any, kept: Kept) -> Any:
    """The rows of a batch that are not padding."""
    shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else (len(leaf),) if isinstance(leaf, list) else ()
    if not shape or kept.rows not in (None, shape[0]):
        found = f"shape {shape}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__qualname__} of shape {shape}"
        raise LoaderError(
            f"gather_for_metrics: expected dim 0 to be this rank's batch{f' of {kept.rows}' if kept.rows else ''}, found "
            f"{found}: its padding is not known. Give one row for each sample, or use accel.all_gather or accel.all_reduce"
        )
    return leaf[: kept.real] if kept.rows is not None else leaf[: shape[0] * kept.real]
