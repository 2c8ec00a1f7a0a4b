"""The mean of gradients and losses over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import BackendError
from ..process import Process, current
from ..process.control import Waiting, agree, announce
from ..process.packing import average_
from .watch import GRAD

_NONE, _DENSE, _SPARSE = range(3)


def held_here(parameters: Iterable[nn.Parameter]) -> bytes:
    """Return the kind of each gradient on this rank, for ``held_by_any``."""
    kinds = bytearray()
    for gradient in map(GRAD, parameters):
        if gradient is None:
            kinds.append(_NONE)
        else:
            kinds.append(_SPARSE if gradient.is_sparse else _DENSE)
    return bytes(kinds)


def held_by_any(what: str, held_by_rank: Iterable[bytes], names: Sequence[str]) -> list[int]:
    """Return the indices of the parameters with a gradient on any rank.

    Every rank raises if a rank has a sparse gradient. ``what`` names the operation
    in the error. ``held_by_rank`` has each rank's result of ``held_here``.
    """
    kinds = list(map(max, zip(*held_by_rank, strict=True)))
    if _SPARSE in kinds:
        raise BackendError(
            f"{what} can't take the sparse gradients of {names[kinds.index(_SPARSE)]}. "
            "Use nn.Embedding(sparse=False)."
        )
    return [index for index, kind in enumerate(kinds) if kind == _DENSE]


def average_gradients_(
    what: str,
    parameters: Sequence[nn.Parameter],
    names: Sequence[str],
    process: Process,
    add: Callable[[Tensor], object] | None = None,
) -> bool:
    """Average the gradients that any rank has. Collective.

    A missing gradient counts as zero. ``add`` sums a flat tensor over the ranks
    in place, by default with ``dist.all_reduce``. Returns True if any rank had
    a gradient. Raises like ``held_by_any``.
    """
    if not parameters:
        return False
    gradients: list[Tensor] = []
    for index in held_by_any(what, agree(what, held_here(parameters)), names):
        parameter = parameters[index]
        # A rank has no gradient for an expert or head that its batch didn't use.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        # After create_graph=True, as for a gradient penalty, gradients have a graph. Drop it.
        gradients.append(parameter.grad.detach())
    add = add or (lambda flat: dist.all_reduce(flat, group=process.group))
    average_(gradients, process.place.world_size, add)
    return bool(gradients)


def mean_loss(loss_sum: Tensor, tokens: Tensor | float) -> Tensor:
    """Return the mean loss per token over all ranks. Collective.

    Use it instead of ``loss_sum / tokens`` if batches have different numbers of
    tokens. The value is the same on every rank, and the averaged gradients are
    those of the global mean. To accumulate gradients, pass the step's total
    number of tokens with each micro-batch, so that their losses add up.

    Args:
        loss_sum: this rank's sum, as from ``cross_entropy(..., reduction="sum")``.
        tokens: the number of tokens on this rank.
    """
    process, count = current(), torch.as_tensor(tokens)
    if process.place.world_size > 1:
        announce(process, "accel.mean_loss")
    with Waiting(process, "accel.mean_loss"):
        return mean_over(loss_sum, count, process.group, process.place.world_size)


def mean_over(total: Tensor, count: Tensor, group: dist.ProcessGroup | None, ranks: int) -> Tensor:
    """Return the mean of all ranks' sums and counts. Collective.

    Its gradients are correct once they are averaged over the ranks.
    """
    # float16 can't hold the loss sum of a long sequence.
    total = total.float() if total.itemsize < 4 else total
    # mps has no float64.
    wide = torch.float32 if total.device.type == "mps" else torch.float64
    both = torch.stack([total.detach().to(wide), count.to(total.device, wide)])
    if ranks > 1:
        dist.all_reduce(both, group=group)
    # The value is the mean over all ranks, but only this rank's sum has a gradient.
    local = total * (ranks / both[1]).to(total.dtype)
    return local + ((both[0] / both[1]).to(total.dtype) - local).detach()
