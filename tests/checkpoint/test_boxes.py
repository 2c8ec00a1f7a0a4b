"""Parts that are cut along any dimension, evenly or not, along several axes: saved, read back under other cuts, gathered."""

from __future__ import annotations

import contextlib
import itertools
import math
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
from accel.checkpoint.plan import make_plan
from accel.checkpoint.save import contents_of
from accel.engines.base import gather as gathering
from accel.errors import CheckpointError
from accel.process import current
from accel.shard import Box, Shard, shape_of, slices
from accel.shard import whole as whole_shard
from tests.checkpoint.helpers import body_of, counted_reads, fresh
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
def divisions(draw: st.DrawFn, wholes: dict[str, torch.Tensor], flat: bool) -> list[list[Shard]]:
    """Ranks that have ranges of the blocks of a grid; or of whole tensors, as ZeRO divides them."""
    ranks: list[list[Shard]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, whole in wholes.items():
        for box in [((0, whole.numel()),)] if flat else draw(grids(tuple(whole.shape))):
            numel = math.prod(shape_of(box))
            places = sorted(draw(st.lists(st.integers(0, numel), max_size=3 if flat else 2)))
            for start, stop in split(numel, places):
                for rank in draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1, max_size=2)):
                    part = [flat_part(name, whole, start, stop)] if flat else parts_of(name, whole, box, start, stop)
                    ranks[rank] += part
    return ranks


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[list[Shard]], list[list[Shard]]]:
    wholes = {
        f"t{i}": values(tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3))), draw(st.sampled_from(DTYPES)), i)
        for i in range(draw(st.integers(1, 3)))
    }
    before, after = (draw(divisions(wholes, draw(st.booleans()))) for _ in range(2))
    return wholes, before, after


@contextlib.contextmanager
def chunks_of(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "CHUNK", size)
        patch.setattr(shards, "CHUNK", size)
        patch.setattr(shards, "_PART", min(size, 1 << 20))
        yield


def test_any_cut_into_any_other(tmp_path: Path) -> None:
    directory = str(tmp_path / "c")

    @given(cases(), st.sampled_from([64, 256, 4 << 20]), st.booleans())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any, size: int, turned: bool) -> None:
        wholes, before, after = case
        with chunks_of(size):
            save_as_ranks(before, fresh(Path(directory)))
            for stored in record.read(directory).tensors.values():  # with equal values: each element once
                boxes = [part.at(number)[1] for part in stored.runs for number in range(part.count)]
                assert sum(math.prod(shape_of(box)) for box in boxes) == stored.numel
            for held in after:
                wanted = [blank(one) for one in held]
                if turned:  # every other element of something larger
                    wanted = [replace(s, tensor=s.tensor.repeat_interleave(2, -1)[..., ::2]) for s in wanted if s.shape]
                accel.load(directory, {"model": Parts(wanted)}, strict=False)
                for one in wanted:
                    assert torch.equal(one.tensor, expected(one, wholes[one.name])), one
            found = reader.BoxReader(directory, record.read(directory)).read([f"model/{name}" for name in wholes])
            assert all(torch.equal(found[f"model/{name}"], whole) for name, whole in wholes.items())
            accel.verify(directory)

    check()


def save_divided(mesh: str, directory: str) -> None:
    divided = Divided(mesh)
    divided.fill()
    accel.save(divided.state, directory)


def load_divided(mesh: str, directory: str) -> list[str]:
    divided = Divided(mesh)
    accel.load(directory, divided.state)
    return divided.wrong()


def load_whole(backend: str, directory: str, again: str) -> list[str]:
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
    wrong = []
    for i, mesh in enumerate(MESHES):
        wrong += put_together(mesh)
        save_divided(mesh, f"{directory}/{mesh}")
        wrong += load_divided([*MESHES][i - 1], f"{directory}/{mesh}")
    for mesh, backend in zip(MESHES, backends, strict=False):
        wrong += load_whole(backend, f"{directory}/{mesh}", f"{directory}/{backend}")
        wrong += load_divided(mesh, f"{directory}/{backend}")
    return wrong


def test_from_every_mesh_to_others(tmp_path: Path) -> None:
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


LEFT, RIGHT = ((0, 8), (0, 3)), ((0, 8), (3, 6))
TOP = ((0, 5), (0, 3))
BAD: dict[str, list[list[Box]]] = {
    "a hole between ranges": [[((0, 20),)], [((30, 48),)]],
    "ranges that overlap": [[((0, 20),)], [((10, 48),)]],
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


def test_parts_of_other_tensors(tmp_path: Path) -> None:
    left = Shard("w", (8, 6), LEFT, torch.zeros(24))
    wider = Shard("w", (8, 7), ((0, 8), (3, 7)), torch.zeros(32))
    for right in (Shard("w", (8, 6), RIGHT, torch.zeros(24, dtype=torch.int32)), wider):
        for ranks in ([[left], [right]], [[left, right]]):
            with pytest.raises(CheckpointError, match=r"model/w is F32 \[8, 6\]"):
                save_as_ranks(ranks, str(tmp_path / "c"))


def loads_of(held: list[list[Shard]]) -> list[int]:
    plan = make_plan(tuple(contents_of({"model": Parts(own)}, None).listing for own in held))
    return [sum(entry.nbytes for entry in plan.entries(rank)) for rank in range(len(held))]


def test_ranks_write_equal_shares() -> None:
    kinds = {torch.float32: (100_000,), torch.float64: (3,), torch.float16: (50_001,), torch.uint8: (700, 100)}
    held = [whole_shard(str(dtype), torch.zeros(shape, dtype=dtype)) for dtype, shape in kinds.items()]
    for world in (1, 4, 7):
        loads = loads_of([held] * world)
        assert sum(loads) == 400_000 + 24 + 100_002 + 70_000
        assert max(loads) - min(loads) <= 16
    boxes = list(itertools.product(split(8, [4]), split(6, [3])))
    assert loads_of([[part_of("w", torch.zeros(8, 6), box)] for box in boxes * 2]) == [24] * 8  # two replicas


def loaded(directory: Path) -> torch.Tensor:
    found = torch.zeros(8, 6)
    accel.load(directory, {"model": Parts([whole_shard("w", found)])})
    return found


def test_boxes_are_described_in_few_words(tmp_path: Path) -> None:
    """Even ranges by a rule; boxes that are no grid one by one."""
    whole = values((8, 6), torch.float32)
    save_as_ranks([[part_of("w", whole, (rows, (0, 6)))] for rows in split(8, [2, 4, 6])], str(tmp_path / "a"))
    parts = [[0, [0], [12], 4, 1, 0, 12]]
    assert body_of(tmp_path / "a")["tensors"]["model/w"] == {"dtype": "F32", "shape": [8, 6], "parts": parts}
    boxes: list[Box] = [TOP, ((5, 8), (0, 2)), ((5, 8), (2, 3)), RIGHT]
    save_as_ranks([[part_of("w", whole, box)] for box in boxes], str(tmp_path / "b"))
    assert len(body_of(tmp_path / "b")["tensors"]["model/w"]["parts"]) == 4
    assert torch.equal(loaded(tmp_path / "b"), whole)


def test_replicas_that_differ(tmp_path: Path) -> None:
    """Box by box, the lowest rank's are saved."""
    whole = values((8, 6), torch.float32)
    ranks = [[part_of("w", whole + add, box)] for add, box in ((0, LEFT), (0, RIGHT), (1, LEFT), (1, RIGHT))]
    save_as_ranks(ranks, str(tmp_path), equal=False)
    assert torch.equal(loaded(tmp_path), whole)
    assert len(runs(tmp_path, "model/w")) == 1  # boxes at equal distances in consecutive files


def test_only_wanted_chunks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, reads = values((6, 300, 1200), torch.float32), counted_reads(monkeypatch)
    boxes = [((0, 6), (0, 300), (a, b)) for a, b in split(1200, [400])]
    monkeypatch.setattr(reader, "share", lambda: 1)
    with chunks_of(1 << 16):
        save_as_ranks([[part_of("w", whole, box)] for box in boxes], str(tmp_path / "c"))
        for box, most in ((boxes[0], 1.0), (((2, 4), (0, 300), (100, 900)), 0.4), (((0, 6), (0, 30), (0, 1200)), 0.4)):
            wanted = blank(part_of("w", whole, box))
            turned = torch.zeros(shape_of(box)[::-1]).permute(2, 1, 0)
            one = reader.BoxReader(str(tmp_path / "c"), record.read(str(tmp_path / "c")))
            reads.clear()
            one.fill([replace(wanted, name="model/w")])
            assert sum(reads) < most * whole.nbytes
            assert len(one._stage) <= 5 << 16
            assert torch.equal(wanted.tensor, expected(wanted, whole))
            accel.load(tmp_path / "c", {"model": Parts([Shard("w", wanted.shape, box, turned)])})
            assert torch.equal(turned, whole[slices(box)])


def test_export_and_inspection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {"w": values((70, 60), torch.float32), "v": values((3, 4, 5), torch.bfloat16)}
    boxes = {"w": itertools.product(split(70, [41]), split(60, [7])), "v": [((0, 3), (0, 4), s) for s in split(5, [2])]}
    ranks = [[part_of(name, whole[name], box)] for name in whole for box in boxes[name]]
    save_as_ranks(ranks, str(tmp_path / "a"))
    accel.export(tmp_path / "a", tmp_path / "out")
    found = nn.ParameterDict({name: torch.zeros_like(t) for name, t in whole.items()})
    accel.load(tmp_path / "out", {"model": found})
    assert all(torch.equal(found[name], t) for name, t in whole.items())
    main(["inspect", str(tmp_path / "a")])
    assert "model/w  F32   [70, 60] in 4 parts" in capsys.readouterr().out
