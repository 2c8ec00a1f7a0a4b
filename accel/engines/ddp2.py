"""``ddp2``: ``DataParallel`` inside a node and ``DistributedDataParallel`` across nodes."""

from dataclasses import dataclass
from typing import Any, final

from torch import nn

from ..errors import BackendError
from ..process import Process
from .ddp import DDP, DDPEngine
from .dp import Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP2(DDP):
    """Options of ``ddp2``: those of ``accel.DDP``. ``sync_batchnorm`` needs one device per process.

    Start one process on each node. It splits its batch over all devices of the node and gathers the outputs, so that
    the loss sees the node's whole batch. Gradients are averaged over the nodes. With fewer than two devices in each
    process it is ``ddp``.
    """


@final
class DDP2Engine(DDPEngine):
    """The reducer around a DataParallel."""

    name = "ddp2"
    options_type = DDP2

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        super().check(module, options, process)
        if options.sequence_parallel > 1:
            raise BackendError(f"backend {cls.name!r} has no sequence_parallel. Use backend='ddp'.")
        if options.sync_batchnorm and len(process.devices) > 1:
            raise BackendError(
                "DDP2(sync_batchnorm=True) can't run in the replicas of a DataParallel. Start one process for each "
                "device with backend=accel.DDP(sync_batchnorm=True)."
            )

    def wrap(self) -> None:
        """Put the replicas between the reducer and the module."""
        devices = self.process.devices
        if len(devices) > 1:
            self._core = Replicas(self.entry, devices)
        super().wrap()
