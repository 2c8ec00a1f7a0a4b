"""``horovod``: gradients averaged by Horovod, for clusters that are set up for it."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import BackendError, LaunchError, OptimizerError
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
        _initialize(hvd, process)
    place = (hvd.rank(), hvd.size()) if hvd.is_initialized() else None
    places = agree("the start of Horovod", place)
    if places != [(rank, len(places)) for rank in range(len(places))]:
        raise LaunchError(
            f"Horovod's ranks and sizes are {places} on the {len(places)} ranks of accel. "
            "Use horovodrun or torchrun, and leave hvd.init() to accel."
        )


def _initialize(hvd: Any, process: Process) -> None:
    by_mpi = hvd.mpi_built() and not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}.isdisjoint(os.environ)
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ or by_mpi or not hvd.gloo_built():
        hvd.init()
        return
    # Under torchrun Horovod would start alone. accel would take variables that stay for a
    # launcher's.
    with _rendezvous(process) as variables, contextlib.ExitStack() as undo:
        for name, value in variables.items():
            undo.enter_context(replaced(os.environ, name, value))
        hvd.init()


@contextlib.contextmanager
def _rendezvous(process: Process) -> Iterator[dict[str, str]]:
    """Serve on rank 0 as ``horovodrun`` would, and yield this rank's variables. Collective."""
    hosts: Any = importlib.import_module("horovod.runner.common.util.hosts")
    http_server: Any = importlib.import_module("horovod.runner.http.http_server")

    rank = process.place.rank
    names = agree("Horovod's hosts", socket.gethostname())
    slots = [hosts.SlotInfo(name, r, *_position(names, r)) for r, name in enumerate(names)]
    server, port = None, 0
    if rank == 0:
        server = http_server.RendezvousServer()
        port = server.start()
        server.init(slots)
    try:
        port = agree("Horovod's server", port)[0]
        address = "127.0.0.1" if len(set(names)) == 1 else process.place.master_addr or names[0]
        yield {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            # Such as HOROVOD_LOCAL_RANK.
            **{f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slots[rank]).items()},
        }
    finally:
        agree("the end of Horovod's rendezvous", None)
        if server is not None:
            server.stop()


def _position(hosts: list[str], rank: int) -> tuple[int, int, int, int, int]:
    """Return local rank, cross rank, size, local size and cross size, for ``SlotInfo``."""
    local_rank = hosts[:rank].count(hosts[rank])
    column = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]
    return local_rank, column.index(hosts[rank]), len(hosts), hosts.count(hosts[rank]), len(column)


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

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        if process.place.world_size > 1:
            load()

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        if self.distributed:
            # Before the weights of rank 0 are sent, so that a failed start changes nothing.
            start(self.process)
        super().start(optimizers)

    def attach(self, optimizer: Optimizer) -> None:
        if type(optimizer).__module__.startswith("horovod."):
            raise OptimizerError(
                f"{type(optimizer).__name__} is a horovod.torch.DistributedOptimizer. "
                "Give accel.setup the plain optimizer."
            )
        super().attach(optimizer)

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
