"""A check that ranks which compute one forward together were given the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar, final

from ...errors import RankMismatchError
from ...precision import here
from ...process.control import agree
from ...process.transfer import Prints, refuse_other_values
from ...trees import all_tensors

R = TypeVar("R")

#: Of the forward, and of each method.
_FIRST_CALLS: Final = 4
_ADVICE: Final = (
    "ranks that share a layer or a sequence need the same batches. Use the loader that accel.setup returned, or "
    "accel.data_parallel_place(model) instead of accel.rank()."
)


@final
class SameInputs:
    """Compares the inputs of the first forwards of ranks that have the same ``place``."""

    def __init__(self, label: str, place: Hashable) -> None:
        self._label, self._place = label, place
        self._calls: dict[str, int] = {}

    def call(
        self, run: Callable[[], R], args: tuple[Any, ...], kwargs: dict[str, Any], method: str = ""
    ) -> R:
        """Run a forward or method. Collective if it is one of the first calls."""
        number = self._calls[method] = self._calls.get(method, 0) + 1
        tensors = [here(tensor) for _, tensor in all_tensors((args, kwargs))]
        if (
            number > _FIRST_CALLS or not tensors
        ):  # a method without inputs may be called on one rank
            return run()
        prints = Prints(tensors)  # of the inputs as they are before a forward that writes to them
        out = run()
        what = f"{f'the method {method}' if method else 'a forward'} of {self._label}"
        from_ranks = agree(what, (self._place, [tuple(t.shape) for t in tensors], prints.read()))
        places: dict[Hashable, dict[int, tuple[Any, Any]]] = {}
        for rank, (place, *facts) in enumerate(from_ranks):
            places.setdefault(place, {})[rank] = tuple(facts)
        for by_rank in places.values():
            _refuse_different(what, by_rank)
        return out


def _refuse_different(what: str, by_rank: dict[int, tuple[Any, Any]]) -> None:
    (first, (shapes, _)), *others = by_rank.items()
    for rank, (other_shapes, _) in others:
        if other_shapes != shapes:
            raise RankMismatchError(
                f"{what}: rank {first} has inputs of {shapes} and rank {rank} of {other_shapes}: {_ADVICE}"
            )
    refuse_other_values(what, {rank: sums for rank, (_, sums) in by_rank.items()}, _ADVICE)
