"""Work and records grow with kinds of shards and ranks, and not with tensors times ranks: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from accel.checkpoint.plan import BoxKind, Listing, Table, make_plan
from accel.checkpoint.record import Record, encode
from accel.checkpoint.shards import Written
from accel.shard import Box
from tests.bench.scale import SAVE, simulate

ROWS, COLUMNS = 4096, 64


def work(act: Callable[[], Any]) -> int:
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


def box_of(kind: str, world: int, rank: int) -> Box:
    """The elements of a rank: all, rows, rows on half of the ranks, or rows and columns."""
    ranks = {"replicated": 1, "sharded": world, "pairs": world // 2, "mesh": world // 4}[kind]
    place = rank // 4 if kind == "mesh" else rank % ranks
    rows = place * ROWS // ranks, (place + 1) * ROWS // ranks
    if kind == "mesh":
        return rows, (rank % 4 * COLUMNS // 4, (rank % 4 + 1) * COLUMNS // 4)
    return ((rows[0] * COLUMNS, rows[1] * COLUMNS),)


def listings(kind: str, world: int, tensors: int) -> tuple[Listing, ...]:
    table = Table("names", tuple((f"t{i}", 0) for i in range(tensors)))
    kinds = [BoxKind("F32", (ROWS, COLUMNS), box_of(kind, world, rank), False) for rank in range(world)]
    return tuple(Listing(table, (one,)) for one in kinds)


def record_of(everyone: tuple[Listing, ...]) -> bytes:
    world = len(everyone)
    stored = make_plan.__wrapped__(everyone).stored({rank: rank for rank in range(world)})
    files = [Written(f"accel-{SAVE}-{rank:05d}.safetensors", 1 << 30, ("0" * 16,)) for rank in range(world)]
    return encode(Record(id=SAVE, time=0.0, world_size=world, files=files, tensors=stored, values={}))


@pytest.mark.parametrize("kind", ["replicated", "sharded", "pairs", "mesh"])
def test_work_grows_with_tensors_plus_ranks(kind: str) -> None:
    small, tensors, ranks = (listings(kind, *size) for size in ((16, 100), (16, 800), (128, 100)))
    base = work(lambda: record_of(small))
    assert work(lambda: record_of(tensors)) < 9 * base
    assert work(lambda: record_of(ranks)) < 9 * base
    assert len(record_of(ranks)) - len(record_of(small)) < 112 * 150  # a line for each file


def test_a_load_opens_few_files(tmp_path: Path) -> None:
    small, large = (simulate(world, 40, world // 2, str(tmp_path)) for world in (32, 128))
    assert large.record_bytes - small.record_bytes < 96 * 110
    assert small.files_opened == large.files_opened == 2
