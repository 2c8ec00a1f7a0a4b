"""On one CUDA device: every engine, two ranks that share the device over gloo, fp16, and moves from pinned memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accel
from tests.distributed import run
from tests.gpu import TOLERANCE, Pair, batch, gpus, no_reads
from tests.models import adamw, distance, sgd
from tests.programs import ROOT

pytestmark = gpus(1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def check(backend: Any, precision: str) -> float:
    """Train beside one process in fp32. Layers that see the batch (BatchNorm) are in eval mode."""
    pair = Pair(lambda: net().eval(), adamw, backend, precision=precision)
    assert {p.device.type for p in pair.raw.parameters()} == {"cuda"}
    for step in range(6):
        pair.step(step)
    return pair.distance()


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("backend", ["single", "dp", "ddp"])
def test_one_process(backend: str, precision: str) -> None:
    assert check(backend, precision) < TOLERANCE[precision]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_two_ranks_share_a_gpu(precision: str) -> None:
    assert max(run(2, check, "ddp", precision, timeout=120)) < TOLERANCE[precision]


def test_nccl_at_world_size_1() -> None:
    code = (
        "import torch.distributed as dist, accel; from tests.gpu.test_one_gpu import check;"
        "dist.init_process_group('nccl', rank=0, world_size=1, init_method='tcp://127.0.0.1:29533');"
        "assert check('ddp', '32-true') < 1e-5; assert dist.is_initialized(); accel.teardown();"
        "assert dist.is_initialized(); dist.destroy_process_group(); print('done')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert out.stdout.strip().endswith("done"), out.stderr


def test_overflow_skips_the_step() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, adamw(raw), precision="16-mixed")
    accel.backward(model(batch(0)).square().mean() * 1e35)
    optimizer.step()
    assert not distance(raw, net().cuda())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_step_never_waits(precision: str) -> None:
    """tests/engines/test_device_reads.py counts the same on the CPU, where blocking copies do not show."""
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), precision=precision)
    for step in range(4):
        x = batch(step)
        with no_reads() if step else contextlib.nullcontext():
            optimizer.zero_grad()
            accel.backward(model(x).square().mean())
            accel.clip_grad_norm_(model, 1.0)
            optimizer.step()


def test_recurrent_weights_lie_together() -> None:
    """cuDNN, which the CPU has not, warns where it must copy them at every forward."""
    model = accel.setup(nn.LSTM(8, 16, num_layers=2)).model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 3, 8).cuda())


class Tokens(UserDict[str, torch.Tensor]):
    """As a tokenizer's batch: it has ``to``, and nothing that tells whether it is pinned."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Tokens:
        return Tokens({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})


def tokens(rows: list[torch.Tensor]) -> Tokens:
    return Tokens({"ids": torch.stack(rows), "mask": torch.ones(len(rows), 2)})


def test_pinned_batches_never_wait() -> None:
    """Each is used after a long computation, while the next one travels: only a device has the two at once."""
    rows = torch.arange(1 << 16).view(64, 1024)
    for collate, first in ((None, lambda batch: batch), (tokens, lambda batch: batch["ids"])):
        loader = DataLoader(rows, batch_size=8, pin_memory=True, num_workers=2, collate_fn=collate)  # type: ignore[arg-type]
        handle = accel.setup(net(), None, loader).dataloaders
        big, sums = torch.randn(4096, 4096, device="cuda"), []
        iterator = iter(handle)
        for step in range(8):
            with no_reads() if step else contextlib.nullcontext():
                here = first(next(iterator))
                big = (big @ big).tanh()
                sums.append(here.sum() + 0 * big[0, 0].long())
                del here
        assert [int(total) for total in sums] == [int(piece.sum()) for piece in rows.split(8)]


def test_visible_devices() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    code = "import accel, torch; accel.setup(torch.nn.Linear(2, 2)); print(accel.device())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, env=env)
    assert out.stdout.strip() == "cpu"
    with pytest.raises(accel.DeviceError, match="cuda"):
        accel.setup(net(), devices=[torch.cuda.device_count()])
