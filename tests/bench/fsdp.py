"""Section ``fsdp``: accel beside torch's own ``fully_shard``, with the same modules gathered as one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

import accel
from accel.engines.fsdp.plan import blocks

from .contenders import plain_step
from .section import Data, Panel, Section, Verdict
from .steps import Comparison, Makers, Step, compare, ratio_panel, ratio_verdicts, tell
from .workloads import Workload, with_adamw

RAW, AGAIN, ACCEL = "raw `fully_shard`", "raw `fully_shard`, again", 'accel, `backend="fsdp"`'
PLAIN = "the same tensors without DTensor"
WORLD = 2
#: What is timed: a title, a workload, arguments of AdamW, what of a training step, and the most of raw FSDP2 that accel may take.
ROWS: dict[str, tuple[str, str, dict[str, bool], str, float]] = {
    "many": ("whole step", "many", {}, "all", 1.0),
    "gpt": ("whole step", "gpt", {}, "all", 0.98),
    "step": ("`optimizer.step()`, for-loop", "many", {"foreach": False}, "step", 0.35),
    "fused": ("`optimizer.step()`, fused", "many", {"fused": True}, "step", 0.5),
    "clip": ("clipping", "many", {}, "clip", 0.4),
}
ABOUT = """`fully_shard` on the modules that accel's rule chooses (the blocks of the GPT, and the whole), AdamW on the \
sharded parameters, 2 ranks over gloo, fp32; times in microseconds per step. Clipping is `accel.clip_grad_norm_` beside \
torch's own, whose norm is then read as a whole. The last line of a table is this rank's part of everything in plain \
tensors: AdamW, or torch's clipping by a norm that is this rank's alone."""


def raw_fsdp(workload: Workload) -> tuple[nn.Module, Optimizer]:
    model, _ = workload.build()
    mesh = init_device_mesh("cpu", (WORLD,))
    for _, block in blocks(model, None):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, workload.optimizer(model)


def by_accel(workload: Workload) -> tuple[Any, Any]:
    handles = accel.setup(*workload.build(), backend=accel.FSDP(), devices="cpu")
    return handles.model, handles.optimizers


def _raw_clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()  # type: ignore[operator]


def _plain_clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def _accel_clip(model: Any) -> None:
    accel.clip_grad_norm_(model, 1e9)


def plain(workload: Workload) -> tuple[nn.Module, Optimizer]:
    """This rank's part of each parameter and gradient of a sharded model, in a module that computes nothing."""
    sharded, optimizer = raw_fsdp(workload)
    plain_step(workload, sharded, optimizer)()
    model = nn.Module()
    model.parts = nn.ParameterList(p.to_local().detach().clone() for p in sharded.parameters())  # type: ignore[operator]
    for part, p in zip(model.parts, sharded.parameters(), strict=True):
        part.grad = p.grad.to_local().clone()  # type: ignore[union-attr, operator]
    return model, workload.optimizer(model)


def _timed(workload: Workload, what: str, build: Callable[..., Any], clip: Callable[[Any], None]) -> Step:
    model, optimizer = build(workload)
    if what == "all":
        return plain_step(workload, model, optimizer)
    if build is not plain:
        plain_step(workload, model, optimizer)()
    step: Step = optimizer.step if what == "step" else functools.partial(clip, model)
    return step


def _makers(key: str) -> Makers:
    _, name, kwargs, what, _ = ROWS[key]
    # So small that thousands of steps on one batch change nothing about the cost of a step.
    adamw = lambda model: AdamW(model.parameters(), lr=1e-9, **kwargs)  # noqa: E731
    workload = dataclasses.replace(with_adamw(name), optimizer=adamw)
    makers: Makers = {
        RAW: lambda: _timed(workload, what, raw_fsdp, _raw_clip),
        AGAIN: lambda: _timed(workload, what, raw_fsdp, _raw_clip),
        ACCEL: lambda: _timed(workload, what, by_accel, _accel_clip),
    }
    if what != "all":
        makers[PLAIN] = lambda: _timed(workload, what, plain, _plain_clip)
    return makers


def _title(key: str) -> str:
    what, name, *_ = ROWS[key]
    return f"{with_adamw(name).title}: {what}"


def _measure(quick: bool) -> Data:
    return compare({k: Comparison(_title(k), WORLD, _makers, (k,)) for k in ROWS}, 6.0 if quick else 60.0)


def _judge(data: Data) -> Iterator[Verdict]:
    for key, (what, name, _, _, limit) in ROWS.items():
        yield from ratio_verdicts(data, key, f"{what} against raw FSDP2, {name}", ACCEL, RAW, AGAIN, limit)


def _draw(data: Data) -> list[Panel]:
    return [ratio_panel(data, "FSDP2, 2 ranks", [RAW, AGAIN, ACCEL, PLAIN], 1.0)]


SECTION = Section("fsdp", "FSDP2, 2 ranks over gloo", _measure, lambda data: [ABOUT, *tell(data)], _judge, _draw)
