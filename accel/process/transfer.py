"""Copy tensors between devices and the CPU, and compare tensors of several ranks by a few sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias, final

import torch

from ..trees import move

# -- from a GPU to the CPU -------------------------------------------------------------------------

#: Bytes of a piece on its way to the CPU, and of each of the two pinned buffers.
PIECE: Final = 16 << 20


def is_remote(tensor: torch.Tensor) -> bool:
    """True if copies to pinned memory are asynchronous. Only CUDA has events for their end."""
    return tensor.is_cuda


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return uninitialized bytes on the CPU."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def begun(devices: Iterable[torch.device]) -> list[Any]:
    """Return events for the end of the work in the devices' queues."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def finish(events: Iterable[Any]) -> None:
    """Wait for events."""
    for event in events:
        event.synchronize()


def on_host(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield flat tensors on the CPU, in pieces of at most ``PIECE`` bytes.

    While you use a piece, the next is copied. Each piece is valid until you ask for the next.
    """
    buffers: list[torch.Tensor] = []
    last: tuple[torch.Tensor, list[Any]] | None = None
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


# -- sums, to compare tensors over the ranks -------------------------------------------------------

#: For each tensor its sums and their tolerance.
Read: TypeAlias = "list[tuple[list[float], float]]"


@final
class Prints:
    """A few sums of tensors that differ if values or their order differ."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [(_sums(tensor), _tolerance(tensor.dtype)) for tensor in tensors]

    def read(self) -> Read:
        """Return the sums. Waits for the device."""
        read: Read = []
        for sums, tolerance in self._tensors:
            numbers = sums.tolist()
            read.append((numbers, tolerance * abs(numbers[1]) + 1e-30))
        return read


def _tolerance(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point and not dtype.is_complex:
        return 1e-12
    return 1e-5 if dtype.itemsize >= 4 else 1e-2


@torch.no_grad()
def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of the values, of their magnitudes, and of the values times their places."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    row = values.detach().reshape(-1).double()
    places = torch.linspace(1, 2, len(row), dtype=torch.float64, device=row.device)
    return torch.stack([row.sum(), row.abs().sum(), row @ places])


def find_difference(by_rank: Mapping[int, Read]) -> str:
    """Return a text about the first tensor with different values on the ranks, or an empty text."""
    first, *others = by_rank
    for rank in others:
        pairs = zip(by_rank[first], by_rank[rank], strict=True)
        for index, ((expected, tolerance), (sums, _)) in enumerate(pairs):
            for a, b in zip(expected, sums, strict=True):
                # Equal infinities have no difference, and equal NaNs no order.
                is_same = a == b or abs(a - b) <= tolerance or (a != a and b != b)
                if not is_same:
                    return f"tensor {index} has other values on rank {rank} than on rank {first}"
    return ""


# -- batches to the device -------------------------------------------------------------------------


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on the device. Copies from pinned memory are asynchronous."""

    def copied(leaf: Any) -> Any:
        if hasattr(leaf, "is_pinned") and leaf.is_pinned():
            return leaf.to(device, non_blocking=True)
        return leaf.to(device)

    return move(batch, copied)
