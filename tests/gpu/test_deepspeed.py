"""ZeRO on several CUDA devices over NCCL, beside one process: streams, pinned memory and other devices, which no CPU has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from tests.gpu import Pair, batch, gpus

STAGES = (1, 2, 3)
WIDTH = 1024


def zero(stage: int, offload: bool = False, **config: Any) -> DeepSpeed:
    options = {"zero_optimization": {"stage3_param_persistence_threshold": 0, **config}}
    return DeepSpeed(stage=stage, offload_optimizer=offload, config=options)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def trained(backend: Any) -> None:
    pair = Pair(net, adamw, backend)
    for step in range(30):
        pair.step(step, 4)
    assert pair.distance() < 2e-4


@gpus(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("offload", [False, True])
def test_a_loop_is_exact(stage: int, offload: bool) -> None:
    """A CPU has one memory and no streams: stale weights of stage 3, and copies that the host does not wait for, are not seen."""
    accel.launch(trained, zero(stage, offload), num_processes=2)


@gpus(2)
@pytest.mark.parametrize("config", [{}, {"reduce_scatter": False}, {"contiguous_gradients": False}], ids=str)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=gpus(2)), pytest.param(3, marks=gpus(3))])
def test_overlapped_reductions_are_exact(ranks: int, config: dict[str, Any]) -> None:
    """On a CPU nothing runs beside, so that no memory is used again too early."""
    backend = zero(2, overlap_comm=True, reduce_bucket_size=WIDTH * WIDTH // 2, **config)
    accel.launch(trained, backend, num_processes=ranks)


def fused(stage: int, offload: bool, directory: str) -> None:
    pair, other = (Pair(net, partial(adamw, fused=True), zero(stage, offload)) for _ in range(2))
    for step in range(3):
        pair.step(step, 4)
    full = accel.full_state_dict(pair.optimizer)
    accel.save({"model": pair.model, "optimizer": pair.optimizer}, directory)
    pair.optimizer.load_state_dict(full)
    for step in (3, 4):
        pair.step(step, 4)
    accel.load(directory, {"model": other.model, "optimizer": other.optimizer})
    other.plain, other.plain_optimizer = pair.plain, pair.plain_optimizer
    other.model.load_state_dict({k: v.cpu() for k, v in accel.full_state_dict(pair.model).items()})
    other.optimizer.load_state_dict(accel.full_state_dict(pair.optimizer))
    for step in (5, 6):
        other.step(step, 4)
    assert other.distance() < 2e-4
    raw = accel.teardown(other.model)
    for model, optimizer in ((raw, other.raw_optimizer), (other.plain, other.plain_optimizer)):
        model.zero_grad()
        model(batch(9, 0, 4, WIDTH)).square().mean().backward()
        optimizer.step()
    for p, q in zip(raw.parameters(), other.plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-4)


@gpus(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("offload", [False, True])
def test_fused_optimizers_load_and_tear_down(stage: int, offload: bool, tmp_path: Path) -> None:
    """On a CPU the counters of steps are where their parameters are anyway."""
    accel.launch(fused, stage, offload, str(tmp_path / "saved"), num_processes=2)


def bytes_beside_the_parts() -> None:
    width = 4096
    raw = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9), backend=zero(3))
    model(torch.randn(2, width, device=accel.device())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    one, before = 4 * width * width, torch.cuda.memory_allocated()
    for whole in (model, optimizer):
        torch.cuda.reset_peak_memory_stats()
        state = accel.full_state_dict(whole)
        assert torch.cuda.max_memory_allocated() - before <= 4 * one
        whole.load_state_dict(state)
        assert torch.cuda.max_memory_allocated() - before <= 4 * one
        del state
    torch.cuda.reset_peak_memory_stats()
    accel.teardown(model)
    assert torch.cuda.max_memory_allocated() - before <= (8 + 8 + 4) * one  # weights and momentum


@gpus(2)
def test_full_state_needs_little_memory() -> None:
    """On a CPU what is whole lies in the memory of the parts."""
    accel.launch(bytes_beside_the_parts, num_processes=2)
