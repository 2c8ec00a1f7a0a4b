"""Several hosts on one machine: an agent of torchrun for each, on the loopback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed import GUARD
from tests.faults import Fault, declared
from tests.interpreters import executable
from tests.programs import by_hand, free_port, started

TRAIN = """
import sys, torch, accel
from tests.engines.matrix import Cell, check_cells
accel.init(timeout=60)
from accel.process import current
place = current().place
# In one write: the processes of a host share their output, which may be unbuffered.
print(f"[place] {place.rank} {place.world_size} {place.local_rank} {place.local_world_size}\\n", end="", flush=True)
failures = check_cells([Cell("ddp", accumulation=4, no_sync=True, freeze=True, clip=True)])
assert not failures, failures
print("[parity]", flush=True)
"""

FOREVER = """
import os, time, torch, accel
from pathlib import Path
from tests.faults import begin, reach
begin()
here = Path(__file__).parent  # both begin together: what comes before may take longer on one than the timeout
(here / ("begins" + os.environ["RANK"])).touch()
while len(list(here.glob("begins*"))) < 2:
    time.sleep(0.01)
accel.init(timeout=10)
torch.manual_seed(0)
raw = torch.nn.Linear(4, 1)
model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), 0.01))
for step in range(10**6):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
    reach("step")
"""


def log(folder: Path, index: int) -> str:
    return (folder / f"{index}.log").read_text()


def agent(node: int, port: int, script: Path, workers: int) -> list[str]:
    return [
        executable(), "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={workers}",
        "--master-addr=127.0.0.1", f"--master-port={port}", "--monitor-interval=0.1", str(script),
    ]  # fmt: skip


def test_two_agents_train_one_model(tmp_path: Path) -> None:
    script, port = tmp_path / "train.py", free_port()
    script.write_text(TRAIN)
    with started([agent(node, port, script, 2) for node in range(2)], [{}, {}], tmp_path) as agents:
        assert [each.wait(GUARD) for each in agents] == [0, 0], log(tmp_path, 0) + log(tmp_path, 1)
    text = log(tmp_path, 0) + log(tmp_path, 1)
    assert text.count("[parity]") == 4
    places = sorted(re.findall(r"\[place\] (\d+) (\d+) (\d+) (\d+)", text))
    assert places == [(str(rank), "4", str(rank % 2), "2") for rank in range(4)]


@pytest.mark.parametrize("end", ["host", "SIGSTOP"])
def test_a_lost_host_is_named(end: str, tmp_path: Path) -> None:
    """The agent is killed with its worker, or a process without an agent hangs."""
    script, port = tmp_path / "train.py", free_port()
    script.write_text(FOREVER)
    commands = [agent(node, port, script, 1) if end == "host" else [executable(), str(script)] for node in range(2)]
    environs = [{} if end == "host" else by_hand(rank, 2, port) for rank in range(2)]
    with (
        declared([Fault(end, at="step", rank=1, turn=6)]) as plan,
        started(commands, [environ | plan.environ for environ in environs], tmp_path) as processes,
    ):
        assert processes[0].wait(GUARD) == 1
    text = log(tmp_path, 0)
    assert re.search(r"rank 1 \(host \S+\) did not answer", text), text
    assert end != "host" or re.search(r"RuntimeError: .* by peer[\s\S]*AccelError: ", text), text
