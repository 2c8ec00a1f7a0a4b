"""fairscale's OSS over parameters that the user's own optimizer steps.

Import this module inside ``unseen_group``. fairscale's defaults would keep the process group alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import Any, final

import torch
from fairscale.nn.misc import ParamBucket  # type: ignore[import-untyped,unused-ignore]
from fairscale.optim.oss import OSS  # type: ignore[import-untyped,unused-ignore]
from torch import nn
from torch.optim import Optimizer


@final
class FlatOSS(OSS):  # type: ignore[misc,unused-ignore]
    """An OSS whose partition, refresh and broadcast are fairscale's, with a buffer per dtype."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
        #: The parameters that are views of the buffers, and their addresses.
        self.flat: list[nn.Parameter] = []
        self._addresses: list[int] = []
        super().__init__([{"params": parameters}], optim=lambda groups, **defaults: optimizer)
        #: The owner of each parameter, by its ``id``.
        self.rank_of = {id(p): rank for p, rank in self._param_to_rank.items()}
        self.group = None  # A reference to the default group would keep it from its end.

    @torch.no_grad()
    def _setup_flat_buffers(self) -> None:
        """Make trainable parameters views of flat buffers. OSS's own raises for several dtypes."""
        members: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter, rank in self._param_to_rank.items():
            is_dense = type(parameter.data) is torch.Tensor and parameter.is_contiguous()
            if is_dense and parameter.requires_grad and parameter.numel():
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
    bucket = ParamBucket(sum(p.numel() for p in parameters), first.dtype, first.device)
    for parameter in parameters:
        bucket.add_param(parameter)
    bucket.buffer = bucket.buffer.view(torch.uint8)  # Not every process group can send every dtype.
    return bucket
