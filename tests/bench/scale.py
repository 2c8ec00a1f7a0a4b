"""Section ``scale``: a checkpoint of very many ranks, simulated in one process: what planning, the record and a load cost a rank.

Every tensor is divided by rows over all ranks, as FSDP2 does. Of the shard files only those that the loading rank needs are
there, so that it fails if it opens another.
"""

from __future__ import annotations

import functools
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from accel.checkpoint import record, shards
from accel.checkpoint.plan import Listing, Plan, list_shards, make_plan
from accel.checkpoint.reader import Reader
from accel.checkpoint.record import Record
from accel.checkpoint.shards import LocalShard, Written
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


Row = tuple[str, tuple[int, int]]


def simulate(world: int, tensors: int, loading: int, directory: str) -> Scale:
    """Plan a save of ``tensors`` on ``world`` ranks, and load the share of the middle one of ``loading`` ranks."""
    table = [(f"model/layers.{i}.weight", (ROWS - i % SHAPES, COLUMNS)) for i in range(tensors)]
    memory = torch.ones(ROWS, COLUMNS)
    mine = _rows_of(world // 2, world, table, memory)
    listing, list_s = _timed(lambda: list_shards(mine))
    listings = [_listing(rank, world, table, memory) for rank in range(world)]
    assert listings[world // 2] == listing
    plan, plan_s = _timed(lambda: make_plan(tuple(listings)))
    stored, more_s = _timed(lambda: plan.stored({rank: rank for rank in range(world)}))

    wanted = _rows_of(loading // 2, loading, table, torch.zeros_like(memory))
    needed = {file for one in wanted for file, _ in stored[one.shard.name].overlaps(one.shard.region)}
    files = [_write(rank, world, plan, table, memory, directory, real=rank in needed) for rank in range(world)]
    new = Record(id=SAVE, time=0.0, world_size=world, files=files, tensors=stored, values={})
    content, record_s = _timed(lambda: record.encode(new))
    read, parse_s = _timed(lambda: record.parse(content, record.NAME))
    opened = _count_opened(directory)
    _, load_s = _timed(lambda: Reader(directory, read).fill(one.shard for one in wanted))
    assert all(bool((one.shard.tensor == 1).all()) for one in wanted)
    return Scale(
        list_s,
        sum(len(pickle.dumps(one.kinds)) for one in listings),
        plan_s + more_s,
        record_s,
        len(content),
        parse_s,
        load_s,
        len(opened),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


def _rows_of(rank: int, world: int, table: list[Row], memory: torch.Tensor) -> list[LocalShard]:
    """A rank's shards; all share ``memory``, which holds as many rows as the largest tensor."""
    shards = []
    for name, shape in table:
        step = -(-shape[0] // world)
        begin, end = (min(shape[0], step * number) for number in (rank, rank + 1))
        shards.append(LocalShard(Shard(name, shape, begin * COLUMNS, memory[begin:end]), equal=True))
    return shards


def _listing(rank: int, world: int, table: list[Row], memory: torch.Tensor) -> Listing:
    """What a rank sends, without making all of its tensors."""
    listing = list_shards(_rows_of(rank, world, table[:SHAPES], memory))
    return replace(listing, table=_table(table))


@functools.cache
def _table_of(tensors: int) -> Any:
    table = [(f"model/layers.{i}.weight", (ROWS - i % SHAPES, COLUMNS)) for i in range(tensors)]
    return list_shards(_rows_of(0, 1, table, torch.ones(ROWS, COLUMNS))).table


def _table(table: list[Row]) -> Any:
    return _table_of(len(table))


def _write(
    rank: int, world: int, plan: Plan, table: list[Row], memory: torch.Tensor, directory: str, *, real: bool
) -> Written:
    name = f"accel-{SAVE}-{rank:05d}.safetensors"
    if not real:
        return Written(name, 1 << 40, ("0" * 16,))
    own = _rows_of(rank, world, table, memory)
    return shards.write(directory, name, shards.items_of(plan.entries(rank), own))


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
