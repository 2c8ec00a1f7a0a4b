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
from accel.checkpoint import record
from accel.errors import CheckpointError
from tests.checkpoint.helpers import distance
from tests.checkpoint.old_states import VALUES, numbered, state_of
from tests.distributed import run

HERE = Path(__file__).parent
WRITTEN = HERE / "written_by_0_1"
#: The samples that both ranks had of the loader when they saved.
GIVEN = {1: {0, 4, 5, 8, 10, 12, 13, 14, 16, 17, 18, 20}, 2: {4, 8, 10, 13, 18, 20}}


def parts(seed: int) -> tuple[nn.Sequential, nn.Sequential, torch.optim.AdamW]:
    """A model whose first layer is frozen, a frozen average of another model, and the model's optimizer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    net[0].requires_grad_(False)
    average = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).requires_grad_(False)
    return net, average, torch.optim.AdamW(net.parameters(), lr=0.1)


def load_old(directory: str) -> None:
    expected, expected_average, raw = parts(0)
    expected(torch.ones(2, 3)).square().mean().backward()
    raw.step()
    net, average, adamw = parts(1)
    model, optimizer, _ = accel.setup(net, adamw, devices="cpu")
    accel.verify(directory)
    found = accel.load(directory, {"model": model, "optimizer": optimizer, "average": average, "step": 0})
    assert found["step"] == 1
    torch.testing.assert_close(accel.full_state_dict(model), dict(expected.state_dict()))
    torch.testing.assert_close(dict(average.state_dict()), dict(expected_average.state_dict()))
    state = accel.full_state_dict(optimizer)["state"]
    torch.testing.assert_close(state, raw.state_dict()["state"])


@pytest.mark.parametrize("world", [1, 2])
def test_files_of_frozen_tensors_load(world: int) -> None:
    run(world, load_old, str(WRITTEN))


def resume(directory: str, backend: str) -> list[float]:
    """Check all that was saved. Return the samples that the loader has left."""
    state, _ = state_of(backend, 9)
    values = {**dict.fromkeys(VALUES), "arrays": [None, None, torch.zeros(3, dtype=torch.int64)]}
    accel.load(directory, {**state, "values": values})
    assert not distance(VALUES, values)
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
def test_all_kinds_of_objects_and_values_load(version: int, world: int, backend: str) -> None:
    directory = HERE / f"written_as_version_{version}"
    accel.verify(directory)
    found = record.read(str(directory))
    assert found.version == version
    left: list[Any] = sum(run(world, resume, str(directory), backend), [])
    assert sorted(left) == sorted(set(map(float, range(24))) - GIVEN[version])


@pytest.mark.parametrize("written", ["written_by_0_1", "written_as_version_2"])
def test_the_next_save_removes_all_of_its_files(written: str, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    shutil.copytree(HERE / written, directory)
    accel.link(directory, tmp_path / "linked")
    assert accel.latest(directory) == str(directory)
    accel.save({"x": torch.ones(3)}, directory)
    assert len(os.listdir(directory)) == 2  # a file and the record
    accel.verify(directory)
    accel.verify(tmp_path / "linked")


@pytest.mark.parametrize("version", [1, 2])
def test_damage_is_found(version: int, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    shutil.copytree(HERE / f"written_as_version_{version}", directory)
    for path in [*directory.glob("*.safetensors"), directory / "accel.json"]:
        content = path.read_bytes()
        for place in (9, 20, 200, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            state: dict[str, Any] = {"half": torch.zeros(4, 3, dtype=torch.half), "complex": torch.zeros(2) + 0j}
            with pytest.raises(CheckpointError, match=path.name):
                accel.verify(directory)
            if path.name == "accel.json":
                with pytest.raises(CheckpointError, match=path.name):
                    accel.load(directory, state)
        path.write_bytes(content)
    accel.verify(directory)
