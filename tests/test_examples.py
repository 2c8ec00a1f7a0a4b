"""The examples train, with the same loop on one process and on two, and leave a picture."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest

from tests.distributed import run
from tests.interpreters import executable
from tests.programs import ROOT, clean_environ

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


LAUNCHERS: dict[int, tuple[str, ...]] = {1: (), 2: TORCHRUN}


def train(world: int, example: str, *arguments: str) -> str:
    """Return the output of an example."""
    command = [executable(), *LAUNCHERS[world], str(ROOT / "examples" / example), *arguments]
    environ = clean_environ() | {"PYTHON_EXEC": executable()}
    program = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert program.returncode == 0, f"{program.stdout}\n{program.stderr}"
    assert "Warning" not in program.stderr
    return program.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


def test_digits(tmp_path: Path) -> None:
    """One process and two get the same curves. Each test image counts once."""
    curves = {}
    for world in LAUNCHERS:
        picture = tmp_path / f"new{world}" / "digits.png"
        out = train(world, "train.py", "--epochs", "6", "--out", str(picture))
        assert is_png(picture)
        assert out.startswith(f"ModelHandle[{'single' if world == 1 else 'ddp'}], {world} x ")
        assert out.count(" on 357 test images\n") == 6
        losses, accuracies = numbers(r"loss ([\d.]+)", out), numbers(r"accuracy ([\d.]+)", out)
        assert len(losses) == len(accuracies) == 6
        assert losses[-1] < losses[0] / 5
        assert accuracies[-1] >= 0.95
        curves[world] = [*losses, *accuracies]
    assert curves[2] == pytest.approx(curves[1], abs=0.02)


@pytest.mark.parametrize("world", LAUNCHERS)
def test_gpt(tmp_path: Path, world: int) -> None:
    picture = tmp_path / "gpt.png"
    precision = ("--precision", "bf16-mixed") if world == 2 else ()
    out = train(world, "gpt.py", "--epochs", "2", "--chars", "15000", "--out", str(picture), *precision)
    first, last = numbers(r"loss ([\d.]+)", out)
    assert last < first - 0.2
    sample = out[out.rindex("loss") : out.rindex("curve:")]
    assert len(sample) > 300
    assert is_png(picture)


def train_on_a_mesh() -> str:
    from examples import llama_mesh

    options = {"tensor_parallel": 2, "replicas": 1, "epochs": 1, "batch_size": 32, "chars": 20_000, "out": ""}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        llama_mesh.main(argparse.Namespace(**options))
    return out.getvalue()


def test_a_mesh() -> None:
    """Each layer is sharded along both dimensions of the mesh."""
    out = run(4, train_on_a_mesh)[0]
    assert "mesh: DeviceMesh((" in out
    assert "down: (64, 128), of which a process has (32, 64)" in out
    ((first, last),) = re.findall(r"loss ([0-9.]+) to ([0-9.]+)", out)
    assert float(last) < float(first) - 0.5
