"""The same training step by raw torch, accel, Accelerate and Fabric, each in the loop that its own documentation shows."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import accel

from .timing import Contender, build
from .workloads import Workload

Step = Callable[[], None]
RIVALS = {"accelerate": "Accelerate", "lightning_fabric": "Fabric"}
DDP_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
# The models have no buffers to broadcast, and torch has renamed this switch.
_OTHERWISE = {"broadcast_buffers"}


def missing_rivals() -> list[str]:
    return [title for package, title in RIVALS.items() if importlib.util.find_spec(package) is None]


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


def by_accel(workload: Workload, **options: Any) -> Step:
    model, optimizer = workload.build()
    backend = accel.DDP(**options) if options else "auto"
    handles = accel.setup(model, optimizer, backend=backend, devices="cpu")
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


def contenders(workload: Workload, world: int) -> list[Contender]:
    """All that take part; the first is raw torch with its defaults, the second the same again, which shows the noise."""
    plain = raw_ddp if world > 1 else raw
    makers: dict[str, Callable[[], Step]] = {RAW: lambda: plain(workload), RAW_AGAIN: lambda: plain(workload)}
    if world > 1:
        makers[RAW_TUNED] = lambda: raw_ddp(workload, **accel_settings())
    makers[ACCEL] = lambda: by_accel(workload)
    makers["Accelerate"] = lambda: by_accelerate(workload)
    makers["Fabric"] = lambda: by_fabric(workload, world)
    return [build(name, make) for name, make in makers.items() if name not in missing_rivals()]


def settings() -> dict[str, dict[str, Any]]:
    """The DDP settings of the table, by their text; the first are torch's defaults."""
    grid = [
        {"gradient_as_bucket_view": view, "bucket_cap_mb": cap}
        for view in (False, True)
        for cap in (None, 1, 5, 25, 100)
    ]
    grid += [{"gradient_as_bucket_view": view, "bucket_cap_mb": 25, "static_graph": True} for view in (False, True)]
    if "batched_grad_copy" in DDP_PARAMETERS:
        grid += [
            {"gradient_as_bucket_view": view, "bucket_cap_mb": cap, "batched_grad_copy": True}
            for view in (False, True)
            for cap in (None, 5, 25)
        ]
    return {", ".join(f"{k}={v}" for k, v in one.items()): one for one in grid}
