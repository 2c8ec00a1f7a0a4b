"""Sections ``single`` and ``ddp``: what a library adds to a raw loop's step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from .contenders import ACCEL, RAW, RAW_AGAIN, RAW_TUNED, RIVALS, compiled, loops
from .section import Data, Panel, Section, Verdict, answer
from .steps import Comparison, compare, ratio_panel, rows, tell
from .workloads import WORKLOADS

STEP_CAUSE = "the calls of the handles, of the engine and of the optimizer's hooks around raw torch's own"
COMPILED = "compiled gpt"
DDP_CAUSE = (
    "these calls, and `requires_grad` of each parameter, which is looked at before a forward and after its backward"
)
ABOUT = """zero_grad, forward, loss, backward and step in fp32, by each library's own loop (`accelerator.backward`, \
`fabric.backward`); times in microseconds per step. Overheads are held against their targets in *thread* time: all that \
a library adds to a step in Python runs there, and gloo's waiting threads, whose cpu time varies by more than any \
overhead, do not."""


#: Of the time, on one rank and over several: what varies most takes longest to decide.
_SHARES = {1: {"gpt": 3.0}, 2: {"tiny": 0.7, "many": 3.0, "gpt": 2.0, COMPILED: 0.6}}
_LAUNCHES: dict[int, dict[str, int]] = {1: {}, 2: {"many": 4, "gpt": 2}}


def _measure(world: int, quick: bool) -> Data:
    seconds = (2.0 if world == 1 else 3.0) if quick else (30.0 if world == 1 else 60.0)
    shares = _SHARES[world]
    comparisons = {
        w.name: Comparison(
            w.title, world, loops, (w.name, world), w.steps, shares.get(w.name, 1.0), _LAUNCHES[world].get(w.name, 1)
        )
        for w in WORKLOADS
    }
    if world > 1:
        title = "small GPT, AdamW, both by torch.compile (inductor)"
        comparisons[COMPILED] = Comparison(title, world, compiled, ("gpt",), share=shares[COMPILED])
    return compare(comparisons, seconds)


def _judge(world: int, data: Data) -> Iterator[Verdict]:
    for name in [*(w.name for w in WORKLOADS), *([COMPILED] if world > 1 else [])]:
        found = rows(data, name)
        if ACCEL not in found:
            lost = "; ".join(data["tables"].get(name, {}).get("failed", {}).values())
            yield Verdict(f"step over raw torch, {name}", "", "none", f"**not measured**: {lost}")
            continue
        own, again = found[ACCEL], found[RAW_AGAIN]
        noise = max(own.thread_noise, abs(again.thread_over), again.thread_noise)
        limit = 10.0 if world == 1 else max(20.0, found[RAW].cpu / 100)
        cause = STEP_CAUSE if world == 1 else DDP_CAUSE
        lines = [("step over raw torch", own.thread_over, limit)]
        if world > 1:
            over = own.thread_over - found[RAW_TUNED].thread_over
            lines.append(("the same over raw torch with accel's settings", over, max(15.0, found[RAW_TUNED].cpu / 200)))
        for what, over, most in lines:
            verdict = answer(over, most, noise, cause)
            yield Verdict(f"{what}, {name}", f"{most:.0f} us", f"{over:+.1f} us", verdict)
        others = {rival: found[rival].thread_over for rival in RIVALS if rival in found}
        if others:
            told = ", ".join(f"{k} {v:+.1f} us" for k, v in others.items())
            verdict = answer(own.thread_over, min(others.values()), noise, cause)
            yield Verdict(f"overhead below the rivals', {name}", told, f"{own.thread_over:+.1f} us", verdict)
    if world > 1:
        yield from _least_cpu(data)


def _least_cpu(data: Data) -> Iterator[Verdict]:
    found = rows(data, "many")
    if ACCEL in found:
        own = found[ACCEL]
        noise = max(abs(found[RAW_AGAIN].cpu_ratio - 1), own.noise / own.cpu)
        what = "cpu of accel's default DDP step below raw DDP's with its defaults, 500 tensors"
        yield Verdict(what, "1", f"{own.cpu_ratio:.3f}", answer(own.cpu_ratio, 1.0, noise, DDP_CAUSE))


def _tell(data: Data) -> list[str]:
    return [ABOUT, *tell(data)]


def _draw(title: str, data: Data) -> list[Panel]:
    return [ratio_panel(data, title, [ACCEL, *RIVALS], 1.0)]


SINGLE = Section(
    "single", "One process", partial(_measure, 1), _tell, partial(_judge, 1), partial(_draw, "one process")
)
DDP = Section(
    "ddp", "DDP, 2 ranks over gloo", partial(_measure, 2), _tell, partial(_judge, 2), partial(_draw, "DDP, 2 ranks")
)
