"""What sharded refuses, on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import accel
from tests.distributed import outcomes, run
from tests.engines.sharded.training import adamw, data, loss_of, net, sharded


def refused() -> None:
    raw = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    before = copy.deepcopy(raw.state_dict())
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    model, handle = sharded(raw, optimizer)
    with pytest.raises(accel.OptimizerError, match="holds only this rank's shard of its state"):
        copy.deepcopy(optimizer)
    model(torch.tensor([1])).mean().backward()
    with pytest.raises(accel.BackendError, match="sparse gradients of 0.weight"):
        handle.step()
    assert torch.equal(raw[0].weight, before["0.weight"])


def test_refusals_change_nothing() -> None:
    run(2, refused)


def after_the_end() -> None:
    accel.init(timeout=5)
    raw = net()
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    loss_of(model, data(0, accel.rank())).backward()
    handle.step()
    raw[accel.rank()].requires_grad_(False)
    with pytest.raises(accel.RankMismatchError, match="requires_grad"):
        model(data(1, accel.rank()))
    accel.teardown(model)
    loss_of(raw, data(2, accel.rank())).backward()
    with pytest.raises(accel.OptimizerError, match="has lost a part of its state"):
        optimizer.step()


def test_partial_state_is_never_stepped() -> None:
    for outcome in outcomes(2, after_the_end, breaks=True):
        assert not outcome.error, outcome.trace
