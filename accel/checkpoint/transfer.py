"""Copies between CUDA devices and the host that go on beside other work of this thread: through pinned memory.

All are on the current stream of their device, and so in order with what made the values and with what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import torch

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
