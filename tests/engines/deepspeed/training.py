"""What the tests of DeepSpeed train, beside plain torch on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from tests.models import distance

STAGES = (1, 2, 3)
#: Without it, models as small as these stay gathered at stage 3.
DIVIDED = {"stage3_param_persistence_threshold": 0}


def zero(stage: int, **options: Any) -> Any:
    return DeepSpeed(stage=stage, config={"zero_optimization": DIVIDED}, **options)


class Net(nn.Module):
    """Two branches, odd sizes, a scalar."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, left: bool = True, right: bool = True) -> dict[str, torch.Tensor]:
        h = self.body(x)
        parts = [branch(h) for branch, used in ((self.left, left), (self.right, right)) if used]
        return {"out": sum(parts) * self.scale}

    def size(self) -> torch.Tensor:
        return self.right.weight.square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def data(step: int, rank: int | None = None) -> torch.Tensor:
    """A batch of every rank, or of one."""
    x = torch.randn(accel.world_size(), 4, 5, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[rank]


def loss_of(out: Any) -> torch.Tensor:
    return out["out"].square().mean() if isinstance(out, dict) else out.square().mean()


def forward_of(model: Any, x: torch.Tensor) -> Any:
    return model(x)


def mean_loss(model: nn.Module, forward: Callable[..., Any], step: int) -> torch.Tensor:
    """What one process on the whole batch would have: the mean over the ranks' batches."""
    return torch.stack([loss_of(forward(model, x)) for x in data(step)]).mean()


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in accel.full_state_dict(model).items()}


class Pair:
    """The same model trained by accel, and by plain torch on the whole batch."""

    def __init__(self, backend: Any, make: Callable[[nn.Module], Any] = adamw, net: Any = Net, **options: Any) -> None:
        self.plain, raw = net(), net()
        self.plain_optimizer, self.raw_optimizer, self.raw = make(self.plain), make(raw), raw
        self.model, self.optimizer, _ = accel.setup(raw, self.raw_optimizer, backend=backend, **options)

    def check(self, tolerance: float = 1e-5) -> None:
        found = distance(whole(self.model), self.plain.state_dict())
        assert found <= tolerance, found
        mine, theirs = accel.full_state_dict(self.optimizer), self.plain_optimizer.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for index, entries in theirs["state"].items():
            assert distance(mine["state"][index], entries) <= tolerance

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def backward(self, step: int, forward: Any = forward_of, more: Any = lambda model: 0.0) -> None:
        """``more`` is added to the loss."""
        (loss_of(forward(self.model, data(step, accel.rank()))) + more(self.model)).backward()
        (mean_loss(self.plain, forward, step) + more(self.plain)).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.plain_optimizer.step()

    def train(self, steps: range = range(3), forward: Any = forward_of, more: Any = lambda model: 0.0) -> None:
        for step in steps:
            self.zero_grad()
            self.backward(step, forward, more)
            self.step()
