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
        kinds = [None if t is None else (tuple(t.shape), t.dtype, t.requires_grad) for t in self.tensors]
        data = pickle.dumps((kinds, self.form, self.failure))
        full = [t.detach() for t in self.tensors if t is not None and t.numel()]
        return data, [t.resolve_conj().resolve_neg().contiguous() for t in full]


@final
class Channel:
    """This rank's connection with the other stages of the model that ``label`` names."""

    def __init__(self, process: Process, label: str) -> None:
        self._process = process
        self.label = label
        self.rank = process.place.rank
        self.device = process.device
        self.last = process.place.world_size - 1
        self.carrier = process.carrier
        self._sent: list[tuple[Any, torch.Tensor]] = []

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks."""
        return self._process.group

    def send(self, to: int, message: Message) -> None:
        """Begin to send; ``flush`` waits for the end."""
        head, tensors = message.head()
        with self._transfer():
            for piece in (*map(to_tensor, framed(head)), *tensors):
                travelling = piece.to(self.carrier)
                self._sent.append((dist.isend(travelling, to, self.group, _TAG), travelling))

    def flush(self) -> None:
        """Wait until the neighbours have what was sent."""
        with self._transfer():
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    def receive(self, source: int) -> Message:
        """The next message of a neighbour."""
        return self._read(lambda tensor: dist.recv(tensor, source, self.group, _TAG))

    def broadcast(self, source: int, message: Message | None) -> Message:
        """Give every rank the message of ``source``. Collective."""
        group = self.group
        if message is None:
            return self._read(lambda tensor: dist.broadcast(tensor, source, group))
        head, tensors = message.head()
        with self._transfer():
            for piece in framed(head):
                dist.broadcast(to_tensor(piece).to(self.carrier), source, group)
            for tensor in tensors:
                dist.broadcast(_bytes(tensor.to(self.carrier)), source, group)
        return message

    def _read(self, get: Callable[[torch.Tensor], object]) -> Message:
        with self._transfer():
            kinds, form, failure = pickle.loads(unframed(lambda count: self._bytes(get, count)))
            tensors: list[torch.Tensor | None] = []
            for kind in kinds:
                if kind is None:
                    tensors.append(None)
                    continue
                shape, dtype, requires_grad = kind
                tensor = torch.empty(shape, dtype=dtype, device=self.carrier)
                if tensor.numel():
                    get(_bytes(tensor))
                tensors.append(tensor.to(self.device).requires_grad_(requires_grad))
        return Message(tensors, form, failure)

    def _bytes(self, get: Callable[[torch.Tensor], object], count: int) -> bytearray:
        block = torch.empty(count, dtype=torch.uint8, device=self.carrier)
        get(block)
        return to_bytes(block)

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
