"""Whole tensors from the ranks' fragments, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..control import agree
from ..process import Process
from ._deepspeed_fragment import Fragment
from ._deepspeed_partitions import Partitions

_PIECE_BYTES: Final = 16 << 20
_ALIGNMENT: Final = 16


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to put together: its shape, and what this rank has of it, which starts at ``start``."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    part: torch.Tensor | None


@torch.no_grad()
def assemble(pieces: Iterable[Piece], group: dist.ProcessGroup | None, device: torch.device) -> list[torch.Tensor]:
    """The whole tensors, on every rank; each element is on exactly one of them. Collective."""
    whole: list[torch.Tensor] = []
    waiting: list[Piece] = []
    size = 0
    for piece in pieces:
        if waiting and size > _PIECE_BYTES:
            whole += _assemble(waiting, size, group, device)
            waiting, size = [], 0
        waiting.append(piece)
        size += _padded(piece)
    return whole + _assemble(waiting, size, group, device)


def _padded(piece: Piece) -> int:
    return -(-piece.shape.numel() * piece.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _assemble(
    pieces: Sequence[Piece], size: int, group: dist.ProcessGroup | None, device: torch.device
) -> list[torch.Tensor]:
    # As bytes, since zeros added to them are exact for every dtype.
    flat = torch.zeros(size, dtype=torch.uint8, device=device)
    offset, places = 0, []
    for piece in pieces:
        places.append(flat.narrow(0, offset, piece.shape.numel() * piece.dtype.itemsize).view(piece.dtype))
        offset += _padded(piece)
        if piece.part is not None:
            places[-1].narrow(0, piece.start, piece.part.numel()).copy_(piece.part.reshape(-1))
    if size:
        dist.all_reduce(flat, group=group)
    return [place.clone().view(piece.shape) for place, piece in zip(places, pieces, strict=True)]


def of_fragments(
    partitions: Partitions, what: Mapping[int, torch.Tensor], dtypes: Mapping[int, torch.dtype]
) -> list[Piece]:
    """The pieces of one tensor for each parameter that ``dtypes`` names; ``what`` is this rank's part, by parameter."""
    pieces = []
    for index, dtype in dtypes.items():
        fragment = partitions.fragments.get(index)
        start = 0 if fragment is None else fragment.start
        pieces.append(Piece(partitions.shapes[index], dtype, start, what.get(index)))
    return pieces


# -- optimizers -------------------------------------------------------------------------------------------------------


def is_divided(key: str, value: Any, like: torch.Tensor | torch.Size) -> bool:
    """Whether an entry of an optimizer's state has an element for each of its parameter's."""
    shape = like if isinstance(like, torch.Size) else like.shape
    return isinstance(value, torch.Tensor) and value.shape == shape and not (key == "step" and value.numel() == 1)


def divide(optimizer: Optimizer, fragment: Fragment, shape: torch.Size, state: Mapping[str, Any]) -> None:
    """Give the fragment its part of a parameter's whole state."""
    mine: dict[str, Any] = {}
    for key, value in state.items():
        if is_divided(key, value, shape):
            part = value.detach().reshape(-1).narrow(0, fragment.start, fragment.home.numel())
            floating = part.is_floating_point()
            value = part.to(fragment.weights.device, fragment.weights.dtype if floating else part.dtype, copy=True)
        elif isinstance(value, torch.Tensor):
            value = value.clone()
        mine[key] = value
    optimizer.state[fragment.weights] = mine


def gather(
    optimizer: Optimizer,
    indices: Sequence[int],
    partitions: Partitions,
    process: Process,
    label: str,
) -> dict[int, dict[str, Any]]:
    """The whole state of each parameter of the model ``label`` that has one, on every rank. Collective."""
    mine: dict[int, dict[str, Any]] = {}
    for index in indices:
        fragment = partitions.fragments.get(index)
        state = optimizer.state.get(fragment.weights, {}) if fragment is not None else {}
        if fragment is not None and state:
            mine[index] = {k: v.dtype if is_divided(k, v, fragment.weights) else v for k, v in state.items()}
    kinds: dict[int, dict[str, Any]] = {}
    for theirs in agree(f"gathering an optimizer's state ({label})", mine):
        for index, entries in theirs.items():
            kinds.setdefault(index, entries)
    places, pieces = [], []
    for index in sorted(kinds):
        fragment = partitions.fragments.get(index)
        for key, kind in kinds[index].items():
            if isinstance(kind, torch.dtype):
                part = optimizer.state[fragment.weights][key] if fragment is not None else None
                start = fragment.start if fragment is not None else 0
                pieces.append(Piece(partitions.shapes[index], kind, start, part))
                places.append((index, key))
    for (index, key), tensor in zip(places, assemble(pieces, process.group, process.device), strict=True):
        kinds[index][key] = tensor
    return kinds


@contextmanager
def without_state(optimizer: Optimizer) -> Iterator[None]:
    """Hide the fragments' state, whose keys ``state_dict`` does not know."""
    held, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        yield
    finally:
        optimizer.state = held
