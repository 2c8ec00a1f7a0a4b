"""Whole checkpoints: the newest, links, removed ones, verification."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import accel
from accel.errors import CheckpointError
from tests.checkpoint.helpers import filled, value_of
from tests.distributed import refusals, run


def test_latest(tmp_path: Path) -> None:
    assert accel.latest(tmp_path / "none") is None
    assert accel.latest(tmp_path) is None
    for name in ("step-9", "step-10", "b", "a"):
        accel.save(filled(1), tmp_path / name)
        assert accel.latest(tmp_path) == str(tmp_path / name)
        assert accel.latest(str(tmp_path / name)) == str(tmp_path / name)
    next((tmp_path / "a").glob("*.safetensors")).unlink()
    assert accel.latest(tmp_path) == str(tmp_path / "b")
    (tmp_path / "b" / "accel.json").write_text("{}")
    assert accel.latest(tmp_path) == str(tmp_path / "step-10")
    accel.save(filled(2), tmp_path / "step-9")
    assert accel.latest(tmp_path) == str(tmp_path / "step-9")
    accel.link(tmp_path / "step-10", tmp_path / "best")  # a second name is as old as the checkpoint
    assert accel.latest(tmp_path) == str(tmp_path / "step-9")


def test_keep(tmp_path: Path) -> None:
    for name in ("best", "epoch-1", "step-x1"):
        accel.save(filled(1), tmp_path / name)
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "mine").write_text("x")
    for number in (1, 2, 3, 4, 5):
        accel.save(filled(number), tmp_path / f"step-{number}", keep=2)
        if number == 1:
            (tmp_path / "step-1" / "mine").write_text("x")
            (tmp_path / "step-00").symlink_to(tmp_path / "best")
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"best", "epoch-1", "step-x1", "step-0", "step-00", "step-1", "step-4", "step-5"}
    assert [p.name for p in (tmp_path / "step-1").iterdir()] == ["mine"]
    assert value_of(tmp_path / "best") == 1
    accel.save(filled(6), tmp_path / "step-6", keep=1)
    for name, keep in (("last", 2), ("step-7", 0)):
        with pytest.raises(CheckpointError, match="keep="):
            accel.save(filled(1), tmp_path / name, keep=keep)
    assert {p.name for p in tmp_path.iterdir()} == names - {"step-4", "step-5"} | {"step-6"}


@pytest.mark.parametrize("world", [1, 2])
def test_link(world: int, tmp_path: Path) -> None:
    source, best = tmp_path / "step-1", tmp_path / "best"
    accel.save(filled(1), source)
    accel.save(filled(2), best)
    run(world, accel.link, str(source), str(best))
    shard = next(best.glob("*.safetensors"))
    assert os.path.samefile(shard, source / shard.name)
    assert len(list(best.iterdir())) == 2
    accel.save(filled(3), source)
    assert value_of(best) == 1
    shutil.rmtree(source)
    assert value_of(best) == 1
    with pytest.raises(CheckpointError, match="does not exist"):
        accel.link(source, best)
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match="was truncated or changed"):
        accel.link(best, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_verify_on_several_ranks(tmp_path: Path) -> None:
    accel.save({"x": torch.zeros(6_000_000)}, tmp_path)
    run(2, accel.verify, str(tmp_path))
    with open(next(tmp_path.glob("*.safetensors")), "r+b") as file:
        file.seek(23_000_000)
        file.write(b"\x01")
    messages = refusals(2, accel.verify, str(tmp_path), error="CheckpointError")
    assert all("damaged" in text for text in messages)
