"""What sharded refuses, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.distributed import outcomes, run
from tests.engines.sharded.training import adamw, data, loss_of, net, sharded


def refuse(case: str) -> None:
    raw: Any = nn.Sequential(nn.Embedding(4, 2, sparse=True)) if case == "sparse" else net()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    model, handle = sharded(raw, optimizer)
    x = torch.tensor([1]) if case == "sparse" else data(0, accel.rank())
    before = copy.deepcopy(raw.state_dict())
    try:
        if case == "copy":
            copy.deepcopy(optimizer)
        model(x).mean().backward()
        if case == "scaler":
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.zeros(()))
            scaler.step(handle)
        handle.step()
    finally:
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
        raw.zero_grad()


REFUSALS = {
    "copy": (accel.OptimizerError, "holds only this rank's shard of its state"),
    "scaler": (accel.PrecisionError, "accel.backward"),
    "sparse": (accel.BackendError, "sparse gradients of 0.weight"),
}


def refuse_all() -> int:
    for case, (error, message) in REFUSALS.items():
        with pytest.raises(error, match=message):
            refuse(case)
        accel.teardown()
    return len(REFUSALS)


def test_refusals_change_nothing() -> None:
    assert run(2, refuse_all) == [len(REFUSALS)] * 2


def after_the_end() -> str:
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
    try:
        optimizer.step()
    except accel.OptimizerError as error:
        return str(error)
    return "stepped"


def test_partial_state_is_never_stepped() -> None:
    for outcome in outcomes(2, after_the_end, breaks=True):
        assert "has lost a part of its state" in outcome.value, outcome
