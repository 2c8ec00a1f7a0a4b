"""Engines that average gradients at the step: what Horovod and XLA share, over gloo."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import accel
from tests.distributed import run
from tests.engines.deferred import known
from tests.engines.matrix import cells_of, check_cells


def matrix() -> list[str]:
    with known():
        return check_cells([c for c in cells_of("deferred") if c.optimizer == "adamw" and (c.clip or c.freeze)])


def test_parity() -> None:
    for failures in run(2, matrix, timeout=240):
        assert not failures, "\n".join(failures)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


def branches_by_rank() -> dict[str, Any]:
    torch.manual_seed(0)
    raw = Branches()
    before = {n: p.detach().clone() for n, p in raw.named_parameters()}
    with known():
        model, optimizer, _ = accel.setup(
            raw, torch.optim.AdamW(raw.parameters(), weight_decay=0.1), backend="deferred"
        )
        model(torch.ones(2, 3), accel.rank() == 0).sum().backward()
        assert (model.left.weight.grad is None) == (accel.rank() == 1)
        optimizer.step()
        gradients = [None if p.grad is None else p.grad.tolist() for p in raw.parameters()]
        moved = [n for n, p in raw.named_parameters() if not torch.equal(p, before[n])]
        return {"gradients": gradients, "moved": moved, "weights": [p.tolist() for p in raw.parameters()]}


def test_a_missing_gradient_counts_zero() -> None:
    first, second = run(2, branches_by_rank)
    assert first == second
    assert first["gradients"] == [[[1.0] * 3], [1.0], [[1.0] * 3], [1.0], None, None]
    assert first["moved"] == ["left.weight", "left.bias", "right.weight", "right.bias"]
