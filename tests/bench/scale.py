"""Section ``scale``: what planning a checkpoint of a thousand ranks takes, simulated in one process without tensors' values."""

from __future__ import annotations

import resource
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel.checkpoint import record
from accel.checkpoint.layout import parts
from accel.checkpoint.listing import Listing, Row, make_plan
from accel.checkpoint.record import Record, Stored
from accel.checkpoint.shards import Written

from .ranks import run
from .section import Data, Section, Verdict, answer, brief, failures, table

TENSORS, RANKS, QUICK = 10_000, (256, 1024), (64, 256)
NUMEL = 3_000 * 1_024 + 8  # of a tensor; no power of two
MIB = 2**20
ABOUT = f"""{TENSORS} tensors of {NUMEL} fp32 elements on simulated ranks, in one process, as a save's ranks do it after \
they told each other what they have: *plan* decides who writes what (each rank does that), *record* is made by rank 0 and \
read by each loading rank. Seconds are cpu time (`time.process_time`; one thread), of *plan* the wall time too. *Files* is \
how many shard files a rank opens that loads its even share at three quarters of the ranks, the most of any. *Memory* is \
this process's peak, with the listings of all ranks."""


def _even(rank: int, world: int) -> Listing:
    """A piece of each tensor (FSDP2)."""
    each = -(-NUMEL // world)
    first = min(each * rank, NUMEL)
    count = min(each, NUMEL - first)
    numbers = range(TENSORS) if count else range(0)
    return _listing(numbers, [first] * len(numbers), [count] * len(numbers))


def _flat(rank: int, world: int) -> Listing:
    """A piece of all tensors behind one another, cut anywhere (ZeRO 1 and 2)."""
    total = TENSORS * NUMEL
    each = -(-total // world)
    first, last = min(each * rank, total), min(each * (rank + 1), total)
    numbers = range(first // NUMEL, -(-last // NUMEL))
    starts = [max(first - n * NUMEL, 0) for n in numbers]
    return _listing(numbers, starts, [min(last - n * NUMEL, NUMEL) - s for n, s in zip(numbers, starts, strict=True)])


def _whole(rank: int, world: int) -> Listing:
    """Whole tensors of this rank (fairscale's owners)."""
    numbers = range(rank, TENSORS, world)
    return _listing(numbers, [0] * len(numbers), [NUMEL] * len(numbers))


def _replicated(rank: int, world: int) -> Listing:
    """Everything, as on every other rank, so that one listing stands for all (DDP)."""
    return _listing(range(TENSORS), [0] * TENSORS, [NUMEL] * TENSORS)


LAYOUTS: dict[str, Callable[[int, int], Listing]] = {
    "a piece of each tensor on each rank": _even,
    "one flat piece of everything on each rank": _flat,
    "whole tensors, one owner each": _whole,
    "replicated": _replicated,
}


def _listing(numbers: range, starts: list[int], counts: list[int]) -> Listing:
    rows: list[Row] = [(f"model/layers.{n}.weight", "F32", (NUMEL,)) for n in numbers]
    held = (array("q", range(len(rows))), array("q", starts), array("q", counts), array("q", [0] * len(rows)))
    return Listing(rows, *held)


def _simulate(layout: str, world: int) -> dict[str, Any]:
    make = LAYOUTS[layout]
    listings = [make(rank, world) for rank in range(1 if make is _replicated else world)]
    wall, clock = time.perf_counter(), time.process_time()
    plan = make_plan(listings, world)
    wall, planned = time.perf_counter() - wall, time.process_time()
    files = [Written(f"s-{rank:05}.safetensors", TENSORS * NUMEL * 4, ("0" * 16,)) for rank in range(world)]
    found = parts(plan.ranges, torch.arange(world))
    tensors = {
        name: Stored(dtype, shape, tuple(found[number])) for number, (name, dtype, shape) in enumerate(plan.table)
    }
    content = record.encode(Record(id="0" * 16, time=0.0, world_size=world, files=files, tensors=tensors, values={}))
    encoded = time.process_time()
    read, _ = record.parse(content, record.NAME)
    return {
        "ranges": len(plan.ranges.tensor),
        "plan": planned - clock,
        "wall": wall,
        "encode": encoded - planned,
        "parse": time.process_time() - encoded,
        "bytes": len(content),
        "files": _files(read, 3 * world // 4),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _files(read: Record, world: int) -> int:
    """The files that hold an even share of each tensor, of the rank that opens most."""
    each = -(-NUMEL // world)
    pieces = {stored.parts: stored.pieces() for stored in read.tensors.values()}
    opened: list[set[int]] = [set() for _ in range(world)]
    for found in pieces.values():
        for file, first, count in found:
            for rank in range(first // each, (first + count - 1) // each + 1):
                opened[rank].add(file)
    return max(map(len, opened))


def _measure(quick: bool) -> Data:
    data: Data = {"rows": [], "failed": {}}
    for layout in LAYOUTS:
        for world in QUICK if quick else RANKS:
            try:
                found = run(1, _simulate, layout, world)[0]
            except RuntimeError as error:
                data["failed"][f"{layout} on {world}"] = brief(error)
                continue
            data["rows"].append({"layout": layout, "world": world, **found})
    return data


def _tell(data: Data) -> list[str]:
    rows = [
        [
            row["layout"],
            str(row["world"]),
            f"{row['ranges']:,}",
            *(f"{row[part]:.2f}" for part in ("plan", "wall", "encode", "parse")),
            f"{row['bytes'] / 1e6:.2f}",
            str(row["files"]),
            f"{row['memory'] / MIB:.0f}",
        ]
        for row in data["rows"]
    ]
    head = [
        "",
        "ranks",
        "ranges",
        "plan, s",
        "plan, wall",
        "record, s",
        "read, s",
        "record, MB",
        "files",
        "memory, MiB",
    ]
    return [ABOUT, table(head, rows), *failures(data["failed"])]


def _judge(data: Data) -> Iterator[Verdict]:
    most = max((row["world"] for row in data["rows"]), default=0)
    for row in data["rows"]:
        if row["world"] != most:
            continue
        where = f"{row['world']} ranks, {TENSORS} tensors, {row['layout']}"
        yield Verdict(f"plan of a save, {where}", "5 s", f"{row['plan']:.2f} s", answer(row["plan"], 5.0))
        size = row["bytes"] / 1e6
        yield Verdict(f"record, {where}", "64 MB", f"{size:.2f} MB", answer(size, 64.0))
    for name, error in data["failed"].items():
        yield Verdict(f"plan of a save, {name}", "5 s", "none", f"**not measured**: {error}")


SECTION = Section("scale", "Checkpoints of many ranks, simulated", _measure, _tell, _judge)
