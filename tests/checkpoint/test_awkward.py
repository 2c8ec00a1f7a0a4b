"""Views, paths, and settings of the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.distributed import refusals, run


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_views_are_saved(wait: bool, tmp_path: Path) -> None:
    views = {
        "every second": torch.arange(10.0)[::2],
        "expanded": torch.ones(1).expand(4),
        "column": torch.arange(12.0).view(3, 4)[:, 1],
        "large": torch.arange(10_000_000)[::2],
    }
    accel.save({"leaves": views, "values": {1: list(views.values())}}, tmp_path / "c", wait=wait)
    found = {name: torch.zeros_like(view, memory_format=torch.contiguous_format) for name, view in views.items()}
    values = [tensor.clone() for tensor in found.values()]
    accel.load(tmp_path / "c", {"leaves": found, "values": {1: values}})
    for view, leaf, value in zip(views.values(), found.values(), values, strict=True):
        assert torch.equal(leaf, view)
        assert torch.equal(value, view)


def test_targets_of_other_forms(tmp_path: Path) -> None:
    floats = torch.tensor([0.5, 300.0])
    matrix = torch.arange(12.0).view(3, 4)
    accel.save({"f": floats, "c": torch.ones(2, dtype=torch.complex64), "m": matrix}, tmp_path)
    for target in (torch.zeros(4, 3).T, torch.zeros(6, 8)[::2, ::2], torch.zeros(3, 4, 2)[..., 0]):
        accel.load(tmp_path, {"m": target})
        assert torch.equal(target, matrix)
    half = torch.zeros(2, dtype=torch.float16)
    accel.load(tmp_path, {"f": half}, convert=True)
    assert half.tolist() == floats.tolist()
    refused: list[tuple[str, torch.Tensor, str]] = [
        ("m", torch.zeros(4).expand(3, 4), "more than one element"),
        ("f", torch.zeros(2, dtype=torch.uint8), "cannot hold its values"),
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


def load_on_meta(directory: str) -> None:
    """Scripts often call ``torch.set_default_device("cuda")``."""
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            net = nn.Linear(3, 5)
        model, optimizer, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend="ddp")
        state = {"model": model, "optimizer": optimizer, "rng": accel.rng_state(), "epoch": 3}
        expected = net.weight.detach().clone()
        for wait in (True, False):
            pending = accel.save(state, directory, wait=wait)
            if pending is not None:
                pending.result(60)
            with torch.no_grad():
                net.weight.zero_()
            accel.load(directory, state)
            assert torch.equal(net.weight, expected)
        accel.verify(directory)
    finally:
        torch.set_default_device(None)


def test_the_default_device_makes_no_difference(tmp_path: Path) -> None:
    run(2, load_on_meta, str(tmp_path / "c"))


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    accel.save({"a": 1}, "~/run/step-1")
    assert (tmp_path / "home/run/step-1/accel.json").exists()
    assert accel.latest("~/run") == str(tmp_path / "home/run/step-1")
    assert accel.load("~/run/step-1/") == {"a": 1}
    # Path makes one slash of two.
    for path, message in ((None, "expected"), ("", "expected"), (5, "expected"), (Path("s3://b/x"), "as a string")):
        for call in (lambda p: accel.save({"a": 1}, p), accel.load, accel.verify, accel.latest):
            with pytest.raises(CheckpointError, match=message):
                call(path)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["home"]


def differing_options(directory: str) -> None:
    state = {"x": torch.ones(3)}
    accel.init()
    accel.save(state, directory)
    odd = bool(accel.rank())
    for call in (
        lambda: accel.save(state, directory, wait=odd),
        lambda: accel.save(state, f"{directory}-1", keep=1 + odd),
        lambda: accel.load(directory, state, strict=odd),
        lambda: accel.load(directory, state, convert=odd),
        lambda: accel.load(directory, {} if odd else state),
    ):
        with pytest.raises(CheckpointError, match="Pass the same"):
            call()
    assert os.listdir(os.path.dirname(directory)) == [os.path.basename(directory)]
    accel.load(directory, state)


def test_options_that_differ_between_ranks(tmp_path: Path) -> None:
    run(2, differing_options, str(tmp_path / "c"))


def average_of_parts(folder: Path) -> None:
    model, _, _ = accel.setup(nn.Linear(4, 4), backend="fsdp")
    average: dict[str, Any] = {n: p.detach().clone() for n, p in model.named_parameters()}
    accel.save({"average": average}, folder)


def test_shards_among_the_values_are_refused(tmp_path: Path) -> None:
    for message in refusals(2, average_of_parts, tmp_path / "c", error="CheckpointError"):
        assert "full_tensor()" in message
