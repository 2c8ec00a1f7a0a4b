"""What sharded refuses, on every rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.registry import registry
from tests.distributed import run
from tests.engines.sharded.training import adamw, data, loss_of, net, sharded
from tests.models import distance, equal_on_all_ranks


def refuse(case: str) -> None:
    raw: Any = nn.Sequential(nn.Embedding(4, 2, sparse=True)) if case == "sparse" else net()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    model, handle = sharded(raw, optimizer)
    x = torch.tensor([1]) if case == "sparse" else data(0, accel.rank())
    before = copy.deepcopy(raw.state_dict())
    try:
        if case == "copy":
            copy.deepcopy(optimizer)
        if case == "pickle":
            pickle.dumps(optimizer)
        model(x).mean().backward()
        if case == "scaler":
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.zeros(()))
            scaler.step(handle)
        if case == "join":
            with accel.join(model):
                pass
        handle.step()
    finally:
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
        raw.zero_grad()


REFUSALS = {
    "copy": (accel.OptimizerError, "holds only this rank's shard of its state"),
    "pickle": (accel.OptimizerError, "holds only this rank's shard of its state"),
    "scaler": (accel.PrecisionError, "accel.backward"),
    "sparse": (accel.BackendError, "sparse gradients of 0.weight"),
    "join": (accel.BackendError, "uneven inputs"),
}


def refuse_all() -> int:
    for case, (error, message) in REFUSALS.items():
        with pytest.raises(error, match=message):
            refuse(case)
        accel.teardown()
    return len(REFUSALS)


def test_refusals_change_nothing() -> None:
    assert run(2, refuse_all) == [len(REFUSALS)] * 2


def overflow() -> tuple[float, list[float], int]:
    raw = net()
    optimizer = adamw(raw.parameters())
    handles = accel.setup(raw, optimizer, backend="sharded", precision="16-mixed")
    scales = [registry.loss_scale.value]
    before = copy.deepcopy(raw)
    accel.backward(loss_of(handles.model, data(0, accel.rank())))
    if accel.rank() == 1:
        raw[0].weight.grad[0, 0] = float("inf")
    handles.optimizers.step()
    moved = distance(raw, before)
    scales.append(registry.loss_scale.value)
    states = len(optimizer.state)
    handles.optimizers.zero_grad()
    accel.backward(loss_of(handles.model, data(1, accel.rank())))
    handles.optimizers.step()
    assert distance(raw, before) > 0
    assert equal_on_all_ranks(raw)
    return moved, scales, states


def test_an_overflow_anywhere_skips_the_step_everywhere() -> None:
    assert run(2, overflow) == [(0.0, [65536.0, 32768.0], 0)] * 2
