"""Loads read each chunk once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import accel
from accel.checkpoint import reader
from accel.checkpoint.storage import CHUNK
from tests.checkpoint.helpers import counted_reads


def sizes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def small_tensors(count: int, numel: int) -> dict[str, torch.Tensor]:
    return {f"t{i:04}": torch.arange(numel).add(i).to(torch.float32) for i in range(count)}


def blank(saved: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """What takes the same values in another way: another dtype, another order of the elements, or every second so."""
    found = {}
    for i, (name, t) in enumerate(saved.items()):
        if kind == "order":
            found[name] = torch.zeros(2, t.numel() // 2).t()
        else:
            found[name] = t.double() * 0 if kind == "dtype" or i % 2 else t * 0
    return found


@pytest.mark.parametrize(
    ("count", "numel", "kind", "threads"),
    [(2000, 512, "dtype", 4), (500, 16384, "order", 1), (500, 16384, "half of them", 4), (3, CHUNK + 2000, "dtype", 1)],
)
def test_a_load_reads_each_chunk_once(
    count: int, numel: int, kind: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "share", lambda: threads)
    saved = small_tensors(count, numel)
    if kind == "order":
        saved = {name: t.view(-1, 2) for name, t in saved.items()}
    accel.save(saved, tmp_path)
    state, reads = blank(saved, kind), counted_reads(monkeypatch)
    accel.load(tmp_path, state, convert=True)
    assert sum(reads) < 1.01 * sizes(tmp_path) + 2**20
    assert all(torch.equal(state[name], t.to(state[name].dtype)) for name, t in saved.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_over_a_chunk_s_end(dtype: torch.dtype, tmp_path: Path) -> None:
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
