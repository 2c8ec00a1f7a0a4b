"""A checkpoint that accel 0.1 wrote on two ranks: frozen tensors lie in files of their own, and the record names a node."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.distributed import refusals, run

WRITTEN = Path(__file__).parent / "written_by_0_1"


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


def test_the_next_save_removes_all_of_its_files(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    shutil.copytree(WRITTEN, directory)
    accel.link(directory, tmp_path / "linked")
    assert accel.latest(directory) == str(directory)
    accel.save({"x": torch.ones(3)}, directory)
    assert len(os.listdir(directory)) == 3  # a file, the record and the lock
    accel.verify(directory)
    load_old(str(tmp_path / "linked"))


def test_files_on_disks_of_other_nodes_are_an_error(tmp_path: Path) -> None:
    """With ``placement="host"`` each node has the record and its own files."""
    directory = tmp_path / "c"
    shutil.copytree(WRITTEN, directory)
    next(directory.glob("*-00001.safetensors")).unlink()
    message = (
        "was saved to the disks of node-1, and some of its files are not here. Copy all of its files into one directory"
    )
    for text in refusals(2, load_old, str(directory), error="CheckpointError"):
        assert message in text
    with pytest.raises(CheckpointError, match=message):
        accel.verify(directory)
    assert accel.latest(directory) is None
