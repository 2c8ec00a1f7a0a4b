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
from tests.engines.test_ddp import data, net
from tests.models import distance, equal_on_all_ranks

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


def unused_alike() -> float:
    """Train one head only, then both. Return the distance from one process."""
    raw = TwoHeads()
    reference = copy.deepcopy(raw)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), lr=0.1, weight_decay=0.1), backend="ddp")
    for step in range(6):
        side = ("left", "right", "both")[step // 2]
        plain.zero_grad()
        (sum(reference(data(step, r), side).square().mean() for r in range(2)) / 2).backward()
        plain.step()
        optimizer.zero_grad()
        model(data(step, accel.rank()), side).square().mean().backward()
        assert (raw.right.weight.grad is None) == (side == "left")
        optimizer.step()
    assert equal_on_all_ranks(raw)
    return distance(raw, reference)


def test_parameters_without_a_gradient_are_those_of_one_process() -> None:
    assert max(run(2, unused_alike)) < 1e-5


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


def unused_allowed() -> None:
    raw = TwoHeads()
    reference = copy.deepcopy(raw)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, _ = accel.setup(
        raw, torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9), backend=accel.DDP(find_unused_parameters=True)
    )
    world, rank = accel.world_size(), accel.rank()
    for step in range(8):
        sides = [("left", "right", "both")[(step + r * (step % 2)) % 3] for r in range(world)]
        plain.zero_grad()
        (sum(reference(data(step, r), sides[r]).square().mean() for r in range(world)) / world).backward()
        plain.step()
        optimizer.zero_grad()
        model(data(step, rank), sides[rank]).square().mean().backward()
        optimizer.step()
    for p, q in zip(raw.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_find_unused_parameters_with_other_branches_on_other_ranks() -> None:
    run(2, unused_allowed)


def freeze_on_one_rank() -> str:
    accel.init(timeout=5)
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    if accel.rank() == 0:
        raw[0].weight.requires_grad_(False)
    before = copy.deepcopy(raw.state_dict())
    try:
        model(data(0, 0)).mean().backward()
        optimizer.step()
    finally:
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
    return "stepped"


def test_a_mask_that_differs_ends_every_rank_and_none_steps() -> None:
    first, second = outcomes(2, freeze_on_one_rank, breaks=True)
    assert "RankMismatchError" in first.error
    assert second.error
    assert "AssertionError" not in second.error
    assert max(first.seconds, second.seconds) < 50  # the group's own timeout is 60 s


def manual_refresh() -> None:
    raw, other = net(), net()
    options = accel.DDP(auto_refresh=False)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=options)
    reference, ref_optimizer, _ = accel.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for step in range(6):
        for m, o, r in ((model, optimizer, raw), (reference, ref_optimizer, other)):
            r[0].requires_grad_(step % 3 == 0)
            accel.refresh_trainable(m)
            o.zero_grad()
            m(data(step, accel.rank())).square().mean().backward()
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), other.parameters(), strict=True))
    # Without the call, unfrozen parameters are reduced too, and frozen ones are left out.
    for child, trainable in ((raw[0], True), (raw[3], False)):
        child.requires_grad_(trainable)
        optimizer.zero_grad()
        model(data(9, accel.rank())).square().mean().backward()
        optimizer.step()
        assert equal_on_all_ranks(raw)
    assert raw[3].weight.grad is None


def test_manual_refresh() -> None:
    run(2, manual_refresh)


def all_frozen() -> None:
    raw = net().requires_grad_(False)
    model = accel.setup(raw).model
    model(data(0, accel.rank()))
    raw.requires_grad_(True)
    optimizer = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1)).optimizers
    model(data(0, accel.rank())).square().mean().backward()
    optimizer.step()
    assert equal_on_all_ranks(raw)
    raw.requires_grad_(False)
    x = data(0, accel.rank()).requires_grad_(True)
    model(x).mean().backward()
    assert x.grad is not None


def test_all_parameters_frozen_and_back() -> None:
    run(2, all_frozen)


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
