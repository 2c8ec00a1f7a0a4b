"""Of gradients over the ranks: their mean, that of losses, the norm where each rank has a part, and clipping by it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from ..errors import AccelError, BackendError
from ..precision import norms
from ..process import Process, current
from ..process.control import Waiting, agree, announce
from ..process.packing import average_

_NONE, _DENSE, _SPARSE = range(3)


def held_here(parameters: Iterable[nn.Parameter]) -> bytes:
    """Which of them have a gradient on this rank, for ``held_by_any``."""
    return bytes(_NONE if p.grad is None else _SPARSE if p.grad.is_sparse else _DENSE for p in parameters)


def held_by_any(what: str, told: Iterable[bytes], names: Sequence[str]) -> list[int]:
    """The numbers of the parameters that have a gradient on any rank, all of which have ``told`` what ``held_here`` says there.

    BackendError, which names ``what`` is to be done with them, where a rank has a sparse one; on every rank.
    """
    held = list(map(max, zip(*told, strict=True)))
    if _SPARSE in held:
        sparse = [name for name, code in zip(names, held, strict=True) if code == _SPARSE]
        raise BackendError(
            f"{what} cannot take the sparse gradients of {', '.join(sparse[:5])}: use nn.Embedding(sparse=False), or "
            "another backend"
        )
    return [i for i, code in enumerate(held) if code == _DENSE]


def average_gradients_(
    what: str,
    parameters: Sequence[nn.Parameter],
    names: Sequence[str],
    process: Process,
    add: Callable[[torch.Tensor], object] | None = None,
) -> bool:
    """Average the gradients of every parameter that has one on any rank; a rank that has none counts as zero. Collective.

    ``what`` is to be done with them, for messages. ``add`` sums a flat tensor over the ranks, in place; None is
    ``dist.all_reduce``. Returns whether there were any; BackendError where a rank has a sparse one, on every rank.
    """
    gradients: list[torch.Tensor] = []
    for number in held_by_any(what, agree(what, held_here(parameters)), names) if parameters else ():
        parameter = parameters[number]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad.detach())  # of create_graph=True it has a graph
    average_(gradients, process.place.world_size, add or (lambda flat: dist.all_reduce(flat, group=process.group)))
    return bool(gradients)


def mean_loss(loss_sum: torch.Tensor, tokens: torch.Tensor | float) -> torch.Tensor:
    """The mean of a loss over the tokens of all ranks, which may have different numbers of them. Collective.

    Its value is that mean, the same on every rank. Its backward gives what the engine averages over the ranks to the gradient of
    the mean. To accumulate, give each micro-batch the number of tokens of all micro-batches of the step, and divide by nothing:
    the losses add up to the mean.

    Args:
        loss_sum: the sum of this rank's losses, as ``F.cross_entropy(..., reduction="sum")``.
        tokens: how many this rank has in it.

    Raises:
        AccelError: ``loss_sum`` is not one floating number, or ``tokens`` not one number.
    """
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.dim() or not loss_sum.is_floating_point():
        raise AccelError(
            f"accel.mean_loss(loss_sum={loss_sum!r}): expected a floating tensor without dimensions, a sum"
        )
    if isinstance(tokens, bool) or not isinstance(tokens, Real | torch.Tensor):
        raise AccelError(f"accel.mean_loss(tokens={tokens!r}): expected the number of tokens")
    count = torch.as_tensor(tokens, device=loss_sum.device)
    if count.dim():
        raise AccelError(
            f"accel.mean_loss(tokens=...) of shape {tuple(count.shape)}: expected one number, as mask.sum()"
        )
    process = current()
    if process.place.world_size > 1:
        announce(process, "accel.mean_loss")
    with Waiting(process, "accel.mean_loss"):
        return mean_over(loss_sum, count, process.group, process.place.world_size)


def mean_over(total: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> torch.Tensor:
    """The mean that sums and counts of all ranks of a group make, for gradients that are averaged over the ranks. Collective."""
    total = total.float() if total.itemsize < 4 else total
    wide = torch.float32 if total.device.type == "mps" else torch.float64  # which that device does not have
    both = torch.stack([total.detach().to(wide), count.to(total.device, wide)])
    if ranks > 1:
        dist.all_reduce(both, group=group)
    mine = total * (ranks / both[1]).to(total.dtype)
    return mine + ((both[0] / both[1]).to(total.dtype) - mine).detach()


# -- the norm, and clipping --------------------------------------------------------------------------------------------

_DTYPE: Final = operator.attrgetter("dtype")


@torch.no_grad()
def norm_over_ranks(
    parameters: Iterable[torch.Tensor], mine: Sequence[torch.Tensor], norm_type: float, process: Process
) -> torch.Tensor:
    """The norm of all ranks' gradients of some parameters together, a 0-dim tensor on the process's device. Collective.

    ``mine`` is what this rank counts; what is the same on all ranks is counted by one of them. BackendError for an order that is
    not above 0, of which a norm does not add up over the ranks; infinity is the largest absolute value.
    """
    order = float(norm_type)
    if not order > 0:
        raise BackendError(
            f"norm_type={norm_type!r}: a norm of this order does not add up over the ranks; use one above 0"
        )
    # By the parameters, not by what this rank counts, which may be nothing: all ranks clip by the very same number.
    dtype = torch.float64 if torch.float64 in map(_DTYPE, parameters) else torch.float32
    total = _power(_merged(mine), order, process.device)
    if not math.isinf(order):
        dist.all_reduce(total, group=process.group)
        return total.pow(1.0 / order).to(dtype)
    nan = total.isnan()  # which a maximum over the ranks may lose
    largest = torch.stack([total.masked_fill(nan, 0.0), nan.to(total.dtype)])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=process.group)
    return largest[0].masked_fill(largest[1] > 0, float("nan")).to(dtype)


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
    parameters: Iterable[torch.Tensor],
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
    norm = norm_over_ranks(parameters, mine, norm_type, process)
    scale_([*mine, *copies], max_norm, norm)
    return norm
