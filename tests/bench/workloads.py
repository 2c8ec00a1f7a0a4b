"""The models that are timed: the time of one step in raw torch decides how visible a library's overhead is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer and one fixed batch. A block of a round has ``steps`` of it."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Optimizer]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    steps: int = 1

    def build(self) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = self.model()
        return model, self.optimizer(model)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def many() -> nn.Module:
    """Build a chain of 250 Linear layers of widths 32 to 128, scaled so that no value dies out on the way."""
    draw = random.Random(0)
    widths = [64, *(draw.randrange(32, 129, 8) for _ in range(249)), 64]
    layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    return nn.Sequential(*layers)


class GPT(nn.Module):
    """Four transformer blocks of width 256 over 256 characters, 3.3 million parameters."""

    def __init__(self, width: int = 256, blocks: int = 4, context: int = 32) -> None:
        super().__init__()
        self.chars, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, chars: torch.Tensor) -> torch.Tensor:
        x = self.chars(chars) + self.places.weight
        for block in self.blocks:
            x = block(x, self.mask, is_causal=True)
        return self.head(x).transpose(1, 2)


def _numbers(width: int, out: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, width), torch.randn(8, out)


def characters() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(256, (2, 32)), torch.randint(256, (2, 32))


# With such a rate, thousands of steps on one batch change nothing about the cost of a step.
RATE = 1e-9


def adamw(model: nn.Module, **options: bool) -> Optimizer:
    return AdamW(model.parameters(), lr=RATE, **options)


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=RATE)


TINY = Workload("tiny", "tiny: 2 Linear layers, SGD", tiny, _sgd, partial(_numbers, 16, 4), F.mse_loss, 20)
MANY = Workload("many", "500 tensors: 250 Linear layers, SGD", many, _sgd, partial(_numbers, 64, 64), F.mse_loss)
SMALL_GPT = Workload("gpt", "small GPT: 3.3 M parameters, AdamW", GPT, adamw, characters, F.cross_entropy)
WORKLOADS = (TINY, MANY, SMALL_GPT)


def with_adamw(workload: Workload, **options: bool) -> Workload:
    """Sharding divides the state of an optimizer, which SGD doesn't have."""
    title = workload.title.replace("SGD", "AdamW")
    return replace(workload, title=title, optimizer=partial(adamw, **options))
