"""Small models, their optimizers and batches, and how far two are apart."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import accel


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    """Linear layers from each width to the next, with Tanh between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def normalised() -> nn.Sequential:
    """Four inputs, two outputs, and buffers that training changes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


class FailingBackward(torch.autograd.Function):
    """Gives its input; the backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("this backward fails")


def equal_on_all_ranks(module: nn.Module) -> bool:
    """Whether parameters and buffers are, bit for bit."""
    flat = torch.cat([t.detach().to(torch.complex128).reshape(-1) for t in module.state_dict().values()])
    everywhere = accel.all_gather(torch.view_as_real(flat)[None])
    return all(torch.equal(row, everywhere[0]) for row in everywhere)


def one_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()


@contextlib.contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect accel's messages of this level and above."""
    texts: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("accel")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def rows(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers, the same for a seed wherever they are drawn."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(a: Any, b: Any) -> float:
    """The largest difference of two modules' parameters, or of two values of one form: tensors, and containers of them.

    ``nan`` where there is one; what is no tensor must be equal.
    """
    if isinstance(a, nn.Module):
        a, b = list(a.parameters()), list(b.parameters())
    if isinstance(a, dict):
        assert a.keys() == b.keys(), (a.keys(), b.keys())
        a, b = list(a.values()), [b[key] for key in a]
    if isinstance(a, list | tuple):
        found = [distance(x, y) for x, y in zip(a, b, strict=True)]
        return float("nan") if any(d != d for d in found) else max(found, default=0.0)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        one, other = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
        assert one.shape == other.shape, (one.shape, other.shape)
        return float((one - other).abs().max()) if one.numel() else 0.0
    assert a == b, (a, b)
    return 0.0
