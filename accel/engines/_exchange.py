"""Exchanges between the ranks that own tensors and the others, in flat pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist

from ..errors import AccelError

# What one exchange moves, over all owners. On the CPU the copies should stay in its cache; elsewhere calls are dear.
_PIECE_BYTES: Final = 32 << 20
_CPU_PIECE_BYTES: Final = 4 << 20


def _chunks(tensors: Iterable[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """The elements of ``tensors``, which are flat, in order as views: lists of ``limit`` elements in all."""
    piece: list[torch.Tensor] = []
    room = limit
    for tensor in tensors:
        while tensor.numel() > room:
            yield [*piece, tensor[:room]]
            tensor, piece, room = tensor[room:], [], limit
        piece.append(tensor)
        room -= tensor.numel()
    if piece:
        yield piece


def _rounds(by_owner: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """For each exchange the part of each owner; one dtype and device at a time."""
    kinds = dict.fromkeys((t.dtype, t.device) for tensors in by_owner for t in tensors)
    for dtype, device in kinds:
        piece = _CPU_PIECE_BYTES if device.type == "cpu" else _PIECE_BYTES
        limit = max(1, piece // dtype.itemsize // len(by_owner))
        same = ([t for t in tensors if t.dtype is dtype and t.device == device] for tensors in by_owner)
        yield from itertools.zip_longest(*(_chunks(tensors, limit) for tensors in same), fillvalue=[])


def _flat(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each as one dimension: a view where it is contiguous."""
    return [t.reshape(-1) for t in tensors]


def _put_back(tensors: Iterable[torch.Tensor], flat: Iterable[torch.Tensor]) -> None:
    """Write what ``_flat`` had to copy."""
    for tensor, values in zip(tensors, flat, strict=True):
        if not tensor.is_contiguous():
            tensor.copy_(values.view(tensor.shape))


@torch.no_grad()
def reduce_to_owners(by_owner: Sequence[Sequence[torch.Tensor]], rank: int, group: dist.ProcessGroup | None) -> None:
    """Replace, on each owner, its tensors by their means over the ranks; elsewhere they stay as they are.

    Each rank sends each owner its part and the owner adds them up: less traffic than reductions to one rank after the
    other, and one order of addition on any transport.

    Args:
        by_owner: for each rank the tensors that it owns, with the same shapes on every rank.
    """
    world = len(by_owner)
    flat = [_flat(tensors) for tensors in by_owner]
    for parts in _rounds(flat):
        sizes = [sum(t.numel() for t in part) for part in parts]
        sent = torch.cat([t for part in parts for t in part])
        came = sent.new_empty(world * sizes[rank])
        # As bytes: not every transport knows every dtype.
        width = sent.itemsize
        dist.all_to_all_single(
            came.view(torch.uint8),
            sent.view(torch.uint8),
            [sizes[rank] * width] * world,
            [size * width for size in sizes],
            group=group,
        )
        if mine := parts[rank]:
            means = came.view(world, sizes[rank]).mean(0)
            torch._foreach_copy_(mine, means.split([t.numel() for t in mine]))
    _put_back(by_owner[rank], flat[rank])


@torch.no_grad()
def broadcast_from_owners(
    by_owner: Sequence[Sequence[torch.Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Give every rank the owners' values, in place.

    Args:
        by_owner: for each rank the tensors that it owns, with the same shapes on every rank.
    """
    flat = [_flat(tensors) for tensors in by_owner]
    for parts in _rounds(flat):
        buffers = []
        for owner, part in enumerate(parts):
            if part:
                size = sum(t.numel() for t in part)
                buffer = torch.cat(part) if owner == rank else part[0].new_empty(size)
                work = dist.broadcast(buffer.view(torch.uint8), owner, group=group, async_op=True)
                buffers.append((owner, part, buffer, work))
        for owner, part, buffer, work in buffers:
            work.wait()
            if owner != rank:
                torch._foreach_copy_(part, buffer.split([t.numel() for t in part]))
    for owner, tensors in enumerate(by_owner):
        if owner != rank:
            _put_back(tensors, flat[owner])


@torch.no_grad()
def clip_parts_(
    gradients: list[torch.Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Clip by the norm of all ranks' ``gradients`` together; the ranks have different ones. Returns the norm."""
    order = float(norm_type)
    if order <= 0:
        raise AccelError(f"norm_type={norm_type!r}: expected a positive number or infinity")
    norms = torch.zeros(1, dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack([n.to(norms) for n in torch._foreach_norm(gradients, order)])
    if math.isinf(order):
        total = norms.max()
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
    else:
        total = norms.pow(order).sum()
        dist.all_reduce(total, group=group)
        total = total.pow(1.0 / order)
    total = total.float()
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total
