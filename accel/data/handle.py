"""The handle of a dataloader, and its position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils.data import DataLoader

from ..errors import LoaderError, described, whole_number
from ..process import world_size
from ..process.rng import Generators, from_plain, to_plain
from .checks import LoaderOptions, LoaderPlace, check
from .iteration import Iteration, LoaderState
from .readers import Position
from .sampling import length_of, own_generators


class LoaderHandle:
    """A distributed dataloader. All other attributes are those of the ``DataLoader``.

    ``seed`` decides the order of every epoch, and is the same on all ranks. With ``in_place``
    the program's generators do, as in raw PyTorch.
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
        start = Position(epoch=0, seed=None if in_place else seed)
        state = LoaderState(loader, options, place, seed, in_place, start)
        object.__setattr__(self, "_accel", state)

    def __iter__(self) -> Any:
        return Iteration(self._accel)

    def __len__(self) -> int:
        """Return the number of this rank's batches in a full epoch."""
        return len(self._accel.reader())

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at an epoch. A resumed epoch continues at its position.

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
        """Start the next iteration after ``n`` batches.

        For the step number of another library, use ``set_epoch(step // len(loader))`` and
        ``skip(step % len(loader))``. The samples of a map-style dataset are not read. Call
        it on every rank, before or after ``set_epoch``, and after ``load_state_dict``. A
        second call replaces the first.

        Args:
            n: batches of each rank. The next iteration raises LoaderError if the epoch has
                fewer.
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
        """Return the position as plain values, the same on all ranks at the same step.

        At the end of an epoch and after a ``break`` it is the start of the next epoch. It doesn't
        include gradients, so don't save inside a group of ``accumulate``.
        """
        state, current = self._accel, self._accel.current
        if current is None or current.reader.is_complete():
            position = state.reader().skip(state.start, state.skip)
        else:
            position = current.reader.position()
        generators = None
        if position.seed is None:
            own_states = Generators(own_generators(state.raw)).states()
            generators = {
                "order": to_plain(position.states),
                "own": to_plain(own_states),
            }
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

        If each rank has its own position, as with ``shard=False``, the number of ranks
        must be the same.

        Args:
            state_dict: the result of ``state_dict``.

        Raises:
            LoaderError: it isn't such a state, or was saved with a different dataset.
                Nothing has changed.
        """
        state = self._accel
        _check_saved(state, state_dict)
        generators, own = state_dict["generators"], state_dict["own"]
        if generators is None and state.options.shard:
            state.seed, state.in_place = state_dict["seed"], False
        elif generators is not None and state.in_place:
            Generators(own_generators(state.raw)).put(from_plain(generators["own"]))
        position = replace(
            state.fresh(state_dict["epoch"]),
            at=tuple(state_dict["streams"]) if state_dict["consumed"] else (),
            # Older states have a list, for the workers of a stream.
            own=own[0] if isinstance(own, list) else own,
        )
        if generators is not None and generators["order"] is not None:
            states = from_plain(generators["order"])
            position = replace(position, seed=None, states=states)
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
            "A LoaderHandle can't be pickled or copied. Pickle its state_dict(), or the "
            "DataLoader that you passed to accel.setup()."
        )


def _check_saved(state: LoaderState, saved: Any) -> None:
    """Raise LoaderError if a saved state doesn't fit a loader."""
    keys = {"epoch", "consumed", "streams", "seed", "generators", "length", "part", "own"}
    if not isinstance(saved, Mapping) or not keys <= saved.keys():
        raise LoaderError(f"Expected a state of LoaderHandle.state_dict(), found {saved!r}.")
    length = length_of(state.raw.dataset)
    if saved["length"] != length:
        raise LoaderError(f"The state is of a dataset of length {saved['length']}, not {length}.")
    if saved["consumed"] and len(saved["streams"]) != state.reader().streams:
        raise LoaderError(
            f"The state was saved in mid-epoch with num_workers={len(saved['streams'])}. Use the "
            "same num_workers, or save between epochs."
        )
    if saved["consumed"] and saved["part"] != state.part:
        raise LoaderError(
            f"The state was saved in mid-epoch by {_owner(saved['part'])} and can't be loaded "
            f"by {_owner(state.part)}. Use as many ranks and the same options, or save "
            "between epochs."
        )


def _owner(part: list[int]) -> str:
    return f"rank {part[0]} of {part[1]}" if part else "all ranks"


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
    raw: Any = raw_loader(loader)
    size = raw.batch_size or getattr(raw.batch_sampler, "batch_size", None)
    if size is None:
        raise LoaderError(
            f"effective_batch_size: {described(raw)} has no batch_size. Multiply the size "
            "of a rank's batch by accel.world_size()."
        )
    replicas = world_size()
    if isinstance(loader, LoaderHandle):
        state = loader._accel
        replicas = 1 if state.options.split_batches else state.place.world
    return int(size) * replicas
