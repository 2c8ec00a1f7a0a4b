"""Processes are killed under torchrun, and examples/elastic.py goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import accel
from tests.distributed import run
from tests.test_process import clean_environ, free_port

EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic.py"
STEPS = 48  # three epochs


@contextlib.contextmanager
def agents(number: int, folder: Path, *options: str) -> Iterator[list[psutil.Popen]]:
    """``number`` torchrun agents of one worker each; the first one has the store. All of them end here."""
    port = free_port()
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{number}", "--nproc-per-node=1",
        "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
        "--monitor-interval=0.1",
    ]  # fmt: skip
    program = [str(EXAMPLE), f"--steps={STEPS}", f"--checkpoints={folder / 'interrupted'}", *options]
    environ = clean_environ() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}
    started: list[psutil.Popen] = []
    try:
        for index in range(number):
            # Said outright: both agents are on the endpoint's host, and whichever came first would have the store.
            store = (
                f"--rdzv-conf=is_host={index == 0},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
            )
            command = [*torchrun, store, *program]
            with (folder / f"agent{index}.log").open("w") as log:
                started.append(psutil.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
        yield started
    finally:
        for agent in started:
            kill(agent, *workers(agent))


def workers(agent: psutil.Popen) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return agent.children(recursive=True)
    return []


def kill(*processes: Any) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            process.wait(10)


def wait_for(what: str, condition: Callable[[], bool], folder: Path, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen within {timeout} s:\n{output(folder)}")
        time.sleep(0.1)


def output(folder: Path) -> str:
    return "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))


def step(folder: Path) -> int:
    """The step of the last checkpoint."""
    last = accel.latest(folder / "interrupted")
    return 0 if last is None else int(last.rpartition("-")[2])


def weights(root: str) -> dict[str, torch.Tensor]:
    """What the last checkpoint in a folder has."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    last = accel.latest(root)
    assert last is not None
    assert last.endswith(f"step-{STEPS}")
    accel.load(last, {"model": model})
    return {name: value.clone() for name, value in model.state_dict().items()}


def trained_alone(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbs."""
    path = folder / "alone"
    command = [sys.executable, str(EXAMPLE), f"--steps={STEPS}", f"--checkpoints={path}"]
    subprocess.run(command, env=clean_environ(), check=True, capture_output=True, timeout=120)
    found: dict[str, torch.Tensor] = run(1, weights, str(path))[0]
    return found


def check(folder: Path, resumed_on: list[str]) -> None:
    found = re.findall(r"resumed at step (\d+) on (\d) processes after ([\d.]+) s", output(folder))
    assert [world for _, world, _ in found] == resumed_on, output(folder)
    assert all(0 < int(at) < STEPS for at, _, _ in found)
    print("recovery:", ", ".join(f"{seconds} s" for *_, seconds in found))
    trained = run(1, weights, str(folder / "interrupted"))[0]
    for name, expected in trained_alone(folder).items():
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-5)


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    with agents(2, tmp_path, "--pause=0.05") as both:
        wait_for("training", lambda: step(tmp_path) > 3, tmp_path)
        kill(*workers(both[1]))
        assert [agent.wait(120) for agent in both] == [0, 0], output(tmp_path)
    check(tmp_path, ["2"])


def test_a_lost_host_is_done_without(tmp_path: Path) -> None:
    with agents(2, tmp_path, "--pause=0.05") as (first, second):
        wait_for("training", lambda: step(tmp_path) > 3, tmp_path)
        kill(second, *workers(second))
        assert first.wait(180) == 0, output(tmp_path)
    check(tmp_path, ["1"])
