"""A check that ranks which compute one forward together were given the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar, final

import torch.distributed as dist

from ...errors import RankMismatchError
from ...precision import here
from ...process import Process, end_groups
from ...process.control import Waiting, agree
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
    """Compares the inputs of the first forwards over the ranks that compute each together, which have one ``place``.

    ``group`` has these ranks only, and is needed if others may make a different number of forwards.
    """

    def __init__(
        self, label: str, place: Hashable, group: dist.ProcessGroup | None = None, process: Process | None = None
    ) -> None:
        self._label, self._place, self._group, self._process = label, place, group, process
        self._calls: dict[str, int] = {}

    def call(self, run: Callable[[], R], args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "") -> R:
        """Run a forward or method, and compare its inputs if it is one of the first calls. Collective then."""
        number = self._calls[method] = self._calls.get(method, 0) + 1
        tensors = [here(tensor) for _, tensor in all_tensors((args, kwargs))]
        if number > _FIRST_CALLS or not tensors:  # a method without inputs may be called on one rank
            return run()
        prints = Prints(tensors)
        out = run()
        what = f"{f'the method {method}' if method else 'a forward'} of {self._label}"
        self._compare(what, [tuple(t.shape) for t in tensors], prints.read())
        return out

    def _compare(self, what: str, shapes: list[tuple[int, ...]], sums: Any) -> None:
        by_place: dict[Hashable, dict[int, Any]] = {}
        for rank, (place, *facts) in self._exchange(what, (self._place, shapes, sums)).items():
            by_place.setdefault(place, {})[rank] = facts
        try:
            for facts_by_rank in by_place.values():
                _refuse_different(what, facts_by_rank)
        except RankMismatchError as error:
            if self._group is not None and self._group.size() < dist.get_world_size():
                end_groups(str(error), mismatch=True)  # the other ranks do not take part in this
            raise

    def _exchange(self, what: str, value: Any) -> dict[int, Any]:
        if self._group is None or self._process is None:
            return dict(enumerate(agree(what, value)))
        values: list[Any] = [None] * self._group.size()
        with Waiting(self._process, what):
            dist.all_gather_object(values, value, group=self._group)
        return dict(zip(dist.get_process_group_ranks(self._group), values, strict=True))


def _refuse_different(what: str, facts_by_rank: dict[int, Any]) -> None:
    (first, (shapes, _)), *others = facts_by_rank.items()
    for rank, (other_shapes, _) in others:
        if other_shapes != shapes:
            raise RankMismatchError(
                f"{what}: rank {first} has inputs of {shapes} and rank {rank} of {other_shapes}: {_ADVICE}"
            )
    refuse_other_values(what, {rank: sums for rank, (_, sums) in facts_by_rank.items()}, _ADVICE)
