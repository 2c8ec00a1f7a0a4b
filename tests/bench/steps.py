"""Comparisons: contenders that do the same work in turns, in fresh processes, and the most that accel may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from .report import Data, Panel, Section, Verdict, brief, judged, table
from .timing import Contender, Rows, Times, attempt, interleave, over_ranks, summarise

Step = Callable[[], Any]
#: The ways to do the same work, by name. The first is compared with the others, and with itself as "again".
Makers = dict[str, Callable[[], Step]]
ACCEL = "accel"


@dataclass(frozen=True)
class Target:
    """accel takes at most ``limit`` times as long as ``base``, or as the first contender."""

    title: str
    limit: float
    base: str = ""
    clocks: tuple[str, ...] = ("cpu", "wall")


@dataclass(frozen=True)
class Comparison:
    """One table. ``makers(*args)`` runs in the ranks and is at the top level of a module.

    ``share`` is of the seconds of a table: more for a figure close to its limit.
    """

    title: str
    world: int
    makers: Callable[..., Makers]
    args: tuple[Any, ...] = ()
    targets: tuple[Target, ...] = ()
    repeat: int = 1
    share: float = 1.0


def _agree(error: str) -> str:
    """Return the first error of all ranks."""
    errors: list[Any] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    return next((e for e in errors if e), "")


def _take_turns(comparison: Comparison, seconds: float) -> tuple[dict[str, Times], dict[str, str]]:
    """Return times and errors by contender."""
    makers = comparison.makers(*comparison.args)
    first = next(iter(makers))
    makers = {first: makers[first], f"{first}, again": makers[first], **makers}
    running: dict[str, Contender] = {}
    failed: dict[str, str] = {}
    for name, make in makers.items():
        error = ""
        try:
            running[name] = Contender(name, make)
            running[name].block(3)
        except Exception as problem:
            error = brief(problem)
        if error := _agree(error):
            failed[name] = error
            running.pop(name, None)
    if first not in running:
        raise RuntimeError(failed[first])
    return interleave(list(running.values()), seconds, comparison.repeat), failed


def compare(comparisons: dict[str, Comparison], seconds: float) -> Data:
    """Measure tables, by key."""
    data: Data = {"tables": {}, "failed": {}}
    for key, comparison in comparisons.items():
        print(f"  {comparison.title}", flush=True)
        title, length = comparison.title, seconds * comparison.share
        results = attempt(data, title, comparison.world, _take_turns, comparison, length)
        if not results:
            continue
        for name, error in results[0][1].items():
            data["failed"][f"{name}, {title}"] = error
        times = over_ranks([times for times, _ in results])
        first = next(iter(times))
        data["tables"][key] = {"title": title, "rounds": len(times[first]["wall"]), "rows": summarise(times, first)}
    return data


def rows_of(data: Data, key: str) -> Rows:
    """Return the rows of a table by name, none if it failed."""
    rows: Rows = data["tables"].get(key, {"rows": {}})["rows"]
    return rows


def tell(data: Data) -> list[str]:
    """Give each table under its title, in microseconds."""
    parts = []
    head = ["", "wall", "cpu", "wall ratio", "cpu ratio", "thread over the first"]
    for found in data["tables"].values():
        lines = []
        for name, row in found["rows"].items():
            medians = [f"{1e6 * row[clock]['median']:.1f}" for clock in ("wall", "cpu")]
            ratios = [f"{row[clock]['ratio']:.3f}" for clock in ("wall", "cpu")]
            thread = row["thread"]
            over = f"{1e6 * thread['over']:+.1f} ± {1e6 * thread['noise']:.1f}"
            lines.append([name, *medians, *ratios, over])
        parts += [f"### {found['title']}, {found['rounds']} rounds", table(head, lines)]
    return parts


def judge(comparisons: dict[str, Comparison], data: Data) -> Iterator[Verdict]:
    """Hold accel against the targets of each table."""
    for key, comparison in comparisons.items():
        rows = rows_of(data, key)
        for target in comparison.targets:
            if ACCEL not in rows or (target.base and target.base not in rows):
                continue
            first = next(iter(rows))
            for clock in target.clocks:
                own, again = rows[ACCEL][clock], rows.get(f"{first}, again", rows[first])[clock]
                ratio = own["ratio"] / rows[target.base or first][clock]["ratio"]
                noise = max(own["noise"] / rows[first][clock]["median"], abs(again["ratio"] - 1))
                yield judged(f"{target.title}, {clock}", ratio, target.limit, "{:.3f}", noise)


def draw(title: str, data: Data) -> list[Panel]:
    """Draw the cpu time relative to the first contender, a group of bars for each table."""
    tables = {found["title"].partition(":")[0]: rows_of(data, key) for key, found in data["tables"].items()}
    names = dict.fromkeys(name for rows in tables.values() for name in rows)
    bars = {}
    for name in names:
        bars[name] = [rows[name]["cpu"]["ratio"] if name in rows else None for rows in tables.values()]
    first = next(iter(names), "")
    return [Panel(title, f"cpu time of a step, multiple of {first}", list(tables), bars, 1.0)]


def section(name: str, title: str, comparisons: dict[str, Comparison], seconds: Sequence[float]) -> Section:
    """A section of comparisons alone. ``seconds`` are those of a table, in a short run and in a full one."""
    some = dict(list(comparisons.items())[::2])

    def measure(quick: bool) -> Data:
        return compare(some, seconds[0]) if quick else compare(comparisons, seconds[1])

    return Section(name, title, measure, tell, partial(judge, comparisons), partial(draw, title))
