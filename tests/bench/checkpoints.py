"""Section ``checkpoints``: saving and loading beside the same bytes moved by hand, and beside other libraries."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

import accel

from . import movers, placed
from .movers import ACCEL, Movers
from .ranks import run
from .section import Data, Panel, Section, Verdict, answer, brief, failures, table
from .timing import Row, Times, over_ranks, summarise

WORLD = 2
LAYOUTS = {"ddp": "replicated", "fsdp": "FSDP2"}
GROUPS = {"save": "Saving", "load": "Loading", "async": "Stall of a background save", "verify": "Verifying"}
MIB = 2**20
LIMIT_SECONDS = 3600.0
ABOUT = """A transformer's weights and AdamW's state, on 2 ranks over gloo, replicated and in FSDP2's shards; medians of \
rounds in which all take turns, each round beginning with another, the disk idle before each. A time ends when all ranks \
are done. *Raw write* writes this rank's share of the bytes and syncs it; all others are durable as well (where a library \
does not sync its files, that is done within its time). Loads are from a warm page cache, and a load that does not bring \
the saved values back counts as failed; only accel's compares checksums. *memcpy* copies what accel copies, this rank's \
share; DCP copies all that the rank has. *extra* is what a rank's resident memory rises by, in a round that is not timed."""


class _Clock:
    """Times acts on this rank; one that fails on any rank is out from then on."""

    def __init__(self, times: dict[str, Times], failed: dict[str, str]) -> None:
        self.times, self.failed = times, failed

    def take(self, name: str, act: movers.Act) -> None:
        accel.barrier()
        error, after = "", None
        thread, cpu, wall = time.thread_time(), time.process_time(), time.perf_counter()
        try:
            after = act()
        except Exception as problem:
            error = brief(problem)
        accel.barrier()
        spent = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - thread
        if after is not None:
            after.result()
        self.agree(name, error)
        if name not in self.failed:
            times = self.times.setdefault(name, Times())
            for clock, value in zip((times.wall, times.cpu, times.thread), spent, strict=True):
                clock.append(value)

    def agree(self, name: str, error: str) -> None:
        errors: list[Any] = [None] * accel.world_size()
        dist.all_gather_object(errors, error)
        if any(errors):
            self.failed.setdefault(name, next(e for e in errors if e))
            self.times.pop(name, None)


def _noting(name: str, act: movers.Act, extra: dict[str, int]) -> movers.Act:
    """The act, noting by how many bytes this process's resident memory was higher, at the most, than before."""

    def watched() -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        after = act()
        extra[name] = max(_status("VmHWM") - before, 0)
        return after

    return watched


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def _rounds(directory: str, backend: str, layers: int, rounds: int) -> tuple[int, dict[str, Any]]:
    moving = Movers(directory, backend, layers)
    expected = moving.digest()
    groups: dict[str, Any] = {g: {"times": {}, "failed": {}, "extra": {}} for g in GROUPS}
    for number in range(rounds + 1):
        accel.barrier()
        if accel.is_main():
            shutil.rmtree(directory)
            os.makedirs(directory)
        for group, found in groups.items():
            clock = _Clock(found["times"], found["failed"])
            _round(moving, group, number, clock, found["extra"], expected)
        if number == 0:  # the first round is for memory, and for what a library does only once
            for group, found in groups.items():
                found["times"] = {name: Times() for name in moving.acts(group) if name not in found["failed"]}
    return moving.nbytes, groups


def _round(moving: Movers, group: str, number: int, clock: _Clock, extra: dict[str, int], expected: list[int]) -> None:
    acts = list(moving.acts(group).items())
    turn = number % len(acts)
    for name, act in (*acts[turn:], *acts[:turn]):
        if name in clock.failed:
            continue
        loads = group == "load" and name != "Accelerate"
        if loads:
            for tensor in moving.tensors:
                tensor.zero_()
        elif accel.is_main():
            os.sync()
        clock.take(name, act if number else _noting(name, act, extra))
        if loads:
            clock.agree(name, "" if moving.digest() == expected else "the values are not those that were saved")
            if name in clock.failed:
                moving.raw_load()  # for those who come after


def _run(fn: Callable[..., Any], *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="accel-bench-", dir=os.environ.get("ACCEL_BENCH_DIR")) as directory:
        return run(WORLD, fn, directory, *args, seconds=LIMIT_SECONDS)


def _measure(quick: bool) -> Data:
    layers, rounds = (1, 3) if quick else (4, 5)
    found: Data = {"rounds": rounds, "failed": {}, "layouts": {}}
    for backend, layout in LAYOUTS.items():
        try:
            results = _run(_rounds, backend, layers, rounds)
        except RuntimeError as error:
            found["failed"][layout] = brief(error)
            continue
        told: Data = {"nbytes": sum(n for n, _ in results) // (WORLD if backend == "ddp" else 1)}
        for group in GROUPS:
            parts = [groups[group] for _, groups in results]
            # The first act of each group is what the others are compared with.
            rows = [asdict(row) for row in summarise(over_ranks([part["times"] for part in parts]))]
            extra = {name: max(part["extra"].get(name, 0) for part in parts) for name in parts[0]["extra"]}
            told[group] = {"rows": rows, "failed": parts[0]["failed"], "extra": extra}
        found["layouts"][layout] = told
    try:
        found["placed"] = placed.measure(
            lambda fn, *args: run(WORLD, fn, *args, seconds=LIMIT_SECONDS), _Clock, LAYOUTS, quick=quick
        )
    except RuntimeError as error:
        found["failed"]["tmpfs and disk apart"] = brief(error)
    return found


def _rows(told: Data, group: str) -> dict[str, Row]:
    return {row["name"]: Row(**row) for row in told[group]["rows"]}


def _tell(data: Data) -> list[str]:
    parts = [ABOUT, *failures(data["failed"])]
    for layout, told in data["layouts"].items():
        for group, title in GROUPS.items():
            parts.append(f"### {title}: {layout}, {told['nbytes'] / 1e6:.0f} MB, {data['rounds']} rounds")
            lines = []
            for row in _rows(told, group).values():
                extra = told[group]["extra"].get(row.name, 0) / MIB
                times = [f"{row.wall / 1e6:.3f}", f"{row.cpu / 1e6:.3f}"]
                lines.append([row.name, *times, f"{row.wall_ratio:.2f}", f"{row.cpu_ratio:.2f}", f"{extra:.0f}"])
            parts.append(table(["", "wall, s", "cpu, s", "wall ratio", "cpu ratio", "extra, MiB a rank"], lines))
            parts += failures(told[group]["failed"])
    return parts + placed.tell(data.get("placed", {}))


def _judge(data: Data) -> Iterator[Verdict]:
    for name, error in data["failed"].items():
        yield Verdict(f"checkpoints, {name}", "", "none", f"**not measured**: {error}")
    for layout, told in data["layouts"].items():
        yield from _judge_layout(layout, told)
    yield from placed.judge(data.get("placed", {}))


def _judge_layout(layout: str, told: Data) -> Iterator[Verdict]:
    """What the rounds of one layout alone decide; times `placed.judge` decides."""
    for group, name in (("save", ACCEL), ("load", ACCEL)):
        extra = told[group]["extra"].get(name)
        if extra is not None:
            what = f"extra memory of a {group} ({name}), {layout}"
            yield Verdict(what, "64 MiB", f"{extra / MIB:.0f} MiB", answer(extra / MIB, 64))


def _draw(data: Data) -> list[Panel]:
    panels = []
    for group, title in GROUPS.items():
        found = {layout: _rows(told, group) for layout, told in data["layouts"].items()}
        names = list(dict.fromkeys(name for rows in found.values() for name in rows))
        bars = {n: [rows[n].wall_ratio if n in rows else None for rows in found.values()] for n in names}
        if bars:
            panels.append(Panel(title, f"wall time, multiple of {names[0]}", list(found), bars, 1.0))
    return panels


SECTION = Section("checkpoints", "Checkpoints", _measure, _tell, _judge, _draw)
