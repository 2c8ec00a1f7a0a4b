"""Functions in fresh processes, and interleaved rounds.

In each round every contender runs one short block, so that a disturbance hits all of them alike.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer as torch_optimizer

from tests.distributed import outcomes

from .report import Data, brief

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time, "thread": time.thread_time}
#: By clock, the seconds of one unit of work in each round.
Times = dict[str, list[float]]

# A library may change these for the whole process. Each contender has its own, during its own blocks only.
_HOOKS: Any = torch_optimizer._global_optimizer_pre_hooks
_PATCHED: tuple[tuple[Any, str], ...] = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph, "_engine_run_backward"),
    (torch.nn.functional, "linear"),
)


def _globals() -> list[Any]:
    return [dict(_HOOKS), *(vars(owner).get(name) for owner, name in _PATCHED)]


def _restore(state: list[Any]) -> None:
    _HOOKS.clear()
    _HOOKS.update(state[0])
    for (owner, name), value in zip(_PATCHED, state[1:], strict=True):
        if value is not None:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)


class Contender:
    """One way to do the same work: ``make`` builds it, and its result does the work once."""

    def __init__(self, name: str, make: Callable[[], Callable[[], Any]]) -> None:
        self.name, self.globals = name, _globals()
        self.act = self._alone(make)

    def _alone(self, act: Callable[[], Any]) -> Any:
        """Call a function with this contender's own changes of torch."""
        before = _globals()
        _restore(self.globals)
        try:
            return act()
        finally:
            self.globals = _globals()
            _restore(before)

    def block(self, repeat: int) -> dict[str, float]:
        """Return the seconds of some runs, by clock."""

        def work() -> None:
            for _ in range(repeat):
                self.act()

        seconds: dict[str, float] = self._alone(lambda: clocked(work)[0])
        return seconds


def clocked(act: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Return the seconds that an act takes, by clock, and its result."""
    begins = {name: clock() for name, clock in CLOCKS.items()}
    result = act()
    return {name: clock() - begins[name] for name, clock in CLOCKS.items()}, result


def note(times: Times, seconds: dict[str, float], units: int = 1) -> None:
    for clock, value in seconds.items():
        times.setdefault(clock, []).append(value / units)


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of a round. Each round begins with another."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def interleave(contenders: Sequence[Contender], seconds: float, repeat: int) -> dict[str, Times]:
    """Time rounds of one block of ``repeat`` runs for each contender, for about ``seconds``, after a warm-up.

    Each round has its own order, the same on all ranks: the contender before changes the caches by more than the
    measured differences. Times are of one run.
    """
    for contender in contenders:
        for _ in range(3):
            contender.block(max(1, repeat // 4))
    start = time.perf_counter()
    for _ in range(2):
        for contender in contenders:
            _meet()
            contender.block(repeat)
    rounds = torch.tensor(max(7, int(2 * seconds / (time.perf_counter() - start))))
    if dist.is_initialized():
        dist.broadcast(rounds, 0)
    times: dict[str, Times] = {contender.name: {} for contender in contenders}
    for number in range(int(rounds)):
        gc.collect(0)
        gc.disable()
        for contender in random.Random(number).sample(contenders, len(contenders)):
            _meet()
            note(times[contender.name], contender.block(repeat), repeat)
        gc.enable()
    return times


def over_ranks(results: Sequence[dict[str, Times]]) -> dict[str, Times]:
    """Return the mean of the ranks, round by round."""
    means: dict[str, Times] = {}
    for name, times in results[0].items():
        means[name] = {}
        for clock in times:
            rounds = zip(*(result[name][clock] for result in results), strict=True)
            means[name][clock] = [fmean(values) for values in rounds]
    return means


#: By contender and clock: the median seconds, their "ratio" to the base's and the seconds "over" it, round by round.
#: In 95 of 100 such runs, "over" is off by at most "noise".
Rows = dict[str, dict[str, dict[str, float]]]


def _uncertainty(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a median, from the spread of the middle half of the values."""
    low, _, high = quantiles(values, n=4)
    deviation = (high - low) / 1.349
    return 1.96 * 1.2533 * deviation / len(values) ** 0.5


def summarise(times: dict[str, Times], base: str) -> Rows:
    rows: Rows = {base: {}}
    for name, clocks in times.items():
        rows[name] = {}
        for clock, values in clocks.items():
            pairs = list(zip(values, times[base][clock], strict=True))
            over, ratio = [a - b for a, b in pairs], median(a / b for a, b in pairs)
            row = {"median": median(values), "ratio": ratio, "over": median(over), "noise": _uncertainty(over)}
            rows[name][clock] = row
    return rows


# -- processes --------------------------------------------------------------------------------------------------------

LIMIT_SECONDS = 3600.0


def _call(world: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    else:
        # Accelerate takes them for a group.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    return fn(*args)


def run(world: int, fn: Callable[..., Any], *args: Any, seconds: float = LIMIT_SECONDS) -> list[Any]:
    """Return the results of ``fn(*args)`` on each rank. ``fn`` is at the top level of a module.

    Raises:
        RuntimeError: a rank failed (with its traceback), died or was late.
    """
    try:
        results = outcomes(world, _call, world, fn, args, timeout=seconds, breaks=True)
    except AssertionError as error:
        raise RuntimeError(str(error)) from None
    for result in results:
        if result.error:
            raise RuntimeError(result.trace or result.message)
    return [result.value for result in results]


def attempt(data: Data, name: str, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function as `run` does. If it fails, note that in the section's figures and return nothing."""
    try:
        return run(world, fn, *args)
    except RuntimeError as error:
        data["failed"][name] = brief(str(error))
        return []


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for files of a benchmark, in ``ACCEL_BENCH_DIR`` if it is set."""
    return tempfile.TemporaryDirectory(prefix="accel-bench-", dir=os.environ.get("ACCEL_BENCH_DIR"))
