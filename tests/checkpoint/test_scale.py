"""Work grows with the number of ranges, and not with its square: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.checkpoint.layout import Inventory, Row, inventory, make_layout
from accel.checkpoint.record import Record, Stored, encode, parse
from accel.checkpoint.shards import Written
from tests.bench.scale import SAVE, simulate


class Elements(TorchDispatchMode):
    """Counts the elements that torch's operations read or write; a view touches none, an index those that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            touched = (
                [out] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_select) else [args, out]
            )
            self.count += sum(t.numel() for t in tree_leaves(touched) if isinstance(t, torch.Tensor))
        return out


def work(act: Callable[[], Any]) -> int:
    """How many lines of Python ran, and how many elements torch touched."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    with Elements() as elements:
        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(before)
    return lines + elements.count


def inventories(kind: str, world: int, tensors: int) -> list[Inventory]:
    """What the ranks list; in ``pairs`` each half of the ranks has all, divided, so that two ranks hold each range."""
    divided = {"replicated": 1, "sharded": world, "pairs": world // 2}[kind]
    count = 4096 // divided
    table: list[Row] = [(f"t{i}", "F32", (4096,), ()) for i in range(tensors)]
    return [inventory(table, [(i, rank % divided * count, count, 0) for i in range(tensors)]) for rank in range(world)]


def record_of(everyone: list[Inventory], world: int) -> bytes:
    """Plan, and write the record."""
    plan = make_layout(everyone, world)
    files = [Written(f"accel-{SAVE}-{r:05d}.safetensors", 1 << 30, ("0" * 16,)) for r in range(world)]
    found = zip(plan.table, plan.parts(torch.arange(world)), strict=True)
    stored = {name: Stored(dtype, shape, tuple(own)) for (name, dtype, shape, _), own in found}
    return encode(Record(id=SAVE, time=0.0, world_size=world, files=files, tensors=stored, values={}))


def find(content: bytes) -> None:
    """Read a record, and find the first element of each tensor."""
    for tensor in parse(content, "accel.json")[0].tensors.values():
        assert next(tensor.overlaps(0, 1))[1] == 0


@pytest.mark.parametrize("kind", ["replicated", "sharded", "pairs"])
def test_planning_grows_with_the_number_of_ranges(kind: str) -> None:
    def spent(world: int, tensors: int) -> int:
        everyone = inventories(kind, world, tensors)
        return work(lambda: record_of(everyone, world))

    spent(2, 2)  # what torch imports at its first use is not counted
    base = spent(16, 100)
    assert spent(16, 800) < 9 * base
    assert spent(128, 100) < 9 * base


def test_reading_a_record_grows_with_its_size() -> None:
    contents = [record_of(inventories("sharded", world, 400), world) for world in (2, 2, 16, 512)]
    _, _, small, large = (work(lambda content=content: find(content)) for content in contents)  # type: ignore[misc]
    assert large / small < 1.2 * len(contents[3]) / len(contents[2]) < 4


def test_a_record_has_one_part_for_evenly_divided_rows_and_a_load_opens_what_it_needs(tmp_path: Path) -> None:
    small, large = (simulate(world, 40, world // 2, str(tmp_path)) for world in (32, 128))
    # Per rank the record grows by the name of its file, not by the tensors.
    assert large.record_bytes - small.record_bytes < 96 * 110
    assert small.files_opened == large.files_opened == 2
