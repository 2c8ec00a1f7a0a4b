"""ddp2: ddp with a DataParallel inside each process that has several devices. Parity is in test_contract.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.process import current
from tests.distributed import run
from tests.models import distance, mlp, rows, sgd


def steps(model: Any, optimizer: Any, shard: slice) -> None:
    for step in range(6):
        model[0].weight.requires_grad_(step not in (2, 3))
        x = rows(step, 8, 4)[shard]
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :2].sin()).backward()
        optimizer.step()


def train(several: bool) -> None:
    """The names of the state and the weights are those of one process, and DataParallel ran or not."""
    accel.init()
    if several:  # torch's DataParallel takes CPU devices, and passes the batch through.
        current().devices = (torch.device("cpu"), torch.device("cpu"))
    raw, reference = mlp(4, 8, 2, seed=3), mlp(4, 8, 2, seed=3)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.DDP2(bucket_cap_mb=1))
    size = 8 // accel.world_size()
    forward = nn.DataParallel.forward
    with mock.patch.object(nn.DataParallel, "forward", autospec=True, side_effect=forward) as called:
        steps(model, optimizer, slice(accel.rank() * size, (accel.rank() + 1) * size))
    assert called.call_count == 6 * several
    assert list(model.state_dict()) == list(reference.state_dict())
    accel.teardown()
    steps(reference, sgd(reference), slice(None))
    assert distance(raw, reference) < 1e-6


@pytest.mark.parametrize(("world", "several"), [(1, True), (2, True), (2, False)])
def test_trains_as_one_process(world: int, several: bool) -> None:
    run(world, train, several)
