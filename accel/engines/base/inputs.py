"""How ranks that compute one thing together see that they were given the same: sums of tensors, and random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar, final

import torch.distributed as dist

from ...errors import RankMismatchError
from ...precision import here
from ...process import Process, end_groups
from ...process.control import Waiting, agree
from ...process.rng import torch_states
from ...process.transfer import Prints, refuse_other_values
from ...trees import all_tensors

R = TypeVar("R")


_EACH: Final = 4  # of the first calls; later only those whose number is a power of two
_BATCHES: Final = (
    "ranks that have parts of one layer or sequence compute on the same batches: take them from the loader that accel.setup "
    "returned, or by accel.data_parallel_place(model) instead of accel.rank()"
)
_SEEDS: Final = (
    "the forward draws random numbers (dropout), and ranks that have parts of one layer must draw the same: seed by "
    "accel.data_parallel_place(model).rank instead of accel.rank(), before accel.setup or on all of these ranks alike"
)


@final
class SameInputs:
    """Compares the inputs and the random numbers of forwards over the ranks that compute each together, which have one ``place``.

    ``group`` is of these, where others may make other numbers of forwards; None: all ranks make as many.
    """

    def __init__(
        self, label: str, place: Hashable, group: dist.ProcessGroup | None = None, process: Process | None = None
    ) -> None:
        self._label, self._place, self._group, self._process = label, place, group, process
        self._numbers: dict[str, int] = {}

    def call(self, run: Callable[[], R], args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "") -> R:
        """Run one forward, or a method, and compare where it is time to. Collective then."""
        number = self._numbers[method] = self._numbers.get(method, 0) + 1
        if number > _EACH and number & (number - 1):
            return run()
        tensors = [here(tensor) for _, tensor in all_tensors((args, kwargs))]
        seen, before = Prints(tensors), _random()
        out = run()
        after, what = _random(), f"{f'the method {method}' if method else 'a forward'} of {self._label}"
        if not method or tensors or before != after:  # a method that computes nothing may be called on one rank
            self._compare(what, [tuple(t.shape) for t in tensors], seen.read(), before, after)
        return out

    def _compare(self, what: str, *facts: Any) -> None:
        together: dict[Hashable, dict[int, Any]] = {}
        for rank, (place, *theirs) in self._exchange(what, (self._place, *facts)).items():
            together.setdefault(place, {})[rank] = theirs
        try:
            for those in together.values():
                _refuse_others(what, those)
        except RankMismatchError as error:
            if self._group is not None and len(together[self._place]) < dist.get_world_size():
                end_groups(str(error), mismatch=True)  # the others do not come to this
            raise

    def _exchange(self, what: str, value: Any) -> dict[int, Any]:
        if self._group is None or self._process is None:
            return dict(enumerate(agree(what, value)))
        told: list[Any] = [None] * self._group.size()
        with Waiting(self._process, what):
            dist.all_gather_object(told, value, group=self._group)
        return dict(zip(dist.get_process_group_ranks(self._group), told, strict=True))


def _refuse_others(what: str, theirs: dict[int, Any]) -> None:
    first = next(iter(theirs))
    for rank, (shapes, _, one, then) in theirs.items():
        if shapes != theirs[first][0]:
            raise RankMismatchError(
                f"{what}: rank {first} has inputs of {theirs[first][0]} and rank {rank} of {shapes}: {_BATCHES}"
            )
        if one != then and one != theirs[first][2]:
            raise RankMismatchError(f"{what}: ranks {first} and {rank} have different seeds: {_SEEDS}")
    refuse_other_values(what, {rank: facts[1] for rank, facts in theirs.items()}, _BATCHES)


def _random() -> int:
    """A short number for the state of torch's random generators."""
    return zlib.crc32(b"".join(bytes(state.numpy()) for state in torch_states()))
