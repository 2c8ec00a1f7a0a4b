"""What the tests of sharded train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.models import rows


def net(width: int = 12, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(4, width), *layers, nn.Linear(width, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def data(step: int, rank: int) -> torch.Tensor:
    return rows(100 * step + rank, 8, 4)


def everywhere(step: int) -> torch.Tensor:
    return torch.cat([data(step, rank) for rank in range(accel.world_size())])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x[:, :2].sin())


def sharded(raw: nn.Module, optimizers: Any = None, **options: Any) -> Any:
    handles = accel.setup(raw, optimizers, backend=accel.Sharded(**options))
    return handles.model, handles.optimizers
