"""Frozen parameters inside and outside of an optimizer's groups: saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.backends import need
from tests.checkpoint.crafting import body_of
from tests.checkpoint.helpers import differences, engines
from tests.distributed import run


def net(seed: int) -> nn.Sequential:
    """Return four layers. The first two are frozen."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()


def trainable(model: nn.Module) -> str:
    return "".join("-+"[p.requires_grad] for p in model.parameters())


def full(model: nn.Module, optimizer: Any, raw: bool) -> list[Any]:
    state = [o.state_dict() if raw else accel.full_state_dict(o) for o in (model, optimizer)]
    return [{n: t.clone() for n, t in state[0].items()}, state[1]]


def trainable_only(directory: str, backend: Any) -> None:
    """Save and load an optimizer of the trainable parameters alone, and train on."""
    found, alive = [], []
    for seed in (1, 2):
        model = net(seed)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if backend is not None:
            model, optimizer, _ = accel.setup(model, optimizer, backend=backend)
        state = {"m": model, "o": optimizer}
        alive.append(state)
        if seed == 1:
            train(model, optimizer)
            accel.save(state, directory)
        else:
            accel.load(directory, state)
        assert trainable(model) == "----++++"
        found.append(full(model, optimizer, backend is None))
        train(model, optimizer)
        found[-1] += full(model, optimizer, backend is None)
    assert not differences(*found)
    accel.teardown()


@pytest.mark.parametrize("backend", [None, *engines(2)], ids=str)
def test_an_optimizer_of_trainable_parameters(backend: Any, tmp_path: Path) -> None:
    if backend is not None:
        need(backend, 2)
    run(1 if backend is None else 2, trainable_only, str(tmp_path), backend)


def test_freezing_travels_with_the_optimizer(tmp_path: Path) -> None:
    """Parameters in a group are frozen as saved. Others stay as the program made them."""
    model = net(1)
    optimizer = torch.optim.AdamW(model[1:].parameters())  # two of these are frozen
    train(model, optimizer)
    accel.save({"m": model, "o": optimizer}, tmp_path)
    assert body_of(tmp_path)["values"]["o"]["frozen"] == ["1.bias", "1.weight"]
    other = net(2)
    held = torch.optim.AdamW(other[1:].parameters())
    other[:2].requires_grad_(True)
    other[2].requires_grad_(False)
    accel.load(tmp_path, {"m": other})
    assert trainable(other) == "++++--++"
    accel.load(tmp_path, {"m": other, "o": held})
    assert trainable(other) == "++--++++"
    unnamed = net(3)
    held = torch.optim.AdamW(unnamed[1:].parameters())
    unnamed.requires_grad_(True)
    accel.load(tmp_path, {"o": held})  # by position
    assert trainable(unnamed) == "++--++++"
