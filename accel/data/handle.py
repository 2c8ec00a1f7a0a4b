"""The handle of a dataloader, and its position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils.data import DataLoader

from ..errors import LoaderError, described, whole_number
from ..process import world_size
from ..process.rng import Generators, from_plain, to_plain
from .iteration import Iteration, LoaderState
from .sampling import length_of, own_generators


class LoaderHandle:
    """A distributed dataloader, with all attributes of the ``DataLoader``."""

    __slots__ = ("__weakref__", "_accel")
    _accel: LoaderState

    def __init__(self, state: LoaderState) -> None:
        object.__setattr__(self, "_accel", state)

    def __iter__(self) -> Any:
        return Iteration(self._accel)

    def __len__(self) -> int:
        """Return the number of this rank's batches in a full epoch."""
        return len(self._accel.reader())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A loaded position in that epoch is kept.

        Without this call, each iteration starts the next epoch.
        """
        state, number = self._accel, whole_number(epoch)
        is_chosen = state.options.shard and state.start.in_place
        if is_chosen:
            # Draw from the seed, because the program's generators don't depend on the epoch.
            state.in_place = False
        if is_chosen or number != state.start.epoch:
            state.start = state.fresh(number, state.start.skip)

    def skip(self, n: int) -> None:
        """Skip ``n`` batches of each rank in the next iteration.

        Call it on every rank, after ``load_state_dict``. A second call replaces the
        first. Map-style samples are not read.
        """
        self._accel.start = replace(self._accel.start, skip=whole_number(n))

    @property
    def is_last(self) -> bool:
        """True during this rank's last batch of an epoch. May read ahead."""
        current = self._accel.current
        if current is None or not current.reader.given:
            return False
        return not current.upcoming(1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values, equal on all ranks at the same step.

        After an epoch or a ``break``, it is the start of the next epoch.

        Raises:
            LoaderError: a group isn't complete, or the position is unknown.
        """
        state, current = self._accel, self._accel.current
        if current is not None and current.in_group:
            raise LoaderError("accumulate() is inside a group. Save after the group.")
        reader = state.reader()
        reader.begin(state.start)
        if current is not None and not current.reader.is_complete():
            reader = current.reader
        position, generators = reader.position(), None
        if position.seed is None:
            own = Generators(own_generators(state.raw)).states()
            generators = {"order": to_plain(position.states), "own": to_plain(own)}
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
        """Continue at a saved position, at any world size and batch size.

        Within an epoch, sharded streams and ``shard=False`` need the same number of ranks.

        Raises:
            LoaderError: the state doesn't fit the loader. The loader is unchanged.
        """
        state = self._accel
        _check_saved(state, state_dict)
        generators = from_plain(state_dict["generators"]) or {}
        if not generators and state.options.shard:
            state.seed, state.in_place = state_dict["seed"], False
        elif generators and state.in_place:
            Generators(own_generators(state.raw)).put(generators["own"])
        state.start = state.fresh(state_dict["epoch"])
        if generators.get("order"):
            state.start = replace(state.start, seed=None, states=generators["order"])
        at = tuple(state_dict["streams"]) if state_dict["consumed"] else ()
        state.start = replace(state.start, at=at, own=state_dict["own"])
        state.latest = lambda: None
        # Running workers can't skip to the position.
        state.persistent = None

    # Hidden from type checkers, so that they still report unknown attributes.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._accel.raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accel.raw, name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LoaderError("A LoaderHandle can't be pickled. Pickle its state_dict().")


def _check_saved(state: LoaderState, saved: Mapping[str, Any]) -> None:
    length, before = length_of(state.raw.dataset), saved["length"]
    workers, part, problem = len(saved["streams"]), saved["part"], ""
    if before != length:
        raise LoaderError(f"The saved length is {before}, not {length}. Use the same dataset.")
    if workers != state.reader().streams:
        problem = f"with num_workers={workers}. Use the same num_workers"
    if part != state.part:
        saver = f"rank {part[0]} of {part[1]}" if part else "all ranks"
        problem = f"by {saver}. Use as many ranks"
    if saved["consumed"] and problem:
        raise LoaderError(f"Saved mid-epoch {problem}, or save between epochs.")


def raw_loader(loader: LoaderHandle | DataLoader[Any]) -> DataLoader[Any]:
    """Return the user's loader behind a handle, or the loader itself."""
    return loader._accel.raw if isinstance(loader, LoaderHandle) else loader


def effective_batch_size(loader: LoaderHandle | DataLoader[Any]) -> int:
    """Return the number of samples in a step, over all ranks. Local.

    Raises:
        LoaderError: the loader has no batch size.
    """
    raw: Any = raw_loader(loader)
    size = raw.batch_size or getattr(raw.batch_sampler, "batch_size", None)
    if size is None:
        raise LoaderError(f"{described(raw)} has no batch_size.")
    if not isinstance(loader, LoaderHandle):
        return int(size) * world_size()
    state = loader._accel
    return int(size) * (1 if state.options.split_batches else state.place.world)
