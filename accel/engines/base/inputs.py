"""A check that ranks with a common forward get equal inputs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar, final

from ...errors import RankMismatchError
from ...precision import here
from ...process.control import agree
from ...process.transfer import find_difference, sums_of
from ...trees import all_tensors
from .raw_objects import Args, Kwargs

R = TypeVar("R")

#: The number of calls to compare, of the forward and of each method.
_FIRST_CALLS: Final = 4
_ADVICE: Final = "Use the loader from accel.setup, or accel.data_parallel_place(model)."


@final
class SameInputs:
    """Compares the first inputs on ranks with the same ``place``."""

    def __init__(self, label: str, place: Hashable) -> None:
        self._label, self._place = label, place
        self._calls: Counter[str] = Counter()

    def call(self, run: Callable[[], R], args: Args, kwargs: Kwargs, method: str = "") -> R:
        """Run a forward or method. The first calls are collective."""
        self._calls[method] += 1
        if self._calls[method] > _FIRST_CALLS:
            return run()
        tensors = [here(tensor) for _, tensor in all_tensors((args, kwargs))]
        # A method without inputs may be called on one rank only, so it must not communicate.
        if not tensors:
            return run()
        # Before the call, because a forward may write to its inputs.
        sums, shapes = sums_of(tensors), str([tuple(t.shape) for t in tensors])
        out = run()
        what = f"the method {method}" if method else "a forward"
        title = f"{what} of {self._label}"
        firsts: dict[Hashable, tuple[int, str]] = {}
        values: defaultdict[Hashable, dict[int, Any]] = defaultdict(dict)
        by_rank = agree(title, (self._place, shapes, sums))
        for rank, (place, shapes, read) in enumerate(by_rank):
            first, expected = firsts.setdefault(place, (rank, shapes))
            if shapes != expected:
                found = f"{expected} on rank {first}, {shapes} on rank {rank}"
                raise RankMismatchError(f"{title} got different inputs ({found}). {_ADVICE}")
            values[place][rank] = read
        for of_place in values.values():
            difference = find_difference(of_place)
            if difference:
                raise RankMismatchError(f"{title}: {difference}. {_ADVICE}")
        return out
