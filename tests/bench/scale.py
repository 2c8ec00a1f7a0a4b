"""Section ``scale``: a checkpoint of very many ranks, simulated in one process: what planning, the record and a load cost a rank.

Every tensor is divided by rows over all ranks, as FSDP2 does. Of the shard files only those that the loading rank needs are
there, so that it fails if it opens another.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from accel.checkpoint import record, shards
from accel.checkpoint.layout import (
    PackedInventory,
    Row,
    inventory,
    make_inventory,
    make_layout,
    unpack,
    write_items,
)
from accel.checkpoint.objects import LocalRange
from accel.checkpoint.reader import Reader
from accel.checkpoint.record import Record, Stored
from accel.checkpoint.safetensors import Entry
from accel.checkpoint.shards import WriteItem, Written
from accel.shard import Shard

from .ranks import run
from .section import Data, Section, Verdict, answer, brief, failures, table

TENSORS, RANKS, QUICK = 10_000, (256, 1024, 2816, 16_384), (64,)
ROWS, SHAPES = 32_768, 7
ABOUT = f"""{TENSORS} tensors, each divided by rows over all ranks. What each rank does before a save: *list* its tensors, \
receive the lists of all others, and *plan* who writes what. Rank 0 makes the record, each loading rank reads it, and *load* \
is that of one rank of half as many, which opens only the *files* that it needs. Seconds are cpu time of one thread \
(`time.process_time`); peak memory is that of the simulation, which holds the lists of all ranks."""

T = TypeVar("T")
SAVE = "0123456789ab"
COLUMNS = 16


@dataclass(frozen=True)
class Scale:
    """CPU seconds (of one thread) and bytes, of one rank."""

    list_s: float
    exchanged_bytes: int
    plan_s: float
    record_s: float
    record_bytes: int
    parse_s: float
    load_s: float
    files_opened: int
    peak_bytes: int


def simulate(world: int, tensors: int, loading: int, directory: str) -> Scale:
    """Plan a save of ``tensors`` on ``world`` ranks, and load the share of the middle one of ``loading`` ranks."""
    table: list[Row] = [(f"model/layers.{i}.weight", "F32", (ROWS - i % SHAPES, COLUMNS), ()) for i in range(tensors)]
    memory = torch.ones(ROWS, COLUMNS)
    mine = [LocalRange(s, equal=True) for s in _rows_of(world // 2, world, table, memory)]
    listing, list_s = _timed(lambda: make_inventory(mine, compare=True))
    packed = [_pack(rank, world, table) for rank in range(world)]
    assert packed[world // 2].kinds == listing.pack(0).kinds
    plan, plan_s = _timed(lambda: make_layout(unpack(packed), world))
    assert len(write_items(world // 2, plan, listing, mine)) == sum(one.shard.tensor.numel() > 0 for one in mine)

    found = zip(plan.table, plan.parts(torch.arange(world)), strict=True)
    stored = {name: Stored(dtype, shape, tuple(own)) for (name, dtype, shape, _), own in found}
    wanted = _rows_of(loading // 2, loading, table, torch.zeros_like(memory))
    needed = {f for s in wanted for f, _, _ in stored[s.name].overlaps(s.start, s.start + s.tensor.numel())}
    files = [_write(rank, world, table, memory, directory, real=rank in needed) for rank in range(world)]
    new = Record(id=SAVE, time=0.0, world_size=world, files=files, tensors=stored, values={})
    content, record_s = _timed(lambda: record.encode(new))
    (read, _), parse_s = _timed(lambda: record.parse(content, record.NAME))
    opened = _count_opened(directory)
    _, load_s = _timed(lambda: Reader(directory, read).fill(wanted))
    assert all(bool((s.tensor == 1).all()) for s in wanted)
    return Scale(
        list_s,
        sum(len(one.kinds) for one in packed),
        plan_s,
        record_s,
        len(content),
        parse_s,
        load_s,
        len(opened),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


def _rows(rank: int, world: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    step = (rows + world - 1) // world
    return (step * rank).clamp(max=rows), (step * (rank + 1)).clamp(max=rows)


def _rows_of(rank: int, world: int, table: list[Row], memory: torch.Tensor) -> list[Shard]:
    """A rank's shards; all share ``memory``, which holds as many rows as the largest tensor."""
    begin, end = (t.tolist() for t in _rows(rank, world, torch.tensor([shape[0] for _, _, shape, _ in table])))
    return [
        Shard(name, shape, a * COLUMNS, memory[a:b])
        for (name, _, shape, _), a, b in zip(table, begin, end, strict=True)
    ]


def _pack(rank: int, world: int, table: list[Row]) -> PackedInventory:
    """What a rank sends, without making its tensors."""
    if rank:
        table = table[:SHAPES]  # which have a range of each kind
    begin, end = (t.tolist() for t in _rows(rank, world, torch.tensor([shape[0] for _, _, shape, _ in table])))
    ranges = [(i, a * COLUMNS, (b - a) * COLUMNS, 0) for i, (a, b) in enumerate(zip(begin, end, strict=True))]
    return inventory(table, ranges).pack(0 if rank else None)


def _write(rank: int, world: int, table: list[Row], memory: torch.Tensor, directory: str, *, real: bool) -> Written:
    name = f"accel-{SAVE}-{rank:05d}.safetensors"
    if not real:
        return Written(name, 1 << 40, ("0" * 16,))
    own = [
        WriteItem(Entry(s.name, "F32", s.shape, s.start, s.tensor.numel()), s.tensor, 0)
        for s in _rows_of(rank, world, table, memory)
        if s.tensor.numel()
    ]
    return shards.write(directory, name, own)


def _count_opened(directory: str) -> set[str]:
    """A set that grows by each file of ``directory`` that is opened from now on."""
    opened: set[str] = set()

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(directory):
            opened.add(str(arguments[0]))

    sys.addaudithook(hear)
    return opened


def _timed(act: Callable[[], T]) -> tuple[T, float]:
    begin = time.process_time()
    result = act()
    return result, time.process_time() - begin


def _measured(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("ACCEL_BENCH_DIR")) as directory:
        return asdict(simulate(ranks, TENSORS, ranks // 2, directory))


def _measure(quick: bool) -> Data:
    data: Data = {"rows": [], "failed": {}}
    for ranks in QUICK if quick else RANKS:
        try:
            data["rows"].append({"ranks": ranks, **run(1, _measured, ranks)[0]})
        except RuntimeError as error:
            data["failed"][f"{ranks} ranks"] = brief(error)
    return data


def _tell(data: Data) -> list[str]:
    rows = [
        [
            str(row["ranks"]),
            *(f"{row[part]:.2f}" for part in ("list_s", "plan_s", "record_s", "parse_s", "load_s")),
            *(f"{row[part] / 1e6:.1f}" for part in ("exchanged_bytes", "record_bytes", "peak_bytes")),
            str(row["files_opened"]),
        ]
        for row in data["rows"]
    ]
    seconds = ["list, s", "plan, s", "make record, s", "read record, s", "load, s"]
    head = ["ranks", *seconds, "received, MB", "record, MB", "peak memory, MB", "files opened"]
    return [ABOUT, table(head, rows), *failures(data["failed"])]


def _judge(data: Data) -> Iterator[Verdict]:
    for row in data["rows"][-1:]:
        where = f"{row['ranks']} ranks, {TENSORS} tensors divided over all"
        yield Verdict(f"plan of a save, {where}", "5 s", f"{row['plan_s']:.2f} s", answer(row["plan_s"], 5.0))
        size = row["record_bytes"] / 1e6
        yield Verdict(f"record, {where}", "64 MB", f"{size:.2f} MB", answer(size, 64.0))
    for name, error in data["failed"].items():
        yield Verdict(f"plan of a save, {name}", "5 s", "none", f"**not measured**: {error}")


SECTION = Section("scale", "Checkpoints of many ranks, simulated", _measure, _tell, _judge)
