"""The mean of gradients that any rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import BackendError
from ..process import Process
from ..process.control import agree
from ..process.packing import average_

_NONE, _DENSE, _SPARSE = range(3)


def held_here(parameters: Iterable[nn.Parameter]) -> bytes:
    """Which of them have a gradient on this rank, for ``held_by_any``."""
    return bytes(_NONE if p.grad is None else _SPARSE if p.grad.is_sparse else _DENSE for p in parameters)


def held_by_any(what: str, told: Iterable[bytes], names: Sequence[str]) -> list[int]:
    """The numbers of the parameters that have a gradient on any of the ranks, which have told what ``held_here`` says there.

    Args:
        what: is to be done with them, for messages.
        told: by all ranks.
        names: of the parameters.

    Raises:
        BackendError: a rank has a sparse one; on every rank.
    """
    held = list(map(max, zip(*told, strict=True)))
    if _SPARSE in held:
        sparse = [name for name, code in zip(names, held, strict=True) if code == _SPARSE]
        raise BackendError(
            f"{what} cannot take the sparse gradients of {', '.join(sparse[:5])}: use nn.Embedding(sparse=False), or "
            "another backend"
        )
    return [i for i, code in enumerate(held) if code == _DENSE]


def held_anywhere(
    what: str, parameters: Sequence[nn.Parameter], names: Sequence[str], process: Process, *, announced: bool = False
) -> list[int]:
    """The numbers of the parameters that have a gradient on any rank, as in ``held_by_any``. Collective.

    Args:
        what: is to be done with them, for messages.
        parameters: the same on every rank.
        names: of these.
        process: of this rank.
        announced: the ranks are known to be at this place, so that a mask on the device will do.
    """
    if not parameters:
        return []
    mine = held_here(parameters)
    if not announced:
        return held_by_any(what, agree(what, mine), names)
    mask = torch.tensor(list(mine), dtype=torch.uint8, device=process.device)
    dist.all_reduce(mask, dist.ReduceOp.MAX, group=process.group)
    return held_by_any(what, [bytes(mask.tolist())], names)


def average_gradients_(
    what: str,
    parameters: Sequence[nn.Parameter],
    names: Sequence[str],
    process: Process,
    add: Callable[[torch.Tensor], object] | None = None,
    *,
    announced: bool = False,
) -> bool:
    """Average the gradients of every parameter that has one on any rank; a rank that has none counts as zero. Collective.

    Args:
        what: as for ``held_anywhere``.
        parameters: the same on every rank.
        names: of these.
        process: of this rank.
        add: sums a flat tensor over the ranks, in place; None is ``dist.all_reduce``.
        announced: as for ``held_anywhere``.

    Returns:
        Whether there were any.

    Raises:
        BackendError: a rank has a sparse one; on every rank.
    """
    gradients = []
    for number in held_anywhere(what, parameters, names, process, announced=announced):
        parameter = parameters[number]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    average_(gradients, process.place.world_size, add or (lambda flat: dist.all_reduce(flat, group=process.group)))
    return bool(gradients)
