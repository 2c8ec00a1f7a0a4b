"""Copy tensors between devices and the CPU, and compare them across ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..trees import move

#: The size in bytes of a piece that is copied to the CPU, and of each pinned buffer.
PIECE: Final = 16 << 20


def is_remote(tensor: Tensor) -> bool:
    """True if copies to pinned memory are asynchronous and have events."""
    return tensor.is_cuda


def host_memory(nbytes: int, *, pinned: bool) -> Tensor:
    """Return uninitialized bytes on the CPU."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def begun(devices: Iterable[torch.device]) -> list[Any]:
    """Return events for the end of the work queued on the devices."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def finish(events: Iterable[Any]) -> None:
    """Wait for events."""
    for event in events:
        event.synchronize()


def on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors in pieces on the CPU. Each is valid until the next."""
    buffers: list[Tensor] = []
    last: tuple[Tensor, list[Any]] | None = None
    for tensor in tensors:
        for piece in tensor.split(max(1, PIECE // tensor.itemsize)):
            if is_remote(piece):
                if not buffers:
                    buffers = [host_memory(PIECE, pinned=True) for _ in range(2)]
                buffers.reverse()
                copy = buffers[0][: piece.nbytes].view(piece.dtype)
                copy.copy_(piece, non_blocking=True)
                events = begun([piece.device])
            else:
                copy, events = piece.cpu(), []
            if last is not None:
                finish(last[1])
                yield last[0]
            last = copy, events
    if last is not None:
        finish(last[1])
        yield last[0]


# -- sums, to compare tensors across ranks ---------------------------------------------------------

#: A sum and its tolerance for each tensor.
Sums: TypeAlias = "list[tuple[float, float]]"


@torch.no_grad()
def sums_of(tensors: Iterable[Tensor]) -> Sums:
    """Return sums that differ if values or their order differ."""
    sums: Sums = []
    for tensor in tensors:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        row = values.detach().reshape(-1).double()
        places = torch.linspace(1, 2, len(row), dtype=row.dtype, device=row.device)
        # With weights 1 and 2, the labels 3, 0 and 1, 1 have equal sums. With roots they don't.
        total, size = torch.stack([row @ places.sqrt(), row.abs().sum()]).tolist()
        tolerance = 1e-12
        if values.is_floating_point():
            tolerance = 1e-5 if values.itemsize >= 4 else 1e-2
        sums.append((total, tolerance * size + 1e-30))
    return sums


def find_difference(by_rank: Mapping[int, Sums]) -> str:
    """Describe the first tensor with different values, or return an empty string."""
    first, *others = by_rank
    for rank in others:
        pairs = zip(by_rank[first], by_rank[rank], strict=True)
        for index, ((a, tolerance), (b, _)) in enumerate(pairs):
            # inf - inf is NaN, and NaN isn't equal to itself, so check equal values separately.
            is_same = a == b or abs(a - b) <= tolerance or (a != a and b != b)
            if not is_same:
                return f"tensor {index} has different values on rank {rank} than on rank {first}"
    return ""


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on the device. Copies from pinned memory are asynchronous."""

    def copied(leaf: Any) -> Any:
        is_pinned = hasattr(leaf, "is_pinned") and leaf.is_pinned()
        return leaf.to(device, non_blocking=True) if is_pinned else leaf.to(device)

    return move(batch, copied)
