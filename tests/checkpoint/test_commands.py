"""``python -m accel inspect``, ``verify`` and ``diff``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.cli import main
from tests.distributed import run


def save(directory: str, value: float) -> None:
    state: dict[str, Any] = {"x": torch.arange(1000.0), "n": 1, "s": {"lr": value, "t": (1, 2)}}
    state["x"][3] = value
    accel.save(state, directory)


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal contents of other world sizes are equal; every difference is a line."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    save(a, 3.0)
    run(2, save, b, 3.0)
    save(c, 3.5)
    assert main(["diff", a, b]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["diff", a, c]) == 1
    out = capsys.readouterr().out
    assert "x: 1 of 1000 elements differ, by at most 0.5" in out
    assert "state.s.lr: 3.0 and 3.5" in out
    assert "2 differences" in out
    accel.save({"x": torch.zeros(4), "y": torch.zeros(2)}, c)
    assert main(["diff", a, c]) == 1
    out = capsys.readouterr().out
    assert "x: F32 [1000] and F32 [4]" in out
    assert f"y: only in {c}" in out
    assert "state.n: only in the first" in out


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(2, save, str(tmp_path / "step-1"), 3.0)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "by 2 processes" in out
    assert "x  F32   [1000] in 2 parts" in out
    assert "n = 1" in out
    assert "bytes: x 2,000" in out
    picture = tmp_path / "layout.svg"
    assert main(["inspect", str(tmp_path), "--plot", str(picture)]) == 0
    assert str(picture) in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")
    assert main(["inspect", "--values", str(tmp_path)]) == 0
    assert '"lr": 3.0' in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "no")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "c")
    save(directory, 3.0)
    assert main(["verify", directory]) == 0
    assert "every byte" in capsys.readouterr().out
    shard = next((tmp_path / "c").glob("*.safetensors"))
    os.truncate(shard, 100)
    assert main(["verify", directory]) == 1
    assert shard.name in capsys.readouterr().err
