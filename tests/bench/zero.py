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

from .contenders import by_accel
from .section import Data, Panel, Section, Verdict
from .steps import Comparison, Makers, Step, compare, ratio_panel, ratio_verdicts, tell
from .workloads import Workload, with_adamw

RAW, AGAIN, ACCEL = "raw DeepSpeed", "raw DeepSpeed, again", "accel"
NAMES, STAGES = ("many", "gpt"), (1, 2, 3)
ABOUT = """`deepspeed.initialize` with the user's AdamW, then `engine(inputs)`, `engine.backward(loss)` and `engine.step()`; \
accel with the raw loop, and none of accel's \
changes of torch and the library while raw DeepSpeed runs. Both have the buckets that accel sets (DeepSpeed's default, 5e8 elements, is slower on CPU) and \
no clipping. 2 ranks over gloo, fp32; times in microseconds per step."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Inside, torch and the library are as they would be without accel, whose engine lives in the same process."""
    functions, ranges = vars(torch.nn.functional), vars(quiet.library("deepspeed.utils.nvtx"))
    changed = functions["linear"], ranges["enable_nvtx"], vars(torch.Tensor).get("data")
    functions["linear"], ranges["enable_nvtx"] = quiet.library("deepspeed.runtime.zero.linear").zero3_linear_wrap, True
    if changed[2] is not None:
        del torch.Tensor.data
    try:
        yield
    finally:
        functions["linear"], ranges["enable_nvtx"] = changed[:2]
        if changed[2] is not None:
            torch.Tensor.data = changed[2]  # type: ignore[method-assign]


def raw_deepspeed(workload: Workload, stage: int) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    model, optimizer = workload.build()
    numel = sum(p.numel() for p in model.parameters())
    config = Configuration(DeepSpeed(stage=stage)).complete(torch.float32, numel, "gloo")
    # What makes the library fit a raw loop; its own loop does without.
    del config["managed_gradient_accumulation"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed: Any = quiet._import(torch.device("cpu"))
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    inputs, targets = workload.batch()
    loss_of = workload.loss

    def step() -> None:
        with _alone() if stage == 3 else contextlib.nullcontext():
            engine.backward(loss_of(engine(inputs), targets))
            engine.step()

    return step


def _makers(name: str, stage: int) -> Makers:
    workload = with_adamw(name)
    return {
        RAW: lambda: raw_deepspeed(workload, stage),
        AGAIN: lambda: raw_deepspeed(workload, stage),
        ACCEL: lambda: by_accel(workload, accel.DeepSpeed(stage=stage)),
    }


def _key(name: str, stage: int) -> str:
    return f"{name}, ZeRO {stage}"


def _measure(quick: bool) -> Data:
    comparisons = {
        _key(n, stage): Comparison(f"{n}, ZeRO {stage}: {with_adamw(n).title}", 2, _makers, (n, stage))
        for stage in STAGES
        for n in NAMES
    }
    return compare(comparisons, 5.0 if quick else 60.0)


def _judge(data: Data) -> Iterator[Verdict]:
    for stage in STAGES:
        for name in NAMES:
            key = _key(name, stage)
            yield from ratio_verdicts(data, key, f"step against raw DeepSpeed, {key}", ACCEL, RAW, AGAIN, 1.02)


def _draw(data: Data) -> list[Panel]:
    return [ratio_panel(data, "DeepSpeed, 2 ranks", [RAW, AGAIN, ACCEL], 1.02)]


SECTION = Section(
    "deepspeed", "DeepSpeed ZeRO, 2 ranks over gloo", _measure, lambda d: [ABOUT, *tell(d)], _judge, _draw
)
