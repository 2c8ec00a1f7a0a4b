"""Every way in which a reduction of ``ddp`` can go wrong: parameters unused, missing, frozen, exchanged, left waiting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward as bound_early

import accel
from tests.distributed import outcomes, refusals, run
from tests.models import distance, equal_on_all_ranks, mlp, rows, sgd


def data(step: int, rank: int) -> torch.Tensor:
    return rows(100 * step + rank, 8, 4)


# -- unused, missing, frozen ------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        features = self.body(x)
        both = self.left(features) + self.right(features)
        return {"left": self.left(features), "right": self.right(features), "both": both}[side]


def unused_by_rank() -> None:
    accel.init(timeout=5)
    raw = TwoHeads()
    model = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp").model
    model(data(0, 0), ["left", "both"][accel.rank()]).mean().backward()


def test_rank_dependent_missing_gradients_end_every_rank() -> None:
    for message in refusals(2, unused_by_rank, error="AccelError", breaks=True):
        assert "2 parameters got no gradient in the last backward" in message
        assert "right.weight, right.bias" in message
        assert "backend=accel.DDP(find_unused_parameters=True)" in message


def freeze_on_one_rank() -> None:
    accel.init(timeout=5)
    raw = mlp(4, 8, 2)
    model, optimizer, _ = accel.setup(raw, sgd(raw))
    raw[0].weight.requires_grad_(accel.rank() == 1)
    before = copy.deepcopy(raw.state_dict())
    try:
        model(data(0, 0)).mean().backward()
        optimizer.step()
    finally:
        assert not distance(raw.state_dict(), before)


def test_a_mask_that_differs_ends_every_rank() -> None:
    first, second = outcomes(2, freeze_on_one_rank, breaks=True)
    assert "RankMismatchError" in first.error
    assert second.error
    assert "AssertionError" not in second.error
    assert max(first.seconds, second.seconds) < 50  # the group's own timeout is 60 s


def manual_refresh() -> None:
    raw, other = mlp(4, 8, 2), mlp(4, 8, 2)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.DDP(auto_refresh=False))
    reference, ref_optimizer, _ = accel.setup(other, sgd(other))
    for step in range(6):
        for m, o, r in ((model, optimizer, raw), (reference, ref_optimizer, other)):
            r[0].requires_grad_(step % 3 == 0)
            accel.refresh_trainable(m)
            o.zero_grad()
            m(data(step, accel.rank())).square().mean().backward()
            o.step()
    assert not distance(raw, other)
    # Without the call, unfrozen parameters are reduced too, and frozen ones are left out.
    for child, trainable in ((raw[0], True), (raw[2], False)):
        child.requires_grad_(trainable)
        optimizer.zero_grad()
        model(data(9, accel.rank())).square().mean().backward()
        optimizer.step()
        assert equal_on_all_ranks(raw)
    assert raw[2].weight.grad is None


def test_manual_refresh() -> None:
    run(2, manual_refresh)


# -- a backward that leaves the reducer waiting -----------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.tanh(self.trunk(x))
        return self.left(features), self.right(features)


def heads(option: dict[str, Any]) -> float:
    """One backward for each head: the largest difference from one process; buckets of one parameter or of all."""
    torch.manual_seed(0)
    reference, ours = Heads(), Heads()
    ours.load_state_dict(reference.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, ours)]
    model, handle, _ = accel.setup(ours, optimizers[1], backend=accel.DDP(**option))
    for step in range(5):
        everything = torch.cat([data(step, rank) for rank in range(accel.world_size())])
        for m, o, x in ((reference, optimizers[0], everything), (model, handle, data(step, accel.rank()))):
            o.zero_grad()
            left, right = m(x)
            first, second = (left, right) if step % 2 else (right, left)
            first.square().mean().backward(retain_graph=True)
            bound_early(second.square().mean())
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
    assert equal_on_all_ranks(ours)
    accel.teardown(model)
    return distance(reference, ours)


@pytest.mark.parametrize(
    "option", [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_a_backward_for_each_head(option: dict[str, Any]) -> None:
    assert max(run(2, heads, option)) < 1e-5
