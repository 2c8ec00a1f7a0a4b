"""Copy tensors between devices and the CPU, and compare tensors of several ranks by a few sums."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch

from ..errors import RankMismatchError
from ..trees import move

# -- from a GPU to the CPU -------------------------------------------------------------------------

#: Bytes of a piece on its way to the CPU, and of each of the two pinned buffers.
PIECE: Final = 16 << 20


def is_remote(tensor: torch.Tensor) -> bool:
    """True if copies to pinned memory are asynchronous. Only CUDA has events that tell their end."""
    return tensor.is_cuda


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return uninitialized bytes on the CPU."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def begun(devices: Iterable[torch.device]) -> list[Any]:
    """Return events for the end of the work that the devices have been given."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def finish(events: Iterable[Any]) -> None:
    """Wait for events."""
    for event in events:
        event.synchronize()


def on_host(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield flat tensors on the CPU, in pieces of at most ``PIECE`` bytes.

    While you use a piece, the next one is copied. Each piece is valid until you ask for the next.
    """
    buffers: list[torch.Tensor] = []
    copies: deque[tuple[torch.Tensor, list[Any]]] = deque()

    def finished(most: int) -> Iterator[torch.Tensor]:
        while len(copies) > most:
            copy, events = copies.popleft()
            finish(events)
            yield copy

    for tensor in tensors:
        for piece in tensor.split(max(1, PIECE // tensor.itemsize)):
            if not is_remote(piece):
                yield from finished(0)
                yield piece.cpu()
                continue
            if not buffers:
                buffers = [host_memory(PIECE, pinned=True) for _ in range(2)]
            buffers.reverse()
            copy = buffers[0][: piece.nbytes].view(piece.dtype)
            copy.copy_(piece, non_blocking=True)
            copies.append((copy, begun([piece.device])))
            yield from finished(1)
    yield from finished(0)


# -- sums, to compare tensors over the ranks -------------------------------------------------------

#: For each tensor its sums and their tolerance.
Read: TypeAlias = "list[tuple[list[float], float]]"


@final
class Prints:
    """A few sums of tensors that differ if values or their order differ."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tolerances = [_tolerance(tensor.dtype) for tensor in tensors]
        device = tensors[0].device if tensors else None
        sums = [_sums(tensor).to(device) for tensor in tensors]
        self._sums = torch.stack(sums) if sums else None

    def read(self) -> Read:
        """Return the sums. Waits for the device."""
        if self._sums is None:
            return []
        values = []
        for sums, tolerance in zip(self._sums.tolist(), self._tolerances, strict=True):
            values.append((sums, tolerance * abs(sums[1]) + 1e-30))
        return values


def _tolerance(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    return 1e-5 if dtype.itemsize >= 4 else 1e-2


@torch.no_grad()
def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of the values, of their magnitudes, and of the rows times their numbers."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.is_floating_point() and values.dtype.itemsize == 1:
        values = values.float()  # torch doesn't compute with float8
    rows = values.reshape(-1)
    if values.is_floating_point():
        wide = torch.promote_types(values.dtype, torch.float32)
        magnitude = torch.linalg.vector_norm(values, 1, dtype=wide)
        if values.dim() > 1:
            rows = values.sum(tuple(range(1, values.dim())), dtype=wide)
    else:
        magnitude = (values.abs() if values.dtype.is_signed else values).sum()
        if values.dim() > 1:
            rows = values.sum(tuple(range(1, values.dim())))
    rows = rows.double()
    weights = torch.linspace(1, 2, len(rows), dtype=torch.float64, device=rows.device)
    return torch.stack([rows.sum(), magnitude.double(), (rows * weights).sum()])


def other_values(by_rank: Mapping[int, Read]) -> tuple[int, int, int] | None:
    """Return the first rank, a rank with different values, and the number of the tensor."""
    first, *others = by_rank
    for rank in others:
        pairs = zip(by_rank[first], by_rank[rank], strict=True)
        for index, ((expected, tolerance), (sums, _)) in enumerate(pairs):
            for a, b in zip(expected, sums, strict=True):
                both_nan = a != a and b != b
                if not (a == b or abs(a - b) <= tolerance or both_nan):
                    return first, rank, index
    return None


def refuse_other_values(what: str, by_rank: Mapping[int, Read], advice: str) -> None:
    """Raise RankMismatchError if the ranks' tensors differ."""
    difference = other_values(by_rank)
    if difference is not None:
        first, rank, index = difference
        raise RankMismatchError(
            f"{what}: tensor {index} has other values on rank {rank} than on rank {first}: {advice}"
        )


# -- batches to the device -------------------------------------------------------------------------


@final
class Transfer:
    """Moves batches to a device, from pinned memory without waiting for the copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, batch: Any) -> Any:
        return move(batch, self._move)

    def _move(self, leaf: Any) -> Any:
        if _is_pinned(leaf):
            return leaf.to(self._device, non_blocking=True)
        return leaf.to(self._device)


def _is_pinned(leaf: Any) -> bool:
    """True if a copy doesn't have to wait. A tokenizer's batch has no is_pinned(), but values."""
    if hasattr(leaf, "is_pinned"):
        return bool(leaf.is_pinned())
    values = leaf.values() if isinstance(leaf, Mapping) else ()
    pinned = any(isinstance(value, torch.Tensor) and value.is_pinned() for value in values)
    return pinned and "non_blocking" in inspect.signature(type(leaf).to).parameters
