"""Dataloaders: each rank gets its part of every epoch, on its device, and the position can be saved.

data (handle) > loader_checks > iteration (an epoch is read) > feeds, streams (what stands in the loader) > sampling
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar, final

import torch
from torch.utils.data import DataLoader

from .collectives import all_gather
from .control import agree
from .errors import LoaderError
from .feeds import WHOLE, Kept, Position, Start
from .iteration import Iteration, LoaderOptions, LoaderState, latest
from .loader_checks import check, check_options, describe, length_of
from .process import Process, rank, world_size
from .sampling import digest
from .trees import map_tensors
from .turns import in_turn

__all__ = [
    "LoaderHandle",
    "LoaderOptions",
    "check",
    "check_options",
    "describe",
    "distribute",
    "effective_batch_size",
    "gather_for_metrics",
]

T = TypeVar("T")


def distribute(
    loader: DataLoader[Any],
    options: LoaderOptions,
    *,
    rank: int,
    world_size: int,
    device: torch.device | str,
    seed: int,
    process: Process | None = None,
) -> LoaderHandle:
    """The handle of a loader on one rank. Local.

    Args:
        loader: the user's loader, which stays as it is.
        options: how to distribute it.
        rank: this rank.
        world_size: the number of ranks.
        device: where batches go.
        seed: decides the order of every epoch; the same on all ranks, and another for each loader, since loaders of
            one length and one seed are shuffled alike.
        process: with the end of this process the handle ends too.

    Raises:
        LoaderError: as ``check``.
    """
    check(loader, options, world_size)
    return LoaderHandle(
        LoaderState(
            raw=loader,
            options=options,
            rank=rank,
            world=world_size,
            device=torch.device(device),
            seed=seed,
            process=process,
        )
    )


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
        return self._accel.feed().length()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch ``epoch``, from its start; or from where it was, when just that epoch is resumed.

        Args:
            epoch: the epoch, at least 0. Without this call each iteration is the next epoch.

        Raises:
            LoaderError: not an epoch.
        """
        if type(epoch) is not int or epoch < 0:
            raise LoaderError(f"set_epoch: expected an int of at least 0, found {epoch!r}")
        if epoch != self._accel.start.epoch:
            self._accel.start, self._accel.following = Start(epoch), epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks at the same step, as plain values.

        It is that of the iterator that gave the last batch, of those still alive, and counts the samples that the loops
        of all ranks were given. At the end of an epoch, and after a ``break``, it is the start of the next one.

        Raises:
            LoaderError: the position is not known; see docs/dataloaders.md.
        """
        state, current = self._accel, self._accel.current()
        if current is None or current.feed.complete():
            start, following = state.start, state.following
            position = Position(start.at or (0,), None if start.order is None else digest(start.order))
        else:
            start, following = current.feed.start, state.start.epoch
            position = current.feed.position()
        return {
            "epoch": start.epoch,
            "next": following,
            "consumed": sum(position.at),
            "streams": list(position.at),
            "checksum": position.checksum,
            "seed": state.seed,
            "length": length_of(state.raw.dataset),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iteration continues at a saved position, at any world size and batch size.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            LoaderError: it is not such a state, or it was saved with another dataset or sampler; nothing is changed.
        """
        state, saved = self._accel, _read(state_dict)
        length = length_of(state.raw.dataset)
        if saved.length != length:
            raise LoaderError(f"the state was saved with a dataset of length {saved.length}; this one has {length}")
        start = state.feed().resume(saved.seed, saved.epoch, Position(tuple(saved.streams), saved.checksum))
        state.start, state.following, state.seed = start, saved.following, saved.seed
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
        return f"LoaderHandle({self._accel.raw!r}, rank {self._accel.rank} of {self._accel.world})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DataLoader[Any]:
        return copy.deepcopy(self._accel.raw, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LoaderError(
            "a LoaderHandle cannot be pickled, nor copied by copy.copy: it belongs to this process. Pickle its state_dict(), "
            "which is the position, or copy.deepcopy(handle), which is a plain DataLoader"
        )


class _Saved(NamedTuple):
    """A state dict whose types are right."""

    epoch: int
    following: int
    seed: int
    streams: list[int]
    checksum: int | None
    length: int | None


def _read(state: Any) -> _Saved:
    """Checks the form of a state dict."""

    def valid(name: str, optional: bool = False) -> bool:
        value = state.get(name)
        return (optional and value is None) or (type(value) is int and (value >= 0 or name == "seed"))

    plain = isinstance(state, Mapping) and all(map(valid, ("epoch", "next", "seed", "consumed")))
    if plain and valid("checksum", True) and valid("length", True) and isinstance(state.get("streams"), list):
        streams = state["streams"]
        if all(type(n) is int and n >= 0 for n in streams) and sum(streams) == state["consumed"]:
            return _Saved(
                state["epoch"], state["next"], state["seed"], streams, state.get("checksum"), state.get("length")
            )
    raise LoaderError(f"expected what LoaderHandle.state_dict() returns, found {state!r}")


def effective_batch_size(loader: LoaderHandle | DataLoader[Any]) -> int:
    """The samples of one step of all ranks together: the loader's batch size times the number of ranks. Local.

    Args:
        loader: a loader's handle; a raw ``DataLoader`` counts for all ranks that run now.

    Raises:
        LoaderError: the loader does not say how large its batches are.
    """
    raw = loader._accel.raw if isinstance(loader, LoaderHandle) else loader
    if not isinstance(raw, DataLoader):
        raise LoaderError(f"effective_batch_size: expected a DataLoader or its handle, found a {type(loader).__name__}")
    size = raw.batch_size if raw.batch_size is not None else getattr(raw.batch_sampler, "batch_size", None)
    if type(size) is not int:
        raise LoaderError(
            "effective_batch_size: neither the loader nor its batch sampler has a batch_size: multiply what each rank's "
            "batches hold by accel.world_size()"
        )
    return size * (loader._accel.world if isinstance(loader, LoaderHandle) else world_size())


@in_turn
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
    replica = latest.replica if loader is None else (loader._accel.rank, loader._accel.world)
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
