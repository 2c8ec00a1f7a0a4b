"""Checkpoints that earlier versions wrote on two ranks.

``written_by_0_1``: frozen tensors lie in files of their own, and the record names a node. ``written_as_version_1`` and
``_2``: the states of ``old_states.py`` of ``ddp`` and of tensor parallelism, which cuts weights along columns.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.checkpoint.helpers import differences, flipped
from tests.checkpoint.old_states import VALUES, numbered, state_of
from tests.distributed import run

HERE = Path(__file__).parent
WRITTEN = HERE / "written_by_0_1"
#: The samples that both ranks had of the loader when they saved.
GIVEN = {1: {0, 4, 5, 8, 10, 12, 13, 14, 16, 17, 18, 20}, 2: {4, 8, 10, 13, 18, 20}}


def test_files_of_frozen_tensors_load() -> None:
    torch.manual_seed(0)
    expected, average, other, loaded = (nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)) for _ in range(4))
    state = accel.load(WRITTEN, {"model": loaded, "average": other, "step": 0})
    assert state["step"] == 1
    assert not differences(dict(other.state_dict()), dict(average.state_dict()))
    assert not differences(dict(loaded[0].state_dict()), dict(expected[0].state_dict()))


def resume(directory: str, backend: str) -> list[float]:
    """Check all that was saved. Return the samples that the loader has left."""
    state = state_of(backend, 9)
    values = {**dict.fromkeys(VALUES), "arrays": [None, None, torch.zeros(3, dtype=torch.int64)]}
    accel.load(directory, {**state, "values": values})
    assert not differences(VALUES, values)
    weights, optimizer = accel.full_state_dict(state["model"]), accel.full_state_dict(state["optimizer"])
    for number, weight in enumerate(weights.values()):
        assert torch.equal(weight.cpu(), numbered(weight.shape, 1 + 100 * number))
        own = optimizer["state"][number]
        assert torch.equal(own["exp_avg"], numbered(weight.shape, 1001))
        assert torch.equal(own["exp_avg_sq"], numbered(weight.shape, 2001))
        assert float(own["step"]) == 1.0
    assert optimizer["param_groups"][0]["lr"] == 1.1
    assert state["complex"].tolist() == [1 + 2j, 3]
    assert torch.equal(state["half"], numbered((4, 3), 1).half())
    return [sample for (batch,) in state["loader"] for sample in batch.tolist()]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("world", "backend"), [(1, "single"), (2, "fsdp")])
def test_all_kinds_of_objects_load(version: int, world: int, backend: str) -> None:
    directory = HERE / f"written_as_version_{version}"
    accel.verify(directory)
    left: list[Any] = sum(run(world, resume, str(directory), backend), [])
    assert sorted(left) == sorted(set(map(float, range(24))) - GIVEN[version])


@pytest.mark.parametrize("written", ["written_by_0_1", "written_as_version_2"])
def test_the_next_save_removes_them(written: str, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    shutil.copytree(HERE / written, directory)
    accel.link(directory, tmp_path / "linked")
    assert accel.latest(directory) == str(directory)
    accel.save({"x": torch.ones(3)}, directory)
    assert len(os.listdir(directory)) == 2  # a file and the record
    accel.verify(directory)
    accel.verify(tmp_path / "linked")


@pytest.mark.parametrize("version", [1, 2])
def test_damaged_record_is_found(version: int, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    shutil.copytree(HERE / f"written_as_version_{version}", directory)
    path = directory / "accel.json"
    content = path.read_bytes()
    for place in (9, 20, 200, len(content) // 2, len(content) - 2):
        path.write_bytes(flipped(content, place))
        with pytest.raises(CheckpointError, match=path.name):
            accel.verify(directory)
        with pytest.raises(CheckpointError, match=path.name):
            accel.load(directory, {"half": torch.zeros(4, 3, dtype=torch.half)})
    path.write_bytes(content)
    accel.verify(directory)
