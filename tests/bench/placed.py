"""Saving and loading on tmpfs and on the disk, apart: many short rounds, so that the least and the median decide."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import accel

from .movers import ACCEL, MEMCPY, RAW_LOAD, RAW_SAVE, STREAM, Movers
from .section import Data, Verdict, table
from .timing import Times, over_ranks

#: What is compared, the first of each with the others, and at most how many times as long these may take.
AIMS: dict[str, tuple[str, dict[str, float]]] = {
    "save": (RAW_SAVE, {ACCEL: 1.0}),
    "load, warm": (RAW_LOAD, {STREAM: 1.05, ACCEL: 1.3}),
    "load, cold": (RAW_LOAD, {STREAM: 1.05, ACCEL: 1.3}),
    "stall": (MEMCPY, {ACCEL: 1.1}),
}
GROUPS = {"save": "save", "load, warm": "load", "load, cold": "load", "stall": "async"}
ABOUT = """The same on tmpfs and on the disk apart, in many short rounds. Of the times of all rounds the least and the \
median, and what they are of the first line's; a figure is decided where both say the same. *Cold*: the pages of all \
files were given up before each load (`posix_fadvise`, `DONTNEED`); tmpfs has no such loads. *Warm*: they were read just \
before. A raw file is a new one in each round, as accel's are."""


def _give_up_pages(directory: str) -> None:
    for path in Path(directory).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _rounds(directory: str, backend: str, layers: int, rounds: int, cold: bool, clock: Any) -> tuple[int, Data]:
    moving = Movers(directory, backend, layers)
    found: dict[str, dict[str, Times]] = {}
    for number in range(rounds + 1):
        for kind, (base, others) in AIMS.items():
            if kind == "load, cold" and not cold:
                continue
            acts, names = moving.acts(GROUPS[kind]), [base, *others]
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                if name == RAW_SAVE:
                    Path(directory, f"raw{accel.rank()}").unlink(missing_ok=True)
                if accel.is_main():
                    if kind == "load, cold":
                        _give_up_pages(directory)
                    elif kind == "save" and cold:
                        os.sync()
                clock(found.setdefault(kind, {}), {}).take(name, acts[name])
        if number == 0:  # for memory, and for what is done only once
            found = {}
    return moving.nbytes, found


def measure(run: Callable[..., list[Any]], clock: Any, layouts: dict[str, str], *, quick: bool) -> Data:
    """By place and layout; ``run`` runs a function on all ranks, ``clock`` times on each."""
    found: Data = {}
    disk = os.environ.get("ACCEL_BENCH_DIR") or tempfile.gettempdir()
    for place, root in (("tmpfs", "/dev/shm"), ("disk", disk)):
        for backend, layout in layouts.items():
            directory = tempfile.mkdtemp(prefix="accel-bench-", dir=root)
            try:
                results = run(
                    _rounds, directory, backend, 1 if quick else 3, 3 if quick else 25, place == "disk", clock
                )
            finally:
                shutil.rmtree(directory)
            kinds = {kind: over_ranks([times[kind] for _, times in results]) for kind in results[0][1]}
            found[f"{layout}, {place}"] = {
                "nbytes": max(nbytes for nbytes, _ in results),
                "kinds": {kind: {name: one.wall for name, one in times.items()} for kind, times in kinds.items()},
            }
    return found


def _ratios(times: dict[str, list[float]], base: str, name: str) -> tuple[float, float]:
    """Of the least, and the median of those of the rounds."""
    own, other = times[name], times[base]
    return min(own) / min(other), median(a / b for a, b in zip(own, other, strict=True))


def tell(data: Data) -> list[str]:
    lines = [ABOUT]
    for where, told in data.items():
        rows = []
        for kind, times in told["kinds"].items():
            for name, wall in times.items():
                least, middle = _ratios(times, AIMS[kind][0], name)
                seconds = [f"{min(wall):.4f}", f"{median(wall):.4f}"]
                rows.append([f"{kind}: {name}", *seconds, f"{least:.2f}", f"{middle:.2f}", str(len(wall))])
        lines.append(f"### {where}, {told['nbytes'] / 1e6:.0f} MB a rank")
        lines.append(table(["", "least, s", "median, s", "least, ratio", "median, ratio", "rounds"], rows))
    return lines


def judge(data: Data) -> Iterator[Verdict]:
    for where, told in data.items():
        for kind, times in told["kinds"].items():
            base, others = AIMS[kind]
            for name, limit in others.items():
                both = _ratios(times, base, name)
                met = {ratio <= limit for ratio in both}
                said = (
                    "not decided: the least and the median differ"
                    if len(met) > 1
                    else "met"
                    if True in met
                    else "**missed**"
                )
                yield Verdict(f"{kind}: {name}, {where}", f"{limit:.2f}", f"{both[0]:.2f}, {both[1]:.2f}", said)
