"""Section ``fsdp``: accel beside torch's own ``fully_shard``, with the same modules gathered as one."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accel
from accel.engines.fsdp.plan import blocks

from .contenders import plain_step
from .steps import ACCEL, Comparison, Makers, Step, Target, section
from .workloads import MANY, SMALL_GPT, Workload, with_adamw

RAW = "raw `fully_shard`"
WHOLE, STEP, CLIP = "whole step", "`optimizer.step()`", "clipping"


def _raw_fsdp(workload: Workload) -> tuple[Any, Any]:
    model, _ = workload.build()
    mesh = init_device_mesh("cpu", (2,))
    for _, block in blocks(model, None):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, workload.optimizer(model)


def _by_accel(workload: Workload) -> tuple[Any, Any]:
    handles = accel.setup(*workload.build(), backend=accel.FSDP(), devices="cpu")
    return handles.model, handles.optimizers


def _timed(workload: Workload, part: str, name: str) -> Step:
    model, optimizer = _raw_fsdp(workload) if name == RAW else _by_accel(workload)
    step = plain_step(workload, model, optimizer)
    if part == WHOLE:
        return step
    step()
    if part == STEP:
        return optimizer.step
    if name == ACCEL:
        return partial(accel.clip_grad_norm_, model, 1e9)
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()


def _makers(workload: Workload, part: str) -> Makers:
    return {name: partial(_timed, workload, part, name) for name in (RAW, ACCEL)}


def _row(workload: Workload, part: str, limit: float, share: float = 1.0, **options: bool) -> Comparison:
    """A comparison by one part of a training step, with options of AdamW."""
    name = ", ".join([part, *options])
    workload = with_adamw(workload, **options)
    targets = (Target(f"{name} against raw FSDP2, {workload.name}", limit),)
    return Comparison(f"{workload.name}, {name}", 2, _makers, (workload, part), targets, share=share)


ROWS = {
    "many": _row(MANY, WHOLE, 1.0, 0.4),
    "gpt": _row(SMALL_GPT, WHOLE, 0.98),
    "step": _row(MANY, STEP, 0.35, 0.4, foreach=False),
    "fused": _row(MANY, STEP, 0.5, fused=True),
    "clip": _row(MANY, CLIP, 0.4, 0.4),
}
SECTION = section("fsdp", "FSDP2, 2 ranks over gloo", ROWS, (6.0, 60.0))
