"""Damaged, crafted and foreign checkpoints are refused by name, and nothing is changed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import accel
from accel.checkpoint.safetensors import CHUNK
from accel.errors import CheckpointError
from tests.checkpoint.crafting import header_of, rewrite, shard_of, write_header
from tests.distributed import refusals, run


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


def refused(directory: Path, message: str, check: str = "first") -> str:
    state = make_state(0.0)
    before = flat(state)
    with pytest.raises(CheckpointError, match=message) as caught:
        accel.load(directory, state, check=check)  # type: ignore[arg-type]
    if check == "first":
        assert flat(state) == before
        assert not state["opt"].state
    return str(caught.value)


@pytest.mark.parametrize("check", ["first", "stream"])
def test_every_flipped_byte_is_found(good: Path, tmp_path: Path, check: str) -> None:
    """In the record and in the shard, wherever it is."""
    for file in (good / "accel.json", shard_of(good)):
        size = file.stat().st_size
        for at in sorted({*range(0, size, 131), *range(12), size - 1}):
            copy = Path(shutil.copytree(good, tmp_path / f"{file.name}-{at}"))
            content = bytearray((copy / file.name).read_bytes())
            content[at] ^= 1 << at % 8
            (copy / file.name).write_bytes(content)
            assert file.name in refused(copy, "accel.json|safetensors", check)
            with pytest.raises(CheckpointError):
                accel.verify(copy)
            shutil.rmtree(copy)


def test_the_tensor_is_named(copy: Path) -> None:
    path = shard_of(copy)
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)
    assert re.search(r"damaged between bytes \d+ and \d+, in .*net/weight", refused(copy, "damaged"))
    state = make_state(0.0)
    with pytest.raises(CheckpointError, match="the state may be partly filled"):
        accel.load(copy, state, check="stream")


@pytest.mark.parametrize("how", ["cut", "longer", "missing", "link", "folder", "pipe", "unreadable"])
def test_files_that_are_not_there_whole(how: str, copy: Path, tmp_path: Path) -> None:
    path = shard_of(copy)
    whole = path.read_bytes()
    if how in ("cut", "longer"):
        path.write_bytes(whole[:-10] if how == "cut" else whole + b"x")
    else:
        path.unlink()
        if how == "link":
            (tmp_path / "elsewhere").write_bytes(whole)
            path.symlink_to(tmp_path / "elsewhere")
        elif how == "folder":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "unreadable":
            path.symlink_to(path.name)
    text = refused(copy, "safetensors")
    assert path.name in text
    assert ("load another one" in text) == (how == "missing")
    with pytest.raises(CheckpointError, match="safetensors"):
        accel.verify(copy)
    assert accel.latest(tmp_path) is None or how in ("link", "folder", "pipe", "unreadable")


def tensor(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["tensors"]["net/weight"]
    return found


CRAFTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "traversal": lambda b: b["files"][0].update(name="../c/" + b["files"][0]["name"]),
    "absolute": lambda b: b["files"][0].update(name="/etc/passwd.safetensors"),
    "hidden": lambda b: b["files"][0].update(name=".x.safetensors"),
    "no string": lambda b: b["files"][0].update(name=["a"]),
    "twice": lambda b: b["files"].append(b["files"][0]),
    "huge shape": lambda b: tensor(b).update(shape=[2**61, 2**61]),
    "huge part": lambda b: tensor(b).update(shape=[10**12], parts=[[0, 0, 10**12, 1]]),
    "many parts": lambda b: tensor(b).update(shape=[10**12], parts=[[0, 0, 1, 10**12]]),
    "one file for many tensors": lambda b: b["tensors"].update(
        {f"t{i}": b["tensors"]["net/weight"] for i in range(99)}
    ),
    "no time": lambda b: b.update(time=1e300),
    "negative": lambda b: tensor(b).update(shape=[-1, -280]),
    "overlap": lambda b: tensor(b).update(parts=[[0, 0, 280, 1], [0, 0, 280, 1]]),
    "hole": lambda b: tensor(b).update(parts=[[0, 10, 270, 1]]),
    "other range": lambda b: tensor(b).update(parts=[[0, 0, 100, 1], [0, 100, 180, 1]]),
    "other file": lambda b: tensor(b).update(parts=[[7, 0, 280, 1]]),
    "other dtype": lambda b: tensor(b).update(dtype="I32"),
    "no dtype": lambda b: tensor(b).update(dtype="eval"),
    "bool": lambda b: tensor(b).update(shape=[True, 280]),
    "float": lambda b: tensor(b).update(shape=[7.0, 40]),
    "many dimensions": lambda b: tensor(b).update(shape=[1] * 10**6),
    "duplicate key": lambda b: json.dumps(b)[:-1] + ', "values": {}}',
    "nan": lambda b: json.dumps(b).replace('"n": 1.0', '"n": NaN'),
    "deep": lambda b: json.dumps(b).replace('"n": 1.0', '"n": ' + "[" * 10**5 + "]" * 10**5),
    "huge number": lambda b: json.dumps(b).replace('"n": 1.0', '"n": ' + "9" * 5000),
    "no values": lambda b: b.pop("values"),
    "values are a list": lambda b: b.update(values=[1]),
    "a list": lambda b: "[1]",
    "newer": lambda b: b.update(version=3),
    "unknown tag": lambda b: b["values"].update(n={"!": "os.system", "items": ["true"]}),
    "kept tensor that is not there": lambda b: b["values"].update(n={"!": "tensor", "name": "~9"}),
    "module for a value": lambda b: b["values"].update(n=b["values"]["net"]),
    "value for a module": lambda b: b["values"].update(net=1),
    "groups": lambda b: b["values"]["opt"].update(groups=[{"params": ["weight"]}]),
    "no groups": lambda b: b["values"]["opt"].pop("groups"),
    "groups are numbers": lambda b: b["values"]["opt"].update(groups=[1]),
    "other optimizer": lambda b: b["values"]["opt"].update({"class": "Adam"}),
    "other parameters": lambda b: b["values"]["opt"]["groups"][0].update(params=["bias", "weight"]),
    "state of nobody": lambda b: b["values"]["opt"]["state"].update(nobody={}),
    "state is a list": lambda b: b["values"]["opt"].update(state=[]),
}


#: Changes to what the load below does not ask for, which no byte of the files betrays.
NONSENSE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bytes that are none": lambda b: b["values"].update(other={"!": "bytes", "data": "*"}),
    "a set of lists": lambda b: b["values"]["s"].update(other={"!": "set", "items": [[1], [2]]}),
    "a key twice": lambda b: b["values"].update(other={"!": "dict", "items": [[1, 2], [1, 3]]}),
    "an infinite number": lambda b: json.dumps(b).replace('"n": 1.0', '"n": 1e999'),
    "a tensor without a name": lambda b: b["values"].update(x={"!": "tensor", "name": 5}),
    "one tensor for two values": lambda b: b["values"].update(y=b["values"]["kept"]),
    "a value that is a model's tensor": lambda b: b["values"]["kept"].update(items=[{"!": "tensor", "name": "~9"}]),
    "an array of another size": lambda b: array(b).update(shape=[7]),
    "an object in a set": lambda b: b["values"].update(other={"!": "set", "items": [{"!": "module", "extra": {}}]}),
    "a module without its values": lambda b: b["values"]["net"].pop("extra"),
    "values of a rank": lambda b: b.update(ranks=[{}]),
    "a rank too many": lambda b: b["ranks"].append({"rng": {}}),
    "no rank": lambda b: b.update(world_size=0, ranks=[]),
    "state of a rank": lambda b: b["ranks"][0].update(rng={"!": "int", "value": "x"}),
    "objects nested too deeply": lambda b: b["values"].update(other=nested(b["values"]["net"], 200)),
}


def array(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["values"]["kept"]["items"][0][0]
    assert found["!"] == "ndarray"
    return found


def nested(inner: Any, levels: int) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.mark.parametrize("how", NONSENSE)
def test_a_record_of_nonsense_is_refused_by_load_and_verify(how: str, tmp_path: Path) -> None:
    state = {**make_state(1.0), "kept": deque([numpy.ones(500)]), "rng": accel.rng_state()}
    accel.save(state, tmp_path / "c")
    accel.verify(tmp_path / "c")
    rewrite(tmp_path / "c", NONSENSE[how])
    for read in (accel.load, accel.verify, lambda path: accel.load(path, {"n": 0})):
        with pytest.raises(CheckpointError, match=r"accel\.json"):
            read(tmp_path / "c")


@pytest.mark.parametrize("how", CRAFTED)
def test_crafted_records(how: str, copy: Path) -> None:
    rewrite(copy, CRAFTED[how])
    message = refused(copy, ".")
    assert "accel.json" in message or "safetensors" in message or "does not fit" in message, message
    if how == "newer":
        assert "update accel" in message


def test_a_record_that_is_put_right_loads(copy: Path) -> None:
    """So that the tests above are refused for what they change."""
    rewrite(copy, lambda body: None)
    state = make_state(0.0)
    accel.load(copy, state)
    assert flat(state) == flat(make_state(1.0))


def shard_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a shard's header, and the record's checksum of it."""
    header = header_of(directory)
    change(header)
    write_header(directory, json.dumps(header, separators=(",", ":")).encode())


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "swapped": lambda h: h["net/weight"].update(data_offsets=h["opt/weight/momentum_buffer"]["data_offsets"]),
    "other shape": lambda h: h["net/weight"].update(shape=[40, 7]),
    "other dtype": lambda h: h["net/weight"].update(dtype="I32"),
    "outside": lambda h: h["x"].update(data_offsets=[9, 9**9]),
    "missing": lambda h: h.pop("x"),
    "no checksums": lambda h: h["__metadata__"].update(xxh3=""),
    "no metadata": lambda h: h.pop("__metadata__"),
    "a number": lambda h: h.update(x=1),
}


@pytest.mark.parametrize("how", HEADERS)
def test_crafted_headers(how: str, copy: Path) -> None:
    shard_header(copy, HEADERS[how])
    assert shard_of(copy).name in refused(copy, "safetensors")


@pytest.mark.parametrize("names", [[], ["pytorch_model.bin"], [".metadata", "__0_0.distcp"]])
def test_what_is_no_checkpoint(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointError, match=re.escape("has no accel.json")) as caught:
        accel.load(tmp_path)
    assert not names or names[0] in str(caught.value)
    with pytest.raises(CheckpointError, match="does not exist"):
        accel.load(tmp_path / "no")
    accel.save({"n": 1}, tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=re.escape("holds checkpoints (step-1) but is none")):
        accel.load(tmp_path)


def load_damaged(directory: str) -> Any:
    state = make_state(0.0)
    before = flat(state)
    model, optimizer, _ = accel.setup(state["net"], state["opt"], backend="ddp")
    try:
        accel.load(directory, {**state, "net": model, "opt": optimizer})
    except CheckpointError:
        after = flat(state)
        assert after == before
        assert not state["opt"].state
        raise


def save_there(directory: str) -> None:
    accel.save(make_state(1.0), directory)


def load_flipped(directory: str, places: list[tuple[str, int]]) -> int:
    """Load with one changed byte after another; how many were refused, by name and with nothing changed."""
    state = make_state(0.0)
    before = flat(state)
    refusals_seen = 0
    for name, at in places:
        path = Path(directory, name)
        content = path.read_bytes()
        accel.barrier()
        if accel.is_main():
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        accel.barrier()
        with pytest.raises(CheckpointError, match=re.escape(name)):
            accel.load(directory, state)
        refusals_seen += flat(state) == before
        accel.barrier()
        if accel.is_main():
            path.write_bytes(content)
    accel.barrier()
    accel.load(directory, state)
    assert flat(state) == flat(make_state(1.0))
    return refusals_seen


def test_a_changed_byte_anywhere_is_refused_with_the_name_on_all_ranks(tmp_path: Path) -> None:
    """500 places in the record, in the headers and in the data of both ranks' files."""
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
    places += [("accel.json", at) for at in (*range(27), size - 1, *numbers.sample(range(27, size - 1), 72))]
    assert len(set(places)) == 500
    assert run(2, load_flipped, str(tmp_path), places) == [500, 500]


def test_damage_is_an_error_on_all_ranks(copy: Path) -> None:
    path = shard_of(copy)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    messages = refusals(2, load_damaged, str(copy), error="CheckpointError")
    assert all(path.name in message for message in messages)


class Other(nn.Linear):
    pass


def test_mismatches_name_both_sides(good: Path) -> None:
    state = make_state(0.0)
    state["net"] = nn.Sequential(nn.Linear(40, 9))
    state["more"] = 3
    del state["opt"]
    state["x"] = torch.zeros(31, dtype=torch.int64)
    before = [p.clone() for p in state["net"].parameters()]
    with pytest.raises(CheckpointError, match="nothing was changed") as caught:
        accel.load(good, state)
    text = str(caught.value)
    assert 'in the state, not in the checkpoint: state["more"], state["net"], 0.weight, state["net"], 0.bias' in text
    assert 'in the checkpoint, not in the state: state["net"], bias, state["net"], weight' in text
    assert 'state["x"]: [30] in the checkpoint, [31] here' in text
    assert all(torch.equal(a, b) for a, b in zip(before, state["net"].parameters(), strict=True))


def test_not_strict_loads_what_fits_and_says_what_not(good: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = make_state(0.0)
    state["net"] = nn.Linear(40, 7, bias=False)
    state["more"] = 3
    del state["opt"]
    accel.load(good, state, strict=False)
    assert state["net"].weight.unique().tolist() == make_state(1.0)["net"].weight.unique().tolist()
    assert state["more"] == 3
    assert state["n"] == 1.0
    assert 'state["more"]' in caplog.text
    assert "bias" in caplog.text


def test_dtypes_are_converted_when_asked(good: Path) -> None:
    state: dict[str, Any] = {"net": nn.Linear(40, 7).to(torch.bfloat16), "x": torch.zeros(30, dtype=torch.float64)}
    with pytest.raises(CheckpointError, match=r"torch.float32 in the checkpoint, torch.bfloat16 here \(convert=True"):
        accel.load(good, state)
    accel.load(good, state, convert=True)
    assert torch.equal(state["net"].weight, make_state(1.0)["net"].weight.to(torch.bfloat16))
    assert state["x"].tolist() == [1.0] * 30


def seven(directory: str) -> Any:
    return accel.load(directory)["n"]


def test_only_values(good: Path) -> None:
    assert accel.load(good) == {"n": 1.0, "s": {"deep": [1.0]}}
    assert run(2, seven, str(good)) == [1.0, 1.0]


class Remembering(nn.Linear):
    """Its extra state has a tensor."""

    seen = torch.full((CHUNK // 2,), 1.2345)  # the weights are not in the second of its chunks

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("check", ["first", "stream"])
def test_a_tensor_in_extra_state_is_compared_too(tmp_path: Path, check: str) -> None:
    accel.save({"model": Remembering(2, 2)}, tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[content.index(Remembering.seen[:99].numpy().tobytes()) + CHUNK] ^= 1
    path.write_bytes(content)
    model = Remembering(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="is damaged"):
        accel.load(tmp_path / "c", {"model": model}, check=check)  # type: ignore[arg-type]
    assert torch.equal(model.weight, before)
