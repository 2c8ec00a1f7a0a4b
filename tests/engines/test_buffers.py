"""Buffers come from rank 0. A buffer that changes its shape is each rank's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel
from tests.distributed import run
from tests.models import distance


class Positions(nn.Module):
    """A cache that grows with the longest text that this process has seen, and a count of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.grow(2)

    def grow(self, length: int) -> None:
        angles = torch.arange(float(length))[:, None] * torch.arange(4.0)
        self.register_buffer("cache", angles.cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.cache):
            self.grow(x.shape[1])
        self.seen = self.seen + x.shape[1]  # replaces the buffer
        return self.head(x * self.cache[: x.shape[1]]).mean(1)


def train(backend: str, lengths: tuple[int, int]) -> tuple[float, float]:
    """Train on texts of these lengths. Return the distance to one process, and the buffer of rank 0."""
    torch.manual_seed(0)
    model, plain = Positions(), Positions()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    handle, optimizer, _ = accel.setup(model, optimizers[0], backend=backend)
    for step in range(3):
        texts = [torch.randn(4, n + step, 4) for n in lengths]
        for net, stepped, some in ((handle, optimizer, [texts[accel.rank()]]), (plain, optimizers[1], texts)):
            stepped.zero_grad()
            for text in some:
                (net(text).square().mean() / len(some)).backward()
            stepped.step()
    weights = {name: value for name, value in accel.full_state_dict(handle).items() if name != "seen"}
    expected = {name: value for name, value in plain.state_dict().items() if name != "seen"}
    return distance(weights, expected), float(model.seen)


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", "deepspeed:2"])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 1)])
def test_caches_may_grow_differently(backend: str, lengths: tuple[int, int]) -> None:
    for apart, seen in run(2, train, backend, lengths):
        assert apart < 1e-6
        assert seen == 3 * lengths[0] + 3
