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

from .movers import (
    ACCEL,
    HASHED_LOAD,
    HASHED_READ,
    HASHED_SAVE,
    MEMCPY,
    RAW_LOAD,
    RAW_SAVE,
    READ,
    Movers,
)
from .section import Data, Verdict, answer, table
from .timing import Times, over_ranks

#: What is compared, the first of each with the others, and at most how many times as long these may take.
AIMS: dict[str, tuple[str, dict[str, float]]] = {
    "save": (RAW_SAVE, {ACCEL: 1.0}),
    "load, warm": (RAW_LOAD, {ACCEL: 1.05}),
    "verify": (READ, {ACCEL: 1 / 0.8}),  # warm as well
    "load, cold": (RAW_LOAD, {ACCEL: 1.05}),
    "stall": (MEMCPY, {ACCEL: 1.1}),
}
#: The same by hand with the checksums that it has, which nothing on as many cores as ranks comes below.
BY_HAND: dict[tuple[str, str], str] = {
    ("save", ACCEL): HASHED_SAVE,
    ("load, warm", ACCEL): HASHED_LOAD,
    ("load, cold", ACCEL): HASHED_LOAD,
    ("verify", ACCEL): HASHED_READ,
}
GROUPS = {"save": "save", "load, warm": "load", "load, cold": "load", "stall": "async", "verify": "verify"}
ABOUT = """The same on tmpfs and on the disk apart, in many short rounds. Of the times of all rounds the least and the \
median, and what they are of the first line's (the medians of the ratios of each round, and of those of cpu times); the \
median decides. *Cold*: the pages of all files were given up before each load (`posix_fadvise`, `DONTNEED`); tmpfs has no \
such loads. *Warm*: they were read just before. A raw file is a new one in each round, as accel's are. *With xxh3*: the same \
loop by hand, each byte hashed on one rank while it is in the caches. That is what the cores give: where it is over a limit, \
no load that compares checksums is below. *As many tensors without bytes*: the same model, of a width of 8 in place of 768."""


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
            acts, names = moving.acts(GROUPS[kind]), [base, *_by_hand(kind), *others]
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                _prepare(directory, kind, name, cold)
                clock(found.setdefault(kind, {}), {}).take(name, acts[name])
        if number == 0:  # for memory, and for what is done only once
            found = {}
    thin = Path(directory, "thin")
    thin.mkdir(exist_ok=True)
    small = Movers(str(thin), backend, layers, width=8)
    for number in range(rounds + 1):  # apart: a save uses the plan of the one before, where that has the same tensors
        for kind in found:
            for name in AIMS[kind][1]:
                _prepare(str(thin), kind, name, cold)
                clock(found[kind] if number else {}, {}).take(_beside(name), small.acts(GROUPS[kind])[name])
    return moving.nbytes, found


def _beside(name: str) -> str:
    return f"{name}, as many tensors without bytes"


def _prepare(directory: str, kind: str, name: str, cold: bool) -> None:
    if kind == "save" and name != ACCEL:
        Path(directory, f"{'hashed' if name == HASHED_SAVE else 'raw'}{accel.rank()}").unlink(missing_ok=True)
    if accel.is_main():
        if kind == "load, cold":
            _give_up_pages(directory)
        elif kind == "save" and cold:
            os.sync()


def _by_hand(kind: str) -> list[str]:
    return [name for (own, _), name in BY_HAND.items() if own == kind]


def measure(run: Callable[..., list[Any]], clock: Any, layouts: dict[str, str], *, quick: bool) -> Data:
    """By place and layout; ``run`` runs a function on all ranks, ``clock`` times on each."""
    found: Data = {}
    disk = os.environ.get("ACCEL_BENCH_DIR") or tempfile.gettempdir()
    for place, root in (("tmpfs", "/dev/shm"), ("disk", disk)):
        for backend, layout in layouts.items():
            directory = tempfile.mkdtemp(prefix="accel-bench-", dir=root)
            try:
                results = run(
                    _rounds, directory, backend, 1 if quick else 3, 3 if quick else 11, place == "disk", clock
                )
            finally:
                shutil.rmtree(directory)
            kinds = {kind: over_ranks([times[kind] for _, times in results]) for kind in results[0][1]}
            found[f"{layout}, {place}"] = {
                "nbytes": max(nbytes for nbytes, _ in results),
                "kinds": {
                    kind: {name: {"wall": one.wall, "cpu": one.cpu} for name, one in times.items()}
                    for kind, times in kinds.items()
                },
            }
    return found


def _ratio(times: Data, base: str, name: str, clock: str = "wall") -> float:
    """The median of those of the rounds."""
    return median(a / b for a, b in zip(times[name][clock], times[base][clock], strict=True))


def tell(data: Data) -> list[str]:
    lines = [ABOUT]
    for where, told in data.items():
        rows = []
        for kind, times in told["kinds"].items():
            base = AIMS[kind][0]
            for name, own in times.items():
                wall, least = own["wall"], min(own["wall"]) / min(times[base]["wall"])
                ratios = [least, _ratio(times, base, name), _ratio(times, base, name, "cpu")]
                figures = [f"{min(wall):.4f}", f"{median(wall):.4f}", *(f"{ratio:.2f}" for ratio in ratios)]
                rows.append([f"{kind}: {name}", *figures, str(len(wall))])
        lines.append(f"### {where}, {told['nbytes'] / 1e6:.0f} MB a rank")
        head = ["", "least, s", "median, s", "least, ratio", "median, ratio", "cpu ratio", "rounds"]
        lines.append(table(head, rows))
    return lines


def judge(data: Data) -> Iterator[Verdict]:
    for where, told in data.items():
        for kind, times in told["kinds"].items():
            base, others = AIMS[kind]
            for name, limit in others.items():
                ratio, by_hand, causes = _ratio(times, base, name), BY_HAND.get((kind, name)), []
                if by_hand:
                    causes = [f"by hand ({by_hand}) it is {_ratio(times, base, by_hand):.2f}"]
                beside, whole, bytes_alone = (median(times[n]["wall"]) for n in (_beside(name), name, base))
                causes.append(
                    f"accel lists the tensors, agrees and opens files in {beside * 1e3:.1f} ms, however many bytes there are; "
                    f"without that it is {(whole - beside) / bytes_alone:.2f}"
                )
                yield Verdict(
                    f"{kind}: {name}, {where}",
                    f"{limit:.2f}",
                    f"{ratio:.2f}",
                    answer(ratio, limit, cause="; ".join(causes)),
                )
