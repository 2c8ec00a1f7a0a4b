"""Section ``settings``: which arguments of DistributedDataParallel make the cheapest step."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from .contenders import DDP_PARAMETERS, accel_settings, raw_ddp
from .section import Data, Section, table
from .steps import Comparison, Makers, Step, compare, rows, tell
from .timing import Row
from .workloads import MANY

ABOUT = """Raw `DistributedDataParallel` on the 500-tensor model at 2 ranks over gloo, in microseconds per step; the first \
row is torch's defaults (`bucket_cap_mb=None`: 25 MiB, the first bucket 1 MiB). accel's defaults were chosen from it."""


def grid() -> dict[str, dict[str, Any]]:
    """The settings by their text; the first are torch's defaults."""
    found: list[dict[str, Any]] = [
        {"gradient_as_bucket_view": view, "bucket_cap_mb": cap}
        for view in (False, True)
        for cap in (None, 1, 5, 25, 100)
    ]
    if "batched_grad_copy" in DDP_PARAMETERS:
        found += [
            {"gradient_as_bucket_view": view, "bucket_cap_mb": cap, "batched_grad_copy": True}
            for view in (False, True)
            for cap in (None, 5, 25)
        ]
    return {", ".join(f"{k}={v}" for k, v in one.items()): one for one in found}


def _makers() -> Makers:
    def maker(settings: dict[str, Any]) -> Callable[[], Step]:
        return lambda: raw_ddp(MANY, **settings)

    return {name: maker(settings) for name, settings in grid().items()}


def _measure(quick: bool) -> Data:
    return compare({"settings": Comparison("500 tensors: raw DDP", 2, _makers, ())}, 8.0 if quick else 150.0)


def _effect(found: dict[str, Row], change: str, on: str, off: str) -> list[str]:
    """What a change gives in the mean over the pairs of rows that differ in it alone."""
    others = {name: name.replace(on, off) for name in found if f"{name},".count(f"{on},")}
    pairs = [(found[name], found[other]) for name, other in others.items() if other in found]
    cpu = fmean(a.cpu_ratio - b.cpu_ratio for a, b in pairs)
    wall = fmean(a.wall_ratio - b.wall_ratio for a, b in pairs)
    return [change, f"{100 * cpu:+.1f} %", f"{100 * wall:+.1f} %", str(len(pairs))]


def _tell(data: Data) -> list[str]:
    found = rows(data, "settings")
    if not found:
        return [ABOUT, *tell(data)]
    changes = [("`gradient_as_bucket_view=True`", "gradient_as_bucket_view=True", "gradient_as_bucket_view=False")]
    changes += [
        (f"`bucket_cap_mb={cap}` for None", f"bucket_cap_mb={cap}", "bucket_cap_mb=None") for cap in (1, 5, 25, 100)
    ]
    changes.append(("`batched_grad_copy=True`", ", batched_grad_copy=True", ""))
    effects = [_effect(found, *change) for change in changes if any(change[1] in name for name in found)]
    best = min(found.values(), key=lambda r: r.cpu_ratio)
    chosen = ", ".join(f"`{k}={v}`" for k, v in accel_settings().items())
    return [
        ABOUT,
        *tell(data),
        "What one setting gives, in the mean over the pairs of rows that differ in it alone, in percent of the step with "
        "torch's defaults:",
        table(["change", "cpu", "wall", "pairs"], effects),
        f"The least cpu: `{best.name}`, {best.cpu_ratio:.3f} of torch's defaults. accel's defaults are {chosen}.",
    ]


SECTION = Section("settings", "Settings of DDP", _measure, _tell, lambda data: [])
