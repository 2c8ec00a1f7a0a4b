"""Tensors, states and surroundings that are out of the ordinary."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import accel
from accel.__main__ import main
from accel.errors import CheckpointError
from tests.distributed import refusals, run

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


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.note: Any = None

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_extra_state_on_one_side_only(tmp_path: Path) -> None:
    with_it, without = nn.Sequential(Extra()), nn.Sequential(nn.Linear(2, 2))
    with_it[0].note = "a"
    accel.save({"model": with_it}, tmp_path / "with")
    accel.save({"model": without}, tmp_path / "without")
    with pytest.raises(CheckpointError, match="in the checkpoint, not in the state.*0._extra_state"):
        accel.load(tmp_path / "with", {"model": without})
    with pytest.raises(CheckpointError, match="in the state, not in the checkpoint.*0._extra_state"):
        accel.load(tmp_path / "without", {"model": with_it})
    accel.load(tmp_path / "with", {"model": without}, strict=False)
    assert torch.equal(without[0].weight, with_it[0].weight)


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


def test_lazy_modules_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'0.weight' of this Sequential has no shape yet"):
        accel.save({"model": nn.Sequential(nn.LazyLinear(3))}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def stepped(groups: Any) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(groups)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_optimizer_state_that_cannot_be_found_again(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    for where, key in ((net.weight, "a/b"), (net.weight, 3)):
        optimizer = stepped(net.parameters())
        optimizer.state[where][key] = torch.ones(2)
        with pytest.raises(CheckpointError, match="weight in this Adam has a tensor under"):
            accel.save({"model": net, "optimizer": optimizer}, tmp_path / "c")
    optimizer = stepped(net.parameters())
    optimizer.state["calls"] = 5  # type: ignore[index]
    with pytest.raises(CheckpointError, match="'calls', which belongs to none of its parameters"):
        accel.save({"model": net, "optimizer": optimizer}, tmp_path / "c")


def test_optimizer_state_of_other_shapes(tmp_path: Path) -> None:
    """Without a model parameters have no names; their order alone would put state where it does not belong."""
    net = nn.Linear(2, 3)
    accel.save({"optimizer": stepped(net.parameters())}, tmp_path)
    fresh = torch.optim.Adam(reversed(list(net.parameters())))
    with pytest.raises(CheckpointError, match=r"0/exp_avg: \[3, 2\] in the checkpoint, \[3\] here"):
        accel.load(tmp_path, {"optimizer": fresh})
    assert not any(fresh.state.values())


def test_names_and_texts_that_files_cannot_hold(tmp_path: Path) -> None:
    for state in ({"\ud800": torch.ones(3)}, {"a": "\ud83d\ude00"}, {"a": {"\ud83d\ude00": 1}}):
        with pytest.raises(CheckpointError, match="Unicode|surrogate"):
            accel.save(state, tmp_path / "c")
    accel.save({"a": "\ud800", "b": "\U0001f600", "\U0001f600": torch.ones(3)}, tmp_path / "c")
    values = accel.load(tmp_path / "c")
    assert (values["a"], values["b"]) == ("\ud800", "\U0001f600")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    accel.save({"a": 1}, "~/run/step-1")
    assert (tmp_path / "home/run/step-1/accel.json").exists()
    assert accel.latest("~/run") == str(tmp_path / "home/run/step-1")
    assert accel.load("~/run/step-1/") == {"a": 1}
    for path in (None, "", 5, b"bytes", "a\0b", "s3://", "memory:///"):
        for call in (lambda p: accel.save({"a": 1}, p), accel.load, accel.verify, accel.latest):
            with pytest.raises(CheckpointError, match="expected"):
                call(path)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["home"]


@pytest.mark.parametrize("url", ["simplecache::s3://b/x", Path("s3://b/x"), Path("file:///tmp/run")], ids=str)
def test_what_a_path_makes_of_a_url_is_no_directory(
    url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everywhere where a directory is named; nothing is made, and a file's URL is told its path."""
    monkeypatch.chdir(tmp_path)
    accel.save({"m": nn.Linear(2, 2)}, "c")

    def deferred() -> None:
        with accel.deferred_init(weights=url):
            pass

    calls: list[Callable[[], Any]] = [
        lambda: accel.save({"a": 1}, url),
        lambda: accel.save({"a": 1}, url, wait=False),
        lambda: accel.load(url),
        lambda: accel.load(url, {"a": 1}),
        lambda: accel.verify(url),
        lambda: accel.latest(url),
        lambda: accel.link(url, "d"),
        lambda: accel.link("c", url),
        lambda: accel.export(url, "d"),
        lambda: accel.export("c", url),
        deferred,
    ]
    for call in calls:
        with pytest.raises(accel.AccelError, match="give it as text.*without a chain of caches"):
            call()
    with pytest.raises(accel.AccelError, match="mount the bucket"):
        accel.memory_report(nn.Linear(2, 2)).save_plot("s3://bucket/x.png")
    for command in (["verify", url], ["export", url, "d"], ["inspect", url]):
        assert main([str(part) for part in command]) == 1
        assert "is a URL" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["c"]


def test_a_directory_whose_name_looks_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./s3:/bucket", "run:1", "a b/c:d/e", "C:x"):
        accel.save({"a": name}, name)
        assert accel.load(name) == {"a": name}


def test_a_newer_version_is_not_replaced(tmp_path: Path) -> None:
    """Nor is anything of it removed, and another program's directory gets no new file."""
    accel.save({"a": torch.ones(3)}, tmp_path)
    path = tmp_path / "accel.json"
    text = path.read_bytes().replace(b'"version":1,', b'"version":3,')
    text = text[:9] + b"0" * 16 + text[25:]
    path.write_bytes(text[:9] + xxhash.xxh3_64_hexdigest(text).encode() + text[25:])
    (tmp_path / ".accel.lock").unlink()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="version 3"):
        accel.save({"a": torch.zeros(3)}, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_modules(tmp_path: Path) -> None:
    net = torch.jit.script(nn.Linear(2, 2))
    accel.save({"model": net}, tmp_path)
    other = nn.Linear(2, 2)
    accel.load(tmp_path, {"model": other})
    assert torch.equal(other.weight, net.weight)


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


class Plain(nn.Linear):
    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


def average_of_parts(folder: Path) -> None:
    model, _, _ = accel.setup(nn.Linear(4, 4), backend="fsdp")
    accel.save({"average": {n: p.detach().clone() for n, p in model.named_parameters()}}, folder)


def test_what_to_write_instead_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"of this Plain, .*keep_vars.*: write def state_dict\(self, \*args, \*\*kwargs\)"
    ):
        accel.save({"model": Plain(2, 2)}, tmp_path / "c")
    for message in refusals(2, average_of_parts, tmp_path / "c", error="CheckpointError"):
        assert "store value.full_tensor(), called on every rank" in message
    accel.save({"hidden": (torch.ones(2), torch.ones(2))}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r'state\["hidden"\] is a NoneType, and in the checkpoint a tuple'):
        accel.load(tmp_path / "c", {"hidden": None})
    with pytest.raises(CheckpointError, match="does not exist"):
        accel.link(tmp_path / "missing", tmp_path / "missing")


class Written(io.StringIO):
    """What programs put in the place of a standard stream."""

    isatty = None  # type: ignore[assignment]


@pytest.mark.parametrize("error", ["replaced", "closed", "none"])
def test_whatever_standard_error_is(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = {"replaced": Written(), "closed": io.StringIO(), "none": None}[error]
    if error == "closed":
        assert stream is not None
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    accel.save({"x": torch.arange(3)}, tmp_path / "c")
    accel.load(tmp_path / "c", {"x": torch.zeros(3, dtype=torch.int64)})
    accel.verify(tmp_path / "c")
