"""The buffers of a model, which every rank takes from rank 0 once a step."""

from __future__ import annotations

import operator
from itertools import repeat, starmap
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import nn

from ...process import Process
from ...process.control import Waiting, announce
from ...process.packing import broadcast_, writable

_contiguous: Final = operator.methodcaller("is_contiguous")
_device: Final = operator.attrgetter("device")


@final
class Buffers:
    """The buffers that a module has in ``setup``, by their places, because a forward may replace one.

    A buffer that is registered later is each rank's own, as in DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, process: Process, asked: bool) -> None:
        self._process = process
        self._names: list[str] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        for name, _ in module.named_buffers():
            parent, _, key = name.rpartition(".")
            self._names.append(name)
            self._places.append((module.get_submodule(parent)._buffers, key))
        self._shapes = list(
            map(getattr, starmap(dict.get, self._places), repeat("shape"), repeat(None))
        )
        self._what = f"the buffers that rank 0 gives to all ({type(module).__name__})"
        self._waiting = Waiting(process, self._what)
        #: True if ranks take rank 0's; and if a forward may have changed them since they did.
        self.wanted = asked and process.place.world_size > 1 and bool(self._names)
        self.stale = False

    def touch(self) -> None:
        """Note a forward that may change buffers."""
        self.stale = self.wanted

    def synchronize(self) -> None:
        """Copy rank 0's buffers to every rank, in place. Collective.

        Raises:
            RankMismatchError: ranks have buffers of different shapes.
        """
        self.stale = False
        if not self.wanted:
            return
        tensors: list[Any] = list(starmap(dict.get, self._places))
        shapes = list(map(getattr, tensors, repeat("shape"), repeat(None)))
        if shapes != self._shapes:
            self._announce(shapes)
            tensors = [tensor for tensor in tensors if tensor is not None]
        with self._waiting:
            if not all(map(_contiguous, tensors)) or len(set(map(_device, tensors))) > 1:
                broadcast_(writable(tensors), self._process.group)
                return
            # One message of bytes, because not every transport knows every dtype.
            rows = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
            flat = torch.cat(rows)
            dist.broadcast(flat, 0, group=self._process.group)
            if self._process.place.rank:
                torch._foreach_copy_(rows, flat.split(list(map(len, rows))))

    def _announce(self, shapes: list[Any]) -> None:
        """Compare shapes that have changed since ``setup``, as those of a cache of positions."""
        pairs = zip(self._names, shapes, self._shapes, strict=True)
        changed = [f"{name} {list(new or ())}" for name, new, old in pairs if new != old]
        one_shape = "which must have one shape on all ranks, as a plain attribute need not"
        announce(self._process, f"{self._what}, {one_shape}: {', '.join(sorted(changed)[:5])}")
