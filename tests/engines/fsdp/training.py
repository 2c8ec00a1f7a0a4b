"""What the tests of fsdp train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests import models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Repeated blocks, a tied head, a scalar, a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.seen += tokens.float().mean()
        return self.head(x) * self.scale


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch as (world, 8)."""
    generator = torch.Generator().manual_seed(step)
    size = (accel.world_size(), 8)
    return torch.randint(0, 10, size, generator=generator), torch.randint(0, 10, size, generator=generator)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
}


def build(seed: int = 7, optimizer: str = "adamw") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    first = list(net.blocks[0].parameters())
    rest = [p for p in net.parameters() if all(p is not q for q in first)]
    return net, OPTIMIZERS[optimizer]([{"params": first, "lr": 0.02}, {"params": rest}])


def local_loss(model: Any, step: int) -> torch.Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x[accel.rank()]), y[accel.rank()])


def mean_loss(model: Any, step: int) -> torch.Tensor:
    x, y = batch(step)
    return sum((F.cross_entropy(model(a), b) for a, b in zip(x, y, strict=True)), torch.zeros(())) / len(x)


def train(model: Any, optimizer: Any, steps: range, loss: Callable[[Any, int], torch.Tensor] = local_loss) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def distance(state: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two model state dicts; what counts batches differs by how they are seen."""
    assert list(state) == list(other)
    return models.distance(*({k: v for k, v in each.items() if k != "seen"} for each in (state, other)))
