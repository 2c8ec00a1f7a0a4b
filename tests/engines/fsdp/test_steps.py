"""Elementwise optimizers compute with this rank's rows as plain tensors; whoever looks at them finds DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from tests import models
from tests.distributed import run
from tests.engines.fsdp.training import build, distance, local_loss, mean_loss, train
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


def counted(step: Callable[[], Any]) -> int:
    counter = Counter()
    with counter:
        step()
    return counter.on_dtensors


def rows(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


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
            counts[number] += counted(optimizer.step)
    return counts


def same(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """In order, kind and value."""
    alike = list(mine) == list(other) and all(type(mine[k]) is type(other[k]) for k in mine)
    return alike and all(torch.equal(rows(mine[k]), rows(other[k])) for k in mine if isinstance(mine[k], torch.Tensor))


def all_optimizers() -> list[str]:
    net, raw, whole = Many(), Many(), Many()
    model, handles, _ = accel.setup(net, ours := net.optimize(), backend="fsdp")
    fully_shard(raw, mesh=init_device_mesh("cpu", (accel.world_size(),)))
    wrong = [f"{WAYS[i]}: {count} operations" for i, count in enumerate(train_many(model, handles)) if count]
    # What DTensor cannot do is compared with one process.
    impossible = [i for i, (name, how) in enumerate(WAYS) if name == "Rprop" or (how == "fused" and name[:4] != "Adam")]
    theirs, ones = raw.optimize(), whole.optimize()
    train_many(raw, [optimizer for i, optimizer in enumerate(theirs) if i not in impossible])
    train_many(whole, ones)
    weights, full = accel.full_state_dict(model), whole.state_dict()
    for i, way in enumerate(WAYS):
        if i in impossible:
            names = [name for name in full if name.startswith(f"parts.{i}.")]
            pairs = [({n: weights[n] for n in names}, {n: full[n] for n in names})]
            states = accel.full_state_dict(handles[i])["state"], ones[i].state_dict()["state"]
        else:
            pairs = [tuple(dict(n.parts[i].named_parameters()) for n in (net, raw))]
            states = dict(enumerate(ours[i].state.values())), dict(enumerate(theirs[i].state.values()))
        pairs += [(states[0][key], states[1][key]) for key in states[1]]
        if len(states[0]) != len(states[1]) or not all(same(a, b) for a, b in pairs):
            wrong.append(f"{way}: other weights or state")
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


class Counting(torch.optim.SGD):
    """A subclass that leaves the step alone."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def train_twice(model: Any, optimizer: Any) -> int:
    count = 0
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        count += counted(optimizer.step)
    return count


def subclasses() -> None:
    for kind, local in ((Clipped, False), (Counting, True)):
        net, reference = mlp(4, 4), mlp(4, 4)
        model, handle, _ = accel.setup(net, kind(net.parameters(), lr=0.1), backend="fsdp")
        train_twice(reference, kind(reference.parameters(), lr=0.1))
        assert (train_twice(model, handle) == 0) is local, kind
        assert models.distance(accel.full_state_dict(model), reference.state_dict()) < 1e-6
        accel.teardown(model)


def fail(model: Any, raw: torch.optim.Optimizer) -> None:
    """Let a step raise when it has come to the second group."""
    raw.zero_grad()
    local_loss(model, 5).backward()
    raw.param_groups[1]["betas"] = None
    with pytest.raises(TypeError):
        raw.step()
    raw.param_groups[1]["betas"] = (0.9, 0.999)
    assert all(type(p) is DTensor for g in raw.param_groups for p in g["params"] if p.dim())
    assert all(p._local_tensor.grad is None for p in model.parameters() if p.dim())


def replace_state(raw: torch.optim.Optimizer) -> None:
    for entry in raw.state.values():
        for key, value in entry.items():
            entry[key] = value.clone()


def edited() -> None:
    """Steps use state and weights that were replaced since the step before, and none of a failed step."""
    net, raw = build()
    model, handle, _ = accel.setup(net, raw, backend="fsdp")
    train(model, handle, range(2))
    weights, state = accel.full_state_dict(model), accel.full_state_dict(handle)
    train(model, handle, range(2, 4))
    last = accel.full_state_dict(model)
    for change in (lambda raw: None, replace_state, lambda raw: fail(model, raw)):
        change(raw)
        model.load_state_dict(weights)
        handle.load_state_dict(state)
        if change is replace_state:
            change(raw)
        train(model, handle, range(2, 4))
        assert distance(accel.full_state_dict(model), last) == 0.0
    accel.teardown(model)


def schedulers() -> None:
    """Torch's schedulers wrap ``step`` of an optimizer, before or after setup, for good."""
    for before in (True, False):
        net, raw = build()
        reference, other = build()
        scheduler: Any = torch.optim.lr_scheduler.StepLR(raw, 1, 0.5) if before else None
        plain = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
        model, handle, _ = accel.setup(net, raw, backend="fsdp")
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(raw, 1, 0.5)
        for step in range(3):
            train(model, raw if step == 1 else handle, range(step, step + 1))
            scheduler.step()
            fail(model, raw)
            train(reference, other, range(step, step + 1), mean_loss)
            plain.step()
            model.load_state_dict(reference.state_dict())  # after the failed step
            handle.load_state_dict(copy.deepcopy(other.state_dict()))
        accel.teardown(model)
        train(net, raw, range(3, 4), mean_loss)
        train(reference, other, range(3, 4), mean_loss)
        assert distance(net.state_dict(), reference.state_dict()) < 1e-5, before
    assert "step" in vars(raw)  # the last scheduler's
    net, raw = build()
    accel.teardown(accel.setup(net, raw, backend="fsdp").model)
    assert "step" not in vars(raw)


@pytest.mark.parametrize("check", [schedulers, subclasses, edited])
def test_local_steps_are_invisible(check: Callable[[], None]) -> None:
    run(2, check)
