"""``python -m accel inspect``, ``verify`` and ``export``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accel
from accel.__main__ import main
from tests.distributed import run


def save(directory: str, value: float) -> None:
    state = {"x": torch.arange(1000.0), "n": 1, "s": {"lr": value}, "m": nn.Linear(1, 1), 7: "x"}
    accel.save(state, directory)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    save(str(tmp_path), 3.0)
    command = [sys.executable, "-m", "accel", "inspect", str(tmp_path)]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(2, save, str(tmp_path / "step-1"), 3.0)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for text in ("by 2 processes", "  x         F32   [1000]\n", "  n = 1", "  m: a model", '  7 = "x"'):
        assert text in out
    assert main(["inspect", "--values", str(tmp_path)]) == 0
    assert '"lr": 3.0' in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "no")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, out = str(tmp_path / "c"), str(tmp_path / "out")
    save(directory, 3.0)
    assert main(["export", directory, out, "--name", "m", "--dtype", "bfloat16"]) == 0
    assert load_file(f"{out}/model.safetensors")["weight"].dtype is torch.bfloat16
    assert main(["export", directory, out]) == 1
    assert "has weights already" in capsys.readouterr().err


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "c")
    save(directory, 3.0)
    assert main(["verify", directory]) == 0
    assert "every byte" in capsys.readouterr().out
    shard = next((tmp_path / "c").glob("*.safetensors"))
    os.truncate(shard, 100)
    assert main(["verify", directory]) == 1
    assert shard.name in capsys.readouterr().err
