"""Sums of tensors, by which ranks see whether they have the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

import torch

from ..errors import RankMismatchError
from .transfer import to_host

#: For each tensor its sums, and how far rounding may take them apart.
Read: TypeAlias = "list[tuple[list[float], float]]"


@final
class Prints:
    """Sums of tensors in which other values, or another order of them, show. They travel to the host while this rank goes on."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._rounding = [_rounding(t.dtype) for t in tensors]
        self._sums = to_host(list(map(_sums, tensors))) if tensors else None

    def read(self) -> Read:
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
        total = (values.abs() if values.dtype.is_signed else values).sum()
    each = each.double()
    order = (each * torch.linspace(1, 2, len(each), dtype=torch.float64, device=each.device)).sum()
    return torch.stack([each.sum(), total.double(), order])


def other_values(told: Mapping[int, Read]) -> tuple[int, int, int] | None:
    """The first rank of those that told what they have read, another one, and the number of a tensor that is not the first's."""
    first, *others = told
    for rank in others:
        for index, ((one, room), (other, _)) in enumerate(zip(told[first], told[rank], strict=True)):
            if not all(a == b or abs(a - b) <= room or (a != a and b != b) for a, b in zip(one, other, strict=True)):
                return first, rank, index
    return None


def refuse_other_values(what: str, told: Mapping[int, Read], advice: str) -> None:
    """Refuse (RankMismatchError) tensors that are not the first rank's; ``told`` is what ranks have read of their prints."""
    if found := other_values(told):
        first, rank, index = found
        raise RankMismatchError(
            f"{what}: tensor {index} has other values on rank {rank} than on rank {first}: {advice}"
        )
