"""The mean over all ranks of gradients and of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Real

import torch
import torch.distributed as dist
from torch import nn

from ..errors import AccelError, BackendError
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
