"""Dataloaders: each rank gets its part of every epoch, on its device, and the position can be saved.

__init__ (the handle, and which loaders can have one) > iteration (an epoch is read) > streams > readers (what stands in the
loader) > sampling (who gets what, in which order)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar, final

import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from ..errors import LoaderError
from ..process import rank, world_size
from ..process.collectives import all_gather
from ..process.control import agree, locked
from ..process.rng import Generators, Private, from_plain, to_plain
from ..trees import map_tensors
from .iteration import Iteration, LoaderOptions, LoaderPlace, LoaderState, latest
from .readers import WHOLE, Kept, Position, Shape, Start, shape_of
from .sampling import (
    SampleOrder,
    digest,
    drawn_from,
    loader_seed,
    own_generators,
    parts,
)
from .streams import StreamComparisons

__all__ = [
    "LoaderHandle",
    "LoaderOptions",
    "LoaderPlace",
    "check",
    "check_options",
    "describe",
    "distribute",
    "effective_batch_size",
    "gather_for_metrics",
    "loader_seed",
    "raw_loader",
]

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
    """The handle of a loader on one rank. Local.

    Args:
        loader: the user's loader, which stays as it is.
        options: how to distribute it.
        place: for whom; with the end of its process the handle ends too.
        seed: decides the order of every epoch; the same on all ranks, and another for each loader, since loaders of
            one length and one seed are shuffled alike.
        in_place: orders are drawn from the program's generators instead, as raw PyTorch draws them.
        name: of this loader among all of the process, the same on all ranks.

    Raises:
        LoaderError: as ``check``.
    """
    check(loader, options, place.world)
    comparisons = None
    if place.process is not None and place.world > 1 and options.shard and isinstance(loader.dataset, IterableDataset):
        even = options.even_batches or loader.drop_last
        comparisons = StreamComparisons(place.process, name, type(loader.dataset).__qualname__, even)
    return LoaderHandle(
        LoaderState(
            raw=loader,
            options=options,
            place=place,
            seed=seed,
            in_place=in_place or not options.shard,
            comparisons=comparisons,
        )
    )


# -- Which loaders can be distributed, and what of them must be equal on all ranks -------------------------------------

_OFF = "use LoaderOptions(shard=False)"
_COMPARED = 1 << 16  # items of a sampler's order


def check(loader: Any, options: Any, world_size: int) -> None:
    """Refuses what cannot be distributed, before anything changes.

    Raises:
        LoaderError: the loader is not a ``DataLoader``, is distributed already, or reads in a way that cannot be shared.
    """
    if not isinstance(loader, DataLoader):
        raise LoaderError(f"expected a torch.utils.data.DataLoader, found a {type(loader).__qualname__}")
    check_options(options)
    if world_size < 1:
        raise LoaderError(f"expected a world size of at least 1, found {world_size}")
    if not options.shard:
        return
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


def check_options(options: Any) -> None:
    """Refuses other things than LoaderOptions, and bad values in them."""
    if not isinstance(options, LoaderOptions):
        raise LoaderError(f"expected LoaderOptions, found a {type(options).__qualname__}")
    for name in ("shard", "even_batches", "move"):
        if not isinstance(getattr(options, name), bool):
            raise LoaderError(f"LoaderOptions({name}=...): expected a bool, found {getattr(options, name)!r}")
    if options.seed is not None and type(options.seed) is not int:
        raise LoaderError(f"LoaderOptions(seed=...): expected an int or None, found {options.seed!r}")


def _check_sampler(loader: DataLoader[Any]) -> None:
    """Refuses samplers that are distributed already."""
    for part in (*parts(loader.batch_sampler), *parts(loader.sampler)):
        ranks = (
            {getattr(part, name, None) for name in ("num_replicas", "num_processes")}
            if isinstance(part, Sampler)
            else set()
        )
        if isinstance(part, DistributedSampler) or ranks - {None, 1}:
            raise LoaderError(
                f"the loader is distributed already, by a {type(part).__qualname__}: give accel the loader that one "
                f"process would use, or {_OFF}"
            )


def length_of(dataset: Any) -> int | None:
    """The length of a dataset that has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def describe(loader: DataLoader[Any], options: LoaderOptions | None = None) -> str:
    """What must be equal on all ranks for their parts to fit together, as text. Local."""
    options = options or LoaderOptions()
    if not options.shard:
        return f"{options}"
    dataset, shape = loader.dataset, shape_of(loader)
    facts: dict[str, Any] = {
        "dataset": type(dataset).__qualname__,
        "length": length_of(dataset),
        "sampler": type(shape.sampler).__qualname__,
        "batch": shape[1:],
    }
    if isinstance(dataset, Subset):
        # A random_split with another seed on each rank would mix training and validation data.
        facts["checksum of the Subset's indices"] = digest(dataset.indices)
    if isinstance(dataset, IterableDataset):
        facts["num_workers"] = loader.num_workers
    elif type(shape.sampler) not in (SequentialSampler, RandomSampler) and world_size() > 1:
        facts["checksum of the sampler's order"] = _order_of(loader, shape)
    return f"{facts}, {options}"


def _order_of(loader: DataLoader[Any], shape: Shape) -> str:
    """The beginning of what a sampler draws from fixed seeds; the error where it cannot, which iterating will raise."""
    generators = Generators(drawn_from(shape.sampler, own_generators(loader)))
    try:
        order = SampleOrder(shape.sampler, Private(generators, generators.seeded(0)), ahead=True)
        return str(digest(order.read(_COMPARED)))
    except Exception as error:
        return f"{type(error).__qualname__}"


# -- The handle --------------------------------------------------------------------------------------------------------


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
        if state.options.shard and state.start.in_place:
            state.in_place = False  # an epoch that is chosen by number can only be drawn from the seed
            state.start, state.following = state.fresh(epoch), epoch + 1
        elif epoch != state.start.epoch:
            state.start, state.following = state.fresh(epoch), epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks at the same step, as plain values.

        It is that of the iterator that gave the last batch, of those still alive, and counts the samples that the loops
        of all ranks were given. At the end of an epoch, and after a ``break``, it is the start of the next one.

        Raises:
            LoaderError: the position is not known; see docs/dataloaders.md.
        """
        state, current = self._accel, self._accel.current()
        if current is None or current.reader.complete():
            start, following = state.start, state.following
            position = Position(start.at or (0,), start.checksum, start.states)
        else:
            start, following = current.reader.start, state.start.epoch
            position = current.reader.position()
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
        length = length_of(state.raw.dataset)
        if saved.length != length:
            raise LoaderError(f"the state was saved with a dataset of length {saved.length}; this one has {length}")
        self._check_part(saved)
        generators = saved.generators
        states = None if generators is None else generators["order"]
        seed = saved.seed if generators is None and state.options.shard else None
        wanted = Start(saved.epoch, seed, tuple(saved.streams), saved.checksum, states)
        if seed is None and not any(wanted.at) and states is None:
            wanted = state.fresh(saved.epoch)
        start = state.reader().resume(wanted)
        if seed is not None:
            state.seed, state.in_place = seed, False
        elif state.in_place:
            Generators(own_generators(state.raw)).put(generators["own"] if generators else {})
        state.start, state.following = start, saved.following
        state.live.clear()

    def _check_part(self, saved: _SavedPosition) -> None:
        """Raises where a position is one of many, or of all, and this loader's is not."""
        state = self._accel
        if saved.consumed and saved.part != state.part:
            raise LoaderError(
                f"the state is {saved.consumed} samples into epoch {saved.epoch}, {_part(saved.part)}, and this loader reads "
                f"{_part(state.part)}: what a rank reads by itself cannot be divided anew. Resume with as many ranks and the "
                "same options, or save between epochs"
            )

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


class _SavedPosition(NamedTuple):
    """A state dict whose types are right."""

    epoch: int
    following: int
    consumed: int
    seed: int
    streams: list[int]
    checksum: int | None
    length: int | None
    generators: Mapping[str, Any] | None
    part: list[int]


def _read(state: Any) -> _SavedPosition:
    """Checks the form of a state dict."""

    def number(name: str, optional: bool = False) -> bool:
        value = state.get(name)
        return (optional and value is None) or (type(value) is int and (value >= 0 or name == "seed"))

    def numbers(name: str) -> bool:
        values = state.get(name, [])
        return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)

    plain = isinstance(state, Mapping) and all(map(number, ("epoch", "next", "seed", "consumed")))
    plain = plain and number("checksum", True) and number("length", True) and numbers("streams") and numbers("part")
    if plain and sum(state.get("streams", [])) == state["consumed"] and len(state.get("part", [])) in (0, 2):
        generators = state.get("generators")
        if generators is None or (isinstance(generators, Mapping) and {"order", "own"} <= generators.keys()):
            return _SavedPosition(
                state["epoch"],
                state["next"],
                state["consumed"],
                state["seed"],
                state.get("streams", []),
                state.get("checksum"),
                state.get("length"),
                from_plain(generators),
                state.get("part", []),
            )
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
    return size * (loader._accel.place.world if isinstance(loader, LoaderHandle) else world_size())


@locked
def gather_for_metrics(data: T, loader: LoaderHandle | None = None) -> T:
    """``data`` of all ranks, in the order of the dataset and without the padding of the last batch. Collective.

    Ranks that hold one model together, as the stages of a pipeline do, have the same rows, which come once.

    Args:
        data: nested tensors whose dim 0 is this rank's batch; on one process it comes back as it is.
        loader: the loader that gave the batch; by default the one that gave the last batch.

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
    rows: T = map_tensors(lambda tensor: _trim(tensor, kept), data) if kept.pads else data
    replica = latest.replica if loader is None else loader._accel.place[:2]
    if replica is not None and replica[1] < world_size():
        rows = _once(rows, replica[0])
    gathered: T = all_gather(rows)
    return gathered


def _once(data: T, replica: int) -> T:
    """No rows on all but the first rank of each replica, since its ranks all have the same rows. Collective."""
    first = agree("gather_for_metrics", replica).index(replica) == rank()
    rows: T = map_tensors(lambda t: (t if t.dim() else t[None])[: None if first else 0], data)
    return rows


def _trim(tensor: torch.Tensor, kept: Kept) -> torch.Tensor:
    """The rows of a batch that are not padding."""
    if tensor.dim() == 0 or kept.rows not in (None, len(tensor)):
        raise LoaderError(
            f"gather_for_metrics: expected dim 0 to be this rank's batch{f' of {kept.rows}' if kept.rows else ''}, found "
            f"shape {tuple(tensor.shape)}: its padding is not known. Give one row for each sample, or use "
            "accel.all_gather or accel.all_reduce"
        )
    return tensor[: kept.real] if kept.rows is not None else tensor[: len(tensor) * kept.real]
