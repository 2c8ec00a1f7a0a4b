"""fairscale's OSS over an optimizer that the user steps.

Import this module inside ``unseen_group``. fairscale's defaults would keep the process group alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any, Final, final

import torch
from fairscale.nn.misc import ParamBucket  # type: ignore[import-untyped,import-not-found,unused-ignore]
from fairscale.optim.oss import OSS  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import nn
from torch.optim import Optimizer

from ..process.packing import broadcast_from_owners

#: Matrix kernels are slower if a weight doesn't begin at a multiple of this many bytes.
_ALIGNMENT: Final = 16


@final
class FlatOSS(OSS):  # type: ignore[misc,unused-ignore]
    """An OSS whose partition, refresh and broadcast are fairscale's, with a buffer per dtype.

    ``ranks`` are the ranks in the order in which OSS gives them parameters.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        optimizer: Optimizer,
        ranks: list[int],
    ) -> None:
        self.flat: list[nn.Parameter] = []
        self._addresses: list[int] = []
        super().__init__([{"params": parameters}], optim=lambda groups, **defaults: optimizer)
        self._local_to_global_rank = ranks
        self.owner = {id(p): ranks[rank] for p, rank in self._param_to_rank.items()}
        self.group = None  # A reference to the default group would keep it from its end.

    @torch.no_grad()
    def _setup_flat_buffers(self) -> None:
        """Make trainable parameters views of flat buffers. OSS's own raises for several dtypes."""
        members: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter, rank in self._param_to_rank.items():
            dense = type(parameter.data) is torch.Tensor and parameter.is_contiguous()
            if dense and parameter.requires_grad and parameter.numel():
                members[parameter.device, parameter.dtype, rank].append(parameter)
        self.release(except_for={id(p) for parameters in members.values() for p in parameters})
        for (device, dtype, rank), parameters in members.items():
            self.buckets.setdefault((device, dtype), {})[rank] = _bucket(parameters)
            self.flat += parameters
        self._addresses = list(map(torch.Tensor.data_ptr, self.flat))
        # OSS synchronizes this device before a broadcast, but NCCL waits for the stream by itself.
        self._default_device = torch.device("cpu")

    def moved(self) -> bool:
        """True if the program gave a parameter different memory, as ``p.data = average`` does."""
        return list(map(torch.Tensor.data_ptr, self.flat)) != self._addresses

    def release(self, except_for: Container[int] = ()) -> None:
        """Give each parameter memory of its own again."""
        for parameter in self.flat:
            if id(parameter) not in except_for:
                parameter.data = parameter.data.clone()
        self.buckets.clear()
        self.flat.clear()


def _bucket(parameters: list[nn.Parameter]) -> ParamBucket:
    first = parameters[0]
    unit = max(1, _ALIGNMENT // first.itemsize)
    size = sum(-(-p.numel() // unit) * unit for p in parameters)
    bucket = ParamBucket(size, first.dtype, first.device)
    for parameter in parameters:
        bucket.add_param(parameter)
        bucket._fill = -(-bucket._fill // unit) * unit
    bucket.buffer = bucket.buffer.view(torch.uint8)  # Not every process group can send every dtype.
    return bucket


@final
class Shards:
    """The owners of one optimizer's parameters, by the parameter's ``id``.

    Parameters that become trainable later get a second OSS, so that no optimizer state moves.
    ``loads`` are the numbers of elements that each rank owns, of all optimizers of the model.
    """

    def __init__(self, optimizer: Optimizer, loads: list[int]) -> None:
        self.optimizer = optimizer
        self.owner: dict[int, int] = {}
        self.parts: list[FlatOSS] = []
        self._loads = loads

    def add(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Give owners to parameters without one. Return True if there are any. Local."""
        new = {id(p): p for p in parameters if id(p) not in self.owner}
        if not new:
            return False
        ranks = sorted(range(len(self._loads)), key=self._loads.__getitem__)
        # From large to small, which balances best.
        largest_first = sorted(new.values(), key=lambda p: -p.numel())
        part = FlatOSS(largest_first, self.optimizer, ranks)
        self.parts.append(part)
        self.owner |= part.owner
        for key, rank in part.owner.items():
            self._loads[rank] += new[key].numel()
        return True

    @torch.no_grad()
    def broadcast(self, stepped: Iterable[nn.Parameter], rank: int) -> None:
        """Give every rank the owners' values of flat and of ``stepped`` parameters. Collective."""
        rest = {id(p): p for p in stepped}
        for part in self.parts:
            part._broadcast_params()
            received = [p for p in part.flat if self.owner[id(p)] != rank]
            # backward() of a graph from before the step must raise on all ranks.
            torch.autograd.graph.increment_version(received)
            for parameter in part.flat:
                rest.pop(id(parameter), None)
        by_owner: list[list[torch.Tensor]] = [[] for _ in self._loads]
        for key, parameter in rest.items():
            by_owner[self.owner[key]].append(parameter)
        broadcast_from_owners(by_owner, rank, None)
