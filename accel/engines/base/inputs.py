"""A check that ranks which compute one forward together were given the same inputs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar, final

from ...errors import RankMismatchError
from ...precision import here
from ...process.control import agree
from ...process.transfer import Prints, find_difference
from ...trees import all_tensors

R = TypeVar("R")

#: Of the forward, and of each method.
_FIRST_CALLS: Final = 4
_ADVICE: Final = "use the loader from accel.setup, or accel.data_parallel_place(model)."


@final
class SameInputs:
    """Compares the inputs of the first forwards of ranks that have the same ``place``."""

    def __init__(self, label: str, place: Hashable) -> None:
        self._label, self._place = label, place
        self._calls: Counter[str] = Counter()

    def call(
        self, run: Callable[[], R], args: tuple[Any, ...], kwargs: dict[str, Any], method: str = ""
    ) -> R:
        """Run a forward or method. Collective if it is one of the first calls."""
        self._calls[method] += 1
        tensors = [here(tensor) for _, tensor in all_tensors((args, kwargs))]
        # A method without inputs may be called on one rank.
        if self._calls[method] > _FIRST_CALLS or not tensors:
            return run()
        prints = Prints(tensors)  # of the inputs as they are before a forward that writes to them
        out = run()
        title = f"{f'the method {method}' if method else 'a forward'} of {self._label}"
        shapes = [tuple(tensor.shape) for tensor in tensors]
        places: defaultdict[Hashable, dict[int, Any]] = defaultdict(dict)
        for rank, facts in enumerate(agree(title, (self._place, shapes, prints.read()))):
            places[facts[0]][rank] = facts[1:]
        for by_rank in places.values():
            if len({str(shapes) for shapes, _ in by_rank.values()}) > 1:
                found = ", ".join(f"{shapes} on rank {r}" for r, (shapes, _) in by_rank.items())
                raise RankMismatchError(f"{title} got different inputs ({found}): {_ADVICE}")
            values = {rank: values for rank, (_, values) in by_rank.items()}
            difference = find_difference(values)
            if difference:
                raise RankMismatchError(f"{title}: {difference}: {_ADVICE}")
        return out
