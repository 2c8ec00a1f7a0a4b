"""How ranks that compute one thing together see that they were given the same: sums of tensors, and random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeVar, final

import torch

from ...errors import RankMismatchError
from ...precision import here
from ...process.control import agree
from ...process.rng import torch_states
from ...trees import walk
from .drift import to_host

R = TypeVar("R")


@final
class Prints:
    """Sums of tensors in which other values, or another order of them, show. They travel to the host while this rank goes on."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._rounding = [_rounding(t.dtype) for t in tensors]
        self._sums = to_host(list(map(_sums, tensors))) if tensors else None

    def read(self) -> list[tuple[list[float], float]]:
        """For each tensor its sums, and how far rounding may take them apart."""
        if self._sums is None:
            return []
        values, copied = self._sums
        copied()
        return [(s, rounding * abs(s[1]) + 1e-30) for s, rounding in zip(values.tolist(), self._rounding, strict=True)]


def _rounding(dtype: torch.dtype) -> float:
    return 0.0 if not dtype.is_floating_point and not dtype.is_complex else 1e-5 if dtype.itemsize >= 4 else 1e-2


@torch.no_grad()
def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Of the values, of their amounts, and of rows by their number; without a copy of a large floating tensor."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if values.is_floating_point() and values.dtype.itemsize == 1:
        values = values.float()  # nothing is computed with such
    wide = torch.promote_types(values.dtype, torch.float32) if values.is_floating_point() else None
    each = values.sum(tuple(range(1, values.dim())), dtype=wide) if values.dim() > 1 else values.reshape(-1)
    if wide is not None:
        total = torch.linalg.vector_norm(values, 1, dtype=wide)
    else:
        total = (values if values.dtype is torch.bool else values.abs()).sum()
    each = each.double()
    order = (each * torch.linspace(1, 2, len(each), dtype=torch.float64, device=each.device)).sum()
    return torch.stack([each.sum(), total.double(), order])


def refuse_other_values(what: str, told: Mapping[int, list[tuple[list[float], float]]], advice: str) -> None:
    """Refuse (RankMismatchError) tensors that are not the first rank's; ``told`` is what ranks have read of their prints."""
    first, *others = told
    for rank in others:
        for index, ((one, room), (other, _)) in enumerate(zip(told[first], told[rank], strict=True)):
            if not all(a == b or abs(a - b) <= room or (a != a and b != b) for a, b in zip(one, other, strict=True)):
                raise RankMismatchError(
                    f"{what}: tensor {index} has other values on rank {rank} than on rank {first}: {advice}"
                )


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
    """Compares the inputs and the random numbers of forwards over the ranks that compute each together.

    Args:
        label: of the model.
        place: the same on ranks that compute together, and another one elsewhere.
    """

    def __init__(self, label: str, place: Hashable) -> None:
        self._what, self._place = f"a forward of {label}", place
        self._number = 0

    def call(self, run: Callable[[], R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run one forward, and compare where it is time to. Collective then."""
        self._number += 1
        if self._number > _EACH and self._number & (self._number - 1):
            return run()
        tensors: list[torch.Tensor] = []
        walk(lambda _, leaf: tensors.append(here(leaf)) if isinstance(leaf, torch.Tensor) else None, (args, kwargs), "")
        seen, before = Prints(tensors), _random()
        out = run()
        answers = agree(self._what, (self._place, [tuple(t.shape) for t in tensors], seen.read(), before, _random()))
        together: dict[Hashable, dict[int, Any]] = {}
        for rank, (place, *facts) in enumerate(answers):
            together.setdefault(place, {})[rank] = facts
        for theirs in together.values():
            first = next(iter(theirs))
            for rank, (shapes, _, one, then) in theirs.items():
                if shapes != theirs[first][0]:
                    raise RankMismatchError(
                        f"{self._what}: rank {first} has inputs of {theirs[first][0]} and rank {rank} of {shapes}: {_BATCHES}"
                    )
                if one != then and one != theirs[first][2]:
                    raise RankMismatchError(f"{self._what}: ranks {first} and {rank} have different seeds: {_SEEDS}")
            refuse_other_values(self._what, {rank: facts[1] for rank, facts in theirs.items()}, _BATCHES)
        return out


def _random() -> int:
    """A short number for the state of torch's random generators."""
    return zlib.crc32(b"".join(bytes(state.numpy()) for state in torch_states()))
