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


def around_the_handle() -> None:
    torch.manual_seed(2)
    raw = nn.Linear(3, 1)
    with known():
        model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), 0.1), backend="deferred")
        x = torch.full((1, 3), 1.0 + accel.rank())
        a, b = model(x).sum(), model(2 * x).sum()
        a.backward()
        b.backward(retain_graph=True)
        b.backward()
        raw(x).sum().backward()
        assert raw.weight.grad.tolist() == [[6.0 * (1 + accel.rank())] * 3]
        norm = (3 * 9.0**2 + 4.0**2) ** 0.5
        assert abs(float(nn.utils.clip_grad_norm_(raw.parameters(), 1.0)) - norm) < 1e-4
        assert abs(float(raw.weight.grad[0, 0]) - 9.0 / norm) < 1e-5
        optimizer.step()
        assert abs(float(accel.clip_grad_norm_(model, 1e9)) - 1.0) < 1e-5


def test_accumulation_and_plain_clipping() -> None:
    run(2, around_the_handle)
