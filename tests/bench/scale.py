"""Section ``scale``: a checkpoint of very many ranks, simulated in one process: planning, the record and a load of a rank.

Every tensor is divided by rows over all ranks, as FSDP2 does. Only the shard files that the loading rank needs exist, so
that it fails if it opens another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from accel.checkpoint import record, shards
from accel.checkpoint.plan import list_shards, make_plan
from accel.checkpoint.reader import BoxReader
from accel.checkpoint.record import Record
from accel.checkpoint.shards import LocalShard, Written
from accel.shard import flat_shard

from .report import Data, Section, Verdict, judged, table
from .timing import attempt, clocked, scratch

TENSORS, RANKS, QUICK = 10_000, (256, 1024, 2816, 16_384), (64,)
ROWS, COLUMNS, SHAPES = 32_768, 16, 7
SAVE = "0123456789ab"

Row = tuple[str, tuple[int, int]]


@dataclass(frozen=True)
class Scale:
    """CPU seconds, bytes and files of one rank. The load would fail if it opened another file."""

    plan_s: float
    load_s: float
    record_bytes: int
    files_opened: int


def simulate(world: int, tensors: int, loading: int, directory: str) -> Scale:
    """Plan a save of ``tensors`` on ``world`` ranks, and load the share of the middle one of ``loading`` ranks."""
    rows: list[Row] = [(f"model/layers.{i}.weight", (ROWS - i % SHAPES, COLUMNS)) for i in range(tensors)]
    memory = torch.ones(ROWS, COLUMNS)
    local = _rows_of(world // 2, world, rows, memory)
    listing = list_shards(local)
    # The kinds of a few tensors are those of all, so that not every rank's tensors must be made.
    kinds = (list_shards(_rows_of(rank, world, rows[:SHAPES], memory)) for rank in range(world))
    listings = tuple(replace(one, table=listing.table) for one in kinds)
    assert listings[world // 2] == listing
    plan_s, plan = clocked(partial(make_plan, listings))
    more_s, stored = clocked(lambda: plan.stored({rank: rank for rank in range(world)}))

    wanted = _rows_of(loading // 2, loading, rows, torch.zeros_like(memory))
    needed = {file for one in wanted for file, _ in stored[one.shard.name].overlaps(one.shard.region)}
    files = []
    for rank in range(world):
        name = f"accel-{SAVE}-{rank:05d}.safetensors"
        written = Written(name, 1 << 40, ("0" * 16,))
        if rank in needed:
            items = shards.write_items(plan.entries(rank), _rows_of(rank, world, rows, memory))
            written = shards.write(directory, name, items)
        files.append(written)
    new = Record(id=SAVE, time=0.0, world_size=world, files=files, tensors=stored, values={})
    content = record.encode(new)
    parsed = record.parse(content, record.NAME)
    load_s, _ = clocked(lambda: BoxReader(directory, parsed).fill(one.shard for one in wanted))
    assert all(bool((one.shard.tensor == 1).all()) for one in wanted)
    return Scale(plan_s["cpu"] + more_s["cpu"], load_s["cpu"], len(content), len(needed))


def _rows_of(rank: int, world: int, rows: list[Row], memory: torch.Tensor) -> list[LocalShard]:
    """Return a rank's shards. All share ``memory``, which holds as many rows as the largest tensor."""
    found = []
    for name, shape in rows:
        step = -(-shape[0] // world)
        begin, end = min(shape[0], step * rank), min(shape[0], step * (rank + 1))
        found.append(LocalShard(flat_shard(name, shape, begin * COLUMNS, memory[begin:end]), equal=True))
    return found


def _simulated(ranks: int) -> dict[str, float]:
    with scratch() as directory:
        return {"ranks": ranks, **asdict(simulate(ranks, TENSORS, ranks // 2, directory))}


def _measure(quick: bool) -> Data:
    data: Data = {"rows": [], "failed": {}}
    for ranks in QUICK if quick else RANKS:
        data["rows"] += attempt(data, f"{ranks} ranks", 1, _simulated, ranks)
    return data


def _tell(data: Data) -> list[str]:
    rows = []
    for row in data["rows"]:
        cells = [f"{row['plan_s']:.2f}", f"{row['load_s']:.2f}", f"{row['record_bytes'] / 1e6:.1f}"]
        rows.append([str(row["ranks"]), *cells, str(row["files_opened"])])
    return [table(["ranks", "plan, s", "load, s", "record, MB", "files opened"], rows)]


def _judge(data: Data) -> Iterator[Verdict]:
    for row in data["rows"][-1:]:
        where = f"{row['ranks']} ranks, {TENSORS} tensors divided over all"
        yield judged(f"plan of a save, {where}", row["plan_s"], 5.0, "{:.2f} s")
        yield judged(f"record, {where}", row["record_bytes"] / 1e6, 64.0, "{:.2f} MB")


SECTION = Section("scale", "Checkpoints of many ranks, simulated", _measure, _tell, _judge)
