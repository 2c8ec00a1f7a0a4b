"""Training steps in turns: fresh processes for each workload, in which every contender takes part or says why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import ranks
from .section import Data, Panel, Verdict, answer, brief, failures, table
from .timing import Contender, Row, Times, build, interleave, joined, over_ranks, summarise

Step = Callable[[], None]
#: The ways to do the same work, by title; the first is what the others are compared with.
Makers = dict[str, Callable[[], Step]]


@dataclass(frozen=True)
class Comparison:
    """One table. ``makers(*args)`` runs in the ranks and lives at the top level of a module.

    ``share`` is of the seconds that a table has: more where the figure is close to its limit. ``launches`` divide it: which
    contender was made first, and where its memory came to lie, is worth half a per cent for as long as a process lives.
    """

    title: str
    world: int
    makers: Callable[..., Makers]
    args: tuple[Any, ...]
    repeat: int = 1
    share: float = 1.0
    launches: int = 1


def together() -> dict[str, Any]:
    """What keeps the ranks in step: a barrier before each block, and rank 0's number of rounds."""
    if not dist.is_initialized():
        return {}

    def agree(rounds: int) -> int:
        number = torch.tensor(rounds)
        dist.broadcast(number, 0)
        return int(number)

    return {"meet": dist.barrier, "agree": agree}


def _try(name: str, make: Callable[[], Step]) -> tuple[Contender | None, str]:
    """A contender that has made its first steps, or why some rank could not."""
    contender, error = None, ""
    try:
        contender = build(name, make)
        contender.block(3)
    except Exception as problem:
        error = brief(problem)
    if dist.is_initialized():
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        error = next((e for e in errors if e), "")
    return (None, error) if error else (contender, "")


def _take_turns(comparison: Comparison, seconds: float, launch: int) -> tuple[dict[str, Times], dict[str, str]]:
    """The times, and why some are missing; each launch makes another contender first."""
    makers = comparison.makers(*comparison.args)
    running: dict[str, Contender] = {}
    failed, names = {}, list(makers)
    for name in (*names[launch:], *names[:launch]):
        contender, error = _try(name, makers[name])
        if contender is not None:
            running[name] = contender
        elif name == names[0]:
            raise RuntimeError(f"{name}, which the others are compared with, failed: {error}")
        else:
            failed[name] = error
    return interleave([running[n] for n in names if n in running], seconds, comparison.repeat, **together()), failed


def compare(comparisons: dict[str, Comparison], seconds: float) -> Data:
    """The tables, by key; a comparison that fails as a whole is one without rows."""
    tables: Data = {}
    for key, comparison in comparisons.items():
        print(f"  {comparison.title}", flush=True)
        found: Data = {"title": comparison.title, "rows": [], "failed": {}}
        try:
            each = seconds * comparison.share / comparison.launches
            launches = [
                ranks.run(comparison.world, _take_turns, comparison, each, n) for n in range(comparison.launches)
            ]
        except RuntimeError as error:
            found["failed"] = {"the whole comparison": brief(error)}
        else:
            times = joined([over_ranks([times for times, _ in results]) for results in launches])
            found["rows"] = [asdict(row) for row in summarise(times)]
            found["failed"] = {name: why for results in launches for name, why in results[0][1].items()}
        tables[key] = found
    return {"tables": tables}


def rows(data: Data, key: str) -> dict[str, Row]:
    """A table's rows by name; none where it failed."""
    return {row["name"]: Row(**row) for row in data["tables"].get(key, {"rows": []})["rows"]}


_HEAD = (
    "",
    "wall",
    "wall, best",
    "cpu",
    "wall ratio",
    "cpu ratio",
    "wall over the first",
    "cpu over",
    "thread over",
    "rounds",
)


def steps_table(found: Sequence[Row]) -> str:
    """Microseconds per step."""
    return table(
        _HEAD,
        [
            [
                r.name,
                f"{r.wall:.1f}",
                f"{r.wall_min:.1f}",
                f"{r.cpu:.1f}",
                f"{r.wall_ratio:.3f}",
                f"{r.cpu_ratio:.3f}",
                f"{r.wall_over:+.1f} ± {r.wall_noise:.1f}" if i else "",
                f"{r.cpu_over:+.1f} ± {r.noise:.1f}" if i else "",
                f"{r.thread_over:+.1f} ± {r.thread_noise:.1f}" if i else "",
                str(r.rounds),
            ]
            for i, r in enumerate(found)
        ],
    )


def tell(data: Data) -> list[str]:
    """Every table under its title."""
    parts = []
    for key, found in data["tables"].items():
        parts.append(f"### {found['title']}")
        measured = list(rows(data, key).values())
        parts += [steps_table(measured)] if measured else []
        parts += failures(found["failed"])
    return parts


def ratio_verdicts(
    data: Data, key: str, what: str, own: str, base: str, again: str, limit: float, wall: bool = True
) -> list[Verdict]:
    """cpu and, if wanted, wall time of one contender, as multiples of another's; ``again`` is the first once more."""
    found = rows(data, key)
    if own not in found or base not in found:
        lost = data["tables"].get(key, {}).get("failed", {})
        return [Verdict(what, f"{limit:.2f}", "none", f"**not measured**: {'; '.join(lost.values()) or 'not run'}")]
    first, mine, other = next(iter(found.values())), found[own], found[base]
    verdicts = []
    for clock, over in (("cpu", "noise"), ("wall", "wall_noise"))[: 2 if wall else 1]:
        ratio = getattr(mine, f"{clock}_ratio") / getattr(other, f"{clock}_ratio")
        spread = getattr(mine, over) / getattr(first, clock)
        drift = abs(getattr(found[again], f"{clock}_ratio") - 1) if again in found else 0.0
        verdict = answer(ratio, limit, max(spread, drift))
        verdicts.append(Verdict(f"{what}, {clock}", f"{limit:.2f}", f"{ratio:.3f}", verdict))
    return verdicts


def ratio_panel(data: Data, title: str, names: Sequence[str], limit: float | None) -> Panel:
    """cpu time relative to the first contender, a group of bars for each table."""
    found = {key: rows(data, key) for key in data["tables"]}
    groups = [data["tables"][key]["title"].partition(":")[0] for key in found]
    bars = {n: [t[n].cpu_ratio if n in t else None for t in found.values()] for n in names}
    first = next(name for table in found.values() for name in table)
    return Panel(title, f"cpu time of a step, multiple of {first}", groups, bars, limit)
