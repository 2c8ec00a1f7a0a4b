"""Section ``drift``: what the drift guard costs, at the number of steps that it chooses by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import accel
from accel.engines.base.drift import DriftGuard
from accel.process import current
from accel.registry import registry

from .ranks import run
from .section import Data, Section, Verdict, answer, table
from .workloads import WORKLOADS, workload_of

LIMIT = 0.1  # per cent of a step
CAUSE = "a round costs more than what its last one told, by which the number of steps is chosen"


def _loop(name: str, seconds: float) -> Data:
    """Steps for so long, or until three comparisons have followed the choice; every call of the guard is timed."""
    workload = workload_of(name)
    raw, optimizer = workload.build()
    model, optimizer, _ = accel.setup(raw, optimizer, devices="cpu")
    batch, target = workload.batch()
    guard = registry.of_handle(model).drift
    spent: list[tuple[int, float, float]] = []
    for method in ("judge", "begin"):
        setattr(DriftGuard, method, _timed(getattr(DriftGuard, method), spent))
    marks = []
    start = time.perf_counter()
    while len(marks) < 64 or (accel.any_rank(time.perf_counter() - start < seconds) if len(marks) % 64 == 0 else True):
        before = len(spent), current().rounds
        began = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model(batch), target).backward()
        optimizer.step()
        marks.append((time.perf_counter() - began, len(spent) > before[0], current().rounds - before[1]))
    return _figures(marks, spent, guard.interval)


def _timed(original: Any, spent: list[tuple[int, float, float]]) -> Any:
    def call(guard: DriftGuard) -> None:
        wall, thread = time.perf_counter(), time.thread_time()
        original(guard)
        spent.append((guard.steps, time.perf_counter() - wall, time.thread_time() - thread))

    return call


def _figures(marks: list[Any], spent: list[tuple[int, float, float]], every: int) -> Data:
    quiet = [seconds for seconds, met, _ in marks if not met]
    # The first comparison loads what it needs.
    later = [entry for entry in spent if entry[0] > 2]
    comparisons = max(len({step for step, *_ in later}) / 2, 1)
    return {
        "steps": len(marks),
        "step": median(quiet) * 1e6,
        "wall": sum(wall for _, wall, _ in later) / comparisons * 1e6,
        "thread": sum(thread for *_, thread in later) / comparisons * 1e6,
        "every": every,
        "collectives": sum(rounds for _, met, rounds in marks if not met),
        "messages": sum(rounds for _, met, rounds in marks if met),
    }


def _measure(quick: bool) -> Data:
    found: Data = {}
    for workload in WORKLOADS:
        ranks = run(2, _loop, workload.name, 3.0 if quick else 30.0)
        found[workload.name] = {key: fmean(rank[key] for rank in ranks) for key in ranks[0]}
    return found


def _share(row: Data) -> float:
    return 100 * float(row["thread"]) / (row["every"] * row["step"])


def _tell(data: Data) -> list[str]:
    head = [
        "",
        "step",
        "one comparison, thread",
        "wall",
        "steps to the next",
        "share of a step",
        "collectives in other steps",
    ]
    rows = [
        [
            workload.title,
            f"{row['step']:.0f} us",
            f"{row['thread']:.0f} us",
            f"{row['wall']:.0f} us",
            f"{row['every']:.0f}",
            f"{_share(row):.3f} %",
            f"{row['collectives']:.0f} in {row['steps']:.0f}",
        ]
        for workload in WORKLOADS
        for row in [data[workload.name]]
    ]
    return [
        "`ddp` at 2 ranks over gloo with default options. A comparison is all that the guard does for it in the loop's thread, "
        "in two steps: digests of the weights and group values, the message, a step later the answers. *wall* is the same "
        "by the clock, with the waiting. *steps to the next* is what the guard has chosen from its own times.",
        table(head, rows),
    ]


def _judge(data: Data) -> Iterator[Verdict]:
    for workload in WORKLOADS:
        row = data[workload.name]
        share = _share(row)
        yield Verdict(
            f"the guard's share of a step, {workload.name}",
            f"{LIMIT} %",
            f"{share:.3f} %",
            answer(share, LIMIT, cause=CAUSE),
        )
        count = row["collectives"]
        yield Verdict(
            f"collectives more on the path of a step, {workload.name}", "0", f"{count:.0f}", answer(count, 0.0)
        )


SECTION = Section("drift", "The drift guard", _measure, _tell, _judge)
