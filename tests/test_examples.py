"""The examples train, with the same loop on one process and on two, and leave a picture."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHERS = [pytest.param((), id="1-process"), pytest.param(TORCHRUN, id="2-processes")]


def train(launcher: tuple[str, ...], example: str, *arguments: str, timeout: float = 120) -> str:
    """What an example prints; its whole process group is killed at the timeout."""
    command = [sys.executable, *launcher, str(ROOT / "examples" / example), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHONWARNINGS="error::FutureWarning")
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
    for world, launcher in ((1, ()), (2, TORCHRUN)):
        picture = tmp_path_factory.mktemp("digits") / "new" / "digits.png"
        found[world] = train(launcher, "train.py", "--epochs", "4", "--out", str(picture))
        assert is_png(picture)
    return found
