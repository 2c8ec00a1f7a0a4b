"""Processes are killed under torchrun, and examples/elastic.py goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import accel
from tests.distributed import GUARD, run, wait_for
from tests.process.test_process import clean_environ, free_port

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "elastic.py"
STEPS = 48  # three epochs


@contextlib.contextmanager
def agents(folder: Path, rendezvous: str) -> Iterator[list[psutil.Popen]]:
    """Two torchrun agents of one worker each; the first one has the store. Both end here."""
    port = free_port()
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1",
        "--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
        "--monitor-interval=0.1",
    ]  # fmt: skip
    program = [str(EXAMPLE), f"--steps={STEPS}", "--pause=0.05", f"--checkpoints={folder / 'interrupted'}"]
    environ = clean_environ() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}
    started: list[psutil.Popen] = []
    try:
        for index in range(2):
            # Said outright: both agents are on the endpoint's host, and whichever came first would have the store.
            store = f"--rdzv-conf=is_host={index == 0},{rendezvous}"
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


def wait_for_training(both: list[psutil.Popen], folder: Path) -> None:
    """Until both train, and have come further than a first checkpoint."""
    try:
        wait_for(lambda: all(workers(agent) for agent in both), GUARD)
        begin = step(folder)
        wait_for(lambda: step(folder) > max(3, begin), GUARD)
    except AssertionError:
        pytest.fail(output(folder))


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


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbs."""
    path = tmp_path_factory.mktemp("alone")
    command = [sys.executable, str(EXAMPLE), f"--steps={STEPS}", f"--checkpoints={path}"]
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
    with agents(tmp_path, "last_call_timeout=120") as both:
        wait_for_training(both, tmp_path)
        kill(*workers(both[1]))
        assert [agent.wait(GUARD) for agent in both] == [0, 0], output(tmp_path)
    assert check(tmp_path, trained_alone) == ["2"], output(tmp_path)


def test_a_lost_host_is_done_without(tmp_path: Path, trained_alone: dict[str, torch.Tensor]) -> None:
    # One that is alone goes on soon; so it may begin alone too, where the other is late.
    with agents(tmp_path, "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4") as (first, second):
        wait_for_training([first, second], tmp_path)
        kill(second, *workers(second))
        assert first.wait(GUARD) == 0, output(tmp_path)
    assert check(tmp_path, trained_alone)[-1:] == ["1"], output(tmp_path)
