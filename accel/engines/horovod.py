"""``horovod``: gradients averaged by Horovod, for clusters that use it."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import LaunchError
from ..gradients.patches import replaced
from ..process import Process
from ..process.control import agree, lost
from ._averaging import AveragingEngine, AveragingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Horovod(AveragingOptions):
    """Options of ``horovod``.

    Args:
        compression: "fp16" sends gradients in half precision, which rounds them.
        broadcast_buffers: broadcast rank 0's buffers once per step.
        auto_refresh: check for changes to ``requires_grad`` before each
            forward.
    """

    compression: Literal["fp16"] | None = None

    choices = {"compression": ("fp16", None)}


def start(process: Process) -> None:
    """Start Horovod, unless the program already has. Collective."""
    hvd: Any = importlib.import_module("horovod.torch")
    with contextlib.ExitStack() as undo:
        if not any(agree("the state of Horovod", bool(hvd.is_initialized()))):
            if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ and hvd.gloo_built():
                _serve(process, undo)
            hvd.init()
        place = (hvd.rank(), hvd.size()) if hvd.is_initialized() else None
        places = agree("the start of Horovod", place)
    if places != [(rank, len(places)) for rank in range(len(places))]:
        raise LaunchError(
            f"Horovod's ranks and sizes are {places} on {len(places)} ranks. "
            "Use horovodrun or torchrun, and leave hvd.init() to accel."
        )


def _serve(process: Process, undo: contextlib.ExitStack) -> None:
    """Start a rendezvous server and set its variables. Collective."""
    hosts: Any = importlib.import_module("horovod.runner.common.util.hosts")
    http_server: Any = importlib.import_module("horovod.runner.http.http_server")
    names = agree("Horovod's hosts", socket.gethostname())
    per_host = [hosts.HostInfo(name, count) for name, count in Counter(names).items()]
    slots = hosts.get_host_assignments(per_host, len(names))
    server = http_server.RendezvousServer()
    port = server.start()
    undo.callback(server.stop)
    server.init(slots)
    address = "127.0.0.1" if len(per_host) == 1 else process.place.master_addr or names[0]
    # horovodrun sets these for each rank, for example HOROVOD_LOCAL_RANK.
    variables = vars(slots[process.place.rank]) | {
        "controller": "gloo",
        "cpu_operations": "gloo",
        "gloo_rendezvous_addr": address,
        "gloo_rendezvous_port": agree("Horovod's server", port)[0],
    }
    # Temporary, because otherwise accel would conclude that horovodrun started the program.
    for name, value in variables.items():
        undo.enter_context(replaced(os.environ, f"HOROVOD_{name.upper()}", str(value)))


@final
class HorovodEngine(AveragingEngine):
    """Sums gradients with Horovod. The rest uses accel's process group."""

    name = "horovod"
    options_type = Horovod
    requires = {"horovod": "horovod==0.28.1"}
    options: Horovod

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        if self.distributed:
            # Before rank 0's weights are broadcast, so that a failed start changes nothing.
            start(self.process)
        super().start(optimizers)

    def add(self, flat: Tensor) -> None:
        """Sum a tensor with Horovod, which doesn't support bfloat16."""
        hvd: Any = importlib.import_module("horovod.torch")
        packed = flat.float() if flat.dtype is torch.bfloat16 else flat
        if self.options.compression:
            packed = flat.half()
        # Horovod caches a shape for each name, so different sizes need different names.
        name = f"accel.{self.serial}.{packed.dtype}.{packed.numel()}"
        try:
            hvd.allreduce_(packed, name=name, op=hvd.Sum)
        except RuntimeError as error:
            raise lost("Horovod's allreduce", error) from error
        if packed is not flat:
            flat.copy_(packed)
