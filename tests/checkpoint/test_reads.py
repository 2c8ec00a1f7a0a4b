"""Loads and exports read each chunk once, and copies for a background save have all values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.checkpoint import background, reader, shards
from accel.checkpoint.storage import CHUNK


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of bytes that each ``preadv`` gave."""
    counts: list[int] = []
    preadv = os.preadv

    def counted(*args: Any) -> int:
        counts.append(preadv(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return counts


def sizes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def small_tensors(count: int, numel: int) -> dict[str, torch.Tensor]:
    return {f"t{i:04}": torch.arange(numel).add(i).to(torch.float32) for i in range(count)}


def blank(saved: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """What takes the same values in another way: another dtype, another order of the elements, or every second so."""
    if kind == "order":
        return {name: torch.zeros(2, t.numel() // 2).t() for name, t in saved.items()}
    odd = {"dtype": (0, 1), "half of them": (1,)}[kind]
    return {
        name: torch.zeros_like(t, dtype=torch.float64 if i % 2 in odd else None)
        for i, (name, t) in enumerate(saved.items())
    }


@pytest.mark.parametrize(
    ("count", "numel", "kind", "threads"),
    [(2000, 512, "dtype", 4), (500, 16384, "order", 1), (500, 16384, "half of them", 4), (3, CHUNK + 2000, "dtype", 1)],
)
def test_a_load_reads_each_chunk_once(
    count: int, numel: int, kind: str, threads: int, reads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "share", lambda: threads)
    saved = small_tensors(count, numel)
    if kind == "order":
        saved = {name: t.view(-1, 2) for name, t in saved.items()}
    accel.save(saved, tmp_path)
    state = blank(saved, kind)
    reads.clear()
    accel.load(tmp_path, state, convert=True)
    assert sum(reads) < 1.01 * sizes(tmp_path) + 2**20
    assert all(torch.equal(state[name], t.to(state[name].dtype)) for name, t in saved.items())


def test_an_export_reads_small_tensors_together(reads: list[int], tmp_path: Path) -> None:
    """A batch of them may begin in the chunk in which the one before ended."""
    net = nn.ParameterDict(small_tensors(500, 16384))
    accel.save({"net": net}, tmp_path / "a")
    reads.clear()
    accel.export(tmp_path / "a", tmp_path / "out")
    assert sum(reads) < 1.3 * sizes(tmp_path / "a")
    found = {"net": nn.ParameterDict(small_tensors(500, 16384))}
    accel.load(tmp_path / "out", found)
    assert torch.equal(found["net"]["t0300"], net["t0300"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_over_the_end_of_a_chunk(dtype: torch.dtype, tmp_path: Path) -> None:
    """Other libraries' files may have them, where a tensor of single bytes comes first."""
    values = torch.arange(2 * CHUNK // 4 + 77, dtype=torch.float32)
    table = {
        "flags": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "weight": {"dtype": "F32", "shape": [len(values)], "data_offsets": [3, 3 + values.nbytes]},
    }
    header = json.dumps(table).encode()
    content = len(header).to_bytes(8, "little") + header + b"\1\2\3" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    model = nn.Module()
    model.register_buffer("flags", torch.zeros(3, dtype=torch.uint8))
    model.register_buffer("weight", torch.zeros(len(values), dtype=dtype))
    accel.load(tmp_path, {"model": model}, convert=True)
    assert model.flags.tolist() == [1, 2, 3]
    assert torch.equal(model.weight, values.to(dtype))


def test_a_copy_has_all_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and pieces are smaller than tensors, and some tensors are not contiguous."""
    monkeypatch.setattr(background, "_BLOCK", 4096)
    monkeypatch.setattr(shards, "PIECE", 1500)
    monkeypatch.setattr(background.background, "_blocks", [])
    made = {f"t{n}": torch.randn(n, 7).t() for n in range(40)} | {f"c{n}": torch.randn(n * 11) for n in range(40)}
    state = made | {"bytes": torch.arange(255, dtype=torch.uint8), "one": torch.tensor(3.0, dtype=torch.float64)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    pending = accel.save(state, tmp_path, wait=False)
    for tensor in state.values():
        tensor.zero_()
    assert pending is not None
    pending.result(60)
    accel.load(tmp_path, state)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    monkeypatch.setattr(background.background, "_blocks", [])
