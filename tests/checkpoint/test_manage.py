"""Checkpoints as wholes: the newest one, second names, old ones, and what is not written twice."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.errors import CheckpointError
from tests.distributed import run


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((5000,), float(value)), "n": value}


def value_of(directory: Path) -> float:
    found = state(0.0)
    accel.load(directory, found)
    assert found["x"].unique().tolist() == [found["n"]]
    return float(found["n"])


def test_latest(tmp_path: Path) -> None:
    assert accel.latest(tmp_path / "none") is None
    assert accel.latest(tmp_path) is None
    for name in ("step-9", "step-10", "b", "a"):
        accel.save(state(1), tmp_path / name)
        assert accel.latest(tmp_path) == str(tmp_path / name)
        assert accel.latest(str(tmp_path / name)) == str(tmp_path / name)
    next((tmp_path / "a").glob("*.safetensors")).unlink()
    assert accel.latest(tmp_path) == str(tmp_path / "b")
    (tmp_path / "b" / "accel.json").write_text("{}")
    assert accel.latest(tmp_path) == str(tmp_path / "step-10")
    accel.save(state(2), tmp_path / "step-9")
    assert accel.latest(tmp_path) == str(tmp_path / "step-9")
    accel.link(tmp_path / "step-10", tmp_path / "best")  # a second name is as old as the checkpoint
    assert accel.latest(tmp_path) == str(tmp_path / "step-9")


def test_keep(tmp_path: Path) -> None:
    """Only checkpoints of the same series are removed, only the oldest, and nothing else in their directories."""
    for name in ("best", "epoch-1", "step-x1"):
        accel.save(state(1), tmp_path / name)
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "mine").write_text("x")
    for number in (1, 2, 3, 4, 5):
        accel.save(state(number), tmp_path / f"step-{number}", keep=2)
        if number == 1:
            (tmp_path / "step-1" / "mine").write_text("x")
            (tmp_path / "step-00").symlink_to(tmp_path / "best")
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"best", "epoch-1", "step-x1", "step-0", "step-00", "step-1", "step-4", "step-5"}
    assert [p.name for p in (tmp_path / "step-1").iterdir()] == ["mine"]
    assert value_of(tmp_path / "best") == 1
    accel.save(state(6), tmp_path / "step-6", keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {
        "best",
        "epoch-1",
        "step-x1",
        "step-0",
        "step-00",
        "step-1",
        "step-6",
    }


def test_keep_needs_a_number_in_the_name(tmp_path: Path) -> None:
    for name, keep in (("last", 2), ("step-1", 0)):
        with pytest.raises(CheckpointError, match="keep="):
            accel.save(state(1), tmp_path / name, keep=keep)
        assert not (tmp_path / name).exists()


def link(source: str, target: str) -> None:
    accel.link(source, target)


@pytest.mark.parametrize("world", [1, 2])
def test_link(world: int, tmp_path: Path) -> None:
    """A second name takes no space, replaces what was there, and stays when the first goes."""
    accel.save(state(1), tmp_path / "step-1")
    accel.save(state(2), tmp_path / "best")
    for _ in range(2):
        run(world, link, str(tmp_path / "step-1"), str(tmp_path / "best"))
        shard = next((tmp_path / "best").glob("*.safetensors"))
        assert os.path.samefile(shard, tmp_path / "step-1" / shard.name)
        assert len(list((tmp_path / "best").iterdir())) == 2
    accel.save(state(3), tmp_path / "step-1")
    assert value_of(tmp_path / "best") == 1
    shutil.rmtree(tmp_path / "step-1")
    assert value_of(tmp_path / "best") == 1
    with pytest.raises(CheckpointError, match="does not exist"):
        accel.link(tmp_path / "step-1", tmp_path / "best")
    shard = next((tmp_path / "best").glob("*.safetensors"))
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match="it was cut or changed"):
        accel.link(tmp_path / "best", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def verify_on_ranks(directory: str) -> str:
    try:
        accel.verify(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def test_verify_on_several_ranks(tmp_path: Path) -> None:
    accel.save({"x": torch.zeros(6_000_000)}, tmp_path)
    assert run(2, verify_on_ranks, str(tmp_path)) == ["", ""]
    shard = next(tmp_path.glob("*.safetensors"))
    with open(shard, "r+b") as file:
        file.seek(23_000_000)
        file.write(b"\x01")
    assert all("damaged" in text for text in run(2, verify_on_ranks, str(tmp_path)))


def test_each_says_at_its_end_what_it_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "accel")
    net, path = torch.nn.Linear(500, 500), str(tmp_path / "c")
    accel.save({"net": net}, path)
    accel.load(path, {"net": net})
    accel.verify(path)
    accel.export(path, tmp_path / "out")
    said = [text for text in caplog.messages if " MB in " in text]
    assert [text.partition(": ")[2].partition(" MB in")[0] for text in said] == [
        f"{done}, 1.0" for done in ("saved", "loaded", "verified", "exported")
    ]


CALLS = {
    "dst": lambda root, rank: accel.link(f"{root}/a", f"{root}/l{rank}"),
    "src": lambda root, rank: accel.link(f"{root}/{'ab'[rank]}", f"{root}/l"),
    "dir": lambda root, rank: accel.verify(f"{root}/{'ab'[rank]}"),
    "out": lambda root, rank: accel.export(f"{root}/a", f"{root}/e{rank}"),
    "dtype": lambda root, rank: accel.export(f"{root}/a", f"{root}/e", dtype=["bfloat16", None][rank]),
}


def different_calls(root: str) -> None:
    rank = accel.rank()
    for name in "ab":
        accel.save({"m": torch.nn.Linear(2, 2)}, f"{root}/{name}")
    for argument, call in CALLS.items():
        with pytest.raises(CheckpointError, match=f"got {argument}=.* on rank 0 and {argument}=.* on rank 1"):
            call(root, rank)
    accel.export(f"{root}/a", f"{root}/e", dtype=["bfloat16", torch.bfloat16][rank])
    accel.link(f"{root}/a", f"{root}/l")


def test_ranks_that_ask_for_different_things_are_told(tmp_path: Path) -> None:
    run(2, different_calls, str(tmp_path))
    assert {one.name for one in tmp_path.iterdir()} == {"a", "b", "e", "l"}
