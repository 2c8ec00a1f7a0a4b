"""Parts that are cut along any dimension, evenly or not, along several axes: saved, read back under other cuts, gathered."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import accel
from accel.__main__ import main
from accel.checkpoint import reader, record, shards
from accel.engines.base import gather as gathering
from accel.errors import CheckpointError
from accel.process import current
from accel.shard import Box, Shard, shape_of, slices
from accel.shard import whole as whole_shard
from tests.checkpoint.crafting import body_of
from tests.checkpoint.helpers import fresh
from tests.checkpoint.parts import (
    MESHES,
    Divided,
    Net,
    Parts,
    blank,
    equal,
    expected,
    flat_part,
    part_of,
    parts_of,
    runs,
    save_as_ranks,
    split,
    stepped,
    values,
    whole_value,
)
from tests.distributed import run

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
                    ranks[rank] += parts_of(name, whole, box, start, stop)
    return ranks


@st.composite
def ranges(draw: st.DrawFn, wholes: dict[str, torch.Tensor]) -> list[list[Shard]]:
    """Ranks that have ranges of the tensors in row-major order, as ZeRO divides them."""
    ranks: list[list[Shard]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, whole in wholes.items():
        places = sorted(draw(st.lists(st.integers(0, whole.numel()), max_size=3)))
        for start, stop in split(whole.numel(), places):
            for rank in draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1, max_size=2)):
                ranks[rank].append(flat_part(name, whole, start, stop))
    return ranks


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[list[Shard]], list[list[Shard]]]:
    wholes = {
        f"t{i}": values(tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3))), draw(st.sampled_from(DTYPES)), i)
        for i in range(draw(st.integers(1, 3)))
    }
    before, after = (draw(st.one_of(partitions(wholes), ranges(wholes))) for _ in range(2))
    return wholes, before, after


@contextlib.contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Context: so many bytes have one checksum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "CHUNK", size)
        patch.setattr(shards, "CHUNK", size)
        patch.setattr(shards, "_PART", min(size, 1 << 20))
        yield


def test_any_cut_into_any_other(tmp_path: Path) -> None:
    """Also in chunks of few bytes, into memory of any order, and whole."""
    directory = str(tmp_path / "c")

    @given(cases(), st.sampled_from([64, 256, 4 << 20]), st.booleans())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any, size: int, turned: bool) -> None:
        wholes, before, after = case
        with chunks_of(size):
            save_as_ranks(before, fresh(Path(directory)))
            for held in after:
                wanted = [blank(one) for one in held]
                if turned:  # every other element of something larger
                    wanted = [replace(s, tensor=s.tensor.repeat_interleave(2, -1)[..., ::2]) for s in wanted if s.shape]
                accel.load(directory, {"model": Parts(wanted)}, strict=False)
                for one in wanted:
                    assert torch.equal(one.tensor, expected(one, wholes[one.name])), one
            found = reader.Reader(directory, record.read(directory)).read([f"model/{name}" for name in wholes])
            assert all(torch.equal(found[f"model/{name}"], whole) for name, whole in wholes.items())
            accel.verify(directory)

    check()


# -- real ranks: a model and its optimizer, cut ------------------------------------------------------------------------


def save_divided(mesh: str, directory: str) -> None:
    divided = Divided(mesh)
    divided.fill()
    accel.save(divided.state, directory)


def load_divided(mesh: str, directory: str) -> list[str]:
    divided = Divided(mesh)
    accel.load(directory, divided.state)
    return divided.wrong()


def load_whole(backend: str, directory: str, again: str) -> list[str]:
    """Into a backend, and from there into another checkpoint."""
    net = Net()
    model, optimizer, _ = accel.setup(net, stepped(net), backend=backend)
    accel.load(directory, {"model": model, "optimizer": optimizer})
    accel.save({"model": model, "optimizer": optimizer}, again)
    state = accel.full_state_dict(optimizer)["state"].values()
    found = dict(accel.full_state_dict(model).items())
    found |= {f"{n}/{k}": t for (n, _), s in zip(net.named_parameters(), state, strict=True) for k, t in s.items()}
    steps = [found.pop(name) for name in list(found) if name.endswith("/step")]
    assert [float(step) for step in steps] == [3.0] * 3
    accel.teardown()
    return [n for n, t in found.items() if not equal(t.cpu(), whole_value(n, tuple(t.shape), t.dtype))]


def put_together(mesh: str) -> list[str]:
    """Whole values of all parts, through batches of a few bytes, on ranks that keep them and on ranks that do not."""
    divided, process = Divided(mesh), current()
    divided.fill()
    held = [(n, "", t) for n, t in divided.net.state_dict(keep_vars=True).items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_BATCH_BYTES", 40)
        found = gathering.gather(
            "values", held, divided.holdings.part, process, device=process.device, keep=process.place.rank > 0
        )
    assert len(found) == (len(held) if process.place.rank else 0)
    return [n for (n, _), t in found.items() if not equal(t, whole_value(n, tuple(t.shape), t.dtype))]


def from_each_to_each(directory: str, backends: list[str]) -> list[str]:
    """All meshes of this world into others and into a backend, and that into a mesh."""
    wrong = []
    for i, mesh in enumerate(MESHES):
        wrong += put_together(mesh)
        save_divided(mesh, f"{directory}/{mesh}")
        other = [*MESHES][i - 1]
        wrong += [f"{mesh} to {other}: {n}" for n in load_divided(other, f"{directory}/{mesh}")]
    for mesh, backend in zip(MESHES, backends, strict=False):
        wrong += [
            f"{mesh} to {backend}: {n}" for n in load_whole(backend, f"{directory}/{mesh}", f"{directory}/{backend}")
        ]
        wrong += [f"{backend} to {mesh}: {n}" for n in load_divided(mesh, f"{directory}/{backend}")]
    return wrong


def test_models_and_optimizers_from_every_mesh_to_others(tmp_path: Path) -> None:
    """Uneven parts, and none: of 3 columns over 4 ranks; from 4 ranks to 2 and 1."""
    directory = str(tmp_path)
    assert run(4, from_each_to_each, directory, ["ddp", "fsdp"], timeout=240) == [[]] * 4
    flat = {mesh: len(runs(tmp_path / mesh, "model/deep")[0].box) == 1 for mesh in (*MESHES, "ddp", "fsdp")}
    assert flat == {**dict.fromkeys(MESHES, False), "ddp": True, "fsdp": True}
    for mesh in MESHES:
        accel.verify(tmp_path / mesh)
        assert not load_whole("single", str(tmp_path / mesh), str(tmp_path / "single"))
    assert run(2, load_divided, "columns", str(tmp_path / "both_ends")) == [[], []]
    assert run(2, load_divided, "both_ends", str(tmp_path / "single")) == [[], []]


# -- what is refused ---------------------------------------------------------------------------------------------------

LEFT, RIGHT = ((0, 8), (0, 3)), ((0, 8), (3, 6))
TOP = ((0, 5), (0, 3))
BAD: dict[str, list[list[Box]]] = {
    "a hole": [[LEFT], []],
    "an overlap": [[LEFT], [((0, 8), (2, 6))]],
    "a part and the whole": [[LEFT], [((0, 48),)]],
    "a hole in a box": [[((0, 7), (0, 3))], [RIGHT]],
    "columns outside": [[LEFT], [((0, 8), (3, 7))]],
    "rows outside": [[LEFT], [((1, 9), (3, 6))]],
}


@pytest.mark.parametrize("how", BAD)
def test_boxes_that_are_not_the_tensor(how: str, tmp_path: Path) -> None:
    ranks = [[Shard("w", (8, 6), box, torch.zeros(shape_of(box))) for box in boxes] for boxes in BAD[how]]
    with pytest.raises(CheckpointError, match=r"model/w"):
        save_as_ranks(ranks, str(tmp_path / "c"))
    assert not list(tmp_path.glob("*/accel*.json"))


def test_parts_of_other_tensors_of_one_name(tmp_path: Path) -> None:
    left = Shard("w", (8, 6), LEFT, torch.zeros(24))
    for other in (torch.zeros(24, dtype=torch.int32), torch.zeros(32)):
        columns = 6 if len(other) == 24 else 7
        right = Shard("w", (8, columns), ((0, 8), (3, columns)), other)
        for ranks in ([[left], [right]], [[left, right]]):
            with pytest.raises(CheckpointError, match=r"model/w is F32 \[8, 6\]"):
                save_as_ranks(ranks, str(tmp_path / "c"))


def test_rows_are_ranges_and_even_ones_are_described_by_rule(tmp_path: Path) -> None:
    whole = values((8, 6), torch.float32)
    save_as_ranks([[part_of("w", whole, (rows, (0, 6)))] for rows in split(8, [2, 4, 6])], str(tmp_path))
    assert body_of(tmp_path)["tensors"]["model/w"] == {
        "dtype": "F32",
        "shape": [8, 6],
        "parts": [[0, [0], [12], 4, 1, 0, 12]],
    }


def test_boxes_that_are_no_grid_are_described_one_by_one(tmp_path: Path) -> None:
    whole = values((8, 6), torch.float32)
    boxes: list[Box] = [TOP, ((5, 8), (0, 2)), ((5, 8), (2, 3)), RIGHT]
    save_as_ranks([[part_of("w", whole, box)] for box in boxes], str(tmp_path))
    assert len(body_of(tmp_path)["tensors"]["model/w"]["parts"]) == 4
    found = torch.zeros(8, 6)
    accel.load(tmp_path, {"model": Parts([whole_shard("w", found)])})
    assert torch.equal(found, whole)


def test_of_replicas_that_differ_the_lowest_rank_s_are_saved(tmp_path: Path) -> None:
    """Box by box, as of tensors."""
    whole = values((8, 6), torch.float32)
    ranks = [[part_of("w", whole + add, box)] for add, box in ((0, LEFT), (0, RIGHT), (1, LEFT), (1, RIGHT))]
    save_as_ranks(ranks, str(tmp_path), equal=False)
    found = torch.zeros(8, 6)
    accel.load(tmp_path, {"model": Parts([whole_shard("w", found)])})
    assert torch.equal(found, whole)
    assert len(runs(tmp_path, "model/w")) == 1  # boxes at equal distances in consecutive files


# -- what is read, and through how much memory -------------------------------------------------------------------------


def test_only_chunks_with_wanted_elements_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a buffer of a few chunks, and into memory of any order."""
    whole, read, preadv = values((6, 300, 1200), torch.float32), [0], os.preadv
    boxes = [((0, 6), (0, 300), (a, b)) for a, b in split(1200, [400])]

    def counted(*args: Any) -> int:
        read[0] += (count := preadv(*args))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(reader, "share", lambda: 1)
    with chunks_of(1 << 16):
        save_as_ranks([[part_of("w", whole, box)] for box in boxes], str(tmp_path / "c"))
        for box, most in ((boxes[0], 1.0), (((2, 4), (0, 300), (100, 900)), 0.4), (((0, 6), (0, 30), (0, 1200)), 0.4)):
            wanted = blank(part_of("w", whole, box))
            turned = torch.zeros(shape_of(box)[::-1]).permute(2, 1, 0)
            one = reader.Reader(str(tmp_path / "c"), record.read(str(tmp_path / "c")))
            read[0] = 0
            one.fill([replace(wanted, name="model/w")])
            assert read[0] < most * whole.nbytes
            assert len(one._stage) <= 5 << 16
            assert torch.equal(wanted.tensor, expected(wanted, whole))
            accel.load(tmp_path / "c", {"model": Parts([Shard("w", wanted.shape, box, turned)])})
            assert torch.equal(turned, whole[slices(box)])


def test_export_comparison_and_inspection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a checkpoint in boxes, as of one that is whole."""
    whole = {"w": values((70, 60), torch.float32), "v": values((3, 4, 5), torch.bfloat16)}
    boxes = {"w": itertools.product(split(70, [41]), split(60, [7])), "v": [((0, 3), (0, 4), s) for s in split(5, [2])]}
    ranks = [[part_of(name, whole[name], box)] for name in whole for box in boxes[name]]
    save_as_ranks(ranks, str(tmp_path / "a"))
    accel.export(tmp_path / "a", tmp_path / "out")
    found = nn.ParameterDict({name: torch.zeros_like(t) for name, t in whole.items()})
    accel.load(tmp_path / "out", {"model": found})
    assert all(torch.equal(found[name], t) for name, t in whole.items())
    capsys.readouterr()
    main(["inspect", str(tmp_path / "a")])
    assert "model/w  F32   [70, 60] in 4 parts" in capsys.readouterr().out
