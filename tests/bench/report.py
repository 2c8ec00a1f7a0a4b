"""The page: tables, how each figure was taken, the targets beside the figures."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch

from .contenders import accel_settings
from .measure import NUM_BATCHES, NUM_IMPORTS
from .targets import verdicts
from .timing import Row
from .workloads import WORKLOADS

METHOD = """Every comparison comes from one run in which the contenders take turns in the same processes: a round is one \
short block of steps of each, and each round begins with another. A ratio or an overhead is the median over the \
rounds of what is computed within one round, so that a disturbance hits both sides; *best* is the shortest \
block. Times of 2 ranks are their mean, a barrier starts each block. *cpu* is the process's own time with all \
its threads (`time.process_time`), *thread* is that of the thread that runs the loop (`time.thread_time`), \
without the threads of gloo; *wall* is what the clock says. All with `OMP_NUM_THREADS=1` and without garbage \
collection inside a block. "raw torch, again" is the same loop as "raw torch" once more: what it shows is noise. \
± is half the 95 % interval of a median. Overheads of a step are held against their targets in *thread* time: \
all that a library adds to a step in Python runs there, and gloo's waiting threads, whose cpu time varies by \
more than any overhead, do not; ratios are held in *cpu* time. What a library changes for the whole process \
(optimizer hooks, for example) is in place during its own blocks only."""
STEPS = """zero_grad, forward, loss, backward and step in fp32, by each library's own loop (`accelerator.backward`, \
`fabric.backward`); times in microseconds per step."""
SETTINGS = """Raw `DistributedDataParallel` on the 500-tensor model at 2 ranks over gloo, in microseconds per step; the first \
row is torch's defaults (`bucket_cap_mb=None`: 25 MiB, the first bucket 1 MiB)."""


@dataclass
class Results:
    """What was measured; a section that was not is empty."""

    quick: bool = False
    missing: list[str] = field(default_factory=list)
    single: dict[str, list[Row]] = field(default_factory=dict)
    ddp: dict[str, list[Row]] = field(default_factory=dict)
    settings: list[Row] = field(default_factory=list)
    costs: dict[str, list[Row]] = field(default_factory=dict)


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores, {model}, torch {torch.__version__}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _steps(rows: list[Row]) -> str:
    head = [
        "",
        "wall",
        "wall, best",
        "cpu",
        "wall ratio",
        "cpu ratio",
        "wall over raw",
        "cpu over raw",
        "thread over raw",
        "rounds",
    ]
    return _table(
        head,
        [
            [
                r.name,
                f"{r.wall:.1f}",
                f"{r.wall_min:.1f}",
                f"{r.cpu:.1f}",
                f"{r.wall_ratio:.3f}",
                f"{r.cpu_ratio:.3f}",
                f"{r.wall_over:+.1f}" if i else "",
                f"{r.cpu_over:+.1f} ± {r.noise:.1f}" if i else "",
                f"{r.thread_over:+.1f} ± {r.thread_noise:.1f}" if i else "",
                str(r.rounds),
            ]
            for i, r in enumerate(rows)
        ],
    )


def _all_steps(title: str, tables: dict[str, list[Row]]) -> list[str]:
    parts = [f"## {title}", STEPS]
    for workload in WORKLOADS:
        parts += [f"### {title}: {workload.title}", _steps(tables[workload.name])]
    return parts


def _effect(rows: dict[str, Row], change: str, on: str, off: str) -> list[str]:
    """What a change gives in the mean over the pairs of rows that differ in it alone."""
    others = {name: name.replace(on, off) for name in rows if f"{name},".count(f"{on},")}
    pairs = [(rows[name], rows[other]) for name, other in others.items() if other in rows]
    cpu = fmean(a.cpu_ratio - b.cpu_ratio for a, b in pairs)
    wall = fmean(a.wall_ratio - b.wall_ratio for a, b in pairs)
    return [change, f"{100 * cpu:+.1f} %", f"{100 * wall:+.1f} %", str(len(pairs))]


def _all_settings(rows: list[Row]) -> list[str]:
    named = {r.name: r for r in rows}
    changes = [("`gradient_as_bucket_view=True`", "gradient_as_bucket_view=True", "gradient_as_bucket_view=False")]
    changes += [
        (f"`bucket_cap_mb={cap}` for None", f"bucket_cap_mb={cap}", "bucket_cap_mb=None") for cap in (1, 5, 25, 100)
    ]
    changes += [(f"`{k}=True`", f", {k}=True", "") for k in ("static_graph", "batched_grad_copy")]
    effects = [_effect(named, *change) for change in changes if any(change[1] in name for name in named)]
    best = min(rows, key=lambda r: r.cpu_ratio)
    chosen = ", ".join(f"`{k}={v}`" for k, v in accel_settings().items())
    return [
        "## Settings of DDP",
        SETTINGS,
        _steps(rows),
        "What one setting gives, in the mean over the pairs of rows that differ in it alone, in percent of the step with "
        "torch's defaults:",
        _table(["change", "cpu", "wall", "pairs"], effects),
        f"The least cpu: `{best.name}`, {best.cpu_ratio:.3f} of torch's defaults. accel's defaults are {chosen}.",
    ]


def _all_costs(costs: dict[str, list[Row]]) -> list[str]:
    setup, mask, log, loader = (costs[name] for name in ("setup", "mask", "log", "loader"))
    lines = [
        ["repeated `accel.setup(model, optimizer, loader)` of raw objects", setup[0].wall, setup[0].cpu],
        ["the same of their handles", setup[1].wall, setup[1].cpu],
        ["trainability check of 500 tensors (`TrainableMask.changed`)", mask[0].wall, mask[0].cpu],
        ["gradient log, for each parameter of a backward", log[1].wall_over, log[1].cpu_over],
        *(
            [f"dataloader, {r.name}: for each batch over the raw `DataLoader`", r.wall_over, r.cpu_over]
            for r in loader[1:]
        ),
    ]
    figures = [[what, f"{wall:.2f}", f"{cpu:.2f}"] for what, wall, cpu in lines]
    imports = [[f"`import {r.name}`", f"{r.wall / 1e3:.1f}", f"{r.cpu / 1e3:.1f}"] for r in costs["import"]]
    return [
        "## Costs of single verbs",
        "In microseconds, from loops in one process. The gradient log is the difference of backward passes into 500 scalar "
        f"parameters with and without it, the dataloader the difference of epochs of {NUM_BATCHES} shuffled batches that "
        f"cost almost nothing themselves (the raw one takes {loader[0].wall:.1f} a batch), their start included.",
        _table(["", "wall", "cpu"], figures),
        f"Imports in milliseconds, in {NUM_IMPORTS} or more fresh processes each, which take turns and import torch first; all "
        "bytecode exists already:",
        _table(["", "wall", "cpu"], imports),
    ]


def page(results: Results) -> str:
    """The whole page, of the sections that there are."""
    parts = ["# Benchmarks", f"Written by `make bench` on {machine()}.", METHOD]
    if results.missing:
        parts.append(f"Not installed, so not measured: {', '.join(results.missing)}.")
    if results.single and results.ddp:
        parts.append("![cpu time of a step relative to raw torch](benchmarks.png)")
    found = verdicts(results.single, results.ddp, results.costs)
    if found:
        rows = [[v.what, v.limit, v.figure, v.answer] for v in found]
        parts += ["## Targets", _table(["target", "limit", "figure", "verdict"], rows)]
    if results.single:
        parts += _all_steps("One process", results.single)
    if results.ddp:
        parts += _all_steps("DDP, 2 ranks over gloo", results.ddp)
    if results.settings:
        parts += _all_settings(results.settings)
    if results.costs:
        parts += _all_costs(results.costs)
    return "\n\n".join(parts) + "\n"
