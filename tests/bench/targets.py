"""The project's own limits, and whether the measured figures keep them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .contenders import ACCEL, RAW_AGAIN, RAW_TUNED, RIVALS
from .timing import Row
from .workloads import WORKLOADS

STEP_CAUSE = "the calls of the handles, of the engine and of the optimizer's hooks around raw torch's own"
DDP_CAUSE = "beside these calls, the gradient log: one Python call for each parameter and step"
CAUSES = {
    "setup": "each object is looked up again, the loader's options are compared",
    "mask": "one attribute of each parameter is read in every forward",
    "import": "the building of accel's own classes and modules, which load nothing that torch has not loaded",
}


@dataclass(frozen=True)
class Verdict:
    """A target beside its figure."""

    what: str
    limit: str
    figure: str
    answer: str


def _answer(value: float, limit: float, noise: float, cause: str) -> str:
    if value <= limit:
        return "met" if limit - value >= noise else f"met, within this run's noise of {noise:.3g}"
    if value - limit <= noise:
        return f"not decided: the excess of {value - limit:.3g} is within this run's noise of {noise:.3g}"
    return f"**missed**: {cause}"


def _row(rows: list[Row], name: str) -> Row:
    return next(r for r in rows if r.name == name)


def _steps(world: int, tables: dict[str, list[Row]]) -> Iterator[Verdict]:
    place = "single process" if world == 1 else "2-rank DDP"
    for workload in WORKLOADS:
        rows = tables[workload.name]
        own, again = _row(rows, ACCEL), _row(rows, RAW_AGAIN)
        noise = max(own.thread_noise, abs(again.thread_over), again.thread_noise)
        limit = 10.0 if world == 1 else max(20.0, rows[0].cpu / 100)
        cause = STEP_CAUSE if world == 1 else DDP_CAUSE
        yield Verdict(
            f"step over raw torch, {place}, {workload.name}",
            f"{limit:.0f} us",
            f"{own.thread_over:+.1f} us",
            _answer(own.thread_over, limit, noise, cause),
        )
        if world > 1:
            same = own.thread_over - _row(rows, RAW_TUNED).thread_over
            yield Verdict(
                f"the same over raw torch with accel's settings, {workload.name}",
                f"{limit:.0f} us",
                f"{same:+.1f} us",
                _answer(same, limit, noise, cause),
            )
        others = {r.name: r.thread_over for r in rows if r.name in RIVALS.values()}
        if others:
            best = min(others.values())
            yield Verdict(
                f"step overhead below the rivals', {place}, {workload.name}",
                ", ".join(f"{k} {v:+.1f} us" for k, v in others.items()),
                f"{own.thread_over:+.1f} us",
                _answer(own.thread_over, best, noise, cause),
            )


def _least_cpu(tables: dict[str, list[Row]]) -> Verdict:
    own = _row(tables["many"], ACCEL)
    noise = max(abs(_row(tables["many"], RAW_AGAIN).cpu_ratio - 1), own.noise / own.cpu)
    return Verdict(
        "cpu of accel's default DDP step below raw DDP's with its defaults, 500 tensors",
        "ratio 1",
        f"ratio {own.cpu_ratio:.3f}",
        _answer(own.cpu_ratio, 1.0, noise, DDP_CAUSE),
    )


def _costs(tables: dict[str, list[Row]]) -> Iterator[Verdict]:
    for name, what, limit in (
        ("setup", "repeated `accel.setup(model, optimizer, loader)`", 50.0),
        ("mask", "trainability check of 500 tensors", 40.0),
    ):
        row = tables[name][0]
        yield Verdict(what, f"{limit:.0f} us", f"{row.cpu:.1f} us", _answer(row.cpu, limit, 0.0, CAUSES[name]))
    row = _row(tables["import"], "accel")
    answer = _answer(row.wall, 50e3, 0.0, CAUSES["import"])
    yield Verdict("`import accel` over `import torch`", "50 ms", f"{row.wall / 1e3:.1f} ms", answer)


def verdicts(single: dict[str, list[Row]], ddp: dict[str, list[Row]], costs: dict[str, list[Row]]) -> list[Verdict]:
    """A verdict for each target whose figures were measured."""
    found: list[Verdict] = []
    if single:
        found += _steps(1, single)
    if ddp:
        found += _steps(2, ddp)
        found.append(_least_cpu(ddp))
    if costs:
        found += _costs(costs)
    return found
