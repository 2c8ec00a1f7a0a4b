"""Sections ``single`` and ``ddp``: what a library adds to a step of a raw loop. ``settings``: those of DDP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

import accel

from .contenders import DDP_PARAMETERS, RIVALS, accel_settings, by_library, plain_step, raw_ddp
from .section import Data, Verdict, judged
from .steps import ACCEL, Comparison, Makers, Target, judge, rows_of, section
from .workloads import MANY, SMALL_GPT, TINY, WORKLOADS, Workload

RAW, TUNED = "raw torch", "raw torch, accel's settings"
CAUSE = "the calls of the handles, of the engine and of the optimizer's hooks around raw torch's own"


def makers(workload: Workload, world: int) -> Makers:
    """All contenders. The first is raw torch with its defaults."""
    if world == 1:
        found: Makers = {RAW: lambda: plain_step(workload, *workload.build())}
    else:
        found = {RAW: partial(raw_ddp, workload), TUNED: partial(raw_ddp, workload, **accel_settings())}
    return found | {name: partial(by_library, name, workload) for name in ("accel", *RIVALS)}


def _compiled() -> Makers:
    """Raw DDP and accel, given to ``torch.compile`` by the same line after they were built."""

    def raw(**settings: bool) -> object:
        model, optimizer = SMALL_GPT.build()
        return plain_step(SMALL_GPT, torch.compile(DistributedDataParallel(model, **settings)), optimizer)

    def handle() -> object:
        model, optimizer, _ = accel.setup(*SMALL_GPT.build(), devices="cpu")
        return plain_step(SMALL_GPT, torch.compile(model), optimizer)

    return {RAW: raw, TUNED: partial(raw, **accel_settings()), ACCEL: handle}


def _comparison(workload: Workload, world: int, share: float = 1.0) -> Comparison:
    args, repeat = (workload, world), workload.steps
    return Comparison(workload.title, world, makers, args, repeat=repeat, share=share)


LEAST_CPU = Target("accel's default DDP step below raw DDP's, 500 tensors", 1.0, clocks=("cpu",))
ONE = {w.name: _comparison(w, 1, share=3.0 if w is SMALL_GPT else 1.0) for w in WORKLOADS}
TWO = {
    "tiny": _comparison(TINY, 2, 0.7),
    "many": replace(_comparison(MANY, 2, 3.0), targets=(LEAST_CPU,)),
    "gpt": _comparison(SMALL_GPT, 2, 2.0),
    "compiled gpt": Comparison("compiled GPT: both by torch.compile (inductor)", 2, _compiled, share=0.6),
}


def _judge(data: Data) -> Iterator[Verdict]:
    for name in data["tables"]:
        rows = rows_of(data, name)
        if ACCEL not in rows:
            continue
        own, again = rows[ACCEL]["thread"], rows[f"{RAW}, again"]["thread"]
        noise = 1e6 * max(own["noise"], abs(again["over"]), again["noise"])
        bases: list[tuple[str, float, float]] = [("raw torch", 0.0, 10.0)]
        if TUNED in rows:
            bases = [("raw torch", 0.0, max(20.0, 1e4 * rows[RAW]["cpu"]["median"]))]
            tuned = max(15.0, 5e3 * rows[TUNED]["cpu"]["median"])
            bases.append(("raw torch with accel's settings", 1e6 * rows[TUNED]["thread"]["over"], tuned))
        for base, over, limit in bases:
            yield judged(f"step over {base}, {name}", 1e6 * own["over"] - over, limit, "{:+.1f} us", noise, CAUSE)
        for rival in RIVALS:
            if rival in rows:
                target, limit = f"overhead below {rival}'s, {name}", 1e6 * rows[rival]["thread"]["over"]
                yield judged(target, 1e6 * own["over"], limit, "{:+.1f} us", noise, CAUSE)


SINGLE = replace(section("single", "One process", ONE, (2.0, 30.0)), judge=_judge)
DDP = section("ddp", "DDP, 2 ranks over gloo", TWO, (3.0, 60.0))
DDP = replace(DDP, judge=lambda data: [*_judge(data), *judge(TWO, data)])


def _grid() -> Makers:
    """DDP by its settings. The first are torch's defaults."""
    found: Makers = {}
    for batched in ({}, {"batched_grad_copy": True}) if "batched_grad_copy" in DDP_PARAMETERS else ({},):
        for view in (False, True):
            for cap in (None, 5, 25) if batched else (None, 1, 5, 25, 100):
                settings = {"gradient_as_bucket_view": view, "bucket_cap_mb": cap, **batched}
                name = ", ".join(f"{k}={v}" for k, v in settings.items())
                found[name] = partial(raw_ddp, MANY, **settings)
    return found


SETTINGS = section("settings", "Settings of DDP", {"grid": Comparison("500 tensors: raw DDP", 2, _grid)}, (8.0, 150.0))
