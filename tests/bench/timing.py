"""Interleaved rounds: in each, every contender runs one short block, so that a disturbance hits all of them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from torch.optim import optimizer as torch_optimizer

# A library may register hooks for every optimizer of the process: they are in place for its own blocks only.
_GLOBAL_HOOKS: Any = torch_optimizer._global_optimizer_pre_hooks


@dataclass
class Contender:
    """One way to do the same work. ``run`` does it once."""

    name: str
    run: Callable[[], Any]
    hooks: dict[Any, Any] = field(default_factory=dict)


def build(name: str, make: Callable[[], Callable[[], Any]]) -> Contender:
    """Make a contender and take the global optimizer hooks that it registered out of the way of the others."""
    before = set(_GLOBAL_HOOKS)
    run = make()
    contender = Contender(name, run, {k: v for k, v in _GLOBAL_HOOKS.items() if k not in before})
    for key in contender.hooks:
        del _GLOBAL_HOOKS[key]
    return contender


@dataclass
class Times:
    """Seconds per unit of work, one entry for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def _block(contender: Contender, repeat: int) -> tuple[float, float]:
    run = contender.run
    _GLOBAL_HOOKS.update(contender.hooks)
    try:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(repeat):
            run()
        return time.perf_counter() - wall, time.process_time() - cpu
    finally:
        for key in contender.hooks:
            del _GLOBAL_HOOKS[key]


def interleave(
    contenders: Sequence[Contender],
    seconds: float,
    repeat: int,
    *,
    units: int = 1,
    meet: Callable[[], Any] = lambda: None,
    agree: Callable[[int], int] = lambda rounds: rounds,
) -> dict[str, Times]:
    """Rounds of one block of ``repeat`` runs for each contender, for about ``seconds``, after a warm-up.

    Each round begins with another contender. ``meet`` lets the ranks start a block together, ``agree`` gives them
    the number of rounds. Times are those of one of the ``units`` of work that a run does.
    """
    for contender in contenders:
        for _ in range(3):
            _block(contender, max(1, repeat // 2))
    start = time.perf_counter()
    for _ in range(2):
        for contender in contenders:
            meet()
            _block(contender, repeat)
    rounds = agree(max(9, int(2 * seconds / (time.perf_counter() - start))))
    times = {contender.name: Times() for contender in contenders}
    for number in range(rounds):
        gc.collect(0)
        gc.disable()
        turn = number % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            meet()
            wall, cpu = _block(contender, repeat)
            times[contender.name].wall.append(wall / (repeat * units))
            times[contender.name].cpu.append(cpu / (repeat * units))
        gc.enable()
    return times


def over_ranks(results: Sequence[dict[str, Times]]) -> dict[str, Times]:
    """The mean of the ranks, round by round."""

    def mean(name: str, clock: str) -> list[float]:
        return [fmean(values) for values in zip(*(getattr(r[name], clock) for r in results), strict=True)]

    return {name: Times(mean(name, "wall"), mean(name, "cpu")) for name in results[0]}


@dataclass(frozen=True)
class Row:
    """A contender's figures, in microseconds; ratios and overheads are medians of those of each round."""

    name: str
    rounds: int
    wall: float
    wall_min: float
    cpu: float
    cpu_min: float
    wall_ratio: float
    cpu_ratio: float
    wall_over: float
    cpu_over: float
    min_over: float

    @property
    def over(self) -> float:
        """The overhead that a target is held against: the larger of cpu and best wall."""
        return max(self.cpu_over, self.min_over)


def summarise(times: dict[str, Times]) -> list[Row]:
    """The rows of a table; the first contender is what the others are compared with."""
    base = next(iter(times.values()))
    rows = []
    for name, own in times.items():
        walls = list(zip(own.wall, base.wall, strict=True))
        cpus = list(zip(own.cpu, base.cpu, strict=True))
        rows.append(
            Row(
                name=name,
                rounds=len(walls),
                wall=median(own.wall) * 1e6,
                wall_min=min(own.wall) * 1e6,
                cpu=median(own.cpu) * 1e6,
                cpu_min=min(own.cpu) * 1e6,
                wall_ratio=median(a / b for a, b in walls),
                cpu_ratio=median(a / b for a, b in cpus),
                wall_over=median(a - b for a, b in walls) * 1e6,
                cpu_over=median(a - b for a, b in cpus) * 1e6,
                min_over=(min(own.wall) - min(base.wall)) * 1e6,
            )
        )
    return rows
