"""Who writes what, as data: every element exactly once, by a rank that has it, in equal shares."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.checkpoint.plan import Kind, Listing, Plan, Table, make_plan
from accel.errors import CheckpointError
from accel.shard import Box, expanded, shape_of

Shape = tuple[int, ...]
#: The shards of a rank: name, dtype, shape and box.
Rank = list[tuple[str, str, Shape, Box]]


def listing(shards: Rank) -> Listing:
    kinds: dict[Kind, int] = {}
    rows = tuple(
        (name, kinds.setdefault(Kind(dtype, shape, box, False), len(kinds))) for name, dtype, shape, box in shards
    )
    return Listing(Table(repr(rows), rows), tuple(kinds))


def plan_of(ranks: list[Rank]) -> Plan:
    return make_plan(tuple(map(listing, ranks)))


def elements(box: Box, shape: Shape) -> set[tuple[int, ...]]:
    return {place for part in expanded(box, shape) for place in product(*(range(*side) for side in part))}


def flat(start: int, stop: int) -> Box:
    return ((start, stop),)


@st.composite
def worlds(draw: st.DrawFn) -> list[Rank]:
    """Ranks with full, sharded and grouped tensors, and some on one rank."""
    world = draw(st.integers(1, 6))
    ranks: list[Rank] = [[] for _ in range(world)]
    for tensor in range(draw(st.integers(0, 5))):
        shape = draw(st.sampled_from([(), (0,), (1,), (7,), (4, 6), (2, 3, 5), (64,), (1, 9)]))
        dtype, numel = draw(st.sampled_from(["U8", "F16", "F32", "F64"])), math.prod(shape)
        kind = draw(st.sampled_from(["full", "sharded", "one", "grouped", "columns"]))
        groups = draw(st.integers(1, world)) if kind in ("grouped", "columns") else world
        for rank in range(world):
            box = flat(0, numel)
            if kind in ("sharded", "grouped"):
                step = -(-numel // groups)
                box = flat(min(step * (rank % groups), numel), min(step * (rank % groups + 1), numel))
            if kind == "columns" and len(shape) > 1 and shape[0] > 1:
                step = -(-shape[-1] // groups)
                side = min(step * (rank % groups), shape[-1]), min(step * (rank % groups + 1), shape[-1])
                box = (*((0, size) for size in shape[:-1]), side)
            if kind != "one" or rank == tensor % world:
                ranks[rank].append((f"t{tensor}", dtype, shape, box))
    return ranks


@given(worlds())
@settings(max_examples=300, deadline=None)
def test_every_element_once_by_a_rank_that_has_it(ranks: list[Rank]) -> None:
    plan, written = plan_of(ranks), Counter[tuple[str, tuple[int, ...]]]()
    boxes = Counter[tuple[str, int, Box]]()
    for rank, shards in enumerate(ranks):
        held = {(name, place) for name, _, shape, box in shards for place in elements(box, shape)}
        for entry in plan.entries(rank):
            own = {(entry.name, place) for place in elements(entry.box, entry.shape)}
            assert own <= held
            written.update(own)
            boxes[entry.name, rank, entry.box] += 1
    shapes = {name: shape for shards in ranks for name, _, shape, _ in shards}
    whole = {(name, place) for name, shape in shapes.items() for place in elements(tuple((0, n) for n in shape), shape)}
    assert written == Counter(dict.fromkeys(whole, 1))
    # The record describes the same boxes.
    stored = plan.stored({rank: rank for rank in range(len(ranks))})
    assert {name: one.shape for name, one in stored.items()} == shapes
    assert boxes == Counter(
        (name, *run.at(number)) for name, one in stored.items() for run in one.runs for number in range(run.count)
    )


@given(worlds(), st.data())
@settings(max_examples=100, deadline=None)
def test_all_boxes_that_have_elements_are_found(ranks: list[Rank], data: st.DataObject) -> None:
    for one in plan_of(ranks).stored({rank: rank for rank in range(len(ranks))}).values():
        if not one.numel:
            continue
        wanted = tuple(sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in one.shape)  # type: ignore[arg-type]
        places = elements(tuple((a, b) for a, b in wanted), one.shape)
        if places:
            found = set[tuple[int, ...]]()
            for _, box in one.overlaps(tuple((a, b) for a, b in wanted)):
                found |= elements(box, one.shape)
            assert places <= found


@pytest.mark.parametrize("world", [1, 4, 7])
def test_what_all_have_is_split_evenly(world: int) -> None:
    shapes = [("F32", (100_000,)), ("F64", (3,)), ("F16", (1,)), ("U8", (700, 100)), ("F16", (50_001,))]
    rank: Rank = [(f"t{i}", dtype, shape, flat(0, math.prod(shape))) for i, (dtype, shape) in enumerate(shapes)]
    plan = plan_of([rank] * world)
    loads = [sum(entry.nbytes for entry in plan.entries(number)) for number in range(world)]
    assert sum(loads) == 400_000 + 24 + 2 + 70_000 + 100_002
    assert max(loads) - min(loads) <= 16


def test_groups_divide_what_they_have_together() -> None:
    """Two replicas of rows and columns on four ranks each."""
    boxes = [(rows, columns) for rows in ((0, 4), (4, 8)) for columns in ((0, 3), (3, 6))]
    plan = plan_of([[("w", "F32", (8, 6), box)] for box in boxes * 2])
    assert [[shape_of(entry.box) for entry in plan.entries(rank)] for rank in range(8)] == [[(2, 3)]] * 8


def test_ranks_without_data_have_no_file() -> None:
    plan = plan_of(
        [[("w", "F32", (6,), flat(0, 2))], [], [("w", "F32", (6,), flat(2, 4))], [("w", "F32", (6,), flat(4, 6))]]
    )
    (run,) = plan.stored({0: 0, 2: 1, 3: 2})["w"].runs
    assert [run.at(number) for number in range(run.count)] == [(0, flat(0, 2)), (1, flat(2, 4)), (2, flat(4, 6))]


@pytest.mark.parametrize(
    "boxes",
    [[flat(0, 4), flat(7, 10)], [flat(0, 4), flat(3, 10)], [flat(0, 5), flat(5, 11)], [flat(1, 10)]],
    ids=str,
)
def test_ranges_that_are_not_the_tensor(boxes: list[Box]) -> None:
    with pytest.raises(CheckpointError, match=r"the shards of w \[10\] overlap or leave a hole"):
        plan_of([[("w", "F32", (10,), box)] for box in boxes])
