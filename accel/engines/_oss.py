"""fairscale's OSS: which rank owns a parameter, and the flat buffers that carry its weights after a step.

Import this module inside ``unseen_group``, because fairscale's defaults would keep the process group alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import torch
from fairscale.nn.misc import ParamBucket  # type: ignore[import-untyped,import-not-found,unused-ignore]
from fairscale.optim.oss import OSS  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import nn
from torch.optim import Optimizer

from ..process.packing import broadcast_from_owners

#: Every parameter in a buffer begins at a multiple of this many bytes, because matrix kernels are slower otherwise.
_ALIGNMENT: Final = 16


@final
class FlatOSS(OSS):  # type: ignore[misc,unused-ignore]
    """An OSS over parameters that the user's own optimizer steps.

    It has fairscale's partition, refresh and broadcast. Only the layout of the buffers is accel's: one buffer per
    dtype, and frozen parameters that were never in a buffer stay where they are.

    Args:
        parameters: the parameters that the ranks divide.
        optimizer: the optimizer that steps them.
        ranks: the rank of the process that stands for each rank of OSS, which gives its rank 0 the first parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, ranks: Sequence[int]) -> None:
        self.flat: list[nn.Parameter] = []
        self._addresses: list[int] = []
        super().__init__([{"params": parameters}], optim=lambda groups, **defaults: optimizer)
        self._local_to_global_rank = list(ranks)
        self.group = None  # The default group, which a reference here would keep from its end.

    def owners(self) -> dict[int, int]:
        """Return the rank that owns each parameter, by the parameter's ``id``."""
        return {id(p): self._local_to_global_rank[rank] for p, rank in self._param_to_rank.items()}

    def refresh_trainable(self) -> None:
        """Put the trainable parameters into buffers, and take the others out."""
        super().refresh_trainable()
        # OSS synchronizes its default device before it broadcasts. NCCL waits for the current stream by itself.
        self._default_device = torch.device("cpu")

    @torch.no_grad()
    def _setup_flat_buffers(self) -> None:
        """Build one buffer per device, dtype and rank, of which the trainable parameters become views."""
        were_flat = {id(p) for p in self.flat}
        members: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter, rank in self._param_to_rank.items():
            plain = type(parameter.data) is torch.Tensor and parameter.is_contiguous()
            if plain and parameter.requires_grad:
                members[parameter.device, parameter.dtype, rank].append(parameter)
            elif id(parameter) in were_flat:
                parameter.data = parameter.data.clone()  # A view would keep the old buffer.
        self.buckets.clear()
        for (device, dtype, rank), parameters in members.items():
            self.buckets.setdefault((device, dtype), {})[rank] = _bucket(parameters, dtype, device)
        self.flat = [p for parameters in members.values() for p in parameters]
        self._addresses = list(map(torch.Tensor.data_ptr, self.flat))

    def moved(self) -> bool:
        """True if the program gave a parameter different memory, as ``p.data = average`` does."""
        return list(map(torch.Tensor.data_ptr, self.flat)) != self._addresses

    def release(self) -> None:
        """Give each parameter memory of its own again."""
        for parameter, address in zip(self.flat, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()
        self.buckets.clear()
        self.flat.clear()


def _bucket(parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device) -> ParamBucket:
    unit = max(1, _ALIGNMENT // dtype.itemsize)
    size = sum(-(-p.numel() // unit) * unit for p in parameters)
    bucket = ParamBucket(size, dtype, device)
    for parameter in parameters:
        bucket.add_param(parameter)
        bucket._fill = -(-bucket._fill // unit) * unit
    bucket.buffer = bucket.buffer.view(torch.uint8)  # Not every process group can send every dtype.
    return bucket


@final
class Shards:
    """The parameters of one optimizer: who owns them, and how all ranks get their new values.

    There is usually one OSS. Parameters that become trainable later get a second one, so no optimizer state moves.

    Args:
        optimizer: the user's optimizer.
        loads: for each rank, the number of elements that it owns in all optimizers of the model.

    Attributes:
        owner: the rank that owns a parameter, by the parameter's ``id``.
    """

    def __init__(self, optimizer: Optimizer, loads: list[int]) -> None:
        self.owner: dict[int, int] = {}
        self._optimizer = optimizer
        self._loads = loads
        self._parts: list[FlatOSS] = []

    def add(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Give the parameters without an owner to the ranks. Return True if there are any. Local, alike on all ranks."""
        new = {id(p): p for p in parameters if id(p) not in self.owner}
        if not new:
            return False
        ranks = sorted(range(len(self._loads)), key=self._loads.__getitem__)
        part = FlatOSS(list(new.values()), self._optimizer, ranks)
        self._parts.append(part)
        for key, rank in part.owners().items():
            self.owner[key] = rank
            self._loads[rank] += new[key].numel()
        return True

    def moved(self) -> bool:
        """True if the program gave a parameter different memory. Local."""
        return any(part.moved() for part in self._parts)

    def refresh(self) -> None:
        """Apply a change of ``requires_grad``, or of the parameters' memory. Local, alike on all ranks."""
        for part in self._parts:
            part.refresh_trainable()

    @torch.no_grad()
    def broadcast(self, stepped: Iterable[nn.Parameter], rank: int) -> None:
        """Give every rank the owners' values of the trainable parameters, and of the others that were stepped. Collective."""
        rest = {id(p): p for p in stepped}
        for part in self._parts:
            part._broadcast_params()
            for parameter in part.flat:
                rest.pop(id(parameter), None)
            received = [p for p in part.flat if self.owner[id(p)] != rank]
            torch.autograd.graph.increment_version(received)  # A graph from before the step must raise on all ranks.
        by_owner: list[list[torch.Tensor]] = [[] for _ in self._loads]
        for key, parameter in rest.items():
            by_owner[self.owner[key]].append(parameter)
        broadcast_from_owners(by_owner, rank, None)

    def release(self) -> None:
        """Give each parameter memory of its own again. Local."""
        for part in self._parts:
            part.release()
