"""Messages between the ranks of a pipeline."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist

from ...process import Process
from ...process.control import lost
from ...process.packing import framed, to_bytes, to_tensor, unframed

_TAG: Final = 0x919E

Failure = tuple[int, str]


class Message(NamedTuple):
    """What passes between stages: a nested value, or where and how its making failed."""

    tensors: list[torch.Tensor | None]
    form: Any = None
    failure: Failure | None = None

    def head(self) -> tuple[bytes, list[torch.Tensor]]:
        """All but the tensors' contents, and the tensors that have any, in memory as they are."""
        kinds = [None if t is None else (t.shape, t.dtype, t.requires_grad) for t in self.tensors]
        data = pickle.dumps((kinds, self.form, self.failure))
        full = [t.detach() for t in self.tensors if t is not None and t.numel()]
        return data, [t.resolve_conj().resolve_neg().contiguous() for t in full]


@final
class Channel:
    """This rank's connection with the other stages."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.rank = process.place.rank
        self.last = process.place.world_size - 1
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, to: int, message: Message) -> None:
        """Begin to send; ``flush`` waits for the end."""
        head, tensors = message.head()
        with self._transfer():
            for piece in (*map(to_tensor, framed(head)), *tensors):
                travelling = piece.to(self._process.carrier)
                self._sent.append((dist.isend(travelling, to, self._process.group, _TAG), travelling))

    def flush(self) -> None:
        """Wait until the neighbours have what was sent."""
        with self._transfer():
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    def receive(self, source: int) -> Message:
        """The next message of a neighbour."""
        return self._read(lambda tensor: dist.recv(tensor, source, self._process.group, _TAG))

    def broadcast(self, source: int, message: Message | None) -> Message:
        """Give every rank the message of ``source``. Collective."""
        group, carrier = self._process.group, self._process.carrier
        if message is None:
            return self._read(lambda tensor: dist.broadcast(tensor, source, group))
        head, tensors = message.head()
        with self._transfer():
            for piece in (*map(to_tensor, framed(head)), *map(_bytes, tensors)):
                dist.broadcast(piece.to(carrier), source, group)
        return message

    def _read(self, get: Callable[[torch.Tensor], object]) -> Message:
        def block(count: int) -> torch.Tensor:
            data = torch.empty(count, dtype=torch.uint8, device=self._process.carrier)
            if count:
                get(data)
            return data

        def tensor(shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
            whole = block(shape.numel() * dtype.itemsize).view(dtype).view(shape)
            return whole.to(self._process.device).requires_grad_(requires_grad)

        with self._transfer():
            kinds, form, failure = pickle.loads(unframed(lambda count: to_bytes(block(count))))
            return Message([None if kind is None else tensor(*kind) for kind in kinds], form, failure)

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._sent.clear()
            raise lost("a message of a pipeline", error) from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: not every backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)
