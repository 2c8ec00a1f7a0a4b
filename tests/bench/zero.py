"""Section ``deepspeed``: accel beside ``deepspeed.initialize`` with ``engine.backward`` and ``engine.step``."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.engines.deepspeed import library as quiet
from accel.engines.deepspeed.config import Configuration

from .contenders import plain_step
from .steps import ACCEL, Comparison, Makers, Step, Target, section
from .workloads import MANY, RATE, SMALL_GPT, Workload, with_adamw

#: With ``offload_optimizer``, by DeepSpeed's Adam or by torch's.
CPU_ADAM, ADAMW = "DeepSpeed's Adam", "torch's AdamW"


def _build(workload: Workload, offload: str) -> tuple[Any, Any]:
    model, optimizer = workload.build()
    if offload == CPU_ADAM:
        adam = quiet.library("deepspeed.ops.adam").DeepSpeedCPUAdam
        optimizer = adam(model.parameters(), lr=RATE, weight_decay=0.01)
    return model, optimizer


def _raw_deepspeed(workload: Workload, stage: int, offload: str) -> Step:
    model, optimizer = _build(workload, offload)
    numel = sum(p.numel() for p in model.parameters())
    config = Configuration(DeepSpeed(stage=stage)).complete(torch.float32, numel)
    # accel sets this for a raw loop. DeepSpeed's own loop does without.
    del config["managed_gradient_accumulation"]
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed: Any = quiet._import()
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    if stage == 3:
        # DeepSpeed's default for the whole process, which accel's engine replaces by its own.
        torch.nn.functional.linear = quiet.library("deepspeed.runtime.zero.linear").zero3_linear_wrap
    inputs, targets = workload.batch()
    loss_of = workload.loss

    def step() -> None:
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()

    return step


def _by_accel(workload: Workload, stage: int, offload: str) -> Step:
    backend = accel.DeepSpeed(stage=stage, offload_optimizer=bool(offload))
    handles = accel.setup(*_build(workload, offload), backend=backend, devices="cpu")
    return plain_step(workload, handles.model, handles.optimizers)


def _makers(*args: Any) -> Makers:
    return {"raw DeepSpeed": partial(_raw_deepspeed, *args), ACCEL: partial(_by_accel, *args)}


def _comparisons() -> dict[str, Comparison]:
    found = {}
    cases = [(stage, "", 1.02) for stage in (1, 2, 3)]
    cases += [(stage, offload, 1.05) for stage in (2, 3) for offload in (CPU_ADAM, ADAMW)]
    for stage, offload, limit in cases:
        for workload in (with_adamw(MANY), SMALL_GPT):
            key = f"{workload.name}, ZeRO {stage}" + (f", offload, {offload}" if offload else "")
            targets = (Target(f"step against raw DeepSpeed, {key}", limit),)
            found[key] = Comparison(key, 2, _makers, (workload, stage, offload), targets)
    return found


SECTION = section("deepspeed", "DeepSpeed ZeRO, 2 ranks over gloo", _comparisons(), (5.0, 60.0))
