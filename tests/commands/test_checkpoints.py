"""``python -m accel inspect``, ``verify`` and ``diff``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.__main__ import main
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


def test_diff_of_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Integers are not rounded, equal NaN are equal, and the ranks' own values count."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    accel.save({"i": torch.tensor([2**60, 1]), "f": torch.tensor([float("nan"), 1.0, 2.0]), "r": accel.rng_state()}, a)
    torch.rand(1)
    accel.save(
        {"i": torch.tensor([2**60 + 1, 1]), "f": torch.tensor([float("nan"), 1.0, 3.0]), "r": accel.rng_state()}, b
    )
    assert main(["diff", a, b]) == 1
    out = capsys.readouterr().out
    assert "i: 1 of 2 elements differ" in out
    assert "f: 1 of 3 elements differ, by at most 1" in out
    assert "rank 0." in out
    accel.save({"m": nn.Linear(1, 1), "step": 3, "n": 4, 7: "x"}, a)
    accel.save({"m": nn.Linear(1, 1), "step": 3, "n": 5}, b)
    assert main(["diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "state.n: 4 and 5" in lines
    assert "state.7: only in the first" in lines
    assert not [line for line in lines if "state.m" in line or "state.!" in line or "state.items" in line]
    assert main(["inspect", a, "--plot", str(tmp_path / "picture")]) == 0
    out = capsys.readouterr().out
    assert "at step 3" in out
    assert "  m: a model" in out
    assert f"picture: {tmp_path / 'picture.png'}" in out
    for text in ("-1", "nan", "x"):
        with pytest.raises(SystemExit):
            main(["diff", a, b, "--tolerance", text])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["diff", a, b, "--tolerant"])
    assert "accel diff: error: unrecognized arguments: --tolerant" in capsys.readouterr().err


def test_diff_of_large_integers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly, also where a distance has more bits than a number, or a float."""
    top = 2**63
    pairs = {
        "near": ([2**62, 5], [2**62 + 100, 5], torch.int64),
        "ends": ([-top, 7], [top - 1, 9], torch.int64),
        "unsigned": ([0, 2**64 - 1], [2**64 - 1, 2**64 - 3], torch.uint64),
        "small": ([200, 3], [100, 3], torch.uint8),
    }
    for side, name in enumerate("ab"):
        accel.save({key: torch.tensor(pair[side], dtype=pair[2]) for key, pair in pairs.items()}, tmp_path / name)
    command = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    expected = {
        "0": {"near": (1, 100), "ends": (2, 2**64 - 1), "unsigned": (2, 2**64 - 1), "small": (1, 100)},
        "2": {"near": (1, 100), "ends": (1, 2**64 - 1), "unsigned": (1, 2**64 - 1), "small": (1, 100)},
        "99.5": {"near": (1, 100), "ends": (1, 2**64 - 1), "unsigned": (1, 2**64 - 1), "small": (1, 100)},
        "100": {"ends": (1, 2**64 - 1), "unsigned": (1, 2**64 - 1)},
        "1e20": {},
    }
    for tolerance, found in expected.items():
        assert main([*command, "--tolerance", tolerance]) == bool(found)
        lines = [line for line in capsys.readouterr().out.splitlines() if "elements" in line]
        assert lines == [
            f"{name}: {count} of 2 elements differ, by at most {most:.3g}"
            for name, (count, most) in sorted(found.items())
        ]


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    save(str(tmp_path), 3.0)
    command = [sys.executable, "-m", "accel", "diff", str(tmp_path), str(tmp_path)]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


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


@pytest.mark.parametrize("command", ["export", "convert"])
def test_errors_of_the_system_are_errors_of_the_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accel.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "c")
    torch.save({"n": 1}, tmp_path / "old.pt")
    long = str(tmp_path / ("x" * 300) / "below")
    assert main([command, str(tmp_path / {"export": "c", "convert": "old.pt"}[command]), long]) == 1
    assert "File name too long" in capsys.readouterr().err


def test_the_tolerance_is_one_of_plain_numbers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate in (("a", 0.001), ("b", 0.001 + 1e-9)):
        accel.save({"rate": rate, "nan": float("nan"), "n": 1}, tmp_path / name)
    command = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main([*command, "--tolerance", "1e-6"]) == 0
    assert main(command) == 1
    assert "state.rate" in capsys.readouterr().out
