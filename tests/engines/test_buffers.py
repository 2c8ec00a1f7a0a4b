"""Buffers come from rank 0. A buffer that changes its shape is each rank's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel
from tests.backends import need
from tests.distributed import run
from tests.models import distance, equal_on_all_ranks, rows


class Positions(nn.Module):
    """A cache that grows with the longest text of this process, statistics, and a count that forward replaces."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3) if norm else nn.Identity()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("wide", torch.full((1,), accel.rank()).expand(3))
        self.grow(2)

    def grow(self, length: int) -> None:
        angles = torch.arange(float(length))[:, None] * torch.arange(4.0)
        self.register_buffer("cache", angles.cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.cache):
            self.grow(x.shape[1])
        self.seen = self.seen + x.shape[1]
        self.count += accel.rank() + 1
        return self.norm(self.head(x * self.cache[: x.shape[1]]).mean(1))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def grow_apart(backend: str, lengths: tuple[int, int]) -> None:
    """Train on texts of these lengths, as one process does on both."""
    model, plain = Positions(norm=False), Positions(norm=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    handle, optimizer, _ = accel.setup(model, optimizers[0], backend=backend)
    for step in range(3):
        texts = [rows(10 * step + n, 4, length + step, 4) for n, length in enumerate(lengths)]
        for net, stepped, some in ((handle, optimizer, [texts[accel.rank()]]), (plain, optimizers[1], texts)):
            stepped.zero_grad()
            for text in some:
                (net(text).square().mean() / len(some)).backward()
            stepped.step()
    full = accel.full_state_dict(handle)
    assert distance([full["head.weight"], full["head.bias"]], [plain.head.weight, plain.head.bias]) < 1e-6
    assert float(model.seen) == 3 * lengths[0] + 3


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", "deepspeed:2"])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 1)])
def test_caches_may_grow_differently(backend: str, lengths: tuple[int, int]) -> None:
    need(backend, 2)
    run(2, grow_apart, backend, lengths)


def replaced(backend: str) -> None:
    raw = Positions(norm=True)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    for step in range(4):
        optimizer.zero_grad()
        x = rows(2 * step + accel.rank(), 8, 3, 4)
        (model(x).square().mean() if step % 2 else model.loss(x)).backward()
        optimizer.step()
        assert equal_on_all_ranks(raw)
        if accel.is_main():  # samples of a GAN in training mode, or an evaluation
            with torch.no_grad():
                model.train(step < 2)(rows(9, 8, 3, 4))
            model.train()
    assert raw.norm.running_mean.abs().sum() > 0


@pytest.mark.parametrize("backend", ["ddp", "sharded", "deepspeed:1", "deepspeed:2"])
def test_buffers_are_those_of_rank_0(backend: str) -> None:
    need(backend, 2)
    run(2, replaced, backend)
