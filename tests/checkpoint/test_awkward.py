"""Tensors, states and surroundings that are out of the ordinary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accel
from accel.errors import CheckpointError

VIEWS = {
    "every second": torch.arange(10.0)[::2],
    "expanded": torch.ones(1).expand(4),
    "all from one": torch.tensor(3.0).expand(2, 3),
    "column": torch.arange(12.0).view(3, 4)[:, 1],
    "large": torch.arange(10_000_000)[::2],
    "windows": torch.arange(10.0).unfold(0, 4, 1),
}


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("name", VIEWS)
def test_elements_that_are_not_neighbours_in_memory(name: str, wait: bool, tmp_path: Path) -> None:
    view = VIEWS[name]
    accel.save({"tensor": view, "values": {1: [view], "list": [1]}}, tmp_path / "c", wait=wait)
    target = torch.zeros_like(view, memory_format=torch.contiguous_format)
    state = accel.load(tmp_path / "c", {"tensor": target, "values": {1: [torch.zeros_like(target)]}})
    assert torch.equal(target, view)
    assert torch.equal(state["values"][1][0], view)


def test_views_are_filled_where_each_element_has_a_place(tmp_path: Path) -> None:
    saved = torch.arange(12.0).view(3, 4)
    accel.save({"tensor": saved}, tmp_path)
    for target in (torch.zeros(4, 3).T, torch.zeros(6, 8)[::2, ::2], torch.zeros(3, 4, 2)[..., 0]):
        accel.load(tmp_path, {"tensor": target})
        assert torch.equal(target, saved)
    for target in (torch.zeros(4).expand(3, 4), torch.zeros(6).unfold(0, 4, 1)):
        before = target.clone()
        with pytest.raises(CheckpointError, match=r'state\["tensor"\]: its elements share memory.*clone'):
            accel.load(tmp_path, {"tensor": target})
        assert torch.equal(target, before)
