"""Sections ``single`` and ``ddp``: the time that a library adds to a step of a raw loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

import accel

from .contenders import RIVALS, by_library, plain_step, raw_ddp
from .section import Data, Verdict, judged
from .steps import ACCEL, Comparison, Makers, Target, judge, rows_of, section
from .workloads import MANY, SMALL_GPT, TINY, WORKLOADS, Workload

RAW = "raw torch"
CAUSE = "the calls of the handles, of the engine and of the optimizer's hooks around raw torch's own"


def makers(workload: Workload, world: int) -> Makers:
    """All contenders. The first is raw torch with its defaults."""
    raw = partial(raw_ddp, workload) if world > 1 else lambda: plain_step(workload, *workload.build())
    return {RAW: raw, **{name: partial(by_library, name, workload) for name in ("accel", *RIVALS)}}


def _compiled() -> Makers:
    """Raw DDP and accel, given to ``torch.compile`` by the same line after they were built."""

    def raw() -> object:
        model, optimizer = SMALL_GPT.build()
        return plain_step(SMALL_GPT, torch.compile(DistributedDataParallel(model)), optimizer)

    def handle() -> object:
        model, optimizer, _ = accel.setup(*SMALL_GPT.build(), devices="cpu")
        return plain_step(SMALL_GPT, torch.compile(model), optimizer)

    return {RAW: raw, ACCEL: handle}


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
        # 10 us, or 1 % of the step.
        limit = max(10.0, 1e4 * rows[RAW]["cpu"]["median"])
        yield judged(f"step over raw torch, {name}", 1e6 * own["over"], limit, "{:+.1f} us", noise, CAUSE)
        for rival in RIVALS:
            if rival in rows:
                share = 0.5 if name == "tiny" else 1.0
                target, limit = f"{share} of {rival}'s overhead, {name}", share * 1e6 * rows[rival]["thread"]["over"]
                yield judged(target, 1e6 * own["over"], limit, "{:+.1f} us", noise, CAUSE)


SINGLE = replace(section("single", "One process", ONE, (2.0, 30.0)), judge=_judge)
DDP = section("ddp", "DDP, 2 ranks over gloo", TWO, (3.0, 60.0))
DDP = replace(DDP, judge=lambda data: [*_judge(data), *judge(TWO, data)])
