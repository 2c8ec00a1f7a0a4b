"""Exchanges between the ranks that own tensors and the others, in flat pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

# What one exchange moves, over all owners. On the CPU the copies should stay in its cache; elsewhere calls are dear.
_PIECE_BYTES: Final = 32 << 20
_CPU_PIECE_BYTES: Final = 8 << 20


def _limit(dtype: torch.dtype, device: torch.device, world: int) -> int:
    """How many elements of one owner go into an exchange."""
    piece = _CPU_PIECE_BYTES if device.type == "cpu" else _PIECE_BYTES
    return max(1, piece // dtype.itemsize // world)


def _limited(tensors: Iterable[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Lists of at most ``limit`` elements in all; a larger tensor, which is contiguous, comes in flat parts."""
    piece: list[torch.Tensor] = []
    room = limit
    for tensor in tensors:
        size = tensor.numel()
        if size > room and piece:
            yield piece
            piece, room = [], limit
        if size > limit:
            *full, tensor = tensor.view(-1).split(limit)
            yield from ([part] for part in full)
            size = tensor.numel()
        piece.append(tensor)
        room -= size
    if piece:
        yield piece


def _rounds(by_owner: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """For each exchange the part of each owner; one dtype and device at a time."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for owner, tensors in enumerate(by_owner):
        for tensor in tensors:
            kind = (tensor.dtype, tensor.device)
            if kind not in kinds:
                kinds[kind] = [[] for _ in by_owner]
            if tensor.numel():
                kinds[kind][owner].append(tensor)
    for (dtype, device), same in kinds.items():
        limit = _limit(dtype, device, len(by_owner))
        yield from itertools.zip_longest(*(_limited(tensors, limit) for tensors in same), fillvalue=[])


def _cuttable(tensors: Sequence[torch.Tensor], world: int) -> list[torch.Tensor]:
    """The same, with a contiguous copy in the place of one that is too large for one exchange."""
    return [
        t if t.is_contiguous() or t.numel() <= _limit(t.dtype, t.device, world) else t.contiguous() for t in tensors
    ]


def _put_back(tensors: Iterable[torch.Tensor], used: Iterable[torch.Tensor]) -> None:
    """Write what ``_cuttable`` had to copy."""
    for tensor, copied in zip(tensors, used, strict=True):
        if copied is not tensor:
            tensor.copy_(copied)


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _flatten(chosen: Iterable[Sequence[torch.Tensor]], parts: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The chosen parts one after the other; where these are empty, an empty tensor like the others."""
    tensors = [t for part in chosen for t in part]
    return _flatten_dense_tensors(tensors) if tensors else next(t for part in parts for t in part).new_empty(0)


@torch.no_grad()
def reduce_to_owners(by_owner: Sequence[Sequence[torch.Tensor]], rank: int, group: dist.ProcessGroup | None) -> None:
    """Replace, on each owner, its tensors by their means over the ranks; elsewhere they stay as they are.

    Each rank sends each owner its part and the owner adds them up: less traffic than reductions to one rank after the
    other, and one order of addition on any transport.

    Args:
        by_owner: for each rank the tensors that it owns, with the same shapes on every rank.
    """
    world = len(by_owner)
    used = [_cuttable(tensors, world) for tensors in by_owner]
    for parts in _rounds(used):
        mine = parts[rank]
        others = [part if owner != rank else [] for owner, part in enumerate(parts)]
        sent = _flatten(others, parts)
        # As bytes: not every transport knows every dtype.
        width = sent.itemsize
        size = width * _numel(mine)
        came = torch.empty((world - 1) * size, dtype=torch.uint8, device=sent.device)
        dist.all_to_all_single(
            came,
            sent.view(torch.uint8),
            [size if owner != rank else 0 for owner in range(world)],
            [width * _numel(part) for part in others],
            group=group,
        )
        if mine:
            rows = came.view(sent.dtype).view(world - 1, -1)
            torch._foreach_add_(mine, _unflatten_dense_tensors(rows.sum(0) if world > 2 else rows[0], mine))
            torch._foreach_mul_(mine, 1 / world)
    _put_back(by_owner[rank], used[rank])


@torch.no_grad()
def broadcast_from_owners(
    by_owner: Sequence[Sequence[torch.Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Give every rank the owners' values, in place.

    Args:
        by_owner: for each rank the tensors that it owns, with the same shapes on every rank.
    """
    used = [_cuttable(tensors, len(by_owner)) for tensors in by_owner]
    for parts in _rounds(used):
        buffers = []
        for owner, part in enumerate(parts):
            if part:
                buffer = _flatten_dense_tensors(part) if owner == rank else part[0].new_empty(_numel(part))
                work = dist.broadcast(buffer.view(torch.uint8), owner, group=group, async_op=True)
                buffers.append((owner, part, buffer, work))
        for owner, part, buffer, work in buffers:
            work.wait()
            if owner != rank:
                torch._foreach_copy_(part, _unflatten_dense_tensors(buffer, part))
    for owner, tensors in enumerate(by_owner):
        if owner != rank:
            _put_back(tensors, used[owner])
