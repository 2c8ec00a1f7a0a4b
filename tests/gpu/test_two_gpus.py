"""Two CUDA devices: every engine over nccl beside one process, replicas in one process, and ranks that are killed."""

from __future__ import annotations

import pytest
from torch import nn

from tests.faults import Fault
from tests.gpu import TOLERANCE, Pair, gpus
from tests.models import mlp, sgd
from tests.programs import by_hand, free_port, scripts

pytestmark = gpus(2)


BACKENDS = ["ddp", "sharded", "fsdp", "pipeline", "deepspeed:1", "deepspeed:2", "deepspeed:3"]


def net() -> nn.Sequential:
    return mlp(8, 32, 32, 4)


def parity(backend: str, precision: str = "32-true") -> float:
    """Return the distance of the weights from those of one process."""
    # The stages of a pipeline read one batch together.
    pair = Pair(net, sgd, backend, together=backend == "pipeline", precision=precision)
    for step in range(6):
        pair.step(step, clip=0.5)
    return pair.distance()


def waits_of(backend: str) -> int:
    """Count the waits after the first steps, which set up communication and compare the models."""
    pair = Pair(net, sgd, backend)
    places = [pair.step(step) for step in range(8)]
    return sum(map(len, places[4:]))


#: A program of two ranks over nccl, which says what it found.
PROGRAM = """
import torch, torch.distributed as dist, accel
from tests.gpu.test_two_gpus import *
accel.init()
assert "nccl" in accel.process.current().backends.values()
print({expression})
accel.teardown()
"""


def over_nccl(expression: str, *environ: dict[str, str]) -> list[str]:
    port = free_port()
    ranks = [by_hand(r, 2, port) | (environ[r] if environ else {}) for r in range(2)]
    return [result.stdout.strip().splitlines()[-1] for result in scripts(PROGRAM.format(expression=expression), *ranks)]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parity_over_nccl(backend: str, precision: str) -> None:
    """A CPU has no streams and no collectives that run beside the program."""
    for text in over_nccl(f"parity({backend!r}, precision={precision!r})"):
        assert float(text) < TOLERANCE[precision]


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", "deepspeed:1", "deepspeed:2"])
def test_a_step_never_waits(backend: str) -> None:
    assert over_nccl(f"waits_of({backend!r})") == ["0", "0"]


def test_each_rank_sees_one_device() -> None:
    environs = [{"CUDA_VISIBLE_DEVICES": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "2"} for r in range(2)]
    for backend in ("ddp", "deepspeed:2", "deepspeed:3"):
        assert all(float(text) < 1e-5 for text in over_nccl(f"parity({backend!r})", *environs))


KILLED = """
import os, time, torch, accel
from tests import faults
from tests.models import mlp, sgd

raw = mlp(4, 8, 2)
model, optimizer, _ = accel.setup(raw, sgd(raw), backend="ddp")
for step in range(3):
    loss = model(torch.ones(4, 4, device="cuda")).sum()
    if step == 2:
        faults.reach("end")
    loss.backward()
    start = time.monotonic()
    try:
        sum(p.grad.sum() for p in raw.parameters()).item()  # behind a kernel that waits for the other rank
        optimizer.step()
    except accel.AccelError as error:
        print(type(error).__name__, error, "after", time.monotonic() - start)
        os._exit(0)
"""


def test_a_killed_rank_ends_kernels() -> None:
    """nccl's kernels wait on the device: gloo's collectives end with an error on the host."""
    port = free_port()
    end = Fault("SIGKILL", at="end", rank=1)
    first, _ = scripts(KILLED, by_hand(0, 2, port), by_hand(1, 2, port), check=False, fails=[end], timeout=120)
    assert "AccelError" in first.stdout, first.stderr
    assert "rank 1 is gone without a word" in first.stdout
    assert float(first.stdout.rsplit("after", 1)[1]) < 60
