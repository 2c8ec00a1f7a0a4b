"""What is measured: steps of whole loops, DDP's settings, and the costs of single verbs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.gradients import GradientLog
from accel.trainable import TrainableMask

from . import contenders
from .ranks import run
from .timing import Contender, Row, Times, build, interleave, over_ranks, summarise
from .workloads import MANY, WORKLOADS

NUM_BATCHES = 500
NUM_IMPORTS = 9


def _together() -> dict[str, Any]:
    """What keeps the ranks in step: a barrier before each block, and rank 0's number of rounds."""
    if not dist.is_initialized():
        return {}

    def agree(rounds: int) -> int:
        number = torch.tensor(rounds)
        dist.broadcast(number, 0)
        return int(number)

    return {"meet": dist.barrier, "agree": agree}


# -- in the worker processes ------------------------------------------------------------------------------------------


def _steps(world: int, seconds: float) -> dict[str, dict[str, Times]]:
    times = {}
    for workload in WORKLOADS:
        rivals = contenders.contenders(workload, world)
        times[workload.name] = interleave(rivals, seconds, workload.steps, **_together())
        # The next engine registers its hooks anew, where they are seen.
        accel.teardown()
    return times


def _settings(seconds: float) -> dict[str, Times]:
    def maker(settings: dict[str, Any]) -> Callable[[], contenders.Step]:
        return lambda: contenders.raw_ddp(MANY, **settings)

    grid = [build(name, maker(settings)) for name, settings in contenders.settings().items()]
    return interleave(grid, seconds, 1, **_together())


def _setup_again(seconds: float) -> dict[str, Times]:
    model, optimizer = MANY.build()
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)))
    handles = accel.setup(model, optimizer, loader, devices="cpu")
    raws = Contender("raw objects", lambda: accel.setup(model, optimizer, loader))
    again = Contender("handles", lambda: accel.setup(*handles))
    return interleave([raws, again], seconds, 200)


def _mask(seconds: float) -> dict[str, Times]:
    mask = TrainableMask(list(MANY.build()[0].parameters()))
    return interleave([Contender("check", mask.changed)], seconds, 200)


def _log(seconds: float) -> dict[str, Times]:
    """Backward into 500 scalars, which is little else than the accumulation that the log notes."""

    def backward(logged: bool) -> Callable[[], None]:
        parameters = [nn.Parameter(torch.zeros(())) for _ in range(500)]
        log = GradientLog(parameters if logged else ())

        def once() -> None:
            torch.stack(parameters).sum().backward()
            log.fold(pending=False)

        return once

    plain, logged = Contender("without", backward(False)), Contender("with", backward(True))
    return interleave([plain, logged], seconds, 4, units=500)


def _loaders(seconds: float) -> dict[str, Times]:
    """Epochs of batches that cost almost nothing; the start of an epoch is part of it."""

    def loader() -> Any:
        return DataLoader(range(NUM_BATCHES * 4), 4, shuffle=True, collate_fn=len)

    def epoch(batches: Any) -> Callable[[], None]:
        def once() -> None:
            for _ in batches:
                pass

        return once

    def by_accel() -> Any:
        return accel.setup(*MANY.build(), loader(), devices="cpu").dataloaders

    def by_accelerate() -> Any:
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(loader())

    def by_fabric() -> Any:
        from lightning_fabric import Fabric

        return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader())

    makers = {"raw torch": loader, "accel": by_accel, "Accelerate": by_accelerate, "Fabric": by_fabric}
    missing = contenders.missing_rivals()
    built = [Contender(name, epoch(make())) for name, make in makers.items() if name not in missing]
    return interleave(built, seconds, 1, units=NUM_BATCHES)


def _costs(seconds: float) -> dict[str, dict[str, Times]]:
    parts = {"setup": _setup_again, "mask": _mask, "log": _log, "loader": _loaders}
    return {name: fn(seconds) for name, fn in parts.items()}


# -- from the outside -------------------------------------------------------------------------------------------------


def steps(world: int, seconds: float) -> dict[str, list[Row]]:
    ranks = run(world, _steps, world, seconds)
    return {w.name: summarise(over_ranks([rank[w.name] for rank in ranks])) for w in WORKLOADS}


def settings(seconds: float) -> list[Row]:
    return summarise(over_ranks(run(2, _settings, seconds)))


def costs(seconds: float) -> dict[str, list[Row]]:
    return {name: summarise(times) for name, times in run(1, _costs, seconds)[0].items()}


def imports(rivals: bool) -> list[Row]:
    """Each library's import in fresh processes that have imported torch before, the libraries taking turns."""
    packages = ["accel", *(contenders.RIVALS if rivals else ())]
    packages = [name for name in packages if importlib.util.find_spec(name) is not None]
    times = {name: Times() for name in ("torch", *packages)}
    code = (
        "import time\nfor name in {names}:\n    w, c = time.perf_counter(), time.process_time()\n    __import__(name)\n"
        "    print(name, time.perf_counter() - w, time.process_time() - c)"
    )
    # Bytecode is kept, as Python does unless told otherwise; the first round makes what is missing and does not count.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(NUM_IMPORTS + 1):
        for package in packages:
            command = [sys.executable, "-c", code.format(names=["torch", package])]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            if number == 0:
                continue
            for line in output.splitlines():
                name, wall, cpu = line.split()
                if name == package or package == "accel":
                    times[name].wall.append(float(wall))
                    times[name].cpu.append(float(cpu))
                    times[name].thread.append(float(cpu))
    return summarise(times)
