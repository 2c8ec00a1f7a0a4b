"""Paths, targets, and values that are shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.distributed import refusals


def test_targets_that_hold_no_values(tmp_path: Path) -> None:
    accel.save({"f": torch.ones(2), "c": torch.ones(2) + 1j, "m": torch.ones(3, 4)}, tmp_path)
    refused: list[tuple[str, torch.Tensor, str]] = [
        ("m", torch.zeros(4).expand(3, 4), "more than one element"),
        ("f", torch.zeros(2, dtype=torch.bool), "cannot hold its values"),
        ("f", torch.zeros(2, device="meta"), "meta device"),
        ("c", torch.zeros(2), "cannot hold its values"),
    ]
    for key, target, message in refused:
        with pytest.raises(CheckpointError, match=message):
            accel.load(tmp_path, {key: target}, convert=True)
    accel.save({"net": nn.Linear(2, 2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r'state\["net"\] is on the meta device'):
        accel.load(tmp_path, {"net": nn.Linear(2, 2, device="meta")})


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    accel.save({"a": 1}, "~/run/step-1")
    assert accel.latest("~/run") == str(tmp_path / "home/run/step-1")
    assert accel.load("~/run/step-1/") == {"a": 1}
    calls: list[Any] = [lambda path: accel.save({"a": 1}, path), accel.load, accel.verify, accel.latest]
    # Path makes one slash of two.
    for path, message in ((None, "expected"), ("", "expected"), (Path("s3://b/x"), "as a string")):
        for call in calls:
            with pytest.raises(CheckpointError, match=message):
                call(path)
    assert os.listdir(tmp_path) == ["home"]


def average_of_parts(folder: Path) -> None:
    model, _, _ = accel.setup(nn.Linear(4, 4), backend="fsdp")
    average: dict[str, Any] = {n: p.detach().clone() for n, p in model.named_parameters()}
    accel.save({"average": average}, folder)


def test_shards_among_the_values_are_refused(tmp_path: Path) -> None:
    for message in refusals(2, average_of_parts, tmp_path / "c", error="CheckpointError"):
        assert "full_tensor()" in message
