"""Copies between CUDA devices and the host that go on beside other work of this thread: through pinned memory.

Those to the host are on the current stream of their device, and so in order with what made the values and with what follows;
batches come on a stream of their own.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, final

import torch

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
    kind = stacked.device.type
    if kind != "cuda":
        return stacked, lambda: None
    values = torch.empty(stacked.shape, dtype=stacked.dtype, device="cpu", pin_memory=True)
    values.copy_(stacked, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return values, event.synchronize


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
        """The same containers with their tensors on the device."""
        return move(batch, self._move)

    def _move(self, leaf: Any) -> Any:
        if not _pinned(leaf):
            return leaf.to(self._device)
        # Only of a tensor is it known what memory the copy has.
        if self._stream is None or type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested:
            return leaf.to(self._device, non_blocking=True)
        with torch.cuda.stream(self._stream):
            moved = leaf.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        moved.record_stream(computing)  # its memory is not given to another copy before the steps that use it end
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
