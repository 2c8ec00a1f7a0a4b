"""Interleaved rounds: in each, every contender runs one short block, so that a disturbance hits all of them alike."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

# What a library may change for the whole process: it is so during its own blocks only.
_GLOBAL_HOOKS: Any = torch_optimizer._global_optimizer_pre_hooks
_PATCHED = "_engine_run_backward"


@dataclass
class Contender:
    """One way to do the same work. ``run`` does it once."""

    name: str
    run: Callable[[], Any]
    hooks: dict[Any, Any] = field(default_factory=dict)
    backward: Any = None

    def block(self, repeat: int) -> tuple[float, float, float]:
        """Seconds of some runs, with what its library changed in place: wall, cpu of the process, cpu of this thread."""
        run, backward = self.run, getattr(torch.autograd, _PATCHED)
        _GLOBAL_HOOKS.update(self.hooks)
        setattr(torch.autograd, _PATCHED, self.backward or backward)
        try:
            thread, cpu, wall = time.thread_time(), time.process_time(), time.perf_counter()
            for _ in range(repeat):
                run()
            return time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - thread
        finally:
            setattr(torch.autograd, _PATCHED, backward)
            for key in self.hooks:
                del _GLOBAL_HOOKS[key]


def build(name: str, make: Callable[[], Callable[[], Any]]) -> Contender:
    """Make a contender and take what it changed for the whole process out of the way of the others."""
    before, backward = set(_GLOBAL_HOOKS), getattr(torch.autograd, _PATCHED)
    try:
        run = make()
        hooks = {k: v for k, v in _GLOBAL_HOOKS.items() if k not in before}
        return Contender(name, run, hooks, getattr(torch.autograd, _PATCHED))
    finally:
        setattr(torch.autograd, _PATCHED, backward)
        for key in set(_GLOBAL_HOOKS) - before:
            del _GLOBAL_HOOKS[key]


@dataclass
class Times:
    """Seconds per unit of work, one entry for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)


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

    Each round has an order of its own, the same on all ranks: after whom a contender comes is worth more than what is measured
    (what is left in the caches). ``meet`` lets the ranks start a block together, ``agree`` gives them
    the number of rounds. Times are those of one of the ``units`` of work that a run does.
    """
    for contender in contenders:
        for _ in range(3):
            contender.block(max(1, repeat // 4))
    start = time.perf_counter()
    for _ in range(2):
        for contender in contenders:
            meet()
            contender.block(repeat)
    rounds = agree(max(7, int(2 * seconds / (time.perf_counter() - start))))
    times = {contender.name: Times() for contender in contenders}
    for number in range(rounds):
        gc.collect(0)
        gc.disable()
        for contender in random.Random(number).sample(contenders, len(contenders)):
            meet()
            wall, cpu, thread = contender.block(repeat)
            times[contender.name].wall.append(wall / (repeat * units))
            times[contender.name].cpu.append(cpu / (repeat * units))
            times[contender.name].thread.append(thread / (repeat * units))
        gc.enable()
    return times


def over_ranks(results: Sequence[dict[str, Times]]) -> dict[str, Times]:
    """The mean of the ranks, round by round."""

    def mean(name: str, clock: str) -> list[float]:
        return [fmean(values) for values in zip(*(getattr(r[name], clock) for r in results), strict=True)]

    return {name: Times(mean(name, "wall"), mean(name, "cpu"), mean(name, "thread")) for name in results[0]}


def joined(launches: Sequence[dict[str, Times]]) -> dict[str, Times]:
    """The rounds of all of them, of what took part in all."""

    def values(name: str, clock: str) -> list[float]:
        return [value for times in launches for value in getattr(times[name], clock)]

    names = [name for name in launches[0] if all(name in times for times in launches)]
    return {name: Times(values(name, "wall"), values(name, "cpu"), values(name, "thread")) for name in names}


@dataclass(frozen=True)
class Row:
    """A contender's figures, in microseconds; ratios and overheads are medians of those of each round.

    ``wall_noise``, ``noise`` and ``thread_noise`` are what ``wall_over``, ``cpu_over`` and ``thread_over`` may be off by,
    in 95 of 100 such runs.
    """

    name: str
    rounds: int
    wall: float
    wall_min: float
    cpu: float
    cpu_min: float
    wall_ratio: float
    cpu_ratio: float
    wall_over: float
    wall_noise: float
    cpu_over: float
    noise: float
    thread_over: float
    thread_noise: float


def _uncertainty(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a median, from the spread of the middle half of the values."""
    low, _, high = quantiles(values, n=4)
    deviation = (high - low) / 1.349
    return 1.96 * 1.2533 * deviation / len(values) ** 0.5


def summarise(times: dict[str, Times]) -> list[Row]:
    """The rows of a table; the first contender is what the others are compared with."""
    base = next(iter(times.values()))
    rows = []
    for name, own in times.items():
        walls = list(zip(own.wall, base.wall, strict=True))
        cpus = list(zip(own.cpu, base.cpu, strict=True))
        threads = [a - b for a, b in zip(own.thread, base.thread, strict=True)]
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
                wall_noise=_uncertainty([a - b for a, b in walls]) * 1e6,
                cpu_over=median(a - b for a, b in cpus) * 1e6,
                noise=_uncertainty([a - b for a, b in cpus]) * 1e6,
                thread_over=median(threads) * 1e6,
                thread_noise=_uncertainty(threads) * 1e6,
            )
        )
    return rows
