"""Copies between CUDA devices and the host that go on beside other work of this thread: through pinned memory.

Those to the host are on the current stream of their device, and so in order with what made the values and with what follows;
batches come on a stream of their own. What ranks compare of tensors comes to the host as a few sums of each.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias, final

import torch

from ..errors import RankMismatchError
from ..trees import move

# -- to the host ------------------------------------------------------------------------------------------------------

#: Bytes of a piece on its way to the host, and of each of the two buffers that such pieces take in turn.
PIECE: Final = 16 << 20


def is_remote(tensor: torch.Tensor) -> bool:
    """Whether its copies to and from pinned memory go on by themselves, and ``begun`` tells of their end.

    Copies of any other device wait: those of some would go on, and nobody hears when they end.
    """
    return tensor.is_cuda


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Bytes of the host."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def begun(devices: Iterable[torch.device]) -> list[Any]:
    """Events that come when devices have done all that they were given so far."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def finish(events: Iterable[Any]) -> None:
    """Wait for them."""
    for event in events:
        event.synchronize()


def on_host(pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flat tensors on the CPU, in pieces of at most ``PIECE`` bytes: while one is in use, the next one comes.

    Each is good until the one after it is asked for.
    """
    buffers: list[torch.Tensor] = []
    coming: deque[tuple[torch.Tensor, list[Any]]] = deque()

    def come(most: int) -> Iterator[torch.Tensor]:
        while len(coming) > most:
            tensor, events = coming.popleft()
            finish(events)
            yield tensor

    for piece in chain.from_iterable(_parts(one) for one in pieces):
        if is_remote(piece):
            buffers = buffers[::-1] or [host_memory(PIECE, pinned=True) for _ in range(2)]
            here = buffers[0][: piece.nbytes].view(piece.dtype)
            coming.append((here.copy_(piece, non_blocking=True), begun([piece.device])))
            yield from come(1)
        else:
            yield from come(0)
            yield piece.cpu()
    yield from come(0)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return [tensor] if tensor.nbytes <= PIECE else tensor.split(PIECE // tensor.itemsize)


def to_host(remote: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """The values on their way to the host, and what waits until they are there."""
    stacked = torch.stack([value.to(remote[0].device) for value in remote])
    if not is_remote(stacked):
        return stacked, lambda: None
    values = host_memory(stacked.nbytes, pinned=True).view(stacked.dtype).view(stacked.shape)
    values.copy_(stacked, non_blocking=True)
    return values, functools.partial(finish, begun([stacked.device]))


# -- sums of tensors, by which ranks see whether they have the same ones -----------------------------------------------

#: For each tensor its sums, and how far rounding may take them apart.
Read: TypeAlias = "list[tuple[list[float], float]]"


@final
class Prints:
    """Sums of tensors in which other values, or another order of them, show. They travel to the host while this rank goes on."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._rounding = [_rounding(t.dtype) for t in tensors]
        self._sums = to_host(list(map(_sums, tensors))) if tensors else None

    def read(self) -> Read:
        if self._sums is None:
            return []
        values, copied = self._sums
        copied()
        return [
            (s, rounding * abs(s[1]) + 1e-30)
            for s, rounding in zip(values.tolist(), self._rounding, strict=True)
        ]


def _rounding(dtype: torch.dtype) -> float:
    return (
        0.0
        if not dtype.is_floating_point and not dtype.is_complex
        else 1e-5
        if dtype.itemsize >= 4
        else 1e-2
    )


@torch.no_grad()
def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Of the values, of their amounts, and of rows by their number; without a copy of a large floating tensor."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if values.is_floating_point() and values.dtype.itemsize == 1:
        values = values.float()  # nothing is computed with such
    wide = torch.promote_types(values.dtype, torch.float32) if values.is_floating_point() else None
    each = (
        values.sum(tuple(range(1, values.dim())), dtype=wide)
        if values.dim() > 1
        else values.reshape(-1)
    )
    if wide is not None:
        total = torch.linalg.vector_norm(values, 1, dtype=wide)
    else:
        total = (values.abs() if values.dtype.is_signed else values).sum()
    each = each.double()
    order = (each * torch.linspace(1, 2, len(each), dtype=torch.float64, device=each.device)).sum()
    return torch.stack([each.sum(), total.double(), order])


def other_values(told: Mapping[int, Read]) -> tuple[int, int, int] | None:
    """The first rank of those that told what they have read, another one, and the number of a tensor that is not the first's."""
    first, *others = told
    for number in others:
        for index, ((one, room), (other, _)) in enumerate(
            zip(told[first], told[number], strict=True)
        ):
            if not all(
                a == b or abs(a - b) <= room or (a != a and b != b)
                for a, b in zip(one, other, strict=True)
            ):
                return first, number, index
    return None


def refuse_other_values(what: str, told: Mapping[int, Read], advice: str) -> None:
    """Refuse (RankMismatchError) tensors that are not the first rank's; ``told`` is what ranks have read of their prints."""
    if found := other_values(told):
        first, number, index = found
        raise RankMismatchError(
            f"{what}: tensor {index} has other values on rank {number} than on rank {first}: {advice}"
        )


# -- to the device ----------------------------------------------------------------------------------------------------


@final
class Transfer:
    """Moves batches to a device; from pinned memory beside what the device computes, and without waiting for either.

    A copy waits for nothing that was launched before it, and what is launched after it waits for the copy: while a step
    computes, its host comes to the next batch, which is there when the step ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        return move(batch, self._move)

    def _move(self, leaf: Any) -> Any:
        if not _pinned(leaf):
            return leaf.to(self._device)
        # Only of a tensor is it known what memory the copy has.
        if (
            self._stream is None
            or type(leaf) is not torch.Tensor
            or leaf.layout is not torch.strided
            or leaf.is_nested
        ):
            return leaf.to(self._device, non_blocking=True)
        with torch.cuda.stream(self._stream):
            moved = leaf.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        moved.record_stream(
            computing
        )  # its memory is not given to another copy before the steps that use it end
        return moved


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: the memory of batches is the stream's, and another stream would take its own."""
    return torch.cuda.Stream(device)


def _pinned(leaf: Any) -> bool:
    """Whether a copy of it need not wait, as far as it tells: a tokenizer's batch only by what it has."""
    if hasattr(leaf, "is_pinned"):
        return bool(leaf.is_pinned())
    values = leaf.values() if isinstance(leaf, Mapping) else ()
    pinned = any(isinstance(value, torch.Tensor) and value.is_pinned() for value in values)
    return pinned and "non_blocking" in inspect.signature(type(leaf).to).parameters
