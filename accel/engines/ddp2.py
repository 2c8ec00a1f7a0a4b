"""``ddp2``: ``torch.nn.DataParallel`` inside a host, ``DistributedDataParallel`` across hosts; one process for each host."""

from dataclasses import dataclass
from typing import Any, final

from torch import nn

from ..errors import BackendError
from ..process import Process
from .ddp import DDP, DDPEngine
from .dp import Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP2(DDP):
    """Options of ``ddp2``: those of ``accel.DDP``, but ``sync_batchnorm``, which works with one device a process only.

    Start one process on each host. It splits its batch over all devices of the host and gathers the outputs, so that
    the loss sees the whole batch of the host; gradients are averaged over the hosts. With fewer than two devices in
    each process it is ``ddp``.
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
            raise BackendError(
                f"backend {cls.name!r} has no sequence_parallel: its replicas divide a batch; use backend='ddp'"
            )
        if options.sync_batchnorm and len(process.devices) > 1:
            raise BackendError(
                "DDP2(sync_batchnorm=True): torch's SyncBatchNorm does not run in the replicas of a DataParallel; leave it "
                "out, or start one process for each device with backend=accel.DDP(sync_batchnorm=True)"
            )

    def wrap(self) -> None:
        """Put the replicas between the reducer and the module."""
        devices = self.process.devices
        if len(devices) > 1:
            self._core = Replicas(self.entry, devices)
        super().wrap()
