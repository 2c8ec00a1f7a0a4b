"""Dataloaders: each rank gets its part of every epoch, on its device, and the position can be saved.

__init__ (the handle) > iteration (one epoch, and groups of its batches) > streams (also by rank 0) > readers (what stands in the
loader, and which loaders there can be) > sampling (who gets what, in which order)
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..errors import (
    AccelError,
    LoaderError,
    RankMismatchError,
    described,
    text_of_error,
    whole_number,
)
from ..process import rank, world_size
from ..process.collectives import gather, walked
from ..process.control import agree, locked, raise_together
from ..process.rng import Generators, from_plain, to_plain
from ..process.transfer import Prints, Read, other_values
from ..trees import walk
from .iteration import Accumulation as Accumulation
from .iteration import Iteration, latest, states
from .iteration import LoaderState as LoaderState
from .iteration import forget as forget
from .readers import WHOLE, Kept, Start, shape_of, too_short
from .readers import LoaderOptions as LoaderOptions
from .readers import LoaderPlace as LoaderPlace
from .readers import check as check
from .readers import check_options as check_options
from .readers import describe as describe
from .readers import length_of as length_of
from .sampling import Division, fingerprint, has_parts, own_generators
from .sampling import first_sample as first_sample
from .sampling import loader_seed as loader_seed
from .streams import StreamComparisons

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

    ``seed`` decides the order of every epoch, the same on all ranks, and another for each loader, since loaders of one length
    and one seed are shuffled alike; ``in_place`` draws orders from the program's generators instead, as raw PyTorch does.
    ``name`` is that of no other loader of the process, the same on all ranks. LoaderError as in ``check``.
    """
    check(loader, options, place.world)
    if loader.persistent_workers and any(state.persistent for state in states):
        gc.collect()  # a dropped loader and its handle are a cycle, and its workers live on with it
    comparisons = None
    compared = (
        options.shard and not options.dispatch and isinstance(loader.dataset, IterableDataset)
    )
    if place.process is not None and place.world > 1 and compared:
        comparisons = StreamComparisons(place.process, name, type(loader.dataset).__qualname__)
    loaded = getattr(
        loader, "next_iter_state", None
    )  # what torchdata calls a state that was loaded and not begun
    state = LoaderState(
        raw=loader, options=options, place=place, name=name, comparisons=comparisons, own=loaded
    )
    state.begin_anew(seed, in_place)
    states.add(state)
    return LoaderHandle(state)


# -- The handle --------------------------------------------------------------------------------------------------------


class LoaderHandle:
    """A distributed dataloader. Everything else about it is the ``DataLoader``: attributes are read and set there."""

    __slots__ = ("__weakref__", "_accel")
    _accel: LoaderState

    def __init__(self, state: LoaderState) -> None:
        object.__setattr__(self, "_accel", state)

    def __iter__(self) -> Any:
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
        if (number := whole_number(epoch)) < 0:
            raise LoaderError(f"set_epoch: expected an int of at least 0, found {epoch!r}")
        state = self._accel
        chosen = state.options.shard and state.start.in_place
        if chosen:
            state.in_place = (
                False  # an epoch that is chosen by number can only be drawn from the seed
            )
        if chosen or number != state.start.epoch:
            state.start, state.following = (
                state.fresh(number)._replace(skip=state.start.skip),
                number + 1,
            )

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
        problem, length = (
            None,
            None if isinstance(state.raw.dataset, IterableDataset) else length_of(self),
        )
        if (number := whole_number(n)) < 0:
            problem = LoaderError(f"loader.skip({n!r}): expected a number of batches, at least 0")
        elif length is not None and number > length:
            problem = too_short(number, length)
        told = (
            agree("loader.skip", (number, str(problem or "")))
            if process is not None and state.options.shard
            else []
        )
        raise_together("loader.skip", problem, [text for _, text in told], LoaderError)
        if any(theirs != number for theirs, _ in told):
            raise RankMismatchError(
                f"loader.skip: the ranks leave out different numbers of batches: {[theirs for theirs, _ in told]}"
            )
        state.start = state.start._replace(skip=number, order=None)

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
            start = start._replace(
                at=start.at or (0,), own=state.own if start.own is None else start.own
            )
        else:
            start, following = current.position(), state.start.epoch
        if start.skip and (current is None or current.reader.given == start.skip):
            raise LoaderError(
                f"the position of this loader is not known between skip({start.skip}) and the first batch after it: save later"
            )
        generators = None
        if start.seed is None:
            own = Generators(own_generators(state.raw)).states()
            generators = {"order": to_plain(start.states), "own": to_plain(own)}
        return {
            "epoch": start.epoch,
            "next": following,
            "consumed": sum(start.at),
            "streams": list(start.at),
            "checksum": start.checksum,
            "seed": state.seed if start.seed is None else start.seed,
            "generators": generators,
            "length": length_of(state.raw.dataset),
            "part": state.part,
            "own": start.own,
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
            raise LoaderError(
                f"the state was saved with a dataset of length {saved['length']}; this one has {length}"
            )
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
        wanted = Start(
            epoch, seed, tuple(saved["streams"]), saved["checksum"], states, own=saved["own"]
        )
        if seed is None and not any(wanted.at) and states is None:
            wanted = state.fresh(epoch)._replace(own=saved["own"])
        start = reader.resume(wanted)
        if seed is not None:
            state.seed, state.in_place = seed, False
        elif state.in_place:
            Generators(own_generators(state.raw)).put(generators["own"] if generators else {})
        state.start, state.following, state.own = start, saved["next"], None
        state.live.clear()

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


class _UnlessOwn:
    """An attribute of a handle whose loader has none of this name."""

    def __init__(self, made: Any, name: str) -> None:
        self._made, self._name = made, name
        functools.update_wrapper(self, made)  # type: ignore[arg-type]

    def __get__(self, handle: LoaderHandle | None, owner: type | None = None) -> Any:
        raw = None if handle is None else handle._accel.raw
        return (
            getattr(raw, self._name)
            if hasattr(raw, self._name)
            else self._made.__get__(handle, owner)
        )


def _of_raw(handle: LoaderHandle, name: str) -> Any:
    return getattr(handle._accel.raw, name)


# Set here, so that to a type checker a loader that is a handle has these two and what its own class has, nothing else.
for _name in ("skip", "is_last"):
    setattr(LoaderHandle, _name, _UnlessOwn(vars(LoaderHandle)[_name], _name))
LoaderHandle.__getattr__ = _of_raw  # type: ignore[attr-defined]


def _part(part: list[int]) -> str:
    return (
        f"as rank {part[0]} of {part[1]} with LoaderOptions(shard=False)"
        if part
        else "divided by accel"
    )


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
    numbers += [
        number for number in (saved.get("checksum"), saved.get("length")) if number is not None
    ]
    streams, part, generators = (saved.get(name) for name in ("streams", "part", "generators"))
    if type(saved.get("seed")) is int and isinstance(streams, list) and isinstance(part, list):
        plain = all(type(n) is int and n >= 0 for n in (*numbers, *streams, *part))
        known = generators is None or (
            isinstance(generators, Mapping) and {"order", "own"} <= generators.keys()
        )
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
        raise LoaderError(
            f"effective_batch_size: expected a DataLoader or its handle, found {described(loader)}"
        )
    shape = shape_of(raw)
    size = getattr(raw.batch_sampler, "batch_size", None) if shape.units else shape.batch
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
    loader: DataLoader[Any] | Any | None = None,
    *,
    pad: float | None = None,
    objects: bool = False,
) -> T:
    """``data`` of all ranks, in the order of the dataset and without the padding of the last batch. Collective.

    Ranks that hold one model together, as the stages of a pipeline do, have the same rows, which come once.

    Args:
        data: nested tensors whose dim 0 is this rank's batch; on one process it comes back as it is.
        loader: the loader that gave the batch, by default the one that gave the last batch, if ``split`` has not cut since; or
            the items that ``split`` has cut, a list, tuple, range, array or tensor, of whose part ``data`` has a row for each.
        pad: fills the other dimensions to the longest of all ranks, as in ``all_gather``.
        objects: takes lists of anything that can be pickled too, such as texts, with one item for each sample; as in
            ``all_gather``.

    Raises:
        LoaderError: no loader gave a batch, or dim 0 is not the batch. The other ranks raise it too, or an AccelError that
            names the rank.
    """
    try:
        kept, replica = _kept(loader, data, objects)
        rows = (
            walked(lambda _, leaf: _trim(leaf, kept, objects), data, objects) if kept.pads else data
        )
        problem = None
    except LoaderError as error:  # which the other ranks hear of where they meet this one
        problem, rows, kept = error, None, WHOLE
        replica = loader._accel.place[:2] if isinstance(loader, LoaderHandle) else latest.replica
    try:
        if replica is not None and replica[1] < world_size():
            rows = _once(rows, replica[0], objects, text_of_error(problem))
        alike = {kept.about: str(kept.order)}
        gathered: T = gather(
            rows, pad=pad, objects=objects, alike=alike, problem=text_of_error(problem)
        )
    except AccelError:
        if problem is not None:
            raise problem from None
        raise
    return gathered


def _kept(loader: Any, data: Any, objects: bool) -> tuple[Kept, tuple[int, int] | None]:
    """What is kept of the batch, or of the items, that rows are of, and for which place it was cut, if that is known."""
    if loader is None:
        kept, replica = latest.kept, latest.replica
    elif isinstance(loader, LoaderHandle):
        loader._accel.refuse_ended()
        kept, replica = loader._accel.kept, loader._accel.place[:2]
    else:
        kept, replica = _cut(loader, data, objects)
    if kept is None and world_size() == 1:
        kept = WHOLE
    if kept is None:
        raise LoaderError(
            "gather_for_metrics: no loader of accel has given a batch yet, or accel.split has cut since, so that the padding is "
            "not known: pass the loader to accel.setup, give the loader or the items that were cut, or use accel.all_gather"
        )
    return kept, replica


def _cut(items: Any, data: Any, objects: bool) -> tuple[Kept, tuple[int, int]]:
    """What is kept of rows for this rank's part of items that ``split`` has cut, and the place that it was cut for."""
    cut: list[Any] = []
    walk(
        lambda _, leaf: cut.append(leaf), items, "items", has_parts
    )  # those of dicts are equally long
    if not cut or not has_parts(cut[0]):
        raise LoaderError(
            "gather_for_metrics: expected the loader that accel.setup returned, or the list, tensor or dict that accel.split has "
            f"cut, found {described(items)}"
        )
    length = len(cut[0])
    ways = [
        latest.divisions[length, pad] for pad in (False, True) if (length, pad) in latest.divisions
    ]
    if not ways and world_size() > 1:
        raise LoaderError(
            f"gather_for_metrics: accel.split has cut nothing yet of {length} items that these could be rows of"
        )
    ways = ways or [Division(rank=0, world=1, batch=0, even=False, drop_last=False)]
    leaves: list[Any] = []
    walked(lambda _, leaf: leaves.append(leaf), data, objects)
    found = {_shape(leaf)[:1] for leaf in leaves if leaf is not None}
    way = next((way for way in ways if found == {(way.share(length).size,)}), ways[0])
    share = way.share(length)
    about = "the number of items that accel.split has cut"
    return Kept(True, share.size, share.real, length, about), (way.rank, way.world)


def _shape(leaf: Any) -> tuple[int, ...]:
    """That of rows; empty where there are none."""
    return (
        tuple(leaf.shape)
        if isinstance(leaf, torch.Tensor)
        else (len(leaf),)
        if isinstance(leaf, list)
        else ()
    )


def _once(data: Any, replica: int, objects: bool, problem: str) -> Any:
    """No rows on all but the first rank of each replica, since its ranks all have the same rows. Collective.

    LoaderError where a rank has a ``problem``, or ranks of a replica have other rows; on every rank.
    """
    mine: list[Any] = []
    tensors: list[torch.Tensor] = []
    walked(lambda _, leaf: mine.append(leaf), data, objects)
    words = fingerprint(mine, tensors)
    told = agree("gather_for_metrics", (replica, Prints(tensors).read(), words, problem))
    raise_together("gather_for_metrics", None, [theirs for *_, theirs in told], LoaderError)
    together: dict[int, dict[int, Read]] = {}
    for number, (theirs, sums, *_) in enumerate(told):
        together.setdefault(theirs, {})[number] = sums
    if len({(theirs, words) for theirs, _, words, _ in told}) > len(together) or any(
        map(other_values, together.values())
    ):
        raise LoaderError(
            "gather_for_metrics: ranks that read one batch have other rows, and those of one of them would be taken. "
            "Where each has a part of the sequence, reduce over it first, or use accel.all_gather"
        )
    stop = None if next(iter(together[replica])) == rank() else 0

    def keep(_: str, leaf: Any) -> Any:
        rows = leaf[None] if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf
        return rows[:stop] if isinstance(rows, torch.Tensor | list) else rows

    return walked(keep, data, objects)


def _trim(leaf: Any, kept: Kept, objects: bool) -> Any:
    """The rows of a batch that are not padding."""
    if leaf is None and not objects:
        return None
    shape = _shape(leaf)
    if not shape or kept.rows not in (None, shape[0]):
        found = (
            f"shape {shape}"
            if isinstance(leaf, torch.Tensor)
            else f"a {type(leaf).__qualname__} of shape {shape}"
        )
        raise LoaderError(
            f"gather_for_metrics: expected dim 0 to be this rank's batch{f' of {kept.rows}' if kept.rows else ''}, found "
            f"{found}: its padding is not known. Give one row for each sample, or use accel.all_gather or accel.all_reduce"
        )
    return leaf[: kept.real] if kept.rows is not None else leaf[: shape[0] * kept.real]
