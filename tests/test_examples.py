"""The examples train, with the same loop on one process and on two, and leave a picture."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed import run
from tests.interpreters import executable
from tests.programs import ROOT

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHERS = {1: (), 2: TORCHRUN}


def train(launcher: tuple[str, ...], example: str, *arguments: str, timeout: float = 240) -> str:
    """What an example prints; its whole process group is killed at the timeout."""
    command = [executable(), *launcher, str(ROOT / "examples" / example), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHON_EXEC=executable())
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{example} did not end within {timeout} s:\n{out}\n{err}")
    assert process.returncode == 0, f"{out}\n{err}"
    assert "Warning" not in err
    return out


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the digits example prints, by number of processes."""
    found = {}
    for world, launcher in LAUNCHERS.items():
        picture = tmp_path_factory.mktemp("digits") / "new" / "digits.png"
        found[world] = train(launcher, "train.py", "--epochs", "6", "--out", str(picture))
        assert is_png(picture)
    return found


@pytest.mark.parametrize("world", LAUNCHERS)
def test_digits(digits: dict[int, str], world: int) -> None:
    out = digits[world]
    assert out.startswith(f"ModelHandle[{'single' if world == 1 else 'ddp'}], {world} x ")
    losses, accuracies = numbers(r"loss ([\d.]+)", out), numbers(r"accuracy ([\d.]+)", out)
    assert len(losses) == len(accuracies) == 6
    assert losses[-1] < losses[0] / 5
    assert accuracies[-1] >= 0.95
    # Each test image counts once, also where the processes do not divide their number.
    assert out.count(" on 357 test images\n") == 6


def test_digits_alike_on_one_process_and_on_two(digits: dict[int, str]) -> None:
    for pattern in (r"loss ([\d.]+)", r"accuracy ([\d.]+)"):
        assert numbers(pattern, digits[2]) == pytest.approx(numbers(pattern, digits[1]), abs=0.02)


@pytest.mark.parametrize("world", LAUNCHERS)
def test_gpt(tmp_path: Path, world: int) -> None:
    picture = tmp_path / "gpt.png"
    precision = ("--precision", "bf16-mixed") if world == 2 else ()
    out = train(LAUNCHERS[world], "gpt.py", "--epochs", "2", "--chars", "15000", "--out", str(picture), *precision)
    first, last = numbers(r"loss ([\d.]+)", out)
    assert last < first - 0.2
    sample = out[out.rindex("loss") : out.rindex("curve:")]
    assert len(sample) > 300
    assert is_png(picture)


def on_a_mesh() -> str:
    from examples import llama_mesh

    heard = io.StringIO()
    with contextlib.redirect_stdout(heard):
        llama_mesh.main(
            argparse.Namespace(tensor_parallel=2, replicas=1, epochs=1, batch_size=32, chars=20_000, out="")
        )
    return heard.getvalue()


def test_a_mesh() -> None:
    """Layers cut, their parts divided."""
    out = run(4, on_a_mesh)[0]
    assert "mesh: DeviceMesh((" in out
    assert "=2, tensor" in out
    assert "down: (64, 128), of which a process has (32, 64)" in out
    ((first, last),) = re.findall(r"loss ([0-9.]+) to ([0-9.]+)", out)
    assert float(last) < float(first) - 0.5
