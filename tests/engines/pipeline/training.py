"""What the tests of pipelines train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import distance


def net(middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.ReLU(inplace=True),
        middle or nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 3),
    )


def batch(step: int, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def one_step(model: Any, optimizer: Any, step: int) -> torch.Tensor:
    x, y = batch(step)
    optimizer.zero_grad()
    out: torch.Tensor = model(x)
    F.mse_loss(out, y).backward()
    optimizer.step()
    return out.detach()


def apart(module: nn.Module, other: nn.Module) -> float:
    """The largest difference of two modules' states; batches are counted once for each part of them."""
    states = ([t for t in m.state_dict().values() if t.is_floating_point()] for m in (module, other))
    return distance(*states)
