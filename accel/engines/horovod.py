"""``horovod``: gradients averaged by Horovod, for clusters that are set up for it."""

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
from torch.optim import Optimizer

from ..errors import BackendError, LaunchError
from ..gradients.patches import replaced
from ..process import Process
from ..process.control import agree, lost
from ._averaging import AveragingEngine, AveragingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Horovod(AveragingOptions):
    """Options of ``horovod``.

    Args:
        compression: "fp16" sends gradients in half precision, so their mean is not exact.
        broadcast_buffers: all ranks take rank 0's buffers once a step.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """

    compression: Literal["fp16"] | None = None

    choices = {"compression": ("fp16", None)}


def load() -> Any:
    """Return the module ``horovod.torch``, or raise BackendError if it was built without torch."""
    hvd: Any = importlib.import_module("horovod.torch")
    if not hasattr(hvd, "allreduce_"):  # The import only prints a warning.
        raise BackendError(
            "horovod is installed without its part for torch. "
            "Build it again with HOROVOD_WITH_PYTORCH=1 (docs/hosts.md)."
        )
    return hvd


def start(process: Process) -> None:
    """Start Horovod on all ranks, unless the program has started it. Collective."""
    hvd = load()
    if not any(agree("the state of Horovod", bool(hvd.is_initialized()))):
        by_mpi = hvd.mpi_built() and not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}.isdisjoint(os.environ)
        if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ or by_mpi or not hvd.gloo_built():
            hvd.init()
        else:
            _start_as_horovodrun(hvd, process)
    place = (hvd.rank(), hvd.size()) if hvd.is_initialized() else None
    places = agree("the start of Horovod", place)
    if places != [(rank, len(places)) for rank in range(len(places))]:
        raise LaunchError(
            f"Horovod's ranks and sizes are {places} on the {len(places)} ranks of accel. "
            "Use horovodrun or torchrun, and leave hvd.init() to accel."
        )


def _start_as_horovodrun(hvd: Any, process: Process) -> None:
    """Serve Horovod's rendezvous on rank 0, and start Horovod with its variables. Collective."""
    hosts: Any = importlib.import_module("horovod.runner.common.util.hosts")
    http_server: Any = importlib.import_module("horovod.runner.http.http_server")
    rank = process.place.rank
    names = agree("Horovod's hosts", socket.gethostname())
    per_host = [hosts.HostInfo(name, count) for name, count in Counter(names).items()]
    slots = hosts.get_host_assignments(per_host, len(names))
    server, port = None, 0
    if rank == 0:
        server = http_server.RendezvousServer()
        port = server.start()
        server.init(slots)
    try:
        variables = {
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            "GLOO_RENDEZVOUS_ADDR": process.place.master_addr or names[0],
            "GLOO_RENDEZVOUS_PORT": agree("Horovod's server", port)[0],
            **vars(slots[rank]),  # such as local_rank
        }
        if len(per_host) == 1:
            variables["GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1"
        # If the variables stayed, accel would take them for a launcher's.
        with contextlib.ExitStack() as undo:
            for name, value in variables.items():
                undo.enter_context(replaced(os.environ, f"HOROVOD_{name.upper()}", str(value)))
            hvd.init()
    finally:
        agree("the end of Horovod's rendezvous", None)
        if server is not None:
            server.stop()


@final
class HorovodEngine(AveragingEngine):
    """Sums gradients by ``horovod.torch``. Everything else uses accel's process group."""

    name = "horovod"
    options_type = Horovod
    requires = {"horovod": "horovod==0.28.1"}
    options: Horovod

    @classmethod
    def probe(cls) -> str:
        load()
        return ""

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        if self.distributed:
            # Before the weights of rank 0 are sent, so that a failed start changes nothing.
            start(self.process)
        super().start(optimizers)

    def add(self, flat: torch.Tensor) -> None:
        """Sum a tensor by ``allreduce_``. Horovod doesn't know complex numbers and bfloat16."""
        hvd = load()
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        packed = real.float() if real.dtype is torch.bfloat16 else real
        if self.options.compression:
            packed = real.half()
        # Horovod remembers the shape of each name.
        name = f"accel.{self.serial}.{packed.dtype}.{packed.numel()}"
        try:
            hvd.allreduce_(packed, name=name, op=hvd.Sum)
        except RuntimeError as error:
            raise lost("Horovod's allreduce", error) from error
        if packed is not real:
            real.copy_(packed)
