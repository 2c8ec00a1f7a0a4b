"""``horovod``: gradients averaged by Horovod, for clusters that are set up for it."""

from __future__ import annotations

import contextlib
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

# -- How Horovod starts: by its own launcher, by MPI, or by accel where another launcher started the processes ---------


def load() -> Any:
    """The module ``horovod.torch``; BackendError where it was built without torch, or for another one."""
    import horovod.torch as hvd  # type: ignore[import-not-found, import-untyped, unused-ignore]

    # Without its library the import only prints a warning.
    if not hasattr(hvd, "allreduce_"):
        raise BackendError(
            "horovod is installed, but its part for torch does not load: build it again with HOROVOD_WITH_PYTORCH=1 in "
            "this environment (docs/hosts.md)"
        )
    return hvd


def start(process: Process) -> None:
    """Start Horovod on all ranks, or raise LaunchError on all; unless the program has. It ends with the process. Collective."""
    hvd = load()
    running = agree("whether Horovod runs", bool(hvd.is_initialized()))
    if any(running) and not all(running):
        ranks = [rank for rank, runs in enumerate(running) if not runs]
        raise LaunchError(f"hvd.init() was called, but not on ranks {ranks}: call it on all ranks or on none")
    problem = ""
    try:
        if not all(running):
            _initialise(hvd, process)
        theirs, ours = (hvd.rank(), hvd.size()), (process.place.rank, process.place.world_size)
        if theirs != ours:
            problem = f"Horovod says rank {theirs[0]} of {theirs[1]}, accel rank {ours[0]} of {ours[1]}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    for rank, text in enumerate(agree("the start of Horovod", problem)):
        if text:
            raise LaunchError(
                f"Horovod did not start on rank {rank}: {text}; start the processes by horovodrun or torchrun, and leave "
                "hvd.init() to accel"
            )


def _initialise(hvd: Any, process: Process) -> None:
    by_mpi = hvd.mpi_built() and any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ or by_mpi or not hvd.gloo_built():
        hvd.init()
        return
    # A Horovod without MPI takes itself for alone under every other launcher.
    with _meeting(process) as variables, contextlib.ExitStack() as undo:
        for name, value in variables.items():  # no longer than it reads them: they would tell accel of another launcher
            undo.enter_context(replaced(os.environ, name, value))
        hvd.init()


@contextlib.contextmanager
def _meeting(process: Process) -> Iterator[dict[str, str]]:
    """What ``horovodrun`` would provide: a server on rank 0 where the ranks meet, and this rank's variables."""
    from horovod.runner.common.util.hosts import SlotInfo  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from horovod.runner.http.http_server import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        RendezvousServer,
    )

    rank = process.place.rank
    hosts = agree("Horovod's hosts", socket.gethostname())
    slots = [SlotInfo(host, r, *_position(hosts, r)) for r, host in enumerate(hosts)]
    server, port = None, 0
    if rank == 0:
        server = RendezvousServer()
        port = server.start()
        server.init(slots)
    try:
        port = agree("Horovod's server", port)[0]
        one_host = len(set(hosts)) == 1
        fields = ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        yield {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1" if one_host else process.place.master_addr or hosts[0],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            **{f"HOROVOD_{field.upper()}": str(getattr(slots[rank], field)) for field in fields},
        }
    finally:
        agree("Horovod's meeting", None)
        if server is not None:
            server.stop()


def _position(hosts: list[str], rank: int) -> tuple[int, int, int, int, int]:
    """Local rank, cross rank, size, local size and cross size of a rank, in the order of Horovod's ``SlotInfo``."""
    local_rank = hosts[:rank].count(hosts[rank])
    column = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]
    return local_rank, column.index(hosts[rank]), len(hosts), hosts.count(hosts[rank]), len(column)


_KNOWN = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Horovod(AveragingOptions):
    """Options of ``horovod``.

    Args:
        compression: "fp16" sends gradients in half precision, so that their mean is not exact.
        broadcast_buffers: all ranks take rank 0's buffers once a step.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """

    compression: Literal["fp16"] | None = None

    choices = {"compression": ("fp16", None)}


@final
class HorovodEngine(AveragingEngine):
    """Sums the flat pieces by ``horovod.torch``; everything else goes over accel's own process group."""

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
            start(self.process)
        super().start(optimizers)

    def attach(self, optimizer: Optimizer) -> None:
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
