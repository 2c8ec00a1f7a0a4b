"""The handle of a dataloader: each rank gets its share of every epoch, on its device."""

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
from .readers import Reader
from .sampling import length_of, own_generators


def distribute(
    loader: DataLoader[Any],
    options: LoaderOptions,
    place: LoaderPlace,
    *,
    seed: int,
    in_place: bool = False,
) -> LoaderHandle:
    """Return the handle of a loader, which stays as it is. Local.

    ``seed`` decides the order of every epoch, and is the same on all ranks. ``in_place`` draws the
    order from the program's generators instead, as raw PyTorch does.
    """
    check(loader, options, place.world)
    state = LoaderState(raw=loader, options=options, place=place, seed=seed, in_place=in_place)
    return LoaderHandle(state)


class LoaderHandle:
    """A distributed dataloader. All other attributes are those of the ``DataLoader``."""

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
        """Start the next iteration at epoch ``epoch``. A resumed epoch continues at its position.

        Args:
            epoch: the epoch, at least 0. Without this call each iteration is the next epoch.

        Raises:
            LoaderError: ``epoch`` isn't an epoch.
        """
        number = whole_number(epoch)
        if number < 0:
            raise LoaderError(f"loader.set_epoch({epoch!r}): expected an int of at least 0.")
        state = self._accel
        is_chosen = state.options.shard and state.start.in_place
        if is_chosen:
            # The program's generators can't give the order of an epoch by its number.
            state.in_place = False
        if is_chosen or number != state.start.epoch:
            state.start = state.fresh(number)
            state.following = number + 1

    def skip(self, n: int) -> None:
        """Start the next iteration after ``n`` batches, for the step number of another library.

        The samples of a map-style dataset are not read. Call it on every rank, before or after
        ``set_epoch``, and after ``load_state_dict``. A second call replaces the first.

        Args:
            n: batches of each rank, at least 0.

        Raises:
            LoaderError: ``n`` isn't a number of batches. The next iteration raises it if the epoch
                has fewer. Use ``set_epoch(step // len(loader))`` and ``skip(step % len(loader))``.
        """
        number = whole_number(n)
        if number < 0:
            raise LoaderError(f"loader.skip({n!r}): expected a number of batches.")
        self._accel.skip = number

    @property
    def is_last(self) -> bool:
        """True during this rank's last batch of an epoch.

        An iterable dataset has to read the next batch to know.
        """
        current = self._accel.current()
        return current is not None and current.reader.given > 0 and not current.upcoming(1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values. It is the same on all ranks at the same step.

        At the end of an epoch and after a ``break`` it is the start of the next epoch.

        Raises:
            LoaderError: the position isn't known.
        """
        state, current = self._accel, self._accel.current()
        if current is not None and current.group_left:
            raise LoaderError(
                f"The state is inside a group of accel.accumulate, {current.group_left} batches "
                "before its end. Save after the optimizer step."
            )
        if current is None or current.reader.complete():
            position, following = state.reader().skip(state.start, state.skip), state.following
        else:
            position, following = current.reader.position(), state.start.epoch
        generators = None
        if position.seed is None:
            own_states = Generators(own_generators(state.raw)).states()
            generators = {"order": to_plain(position.states), "own": to_plain(own_states)}
        return {
            "epoch": position.epoch,
            "next": following,
            "consumed": position.count,
            "streams": list(position.at or (0,)),
            "checksum": position.checksum,
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
            LoaderError: it isn't such a state, or was saved with a different dataset or sampler.
                Nothing has changed.
        """
        state, saved, reader = self._accel, _read(state_dict), self._accel.reader()
        _check_state(state, saved, reader)
        generators = saved["generators"]
        position = replace(
            state.fresh(saved["epoch"]),
            at=tuple(saved["streams"]),
            checksum=saved["checksum"],
            own=saved["own"],
        )
        is_seeded = generators is None and state.options.shard
        if is_seeded:
            position = replace(position, seed=saved["seed"])
        elif generators is not None and generators["order"] is not None:
            position = replace(position, seed=None, states=generators["order"])
        reader.check(position)
        if is_seeded:
            state.seed, state.in_place = saved["seed"], False
        elif state.in_place and generators is not None:
            Generators(own_generators(state.raw)).put(generators["own"])
        state.go_to(position, saved["next"])

    # A type checker knows the attributes of the loader's class, and no others.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._accel.raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accel.raw, name, value)

    def __repr__(self) -> str:
        place = self._accel.place
        return f"LoaderHandle({self._accel.raw!r}, rank {place.rank} of {place.world})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LoaderError(
            "A LoaderHandle can't be pickled or copied. Pickle its state_dict(), or the DataLoader "
            "that you passed to accel.setup()."
        )


def raw_loader(loader: LoaderHandle | DataLoader[Any]) -> DataLoader[Any]:
    """Return the user's loader behind a handle, or the loader itself."""
    return loader._accel.raw if isinstance(loader, LoaderHandle) else loader


def _read(state_dict: Any) -> dict[str, Any]:
    """Return a state with all keys, and the states of its generators."""
    saved: dict[str, Any] = dict.fromkeys(("checksum", "length", "generators", "own"))
    saved |= {"streams": [], "part": []}
    try:
        saved |= state_dict
        numbers = [saved["epoch"], saved["next"], saved["consumed"], *saved["streams"]]
        if min(map(whole_number, numbers)) < 0:
            raise ValueError
        generators = saved["generators"]
        if generators is not None:
            saved["generators"] = {name: from_plain(generators[name]) for name in ("order", "own")}
    except (KeyError, TypeError, ValueError):
        raise LoaderError(
            f"Expected a state of LoaderHandle.state_dict(), found {state_dict!r}."
        ) from None
    return saved


def _check_state(state: LoaderState, saved: dict[str, Any], reader: Reader) -> None:
    length = length_of(state.raw.dataset)
    if saved["length"] != length:
        raise LoaderError(
            f"The state is of a dataset of length {saved['length']}, and this one has {length}."
        )
    has_own = saved["own"] is not None
    is_inside = saved["consumed"] > 0 or has_own
    if is_inside and (saved["part"] != state.part or has_own and not reader.stateful):
        owners = [
            f"rank {p[0]} of {p[1]}" if p else "all ranks" for p in (saved["part"], state.part)
        ]
        raise LoaderError(
            f"The state was saved in mid-epoch by {owners[0]} and can't be loaded by {owners[1]}. "
            "Use as many ranks, the same loader class and options, or save between epochs."
        )


def effective_batch_size(loader: LoaderHandle | DataLoader[Any]) -> int:
    """Return the number of samples in a step of all ranks together. Local.

    Args:
        loader: a loader's handle, or a raw ``DataLoader``, which counts for all ranks.

    Raises:
        LoaderError: the loader has no batch size.
    """
    raw = raw_loader(loader)
    size = getattr(raw, "batch_size", None)
    if size is None:
        size = getattr(getattr(raw, "batch_sampler", None), "batch_size", None)
    if type(size) is not int:
        raise LoaderError(
            f"effective_batch_size: {described(raw)} has no batch_size. Multiply the size of a "
            "rank's batch by accel.world_size()."
        )
    if isinstance(loader, LoaderHandle):
        state = loader._accel
        return size if state.options.split_batches else size * state.place.world
    return size * world_size()
