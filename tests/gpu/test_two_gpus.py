"""Two CUDA devices: every engine over nccl beside one process, replicas in one process, and ranks that are killed."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines import ENGINES
from tests.faults import Fault
from tests.gpu import gpus, no_reads
from tests.gpu.test_one_gpu import TOLERANCE, batch, check, distance, net
from tests.models import mlp, sgd
from tests.programs import by_hand, free_port, scripts

pytestmark = gpus(2)

DIVIDED = [name for name in ENGINES if name not in ("single", "dp", "ddp2", "horovod", "xla")]


def whole(backend: str, stage: int | None = None, precision: str = "32-true") -> float:
    """How far an engine's weights are from one process's; ``stage`` is DeepSpeed's."""
    raw, reference = mlp(8, 32, 32, 4), mlp(8, 32, 32, 4).cuda()
    options: Any = backend if stage is None else accel.DeepSpeed(stage=stage)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=options, precision=precision)
    plain = sgd(reference)
    # The stages of a pipeline read one batch together.
    rank, world = (0, 1) if backend == "pipeline" else (accel.rank(), accel.world_size())
    for step in range(6):
        plain.zero_grad()
        reference(torch.cat([batch(step, r) for r in range(world)])).square().mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        optimizer.zero_grad()
        accel.backward(model(batch(step, rank)).square().mean())
        accel.clip_grad_norm_(model, 0.5)
        optimizer.step()
    accel.teardown(model)
    return distance((raw, reference))


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
@pytest.mark.parametrize("backend", DIVIDED)
def test_parity_over_nccl(backend: str, precision: str) -> None:
    """Streams and nccl's own order of operations: the CPU has neither."""
    for text in over_nccl(f"whole({backend!r}, precision={precision!r})"):
        assert float(text) < TOLERANCE[precision]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parity_of_each_stage_over_nccl(stage: int) -> None:
    for text in over_nccl(f"whole('deepspeed', {stage})"):
        assert float(text) < 1e-5


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", "deepspeed:1", "deepspeed:2"])
def test_a_step_over_nccl_does_not_wait_for_the_device(backend: str) -> None:
    assert over_nccl(f"steps({backend!r})") == ["8", "8"]


def steps(backend: str) -> int:
    name, _, stage = backend.partition(":")
    raw = mlp(8, 32, 32, 4)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.DeepSpeed(stage=int(stage)) if stage else name)
    for step in range(8):
        x = batch(step)
        # In the first steps the ranks learn what follows what; steps 1 and 17 compare the models.
        with no_reads() if step > 3 else contextlib.nullcontext():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return step + 1


def test_one_visible_device_for_each_rank() -> None:
    shown = [{"CUDA_VISIBLE_DEVICES": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "2"} for r in range(2)]
    for expression in ("whole('ddp')", "whole('deepspeed', 2)", "whole('deepspeed', 3)"):
        assert all(float(text) < 1e-5 for text in over_nccl(expression, *shown))


@pytest.mark.parametrize("backend", ["single", "ddp"])
def test_another_device_than_the_first(backend: str) -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=backend, devices=[1])
    model(batch(0).to("cuda:1")).square().mean().backward()
    optimizer.step()
    places = {p.device.index for p in raw.parameters()} | {
        p.grad.device.index for p in raw.parameters() if p.grad is not None
    }
    places |= {t.device.index for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)}
    assert places == {1} == {torch.cuda.current_device()}


class Seen(nn.Module):
    """Gives its input in the dtype in which it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        self.dtypes.append(out.dtype)
        return out


@pytest.mark.parametrize("precision", TOLERANCE)
def test_replicas_compute_in_the_models_precision(precision: str) -> None:
    raw = Seen()
    model = accel.setup(raw, backend="dp", precision=precision).model
    out = model(batch(0))
    assert (out.dtype, out.device.index) == (torch.float32, 0)
    compute = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision]
    assert raw.dtypes == [compute, compute]  # replicas share the list
    assert check("dp", precision) < TOLERANCE[precision]


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


def test_a_rank_behind_a_kernel_hears_of_a_killed_one() -> None:
    """nccl's kernels wait on the device: gloo's collectives end with an error on the host."""
    port = free_port()
    end = Fault("SIGKILL", at="end", rank=1)
    first, _ = scripts(KILLED, by_hand(0, 2, port), by_hand(1, 2, port), check=False, fails=[end], timeout=120)
    assert "AccelError" in first.stdout, first.stderr
    assert "rank 1 is gone without a word" in first.stdout
    assert float(first.stdout.rsplit("after", 1)[1]) < 60


def test_uneven_inputs_over_the_users_own_plain_nccl() -> None:
    """Its group carries no CPU tensors, as AdamW's steps are."""
    code = """
import os, torch, torch.distributed as dist, accel
from tests.gpu.test_one_gpu import batch
from tests.models import adamw, mlp
torch.cuda.set_device(int(os.environ["RANK"]))
dist.init_process_group("nccl")
raw = mlp(8, 8, 4)
model, optimizer, _ = accel.setup(raw, adamw(raw), backend="ddp")
with accel.join(model):
    for step in range(2 + accel.rank()):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
print([float(state["step"]) for state in optimizer.state.values()], [float(p.sum()) for p in raw.parameters()])
accel.teardown()
dist.destroy_process_group()
"""
    port = free_port()
    first, second = (result.stdout for result in scripts(code, by_hand(0, 2, port), by_hand(1, 2, port)))
    assert first == second
    assert "3.0" in first


def test_the_whole_of_a_run_needs_no_local_rank() -> None:
    """As srun starts processes: DeepSpeed would take its device from the environment."""
    environ = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{rank}", "SLURM_NTASKS_PER_NODE": "2"}
    port = free_port()
    ranks = [
        {name: value.format(rank=r) for name, value in environ.items()}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
        for r in range(2)
    ]
    for result in scripts(PROGRAM.format(expression="whole('deepspeed', 2)"), *ranks):
        assert float(result.stdout.strip().splitlines()[-1]) < 1e-5
