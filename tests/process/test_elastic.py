"""Processes are killed under torchrun, and examples/elastic.py goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import accel
from tests.distributed import GUARD, run
from tests.faults import Fault, declared
from tests.interpreters import executable
from tests.programs import ROOT, clean_environ, free_port, started

EXAMPLE = ROOT / "examples" / "elastic.py"
STEPS = 48  # three epochs


@contextlib.contextmanager
def agents(folder: Path, rendezvous: str, fault: Fault) -> Iterator[list[psutil.Popen]]:
    """Two torchrun agents of one worker each; the first one has the store, and the fault is the second one's."""
    port = free_port()
    torchrun = [
        executable(), "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1",
        "--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
        "--monitor-interval=0.1",
    ]  # fmt: skip
    program = ["--module", "tests.faults", str(EXAMPLE)]
    options = [f"--steps={STEPS}", "--pause=0.05", f"--checkpoints={folder / 'interrupted'}"]
    environ = {"PYTHONUNBUFFERED": "1"}  # torchrun's store stays, with the addresses of those that are gone
    # Said outright: both agents are on the endpoint's host, and whichever came first would have the store.
    stores = [f"--rdzv-conf=is_host={first},{rendezvous}" for first in (True, False)]
    commands = [[*torchrun, store, *program, *options] for store in stores]
    with declared([fault]) as plan, started(commands, [environ, environ | plan.environ], folder) as both:
        yield both


def output(folder: Path) -> str:
    return "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))


def weights(root: str) -> dict[str, torch.Tensor]:
    """What the last checkpoint in a folder has."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    last = accel.latest(root)
    assert last is not None
    assert last.endswith(f"step-{STEPS}")
    accel.load(last, {"model": model})
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbs."""
    path = tmp_path_factory.mktemp("alone")
    command = [executable(), str(EXAMPLE), f"--steps={STEPS}", f"--checkpoints={path}"]
    subprocess.run(command, env=clean_environ(), check=True, capture_output=True, timeout=GUARD)
    found: dict[str, torch.Tensor] = run(1, weights, str(path))[0]
    return found


def check(folder: Path, trained_alone: dict[str, torch.Tensor]) -> list[str]:
    """The weights are those of an undisturbed run; on how many processes it was resumed, each time."""
    found = re.findall(r"resumed at step (\d+) on (\d) processes after ([\d.]+) s", output(folder))
    assert all(0 < int(at) < STEPS for at, _, _ in found)
    print("recovery:", ", ".join(f"{seconds} s" for *_, seconds in found))
    trained = run(1, weights, str(folder / "interrupted"))[0]
    for name, expected in trained_alone.items():
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-5)
    return [world for _, world, _ in found]


def test_a_killed_worker_is_replaced(tmp_path: Path, trained_alone: dict[str, torch.Tensor]) -> None:
    # Two meet at once; one that is alone waits for the other, however late it is.
    end = Fault("SIGKILL", at="accel:save", turn=5)
    with agents(tmp_path, "last_call_timeout=120", end) as both:
        assert [agent.wait(GUARD) for agent in both] == [0, 0], output(tmp_path)
    assert check(tmp_path, trained_alone) == ["2"], output(tmp_path)


def test_a_lost_host_is_done_without(tmp_path: Path, trained_alone: dict[str, torch.Tensor]) -> None:
    # One that is alone goes on soon; so it may begin alone too, where the other is late.
    end = Fault("host", at="accel:save", turn=5)
    with agents(tmp_path, "last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=8", end) as (first, _):
        assert first.wait(GUARD) == 0, output(tmp_path)
    assert check(tmp_path, trained_alone)[-1:] == ["1"], output(tmp_path)
