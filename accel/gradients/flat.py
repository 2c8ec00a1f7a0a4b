"""Collectives over many tensors, in flat pieces: one call on the network for each few megabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..errors import BackendError
from ..process.control import agree

# Large enough that a call's latency does not count, small enough that the copy does not either.
_PIECE_BYTES = 16 << 20


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of equal dtype and device, each of about ``_PIECE_BYTES`` or of one larger tensor."""
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        group, size = groups.get(key, ([], 0))
        if group and size + tensor.nbytes > _PIECE_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        groups[key] = (group, size + tensor.nbytes)
    yield from (group for group, _ in groups.values())


@torch.no_grad()
def broadcast_(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None, src: int = 0) -> None:
    """Give every rank rank ``src``'s values, in place; as bytes, since not every backend knows every dtype."""
    for piece in _pieces(tensors):
        flat = torch.cat([t.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for t in piece])
        dist.broadcast(flat, src, group=group)
        for tensor, part in zip(piece, flat.split([t.nbytes for t in piece]), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def average_(tensors: Iterable[torch.Tensor], world_size: int, add: Callable[[torch.Tensor], object]) -> None:
    """Replace each tensor by its mean over the ranks, in place; ``add`` sums a flat piece over them, in place."""
    for piece in _pieces(tensors):
        flat = torch.cat([t.reshape(-1) for t in piece]).mul_(1.0 / world_size)
        add(flat)
        for tensor, part in zip(piece, flat.split([t.numel() for t in piece]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def average_gradients_(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Average the gradients of every parameter that has one on any rank; a rank that has none counts as zero.

    Raises:
        BackendError: a sparse gradient, on the ranks that have one.
    """
    have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(have, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, needed in zip(parameters, have.tolist(), strict=True):
        if needed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    if any(g.is_sparse for g in gradients):
        raise BackendError(
            "sparse gradients were accumulated without the reducer: use one synchronised backward a step"
        )
    average_(gradients, dist.get_world_size(group), lambda flat: dist.all_reduce(flat, group=group))


def broadcast_state(optimizer: Optimizer, source: int, group: dist.ProcessGroup | None, label: str) -> None:
    """Give every rank rank ``source``'s optimizer state; a rank that has none yet gets it. ``label`` names the model."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    # Shapes and plain values by pickle, tensors' contents by the flat pieces.
    mine = [
        {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in optimizer.state.get(p, {}).items()}
        for p in parameters
    ]
    theirs = agree(f"broadcast of optimizer state ({label})", mine)[source]
    tensors = []
    for parameter, entries in zip(parameters, theirs, strict=True):
        if not entries:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor):
                state[key] = value
                continue
            if key not in state:
                device = "cpu" if key == "step" else parameter.device
                state[key] = torch.zeros(value.shape, dtype=value.dtype, device=device)
            tensors.append(state[key])
    broadcast_(tensors, group, source)
