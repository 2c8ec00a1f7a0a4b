"""What is special to ``ddp``: equality with the raw class, its options, uneven inputs, missing gradients."""

from __future__ import annotations

import contextlib
import copy
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import backward as bound_early
from torch.nn.parallel import DistributedDataParallel

import accel
from tests.distributed import outcomes, refusals, run
from tests.models import distance, equal_on_all_ranks, mlp, rows, sgd


def net(bn: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm1d(16) if bn else nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(4, 16), middle, nn.Tanh(), nn.Linear(16, 2))


def data(step: int, rank: int) -> torch.Tensor:
    return rows(100 * step + rank, 8, 4)


def train_beside_raw_ddp(bn: bool, accumulation: int, option: dict[str, Any]) -> bool:
    rank = accel.rank()
    ours, theirs = net(bn), net(bn)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs)]
    ddp = DistributedDataParallel(theirs, **option)
    model, handle, _ = accel.setup(ours, optimizers[0], backend=accel.DDP(**option))
    for step in range(6):
        for m, o, no_sync in ((model, handle, accel.no_sync(model)), (ddp, optimizers[1], ddp.no_sync())):
            o.zero_grad()
            for micro in range(accumulation):
                with no_sync if micro < accumulation - 1 else contextlib.nullcontext():
                    bound_early(F.softplus(m(data(10 * step + micro, rank))).mean())
            o.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    same = all(torch.equal(p, q) for p, q in pairs)
    # Raw DDP leaves each rank's own statistics until its next forward; ours are rank 0's already.
    same_buffers = all(torch.equal(p, q) for p, q in zip(ours.buffers(), theirs.buffers(), strict=True))
    return same and equal_on_all_ranks(ours) and (same_buffers or rank > 0)


@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("option", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}], ids=str)
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_bit_equal_to_raw_ddp(bn: bool, accumulation: int, option: dict[str, Any]) -> None:
    assert run(2, train_beside_raw_ddp, bn, accumulation, option) == [True, True]


def calls_of_a_usual_step(bn: bool) -> list[str]:
    """Return the functions of accel that one step calls."""
    raw = net(bn)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp")
    home, calls = accel.__path__[0], list[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            calls.append(frame.f_code.co_qualname)

    batch = data(0, accel.rank())
    for _ in range(5):  # the drift guard compares in the first one
        calls.clear()
        sys.setprofile(note)
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("bn", "most"), [(False, 12), (True, 20)])
def test_a_usual_step_makes_few_calls(bn: bool, most: int) -> None:
    for calls in run(2, calls_of_a_usual_step, bn):
        assert len(calls) <= most, calls


def compressed(hook: str) -> float:
    raws = net(), net()
    options = accel.DDP(comm_hook=hook, powersgd_rank=2 if hook == "powersgd" else 1)
    pairs = [accel.setup(m, sgd(m), backend=b)[:2] for m, b in zip(raws, (options, "ddp"), strict=True)]
    for step in range(12):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            x = data(step, accel.rank())
            F.mse_loss(model(x), x[:, :2]).backward()
            optimizer.step()
    assert equal_on_all_ranks(raws[0])
    return distance(*raws)


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 1e-2), ("powersgd", 0.2)])
def test_comm_hooks_keep_ranks_equal(hook: str, tolerance: float) -> None:
    for worst in run(2, compressed, hook):
        assert 0.0 < worst < tolerance


def uneven(bn: bool, first: int) -> None:
    raw = net(bn)
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), lr=0.01))
    for epoch in range(2):
        with accel.join(model):
            for step in range(first + accel.rank() * 2):
                optimizer.zero_grad()
                model(data(step + 100 * epoch, accel.rank())).square().mean().backward()
                optimizer.step()
        assert equal_on_all_ranks(raw)
        assert all(float(s["step"]) == (first + 2) * (epoch + 1) for s in optimizer.state.values())
        state = torch.cat([s["exp_avg"].reshape(-1) for s in optimizer.state.values()])
        everywhere = accel.all_gather(state[None])
        assert torch.equal(everywhere[0], everywhere[1])
    optimizer.zero_grad()
    model(data(0, accel.rank())).square().mean().backward()
    optimizer.step()
    assert equal_on_all_ranks(raw)


@pytest.mark.parametrize(("bn", "first"), [(False, 3), (True, 3), (False, 0)])
def test_join_ends_with_equal_state(bn: bool, first: int) -> None:
    run(2, uneven, bn, first)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        features = self.body(x)
        out: torch.Tensor = self.left(features) + (self.right(features) if right else 0)
        return out


def unused_by_rank() -> None:
    accel.init(timeout=5)
    raw = TwoHeads()
    model = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp").model
    model(data(0, 0), accel.rank() == 1).mean().backward()


def test_missing_gradients_end_every_rank() -> None:
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


def test_different_masks_end_every_rank() -> None:
    first, second = outcomes(2, freeze_on_one_rank, breaks=True)
    assert "RankMismatchError" in first.error
    assert second.error
    assert "AssertionError" not in second.error
    assert max(first.seconds, second.seconds) < 50  # the group's own timeout is 60 s


def manual_refresh() -> None:
    raw, other = mlp(4, 8, 2), mlp(4, 8, 2)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.DDP(auto_refresh=False))
    reference = accel.setup(other, sgd(other))
    for step in range(6):
        for m, o in ((model, optimizer), (reference.model, reference.optimizers)):
            accel.unwrap(m)[0].requires_grad_(step % 3 == 0)
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
