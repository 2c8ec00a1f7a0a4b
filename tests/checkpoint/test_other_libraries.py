"""Checkpoints of other libraries load as docs/migrating.md says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accel
from tests.backends import deepspeed_alone
from tests.distributed import outcomes, run


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 7, generator=generator), torch.randn(8, 5, generator=generator)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def check_trained(model: nn.Module, steps: int) -> None:
    net, optimizer = build()
    train(net, optimizer, range(steps))
    found = accel.full_state_dict(model)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)


def save_dcp(directory: str) -> None:
    net, _ = build()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, optimizer, range(3))
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": optim, "epoch": 3}, checkpoint_id=directory)


def load_converted(path: str) -> None:
    state = torch.load(path, weights_only=True)
    assert state["epoch"] == 3
    net, raw = build(seed=1)
    set_state_dict(net, raw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model, optimizer, _ = accel.setup(net, raw, backend="fsdp")
    train(model, optimizer, range(3, 5))
    check_trained(model, 5)


def test_a_directory_of_distributed_checkpoint(tmp_path: Path) -> None:
    run(2, save_dcp, str(tmp_path / "dcp"))
    convert = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    subprocess.run([*convert, str(tmp_path / "dcp"), str(tmp_path / "old.pt")], check=True, timeout=120)
    run(2, load_converted, str(tmp_path / "old.pt"))


def save_zero(directory: str) -> None:
    net, raw = build()
    # Otherwise DeepSpeed replaces torch.nn.functional.linear in this process, for good.
    zero = {"stage": 3, "memory_efficient_linear": False}
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": zero}
    config |= {"zero_allow_untrusted_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed_alone(model=net, optimizer=raw, config=config, dist_init_required=False)
    for step in range(3):
        x, y = batch(step)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
    engine.save_checkpoint(directory)


def load_weights(directory: str) -> None:
    model = accel.setup(build(seed=1)[0], backend="fsdp").model
    accel.load(directory, {"model": model})
    check_trained(model, 3)


def test_a_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    for outcome in outcomes(2, save_zero, str(tmp_path / "zero"), breaks=True):
        assert not outcome.error, outcome.trace
    convert = [sys.executable, "zero_to_fp32.py", ".", "weights", "--safe_serialization"]
    subprocess.run(convert, cwd=tmp_path / "zero", check=True, timeout=120)
    run(2, load_weights, str(tmp_path / "zero/weights"))
