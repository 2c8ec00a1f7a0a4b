"""Who writes what, as data: every element exactly once, by a rank that has it, in level shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.checkpoint.layout import Ranges, Sizes, assign, level, parts, vector
from accel.errors import CheckpointError

Row = tuple[int, int, int, int]


def ranges(rows: list[Row]) -> Ranges:
    return Ranges(*(vector([row[i] for row in rows]) for i in range(4)))


def rows_of(found: Ranges) -> list[Row]:
    columns = (found.tensor, found.start, found.count, found.rank)
    return [(t, s, c, r) for t, s, c, r in zip(*(column.tolist() for column in columns), strict=True)]


def sizes(numels: list[int], itemsizes: list[int]) -> Sizes:
    return Sizes([f"t{i}" for i in range(len(numels))], numels, itemsizes)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, Sizes, list[Row]]:
    """Ranks with whole, sharded, grouped and overlapping tensors."""
    world = draw(st.integers(1, 6))
    numels = draw(st.lists(st.sampled_from([0, 1, 2, 7, 64, 1000]), max_size=6))
    rows: list[Row] = []
    for tensor, numel in enumerate(numels):
        kind = draw(st.sampled_from(["whole", "sharded", "one", "overlapping", "grouped"]))
        groups = draw(st.integers(1, world)) if kind == "grouped" else world
        for rank in range(world):
            if kind == "whole":
                rows.append((tensor, 0, numel, rank))
            elif kind in ("sharded", "grouped"):
                step = -(-numel // groups)
                start = min(step * (rank % groups), numel)
                rows.append((tensor, start, min(step, numel - start), rank))
            elif kind == "one" and rank == tensor % world:
                rows.append((tensor, 0, numel, rank))
            elif kind == "overlapping":
                start = 0 if rank == 0 else draw(st.integers(0, numel))
                stop = numel if rank == 0 else draw(st.integers(start, numel))
                rows.append((tensor, start, stop - start, rank))
    itemsizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=len(numels), max_size=len(numels)))
    return world, sizes(numels, itemsizes), draw(st.permutations(rows))


@given(worlds())
@settings(max_examples=300, deadline=None)
def test_every_element_once_by_a_rank_that_has_it(case: tuple[int, Sizes, list[Row]]) -> None:
    world, tensors, rows = case
    written = [[0] * numel for numel in tensors.numels]
    for tensor, start, count, rank in rows_of(assign(world, tensors, ranges(rows))):
        assert any(t == tensor and r == rank and s <= start and start + count <= s + c for t, s, c, r in rows)
        for element in range(start, start + count):
            written[tensor][element] += 1
    assert all(times == 1 for tensor in written for times in tensor)


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_parts_say_where_each_range_is(case: tuple[int, Sizes, list[Row]]) -> None:
    world, tensors, rows = case
    found = assign(world, tensors, ranges(rows))
    expanded = [
        (tensor, start + i * count, count, file + i)
        for tensor, of_tensor in parts(found, torch.arange(world)).items()
        for file, start, count, files in of_tensor
        for i in range(files)
    ]
    assert expanded == rows_of(found)


@pytest.mark.parametrize("replicated", [True, False])
def test_what_all_have_is_split_evenly(replicated: bool) -> None:
    numels, itemsizes = [100_000, 3, 1, 70_000, 50_001], [4, 8, 2, 1, 2]
    rows = [(t, 0, n, r) for r in range(1 if replicated else 4) for t, n in enumerate(numels)]
    found = assign(4, sizes(numels, itemsizes), ranges(rows), replicated=replicated)
    load = [0] * 4
    for tensor, _, count, rank in rows_of(found):
        load[rank] += count * itemsizes[tensor]
    assert sum(load) == sum(n * i for n, i in zip(numels, itemsizes, strict=True))
    assert max(load) - min(load) <= 16


def test_shared_ranges_level_what_ranks_have_alone() -> None:
    """Ranks 0 and 1 have much alone, so that 2 and 3 write what all have; the halves of a group are balanced too."""
    alone = [(0, 0, 600, 0), (0, 600, 400, 1)]
    rows = alone + [(1, 0, 1000, r) for r in range(4)] + [(2, 0, 500, r) for r in (2, 3)]
    load = [0] * 4
    for _, _, count, rank in rows_of(assign(4, sizes([1000, 1000, 500], [1, 1, 1]), ranges(rows))):
        load[rank] += count
    assert load == [625] * 4


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 5000))
def test_level(loads: list[int], amount: int) -> None:
    shares = level(loads, amount)
    assert sum(shares) == amount
    assert min(shares) >= 0
    after = [load + share for load, share in zip(loads, shares, strict=True)]
    raised = [a for a, share in zip(after, shares, strict=True) if share]
    assert not raised or max(raised) - min(after) <= 1


def test_a_range_that_no_rank_has_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="elements 4 to 6 of t1 lie on no rank"):
        assign(2, sizes([5, 10], [4, 4]), ranges([(0, 0, 5, 0), (1, 0, 4, 0), (1, 7, 3, 1)]))
    with pytest.raises(CheckpointError, match="elements 0 to 4 of t0 lie on no rank"):
        assign(2, sizes([5, 10], [4, 4]), ranges([(1, 0, 10, 0)]))
