"""Damaged checkpoints and other directories are refused by name; nothing is changed, unless the error says so."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.checkpoint.helpers import flipped, rewrite, shard_of
from tests.distributed import run


def make_state(value: float) -> dict[str, Any]:
    net = nn.Linear(40, 7)
    for p in net.parameters():
        nn.init.constant_(p, value)
    optimizer = torch.optim.SGD(net.parameters(), lr=value, momentum=0.9)
    if value:
        net(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    return {"net": net, "opt": optimizer, "x": torch.full((30,), value), "n": value, "s": {"deep": [value]}}


def flat(state: dict[str, Any]) -> Any:
    optimizer = state["opt"].state_dict()
    kept = [*state["net"].state_dict().values(), *(v["momentum_buffer"] for v in optimizer["state"].values())]
    return [[t.tolist() for t in kept], optimizer["param_groups"], state["x"].tolist(), state["n"], state["s"]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "c"
    accel.save(make_state(1.0), path)
    return path


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "c"))


PARTLY = "The state may be partly filled"


def refused(directory: Path, message: str) -> str:
    """Load a checkpoint that must be refused; nothing is changed, unless the error says so."""
    state = make_state(0.0)
    before = flat(state)
    with pytest.raises(CheckpointError, match=message) as caught:
        accel.load(directory, state)
    if PARTLY not in str(caught.value):
        assert flat(state) == before
        assert not state["opt"].state
    return str(caught.value)


@pytest.mark.parametrize("how", ["changed", "cut", "longer", "missing"])
def test_files_that_are_not_complete(how: str, copy: Path, tmp_path: Path) -> None:
    path = shard_of(copy)
    content = path.read_bytes()
    changed = flipped(content, -1, 7)
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"changed": changed, "cut": content[:-10], "longer": content + b"x"}[how])
    text = refused(copy, path.name)
    with pytest.raises(CheckpointError, match=path.name):
        accel.verify(copy)
    if how == "changed":
        assert re.search(rf"damaged between bytes \d+ and \d+, in .*net/weight.*{PARTLY}", text)
    else:
        assert accel.latest(tmp_path) is None


def test_what_is_no_checkpoint(copy: Path, tmp_path: Path) -> None:
    rewrite(copy, version=4)
    assert "update accel" in refused(copy, "version 4")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/pytorch_model.bin").write_text("x")
    accel.save({"n": 1}, tmp_path / "several/step-1")
    for name, message in {
        "empty": "has no accel.json",
        "other": "has no accel.json",
        "no": "does not exist",
        "several": "contains checkpoints .step-1",
    }.items():
        refused(tmp_path / name, message)


def save_there(directory: str) -> None:
    state = make_state(1.0)
    model, optimizer, _ = accel.setup(state["net"], state["opt"], backend="ddp")
    accel.save({**state, "net": model, "opt": optimizer}, directory)


def load_flipped(directory: str, places: list[tuple[str, int]]) -> int:
    """Change one byte after another: how many loads were refused by name, with nothing changed or a word about it."""
    state = make_state(0.0)
    refusals_seen = 0
    for name, at in places:
        path = Path(directory, name)
        content = path.read_bytes()
        accel.barrier()
        if accel.is_main():
            path.write_bytes(flipped(content, at, at % 8))
        accel.barrier()
        before = repr(flat(state))  # damage that was read may be NaN, which equals nothing
        with pytest.raises(CheckpointError, match=re.escape(name)) as caught:
            accel.load(directory, state)
        refusals_seen += PARTLY in str(caught.value) or repr(flat(state)) == before
        accel.barrier()
        if accel.is_main():
            path.write_bytes(content)
    accel.barrier()
    accel.load(directory, state)
    assert flat(state) == flat(make_state(1.0))
    return refusals_seen


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """At 500 places in the record, in the headers and in the data of both files, on both ranks."""
    run(2, save_there, str(tmp_path))
    numbers = random.Random(0)
    places: list[tuple[str, int]] = []
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 2
    for path in shards:
        content = path.read_bytes()
        data = 8 + int.from_bytes(content[:8], "little")
        places += [(path.name, at) for at in (*range(8), *numbers.sample(range(8, data), 92))]
        places += [(path.name, at) for at in numbers.sample(range(data, len(content)), 100)]
    size = (tmp_path / "accel.json").stat().st_size
    last = range(size - 27, size)
    places += [("accel.json", at) for at in (0, *last, *numbers.sample(range(1, size - 27), 72))]
    assert len(set(places)) == 500
    assert run(2, load_flipped, str(tmp_path), places) == [500, 500]


def test_mismatches_name_both_sides(good: Path) -> None:
    state = {**make_state(0.0), "net": nn.Sequential(nn.Linear(40, 9)), "more": 3, "x": torch.zeros(31)}
    del state["opt"]
    before = [p.clone() for p in state["net"].parameters()]
    with pytest.raises(CheckpointError, match="nothing was changed") as caught:
        accel.load(good, state)
    for text in (
        'in the state, not in the checkpoint: state["more"], state["net"], 0.weight, state["net"], 0.bias',
        'in the checkpoint, not in the state: state["net"], bias, state["net"], weight',
        'state["x"]: [30] in the checkpoint, [31] here',
    ):
        assert text in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, state["net"].parameters(), strict=True))


def test_not_strict_loads_what_fits(good: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {**make_state(0.0), "net": nn.Linear(40, 7, bias=False), "more": 3}
    del state["opt"]
    accel.load(good, state, strict=False)
    assert torch.equal(state["net"].weight, make_state(1.0)["net"].weight)
    assert (state["more"], state["n"]) == (3, 1.0)
    assert 'state["more"]' in caplog.text
    assert "bias" in caplog.text
    with pytest.raises(CheckpointError, match="no tensor fits the state"):
        accel.load(good, {"net": nn.Sequential(nn.Linear(40, 7))}, strict=False)
