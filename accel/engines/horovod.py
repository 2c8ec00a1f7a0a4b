"""``horovod``: gradients averaged by Horovod, for clusters that are set up for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..control import lost
from ..errors import BackendError, OptimizerError
from ..process import Process
from ._deferred import DeferredEngine, DeferredOptions
from ._horovod import load, start

_KNOWN = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Horovod(DeferredOptions):
    """Options of ``horovod``.

    Args:
        compression: "fp16" sends gradients in half precision, so that their mean is not exact.
        broadcast_buffers: all ranks take rank 0's buffers once a step.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """

    compression: Literal["fp16"] | None = None

    def check_values(self) -> None:
        """Refuse an unknown compression."""
        if self.compression not in (None, "fp16"):
            raise BackendError(f"Horovod(compression={self.compression!r}): expected 'fp16' or None")


@final
class HorovodEngine(DeferredEngine):
    """Sums the flat pieces by ``horovod.torch``; everything else goes over accel's own process group."""

    name = "horovod"
    options_type = Horovod
    requires = {"horovod": "horovod==0.28.1"}
    hint = " (with torch 2.1 or later its sources need one change: docs/hosts.md)"
    options: Horovod

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Refuse a Horovod that was built without torch or for another one."""
        if process.place.world_size > 1:
            load()

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Start Horovod where the program has not done it."""
        if self.distributed:
            start(self.process)
        super().start(optimizers)

    def attach(self, optimizer: Optimizer) -> None:
        """Refuse Horovod's own optimizer, which would reduce a second time."""
        if type(optimizer).__module__.startswith("horovod."):
            raise OptimizerError(
                f"this {type(optimizer).__name__} is a horovod.torch.DistributedOptimizer: give accel.setup the plain "
                "optimizer, accel averages the gradients itself"
            )
        super().attach(optimizer)

    def add(self, flat: torch.Tensor) -> None:
        """Sum by ``allreduce_``; complex numbers as pairs, and what Horovod does not know (bfloat16) in fp32."""
        hvd = load()
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        packed = real.half() if self.options.compression else real if real.dtype in _KNOWN else real.float()
        # The name stands for a shape: Horovod remembers what it agreed on under it.
        name = f"accel.{self.serial}.{packed.dtype}.{packed.numel()}"
        try:
            hvd.allreduce_(packed, name=name, op=hvd.Sum)
        except RuntimeError as error:
            raise lost("Horovod's allreduce", error) from error
        if packed is not real:
            real.copy_(packed)
