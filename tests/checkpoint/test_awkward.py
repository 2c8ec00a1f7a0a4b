"""Views, paths, versions, and settings of the process that a save or load meets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
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


def test_views_are_filled_if_each_element_has_memory(tmp_path: Path) -> None:
    saved = torch.arange(12.0).view(3, 4)
    accel.save({"tensor": saved}, tmp_path)
    for target in (torch.zeros(4, 3).T, torch.zeros(6, 8)[::2, ::2], torch.zeros(3, 4, 2)[..., 0]):
        accel.load(tmp_path, {"tensor": target})
        assert torch.equal(target, saved)
    expanded = torch.zeros(4).expand(3, 4)
    with pytest.raises(CheckpointError, match="share memory"):
        accel.load(tmp_path, {"tensor": expanded})
    assert not expanded.any()


def load_on_meta(directory: str) -> None:
    """With another default device and dtype, as ``torch.set_default_device("cuda")`` is common in scripts."""
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


@pytest.mark.parametrize("world", [1, 2])
def test_the_default_device_makes_no_difference(world: int, tmp_path: Path) -> None:
    run(world, load_on_meta, str(tmp_path / "c"))


def test_what_cannot_hold_the_saved_values_is_refused(tmp_path: Path) -> None:
    accel.save({"f": torch.tensor([0.5, 300.0]), "c": torch.ones(2, dtype=torch.complex64)}, tmp_path)
    targets = {
        "f": (torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.bool), torch.zeros(2, device="meta")),
        "c": (torch.zeros(2),),
    }
    for key, wrong in targets.items():
        for target in wrong:
            with pytest.raises(CheckpointError, match="cannot hold its values|meta device"):
                accel.load(tmp_path, {key: target}, convert=True)
    half = torch.zeros(2, dtype=torch.float16)
    accel.load(tmp_path, {"f": half}, convert=True)
    assert half.tolist() == [0.5, 300.0]


def test_lazy_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="uninitialized parameter"):
        accel.save({"model": nn.Sequential(nn.LazyLinear(3))}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def stepped(groups: Any) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(groups)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_optimizer_state_of_other_shapes(tmp_path: Path) -> None:
    """Without a model parameters have no names; their order alone would put state where it does not belong."""
    net = nn.Linear(2, 3)
    accel.save({"optimizer": stepped(net.parameters())}, tmp_path)
    fresh = torch.optim.Adam(reversed(list(net.parameters())))
    with pytest.raises(CheckpointError, match=r"0/exp_avg: \[3, 2\] in the checkpoint, \[3\] here"):
        accel.load(tmp_path, {"optimizer": fresh})
    assert not any(fresh.state.values())


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    accel.save({"a": 1}, "~/run/step-1")
    assert (tmp_path / "home/run/step-1/accel.json").exists()
    assert accel.latest("~/run") == str(tmp_path / "home/run/step-1")
    assert accel.load("~/run/step-1/") == {"a": 1}
    for path in (None, "", 5):
        for call in (lambda p: accel.save({"a": 1}, p), accel.load, accel.verify, accel.latest):
            with pytest.raises(CheckpointError, match="expected"):
                call(path)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["home"]


def test_a_url_in_a_path_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Path`` makes one slash of two."""
    monkeypatch.chdir(tmp_path)
    url = Path("s3://bucket/x")
    for call in (lambda: accel.save({"a": 1}, url), lambda: accel.load(url), lambda: accel.latest(url)):
        with pytest.raises(CheckpointError, match="Pass a URL as a string"):
            call()
    assert not os.listdir(tmp_path)


def test_a_newer_version_is_not_replaced(tmp_path: Path) -> None:
    """Nor is anything of it removed, and another program's directory gets no new file."""
    accel.save({"a": torch.ones(3)}, tmp_path)
    path = tmp_path / "accel.json"
    text = path.read_bytes().replace(b'"version":3,', b'"version":4,')[:-27]
    path.write_bytes(text + f',"xxh3":"{xxhash.xxh3_64_hexdigest(text)}"}}'.encode())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="version 4"):
        accel.save({"a": torch.zeros(3)}, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def differing_options(directory: str) -> list[str]:
    state = {"x": torch.ones(3)}
    accel.init()
    accel.save(state, directory)
    odd = bool(accel.rank())
    found = []
    for call in (
        lambda: accel.save(state, directory, wait=odd),
        lambda: accel.save(state, f"{directory}-1", keep=1 + odd),
        lambda: accel.load(directory, state, strict=odd),
        lambda: accel.load(directory, state, convert=odd),
        lambda: accel.load(directory, {} if odd else state),
    ):
        with pytest.raises(CheckpointError, match=r"[Pp]ass the same|give every\s+rank the same") as caught:
            call()
        found.append(str(caught.value))
    assert os.listdir(os.path.dirname(directory)) == [os.path.basename(directory)]
    accel.load(directory, state)
    return found


def test_options_that_differ_between_ranks(tmp_path: Path) -> None:
    one, other = run(2, differing_options, str(tmp_path / "c"))
    assert one == other


def average_of_parts(folder: Path) -> None:
    model, _, _ = accel.setup(nn.Linear(4, 4), backend="fsdp")
    accel.save({"average": {n: p.detach().clone() for n, p in model.named_parameters()}}, folder)


def test_shards_among_the_values_are_refused(tmp_path: Path) -> None:
    for message in refusals(2, average_of_parts, tmp_path / "c", error="CheckpointError"):
        assert "full_tensor()" in message
