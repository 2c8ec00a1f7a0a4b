"""The same training step by raw torch, accel, Accelerate and Fabric, each in the loop that its own documentation shows."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import accel

from .steps import Makers, Step
from .workloads import Workload, workload_of

#: Packages of the rivals, by the names that the tables give them.
RIVALS = {"Accelerate": "accelerate", "Fabric": "lightning_fabric"}
DDP_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
# The models have no buffers to broadcast, and torch has renamed this switch.
_OTHERWISE = {"broadcast_buffers"}


def installed_rivals() -> list[str]:
    return [name for name, package in RIVALS.items() if importlib.util.find_spec(package) is not None]


def accel_settings() -> dict[str, Any]:
    """accel's defaults, as arguments of torch's own class."""
    values = dataclasses.asdict(accel.DDP())
    return {k: v for k, v in values.items() if k in DDP_PARAMETERS and k not in _OTHERWISE}


def plain_step(workload: Workload, model: Any, optimizer: Any, backward: Callable[[Any], Any] | None = None) -> Step:
    inputs, targets = workload.batch()
    loss_of = workload.loss

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()

    def step_by_library() -> None:
        optimizer.zero_grad()
        backward(loss_of(model(inputs), targets))  # type: ignore[misc]
        optimizer.step()

    return step if backward is None else step_by_library


def raw(workload: Workload) -> Step:
    return plain_step(workload, *workload.build())


def raw_ddp(workload: Workload, **settings: Any) -> Step:
    model, optimizer = workload.build()
    return plain_step(workload, DistributedDataParallel(model, **settings), optimizer)


def by_accel(workload: Workload, backend: Any = "auto") -> Step:
    handles = accel.setup(*workload.build(), backend=backend, devices="cpu")
    return plain_step(workload, handles.model, handles.optimizers)


def by_accelerate(workload: Workload) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*workload.build())
    return plain_step(workload, model, optimizer, accelerator.backward)


def by_fabric(workload: Workload, world: int) -> Step:
    from lightning_fabric import Fabric

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
        fabric.launch()
        model, optimizer = fabric.setup(*workload.build())
    return plain_step(workload, model, optimizer, fabric.backward)


RAW, RAW_AGAIN, RAW_TUNED, ACCEL = "raw torch", "raw torch, again", "raw torch, accel's settings", "accel"


def loops(name: str, world: int) -> Makers:
    """All that take part; the first is raw torch with its defaults, the second the same again, which shows the noise."""
    workload = workload_of(name)
    plain = raw_ddp if world > 1 else raw
    makers: Makers = {RAW: lambda: plain(workload), RAW_AGAIN: lambda: plain(workload)}
    if world > 1:
        makers[RAW_TUNED] = lambda: raw_ddp(workload, **accel_settings())
    makers[ACCEL] = lambda: by_accel(workload)
    makers["Accelerate"] = lambda: by_accelerate(workload)
    makers["Fabric"] = lambda: by_fabric(workload, world)
    return makers


def compiled(name: str) -> Makers:
    """Raw DDP and accel, given to ``torch.compile`` by the same line after they were made."""
    workload = workload_of(name)

    def by_raw(**settings: Any) -> Step:
        model, optimizer = workload.build()
        return plain_step(workload, torch.compile(DistributedDataParallel(model, **settings)), optimizer)

    def by_handle() -> Step:
        model, optimizer, _ = accel.setup(*workload.build(), devices="cpu")
        return plain_step(workload, torch.compile(model), optimizer)

    return {RAW: by_raw, RAW_AGAIN: by_raw, RAW_TUNED: lambda: by_raw(**accel_settings()), ACCEL: by_handle}
