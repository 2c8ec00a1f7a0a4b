"""Elementwise optimizers compute with this rank's rows as plain tensors; whoever looks at them finds DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from tests import models
from tests.distributed import run
from tests.engines.fsdp.training import build, distance, local_loss, train
from tests.models import mlp

NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
#: With most of what each can keep, and other ways to compute it.
SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "SGD": {"momentum": 0.9, "nesterov": True, "maximize": True},
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


class Counter(TorchDispatchMode):
    """Operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.on_dtensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.on_dtensors += any(issubclass(t, DTensor) for t in types)
        return func(*args, **(kwargs or {}))


#: The optimizers, and how they compute.
WAYS = [(name, "") for name in NAMES] + [(name, how) for name in FUSED for how in ("foreach", "fused")]


class Many(nn.Module):
    """A part for each way to step; of two ranks the second has no row of some tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(3, 1, 5, seed=number) for number in range(len(WAYS)))

    def optimize(self) -> list[torch.optim.Optimizer]:
        ways = [(n, {**SETTINGS.get(n, {}), **({how: True} if how else {"foreach": False})}) for n, how in WAYS]
        return [
            getattr(torch.optim, name)(part.parameters(), lr=0.01, **kwargs)
            for part, (name, kwargs) in zip(self.parts, ways, strict=True)
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x).square().sum() for part in self.parts]).sum()


def train_many(model: Any, optimizers: list[Any]) -> list[int]:
    """The operations on DTensors in each one's steps."""
    counts = [0] * len(optimizers)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).backward()
        for number, optimizer in enumerate(optimizers):
            with Counter() as counter:
                optimizer.step()
            counts[number] += counter.on_dtensors
    return counts


def all_optimizers() -> list[str]:
    net, plain = Many(), Many()
    model, handles, _ = accel.setup(net, net.optimize(), backend="fsdp")
    counts = train_many(model, handles)
    references = plain.optimize()
    train_many(plain, references)
    wrong = []
    for way, count, handle, reference in zip(WAYS, counts, handles, references, strict=True):
        if count or models.distance(accel.full_state_dict(handle), reference.state_dict()) > 1e-6:
            wrong.append(f"{way}: {count} operations on DTensors, or other state")
    assert models.distance(accel.full_state_dict(model), plain.state_dict()) < 1e-6
    return wrong


def test_elementwise_optimizers_step_local_tensors() -> None:
    for wrong in run(2, all_optimizers):
        assert not wrong


class Clipped(torch.optim.SGD):
    """A subclass that looks across elements in a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm())
        return super().step(closure)


def subclasses() -> None:
    net, reference = mlp(4, 4), mlp(4, 4)
    model, optimizer, _ = accel.setup(net, Clipped(net.parameters(), lr=0.1), backend="fsdp")
    for each, stepped in ((model, optimizer), (reference, Clipped(reference.parameters(), lr=0.1))):
        for _ in range(2):
            stepped.zero_grad()
            each(torch.ones(2, 4)).square().sum().backward()
            stepped.step()
    assert models.distance(accel.full_state_dict(model), reference.state_dict()) < 1e-6


def fail(model: Any, raw: torch.optim.Optimizer) -> None:
    """Let a step raise when it has come to the second group."""
    raw.zero_grad()
    local_loss(model, 5).backward()
    raw.param_groups[1]["betas"] = None
    with pytest.raises(TypeError):
        raw.step()
    raw.param_groups[1]["betas"] = (0.9, 0.999)
    assert all(type(p) is DTensor for g in raw.param_groups for p in g["params"] if p.dim())


def edited() -> None:
    """Steps use the state and weights that were loaded since the step before, and none of a failed step."""
    net, raw = build()
    model, handle, _ = accel.setup(net, raw, backend="fsdp")
    train(model, handle, range(2))
    weights, state = accel.full_state_dict(model), accel.full_state_dict(handle)
    train(model, handle, range(2, 4))
    last = accel.full_state_dict(model)
    for fails in (False, True):
        if fails:
            fail(model, raw)
        model.load_state_dict(weights)
        handle.load_state_dict(state)
        for entry in raw.state.values():
            entry.update({key: value.clone() for key, value in entry.items()})
        train(model, handle, range(2, 4))
        assert distance(accel.full_state_dict(model), last) == 0.0


@pytest.mark.parametrize("check", [subclasses, edited])
def test_local_steps_are_invisible(check: Callable[[], None]) -> None:
    run(2, check)
