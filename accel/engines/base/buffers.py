"""The buffers of a model, which rank 0 broadcasts before a step."""

from __future__ import annotations

import operator
from itertools import starmap
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...process import Process
from ...process.control import Waiting
from ...process.packing import broadcast_

_contiguous: Final = operator.methodcaller("is_contiguous")
_device: Final = operator.attrgetter("device")


@final
class Buffers:
    """The buffers that a module has in ``setup``.

    Later buffers, and buffers with a new shape, are not synchronized.
    """

    def __init__(self, module: nn.Module, process: Process, wanted: bool) -> None:
        self._process = process
        self._places: list[tuple[dict[str, Any], str]] = []
        for name, _ in module.named_buffers():
            parent, _, key = name.rpartition(".")
            self._places.append((module.get_submodule(parent)._buffers, key))
        self._first = [table[key] for table, key in self._places]
        self._kinds = list(map(_kind, self._first))
        self._waiting = Waiting(process, f"rank 0's buffers ({type(module).__name__})")
        #: True if rank 0 broadcasts buffers, and if a forward may have changed them since.
        self.wanted = wanted and process.place.world_size > 1 and bool(self._places)
        self.stale = False

    def touch(self) -> None:
        """Note a forward, which may change buffers."""
        self.stale = self.wanted

    def synchronize(self) -> None:
        """Copy rank 0's buffers to every rank, in place. Collective."""
        self.stale = False
        if not self.wanted:
            return
        buffers: list[Any] = list(starmap(dict.get, self._places))
        # Skip a cache that has grown, because all ranks must send as many bytes as in ``setup``.
        for number, first in enumerate(self._first):
            now = buffers[number]
            if now is not first and _kind(now) != self._kinds[number]:
                buffers[number] = first
        with self._waiting:
            devices = set(map(_device, buffers))
            if len(devices) > 1 or not all(map(_contiguous, buffers)):
                broadcast_(buffers, self._process.group)
                return
            # One message of bytes, because not every process group supports every dtype.
            rows = [buffer.detach().view(-1).view(torch.uint8) for buffer in buffers]
            flat = torch.cat(rows)
            dist.broadcast(flat, 0, group=self._process.group)
            if self._process.place.rank:
                torch._foreach_copy_(rows, flat.split(list(map(len, rows))))


def _kind(buffer: Tensor | None) -> Any:
    return None if buffer is None else (buffer.shape, buffer.dtype)
