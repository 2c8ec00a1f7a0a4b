"""What lies in the directory: files that other programs read, as the format's page says."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from torch import nn

import accel
from tests.distributed import run

PATTERN = re.compile(r"accel-[0-9a-f]{12}-\d{5}(-still)?\.safetensors")


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(301, 307) for _ in range(4))
        self.low = nn.Parameter(torch.randn(70_001).to(torch.bfloat16))
        self.channels = nn.Parameter(torch.randn(8, 3, 5, 7).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(40, 30).t())
        self.frozen = nn.Parameter(torch.randn(1000, 3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.number = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def save_big(directory: str) -> dict[str, torch.Tensor]:
    net = Big()
    model, _, _ = accel.setup(net)
    accel.save({"model": model, "z": torch.tensor([1 + 2j, 3]), "n": 1}, directory)
    return {n: t.detach().contiguous() for n, t in net.state_dict().items()}


def read_by_the_page(directory: Path) -> dict[str, torch.Tensor]:
    """A reader written from docs/checkpoint_format.md, with the public safetensors library."""
    content = (directory / "accel.json").read_bytes()
    assert content[:9] == b'{"xxh3":"'
    assert content[25:26] == b'"'
    assert xxhash.xxh3_64_hexdigest(content[:9] + b"0" * 16 + content[25:]).encode() == content[9:25]
    record = json.loads(content)
    assert (record["format"], record["version"]) == ("accel-checkpoint", 1)
    found = {}
    for name, one in record["tensors"].items():
        pieces = []
        for file, start, count, files in one["parts"]:
            for i in range(files):
                begin = start + i * count
                with safe_open(directory / record["files"][file + i]["name"], "pt") as shard:
                    whole = (begin, count) == (0, torch.Size(one["shape"]).numel())
                    pieces.append(shard.get_tensor(name if whole else f"{name}[{begin}:{begin + count}]").reshape(-1))
        flat = torch.cat(pieces) if pieces else torch.empty(0)
        if one["dtype"].startswith("C"):
            flat = torch.view_as_complex(flat.view(-1, 2))
        found[name] = flat.view(one["shape"])
    for file in record["files"]:
        data = (directory / file["name"]).read_bytes()
        assert len(data) == file["size"]
        length = 8 + int.from_bytes(data[:8], "little")
        header = [xxhash.xxh3_64_hexdigest(data[:length][i : i + 2**22]) for i in range(0, length, 2**22)]
        assert header == file["header"]
        with safe_open(directory / file["name"], "pt") as shard:
            chunks = [xxhash.xxh3_64_hexdigest(data[i : i + 2**22]) for i in range(length, len(data), 2**22)]
            assert shard.metadata() == {"format": "pt", "accel": "1", "xxh3": "".join(chunks)}
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_page_is_enough_to_read_it(world: int, tmp_path: Path) -> None:
    expected = run(world, save_big, str(tmp_path / "c"))[0]
    found = read_by_the_page(tmp_path / "c")
    assert found.keys() == {f"model/{n}" for n in expected} | {"z"}
    for name, tensor in expected.items():
        other = found[f"model/{name}"]
        assert other.shape == tensor.shape
        assert tensor.numel() == 0 or (other.dtype is tensor.dtype and torch.equal(other, tensor)), name
    assert found["z"].tolist() == [1 + 2j, 3]


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_are_split_evenly_by_bytes(world: int, tmp_path: Path) -> None:
    run(world, save_big, str(tmp_path / "c"))
    names = [p.name for p in (tmp_path / "c").iterdir()]
    assert sorted(n for n in names if not PATTERN.fullmatch(n)) == [".accel.lock", "accel.json"]
    for kind in ("", "-still"):
        data = []
        for rank in range(world):
            path = next((tmp_path / "c").glob(f"accel-*-{rank:05d}{kind}.safetensors"))
            content = path.read_bytes()
            data.append(len(content) - 8 - int.from_bytes(content[:8], "little"))
        assert max(data) - min(data) <= 16
    assert len(names) == 2 + 2 * world


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        accel.save({"x": torch.zeros(9)}, tmp_path / "c")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "c").iterdir()}
    assert modes == {0o640}


def large_state(value: float) -> dict[str, Any]:
    return {f"t{i}": torch.full((3_000_000 + i,), value + i) for i in range(4)}


@pytest.mark.parametrize("check", ["first", "stream"])
def test_many_chunks(check: str, tmp_path: Path) -> None:
    """Tensors that begin and end within chunks, and span several."""
    accel.save(large_state(1.0), tmp_path / "c")
    state = large_state(0.0)
    state["t1"] = torch.zeros(2, 3_000_001)[1]
    state["t2"] = torch.zeros(3_000_002, 2)[:, 0]  # not contiguous
    accel.load(tmp_path / "c", state, check=check)  # type: ignore[arg-type]
    assert all(torch.equal(state[name], tensor) for name, tensor in large_state(1.0).items())


def kilobytes(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


class Embeddings(nn.Module):
    """Two of 100 MB, or one under two names."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(500_000, 50)
        self.second = nn.Embedding(500_000, 50, _weight=self.first.weight.detach())
        if tied:
            self.second.weight = self.first.weight


def test_comparing_tied_names_takes_little_memory(tmp_path: Path) -> None:
    accel.save({"m": Embeddings(tied=False)}, tmp_path)
    model = Embeddings(tied=True)
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    accel.load(tmp_path, {"m": model})
    assert kilobytes("VmHWM") - before < 80 * 1000


@pytest.mark.parametrize("wait", [True, False])
def test_memory_stays_bounded(wait: bool, tmp_path: Path) -> None:
    """Saving and loading 200 MB take no second copy of it; in the background one, which the next save uses again."""
    state = {f"t{i}": torch.randn(12_500_000) for i in range(4)}
    accel.save({"x": torch.zeros(5)}, tmp_path / "warm")
    accel.load(tmp_path / "warm")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    for _ in range(2):
        pending = accel.save(state, tmp_path / "c", wait=wait)
        if pending is not None:
            pending.result(60)
    accel.load(tmp_path / "c", state)
    assert kilobytes("VmHWM") - before < (40 if wait else 260) * 1000
