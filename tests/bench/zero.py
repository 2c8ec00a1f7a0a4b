"""Section ``deepspeed``: accel beside ``deepspeed.initialize`` with ``engine.backward`` and ``engine.step``."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.engines.deepspeed import library as quiet
from accel.engines.deepspeed.config import Configuration

from .contenders import plain_step
from .section import Data, Panel, Section, Verdict
from .steps import Comparison, Makers, Step, compare, ratio_panel, ratio_verdicts, tell
from .workloads import Workload, with_adamw

RAW, AGAIN, ACCEL = "raw DeepSpeed", "raw DeepSpeed, again", "accel"
NAMES, STAGES = ("many", "gpt"), (1, 2, 3)
#: With ``offload_optimizer``, by whose Adam.
OFFLOADS = ("DeepSpeed's Adam", "torch's AdamW")
ABOUT = """`deepspeed.initialize` with the user's AdamW, then `engine(inputs)`, `engine.backward(loss)` and `engine.step()`; \
accel with the raw loop, and none of its changes of torch and the library while raw DeepSpeed runs. Both have the buckets that \
accel sets (DeepSpeed's default, 5e8 elements, is slower on CPU) and no clipping. With offload, raw DeepSpeed is given its \
DeepSpeedCPUAdam, or the user's AdamW with `zero_force_ds_cpu_optimizer: False`, and so is accel. \
2 ranks over gloo, fp32; times in microseconds per step."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Inside, torch and the library are as they would be without accel, whose engine lives in the same process."""
    functions = vars(torch.nn.functional)
    linear, data = functions["linear"], vars(torch.Tensor).get("data")
    functions["linear"] = quiet.library("deepspeed.runtime.zero.linear").zero3_linear_wrap
    if data is not None:
        del torch.Tensor.data
    try:
        yield
    finally:
        functions["linear"] = linear
        if data is not None:
            torch.Tensor.data = data  # type: ignore[method-assign]


def _cpu_adam(model: Any) -> Any:
    return quiet.library("deepspeed.ops.adam").DeepSpeedCPUAdam(model.parameters(), lr=1e-9, weight_decay=0.01)


def raw_deepspeed(workload: Workload, stage: int, offload: str = "") -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    model, optimizer = workload.build()
    numel = sum(p.numel() for p in model.parameters())
    config = Configuration(DeepSpeed(stage=stage)).complete(torch.float32, numel)
    # What makes the library fit a raw loop; its own loop does without.
    del config["managed_gradient_accumulation"]
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed: Any = quiet._import()
        if offload == OFFLOADS[0]:
            optimizer = _cpu_adam(model)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    inputs, targets = workload.batch()
    loss_of = workload.loss

    def step() -> None:
        with _alone() if stage == 3 else contextlib.nullcontext():
            engine.backward(loss_of(engine(inputs), targets))
            engine.step()

    return step


def accels_deepspeed(workload: Workload, stage: int, offload: str = "") -> Step:
    model, optimizer = workload.build()
    if offload == OFFLOADS[0]:
        optimizer = _cpu_adam(model)
    backend = accel.DeepSpeed(stage=stage, offload_optimizer=bool(offload))
    handles = accel.setup(model, optimizer, backend=backend, devices="cpu")
    return plain_step(workload, handles.model, handles.optimizers)


def _makers(name: str, stage: int, offload: str = "") -> Makers:
    workload = with_adamw(name)
    return {
        RAW: lambda: raw_deepspeed(workload, stage, offload),
        AGAIN: lambda: raw_deepspeed(workload, stage, offload),
        ACCEL: lambda: accels_deepspeed(workload, stage, offload),
    }


def _key(name: str, stage: int, offload: str = "") -> str:
    return f"{name}, ZeRO {stage}" + (f", offload, {offload}" if offload else "")


#: Each table: the workload, the stage, whose Adam steps what is offloaded, the limit.
TABLES = (
    *((n, stage, "", 1.02) for stage in STAGES for n in NAMES),
    *((n, stage, offload, 1.05) for stage in (2, 3) for n in NAMES for offload in OFFLOADS),
)


def _measure(quick: bool) -> Data:
    comparisons = {
        _key(*table): Comparison(f"{_key(*table)}: {with_adamw(table[0]).title}", 2, _makers, tuple(table))
        for *table, _ in TABLES
    }
    return compare(comparisons, 5.0 if quick else 60.0)


def _judge(data: Data) -> Iterator[Verdict]:
    for *table, limit in TABLES:
        key = _key(*table)
        yield from ratio_verdicts(data, key, f"step against raw DeepSpeed, {key}", ACCEL, RAW, AGAIN, limit)


def _draw(data: Data) -> list[Panel]:
    return [ratio_panel(data, "DeepSpeed, 2 ranks", [RAW, AGAIN, ACCEL], 1.02)]


SECTION = Section(
    "deepspeed", "DeepSpeed ZeRO, 2 ranks over gloo", _measure, lambda d: [ABOUT, *tell(d)], _judge, _draw
)
