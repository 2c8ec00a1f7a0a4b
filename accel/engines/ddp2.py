"""``ddp2``: ``DataParallel`` within nodes, ``ddp`` between them."""

from dataclasses import dataclass
from typing import Any, final

from torch import nn

from ..errors import BackendError
from ..process import Process
from .ddp import DDP, DDPEngine
from .dp import Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP2(DDP):
    """Options of ``ddp2``: those of ``accel.DDP``.

    Start one process on each node. It splits its batch over all devices of
    the node and gathers the outputs, so the loss sees the node's full
    batch. Gradients are averaged over the nodes. With fewer than two
    devices per process, ``ddp2`` is the same as ``ddp``.
    """


@final
class DDP2Engine(DDPEngine):
    """Runs a reducer around ``DataParallel``."""

    name = "ddp2"
    options_type = DDP2

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        super().check(module, options, process)
        several = len(process.devices) > 1
        if options.sequence_parallel > 1 or (options.sync_batchnorm and several):
            raise BackendError(
                "DDP2 doesn't support sequence_parallel, or sync_batchnorm with several "
                "devices. Start a process for each device with accel.DDP(...)."
            )

    def wrap(self) -> None:
        """Put the replicas between the reducer and the module."""
        devices = list(self.process.devices)
        if len(devices) > 1:
            self._core = Replicas(self.entry, devices)
        super().wrap()
