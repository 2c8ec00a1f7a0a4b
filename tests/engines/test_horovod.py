"""Horovod itself: parity under its own launcher, its start by accel, and what is refused."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.distributed import outcomes, run
from tests.faults import Fault, reach
from tests.programs import clean_environ

MISSING = importlib.util.find_spec("horovod") is None
needs_horovod = pytest.mark.skipif(MISSING, reason="horovod is not installed: docs/launch.md says how to build it")


UNDER_HOROVODRUN = """
import sys
import accel
from tests.engines.matrix import Cell, check_cells
if "first" in sys.argv:
    import horovod.torch as hvd
    hvd.init()
cells = [Cell("horovod", "adamw", 4, no_sync=True, freeze=True, clip=True), Cell("horovod", "sgd", clip=True)]
assert check_cells(cells) == [], check_cells(cells)
import horovod.torch as hvd
accel.init()
from accel.process import current
place = current().place
assert (hvd.rank(), hvd.size()) == (place.rank, place.world_size) and place.world_size == 2
print(f"[{place.launcher} {place.rank}]", flush=True)
"""


@needs_horovod
@pytest.mark.parametrize("first", [(), ("first",)], ids=["started by accel", "started by the program"])
def test_parity_under_horovodrun(tmp_path: Path, first: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNDER_HOROVODRUN)
    launcher = [sys.executable, str(Path(sys.executable).parent / "horovodrun"), "-np", "2", "--gloo"]
    environ = clean_environ()
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    command = [*launcher, sys.executable, str(script), *first]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[horovodrun 0]" in result.stdout
    assert "[horovodrun 1]" in result.stdout


def sums(compression: Any) -> tuple[list[float], int, int, int]:
    import horovod.torch as hvd

    raw = nn.Linear(2, 1, bias=False)
    options = accel.Horovod(compression=compression)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), 1.0), backend=options)
    start = raw.weight.detach().clone()
    model(torch.tensor([[1.0 + accel.rank(), 1 / 3]])).sum().backward()
    optimizer.step()
    assert "HOROVOD_RANK" not in os.environ
    return (start - raw.weight.detach()).flatten().tolist(), hvd.size(), hvd.local_rank(), hvd.cross_size()


@needs_horovod
def test_accel_starts_horovod_under_other_launchers() -> None:
    for rank, (gradient, *place) in enumerate(run(2, sums, None)):
        assert gradient == pytest.approx([1.5, 1 / 3], abs=1e-6)
        assert place == [2, rank, 1]
    for gradient, *_ in run(2, sums, "fp16"):
        assert gradient[1] != pytest.approx(1 / 3, abs=1e-6)
        assert gradient == pytest.approx([1.5, 1 / 3], abs=1e-3)


def one_rank_dies() -> None:
    raw = nn.Linear(2, 1)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), 0.1), backend="horovod")
    for _ in range(3):
        reach("step")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@needs_horovod
def test_a_killed_rank_ends_the_others() -> None:
    first, second = outcomes(2, one_rank_dies, breaks=True, fails=[Fault("exit 3", at="step", rank=1, turn=2)])
    assert "AccelError" in first.error, first.trace
    assert "can't continue in 'the reduction of gradients (Linear #" in first.message
    assert second.message == "exit status 3"
