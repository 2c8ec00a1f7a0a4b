"""What is frozen, in the groups of an optimizer and beside them: saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
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
    """Four layers, of which the first two are frozen."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


FROZEN = ["0.bias", "0.weight", "1.bias", "1.weight"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2 and p.requires_grad], lr=0.1)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def whole(*objects: Any, raw: bool) -> list[Any]:
    """What the objects hold, as it is now."""
    full = [o.state_dict() if raw else accel.full_state_dict(o) for o in objects]
    return [{n: t.clone() for n, t in full[0].items()}, *full[1:]]


def trainable_only(
    directory: str, backend: Any, make: Callable[[nn.Module], torch.optim.Optimizer], strict: bool
) -> None:
    """An optimizer that holds the trainable parameters alone."""
    found, alive = [], []
    for seed in (1, 2):
        model = net(seed)
        optimizer = make(model)
        if backend is not None:
            model, optimizer, _ = accel.setup(model, optimizer, backend=backend)
        state = {"m": model, "o": optimizer}
        alive.append(state)
        if seed == 1:
            train(model, optimizer)
            accel.save(state, directory)
            accel.verify(directory)
        else:
            accel.load(directory, state, strict=strict)
        found.append(whole(model, optimizer, raw=backend is None))
        assert [n for n, p in model.named_parameters() if not p.requires_grad] == sorted(FROZEN, key=sort_key)
        train(model, optimizer)
        found[-1] += whole(model, optimizer, raw=backend is None)
    assert not differences(*found)
    accel.teardown()


def sort_key(name: str) -> tuple[str, bool]:
    """In the order of the module."""
    return name[0], "bias" in name


@pytest.mark.parametrize("backend", [None, "single"], ids=["raw", "single"])
@pytest.mark.parametrize("make", [adamw, muon])
def test_an_optimizer_of_the_trainable_parameters(make: Any, backend: Any, tmp_path: Path) -> None:
    for strict in (True, False):
        trainable_only(str(tmp_path), backend, make, strict)


@pytest.mark.parametrize("backend", engines(2), ids=str)
def test_an_optimizer_of_the_trainable_parameters_on_two_ranks(backend: Any, tmp_path: Path) -> None:
    need(backend, 2)
    run(2, trainable_only, str(tmp_path), backend, adamw, True)


def test_the_record_names_what_is_frozen_in_the_groups(tmp_path: Path) -> None:
    model = net(1)
    optimizer = torch.optim.AdamW(model[1:].parameters())
    accel.save({"m": model, "o": optimizer}, tmp_path)
    assert body_of(tmp_path)["values"]["o"]["frozen"] == ["1.bias", "1.weight"]


def test_two_optimizers_with_a_part_frozen_for_a_phase(tmp_path: Path) -> None:
    """Each speaks of its own parameters: loading one leaves the other's as they are."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, torch.optim.SGD(model[0].parameters(), 0.1, 0.9), torch.optim.AdamW(model[1].parameters())

    model, body, head = build(1)
    train(model, body, head)
    model[0].requires_grad_(False)
    train(model, body, head)
    accel.save({"m": model, "body": body, "head": head}, tmp_path)
    other, other_body, other_head = build(2)
    accel.load(tmp_path, {"m": other, "head": other_head})
    assert all(p.requires_grad for p in other.parameters())
    accel.load(tmp_path, {"m": other, "body": other_body, "head": other_head})
    assert [p.requires_grad for p in other.parameters()] == [False, False, True, True]
    train(model, body, head)
    train(other, other_body, other_head)
    assert not differences(whole(model, body, head, raw=True), whole(other, other_body, other_head, raw=True))


def test_frozenness_travels_with_the_optimizer_that_holds_the_parameter(tmp_path: Path) -> None:
    """In a group it is what was saved; in none, or without the optimizer, it stays what the program has made it."""
    model = net(1)
    optimizer = torch.optim.AdamW(model[1:].parameters())  # two of these are frozen
    train(model, optimizer)
    accel.save({"m": model, "o": optimizer}, tmp_path)
    other = net(2)
    held = torch.optim.AdamW(other[1:].parameters())
    other[0].requires_grad_(True)
    other[1].requires_grad_(True)
    other[2].requires_grad_(False)
    accel.load(tmp_path, {"m": other})
    assert [p.requires_grad for p in other.parameters()] == [True, True, True, True, False, False, True, True]
    accel.load(tmp_path, {"m": other, "o": held})
    assert [p.requires_grad for p in other.parameters()] == [True, True, False, False, True, True, True, True]
    unnamed = net(3)
    held = torch.optim.AdamW(unnamed[1:].parameters())
    unnamed.requires_grad_(True)
    accel.load(tmp_path, {"o": held})  # by position
    assert [p.requires_grad for p in unnamed.parameters()] == [True, True, False, False, True, True, True, True]
