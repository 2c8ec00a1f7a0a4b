"""ddp2: ddp, with a DataParallel inside each process where it has several devices. Parity is in test_contract.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.process import current
from tests.distributed import refusals, run
from tests.models import mlp, sgd


def two_devices() -> None:
    """As on a host with two: torch's DataParallel takes CPU devices, and passes the batch through."""
    accel.init()
    current().devices = (torch.device("cpu"), torch.device("cpu"))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(4, 8, 2, seed=3)
    return model, sgd(model)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch: (8, 4) and (8, 2)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def train(monkeypatched: bool) -> tuple[list[torch.Tensor], list[str], list[str]]:
    if monkeypatched:
        two_devices()
    raw, raw_optimizer = model_and_optimizer()
    model, optimizer, _ = accel.setup(raw, raw_optimizer, backend=accel.DDP2(bucket_cap_mb=1))
    calls: list[str] = []
    forward = nn.DataParallel.forward

    def counted(self: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(type(self.module).__name__)
        return forward(self, *args, **kwargs)

    nn.DataParallel.forward = counted  # type: ignore[method-assign]
    try:
        size = 8 // accel.world_size()
        mine = slice(accel.rank() * size, (accel.rank() + 1) * size)
        for step in range(6):
            raw[0].weight.requires_grad_(step not in (2, 3))
            x, y = batch(step)
            optimizer.zero_grad()
            F.mse_loss(model(x[mine]), y[mine]).backward()
            optimizer.step()
    finally:
        nn.DataParallel.forward = forward  # type: ignore[method-assign]
    names = list(model.state_dict())
    accel.teardown()
    return [p.detach().clone() for p in raw.parameters()], calls, names


def reference() -> list[torch.Tensor]:
    model, optimizer = model_and_optimizer()
    for step in range(6):
        model[0].weight.requires_grad_(step not in (2, 3))  # type: ignore[index]
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("several", [True, False])
def test_trains_as_one_process(world: int, several: bool) -> None:
    expected = reference()
    start = model_and_optimizer()[0]
    assert not any(torch.allclose(p, q, atol=1e-3) for p, q in zip(expected, start.parameters(), strict=True))
    for weights, calls, names in run(world, train, several):
        assert max(float((p - q).abs().max()) for p, q in zip(weights, expected, strict=True)) < 1e-6
        assert calls == (["Sequential"] * 6 if several else [])
        assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


def refused() -> None:
    two_devices()
    current().devices = (torch.device("meta"), torch.device("meta"))
    accel.setup(nn.BatchNorm1d(2), backend=accel.DDP2(sync_batchnorm=True))


def missing_gradient() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    handle, optimizer, _ = accel.setup(model, torch.optim.SGD(model.parameters(), 0.1), backend="ddp2")
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    handle(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model[1].weight.grad is None


def test_refusals() -> None:
    run(2, missing_gradient)
    assert "several devices" in refusals(1, refused, error="BackendError")[0]
