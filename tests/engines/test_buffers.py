"""Buffers that do not have one shape on all ranks cannot be given to all: it is told, and nothing is read as something else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel
from tests.distributed import refusals, run
from tests.models import distance

BACKENDS = ["ddp", "sharded", "fsdp", "deepspeed:2"]


class Positions(nn.Module):
    """A cache that grows with the longest text that this process has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.grow(2)

    def grow(self, length: int) -> None:
        angles = torch.arange(float(length))[:, None] * torch.arange(4.0)
        self.register_buffer("cache", angles.cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.cache):
            self.grow(x.shape[1])
        return self.head(x * self.cache[: x.shape[1]]).mean(1)


def lengths(backend: str, here: tuple[int, int]) -> float:
    """Trains on texts of so many words on either rank; how far the weights are from those of one process."""
    torch.manual_seed(0)
    model, plain = Positions(), Positions()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    handle, optimizer, _ = accel.setup(model, optimizers[0], backend=backend)
    for step in range(3):
        texts = [torch.randn(4, n + step, 4) for n in here]
        for net, stepped, some in ((handle, optimizer, [texts[accel.rank()]]), (plain, optimizers[1], texts)):
            stepped.zero_grad()
            for text in some:
                (net(text).square().mean() / len(some)).backward()
            stepped.step()
    return distance(accel.full_state_dict(handle), plain.state_dict())


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_may_grow_alike(backend: str) -> None:
    assert max(run(2, lengths, backend, (9, 9))) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("here", [(9, 5), (5, 9)])
def test_other_lengths_are_told_on_every_rank(backend: str, here: tuple[int, int]) -> None:
    for message in refusals(2, lengths, backend, here, error="RankMismatchError", breaks=True):
        assert "cache [9, 4]" in message
        assert "cache [5, 4]" in message


@pytest.mark.parametrize("here", [(2, 9), (9, 2)])
def test_one_rank_alone_ends_both(here: tuple[int, int]) -> None:
    """The other one has nothing to tell: it hears of it where it waits."""
    for message in refusals(2, lengths_that_stay, here, error="RankMismatchError", breaks=True):
        assert "buffers that rank 0 gives to all" in message


def lengths_that_stay(here: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Positions()
    handle, optimizer, _ = accel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="ddp")
    for _ in range(3):
        handle(torch.randn(4, here[accel.rank()], 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
