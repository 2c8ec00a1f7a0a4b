"""Clipping by a norm over gradients of which each rank has a part."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from ..errors import BackendError
from ..precision import norms
from ..process import Process

_DTYPE: Final = operator.attrgetter("dtype")
#: Reduces a tensor over the ranks in place: ``dist.all_reduce``, or what does the same.
Reduce: TypeAlias = Callable[[torch.Tensor, dist.ReduceOp.RedOpType], object]


@torch.no_grad()
def total_norm(mine: Iterable[torch.Tensor], norm_type: float, device: torch.device, reduce: Reduce) -> torch.Tensor:
    """The norm of all ranks' gradients together, a 0-dim float64 tensor on ``device``. Collective.

    Args:
        mine: what this rank counts; what is the same on all ranks is counted by one of them.
        norm_type: above 0; infinity is the largest absolute value.
        device: where it is computed.
        reduce: over the ranks.

    Raises:
        BackendError: a norm of another order does not add up over the ranks.
    """
    order = float(norm_type)
    if not order > 0:
        raise BackendError(
            f"norm_type={norm_type!r}: a norm of this order does not add up over the ranks; use one above 0"
        )
    total = _power(mine, order, device)
    if not math.isinf(order):
        reduce(total, dist.ReduceOp.SUM)
        return total.pow(1.0 / order)
    nan = total.isnan()  # which a maximum over the ranks may lose
    largest = torch.stack([total.masked_fill(nan, 0.0), nan.to(total.dtype)])
    reduce(largest, dist.ReduceOp.MAX)
    return largest[0].masked_fill(largest[1] > 0, float("nan"))


def _power(gradients: Iterable[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """What of the norm adds up: its power, or the maximum; in float64, so that the order of adding does not show."""
    none = torch.zeros(1, dtype=torch.float64, device=device)
    stacked = torch.cat([none, *(n.to(device, torch.float64) for n in norms(gradients, order))])
    return stacked.max() if math.isinf(order) else stacked.pow(order).sum()


#: Elements for which a call takes as long as what it does with them.
_FEW: Final = 1 << 16


def _merged(gradients: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same elements in fewer tensors: small ones that lie one after the other, as a reduction leaves them, are one."""
    found = list(gradients)
    if {*map(type, found)} != {torch.Tensor} or len({*map(_DTYPE, found)}) > 1:
        return found
    if not all(map(torch.Tensor.is_contiguous, found)):
        return found
    merged: list[torch.Tensor] = []
    number, length, end, width = 0, 0, -1, found[0].itemsize
    sizes, places = map(torch.Tensor.numel, found), map(torch.Tensor.data_ptr, found)
    for i, (size, place) in enumerate(zip(sizes, places, strict=True)):
        if place != end or length + size > _FEW:
            merged += _as_one(found[number:i], length)
            number, length = i, 0
        length, end = length + size, place + size * width
    return merged + _as_one(found[number:], length)


def _as_one(run: list[torch.Tensor], length: int) -> list[torch.Tensor]:
    """Neighbours as one view; as they are where they lie in several pieces of memory, which is chance."""
    if len(run) < 2 or (run[0].storage_offset() + length) * run[0].itemsize > run[0].untyped_storage().nbytes():
        return run
    return [run[0].as_strided((length,), (1,))]


@torch.no_grad()
def scale_(gradients: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply gradients so that a ``norm`` above ``max_norm`` becomes it, by torch's rule; without waiting for a device."""
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in _merged(gradients):
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, some in by_device.items():
        torch._foreach_mul_(some, factor.to(device))


def clip_(
    mine: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    process: Process,
    copies: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Clip gradients by ``norm_over_ranks``, whose arguments it takes, to ``max_norm``, in place; returns the norm before.

    ``copies`` are clipped, and counted by another rank: all ranks clip alike, whatever they were assigned.
    """
    mine, copies = _merged(mine), _merged(copies)
    norm = norm_over_ranks(mine, norm_type, process)
    scale_([*mine, *copies], max_norm, norm)
    return norm


def norm_over_ranks(mine: Sequence[torch.Tensor], norm_type: float, process: Process) -> torch.Tensor:
    """The norm of all ranks' gradients together, as in ``total_norm``; ``mine`` is what this rank counts. Collective."""
    return total_norm(
        _merged(mine), norm_type, process.device, lambda total, op: dist.all_reduce(total, op, group=process.group)
    ).float()
