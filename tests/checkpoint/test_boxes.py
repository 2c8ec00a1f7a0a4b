"""Parts that are cut along any dimension, evenly or not, along several axes: saved, read back under other cuts, gathered."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import accel
from accel.boxes import Box, shape_of
from accel.checkpoint import reader, record
from accel.shard import Shard
from tests.checkpoint.helpers import fresh
from tests.checkpoint.parts import Parts, blank, expected, part_of, save_as_ranks, split, values

SIZES = [0, 1, 2, 3, 5, 8]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The blocks of a tensor that is cut somewhere."""
    cuts = [sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else [] for n in shape]
    return list(itertools.product(*(split(n, places) for n, places in zip(shape, cuts, strict=True))))


@st.composite
def partitions(draw: st.DrawFn, wholes: dict[str, torch.Tensor]) -> list[list[Shard]]:
    """Ranks of which each element of the tensors lies on one at least, in ranges of the blocks of a grid."""
    ranks: list[list[Shard]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, whole in wholes.items():
        for box in draw(grids(tuple(whole.shape))):
            numel = math.prod(shape_of(box))
            places = sorted(draw(st.lists(st.integers(0, numel), max_size=2)))
            for start, stop in split(numel, places):
                for rank in draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1, max_size=2)):
                    ranks[rank].append(part_of(name, whole, box, start, stop))
    return ranks


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[list[Shard]], list[list[Shard]]]:
    wholes = {
        f"t{i}": values(tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3))), draw(st.sampled_from(DTYPES)), i)
        for i in range(draw(st.integers(1, 3)))
    }
    return wholes, draw(partitions(wholes)), draw(partitions(wholes))


def test_any_cut_into_any_other(tmp_path: Path) -> None:
    """Also through a buffer of few bytes, into memory of any order, and whole."""
    directory = str(tmp_path / "c")

    @given(cases(), st.sampled_from([16, 64, 1 << 24]), st.booleans())
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any, room: int, turned: bool) -> None:
        wholes, before, after = case
        save_as_ranks(before, fresh(Path(directory)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "_STAGE", room)
            for shards in after:
                wanted = [blank(one) for one in shards]
                if turned:  # every other element of something larger
                    wanted = [
                        Shard(s.name, s.shape, s.start, s.tensor.repeat_interleave(2)[::2], s.box) for s in wanted
                    ]
                check = "stream" if turned else "first"
                accel.load(directory, {"model": Parts(wanted)}, check=check, strict=False)  # type: ignore[arg-type]
                for one in wanted:
                    assert torch.equal(one.tensor, expected(one, wholes[one.name])), one
            found = reader.Reader(directory, record.read(directory)[0], stream=True).read(
                [f"model/{name}" for name in wholes]
            )
        assert all(torch.equal(found[f"model/{name}"], whole) for name, whole in wholes.items())
        accel.verify(directory)

    check()
