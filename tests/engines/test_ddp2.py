"""ddp2: ddp with a DataParallel inside each process that has several devices. Parity is in test_contract.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.process import current
from tests.distributed import refusals, run
from tests.models import distance, mlp, rows, sgd


def steps(model: Any, optimizer: Any, shard: slice) -> None:
    for step in range(6):
        model[0].weight.requires_grad_(step not in (2, 3))
        x = rows(step, 8, 4)[shard]
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :2].sin()).backward()
        optimizer.step()


def train(several: bool) -> tuple[float, list[str], list[str]]:
    """Return the distance to one process, the calls of DataParallel and the names of the state."""
    accel.init()
    if several:  # torch's DataParallel takes CPU devices, and passes the batch through.
        current().devices = (torch.device("cpu"), torch.device("cpu"))
    raw, reference = mlp(4, 8, 2, seed=3), mlp(4, 8, 2, seed=3)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.DDP2(bucket_cap_mb=1))
    calls: list[str] = []
    forward = nn.DataParallel.forward

    def counted(self: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(type(self.module).__name__)
        return forward(self, *args, **kwargs)

    size = 8 // accel.world_size()
    nn.DataParallel.forward = counted  # type: ignore[method-assign]
    try:
        steps(model, optimizer, slice(accel.rank() * size, (accel.rank() + 1) * size))
    finally:
        nn.DataParallel.forward = forward  # type: ignore[method-assign]
    names = list(model.state_dict())
    accel.teardown()
    steps(reference, sgd(reference), slice(None))
    return distance(raw, reference), calls, names


@pytest.mark.parametrize(("world", "several"), [(1, True), (2, True), (2, False)])
def test_trains_as_one_process(world: int, several: bool) -> None:
    for error, calls, names in run(world, train, several):
        assert error < 1e-6
        assert calls == (["Sequential"] * 6 if several else [])
        assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


def refused() -> None:
    accel.init()
    current().devices = (torch.device("meta"), torch.device("meta"))
    accel.setup(nn.BatchNorm1d(2), backend=accel.DDP2(sync_batchnorm=True))


def test_sync_batchnorm_needs_a_process_per_device() -> None:
    assert "several devices" in refusals(1, refused, error="BackendError")[0]
