"""What is special to ``ddp``: equality with the raw class, its options, no_sync, buffers, exceptions, uneven inputs."""

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
from torch.nn.parallel import DistributedDataParallel

import accel
from tests.distributed import run
from tests.models import FailingBackward, equal_on_all_ranks, rows


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
                    F.softplus(m(data(10 * step + micro, rank))).mean().backward()
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
    raw, plain = net(), net()
    model, handle, _ = accel.setup(
        raw,
        torch.optim.SGD(raw.parameters(), lr=0.05),
        backend=accel.DDP(comm_hook=hook, powersgd_rank=2 if hook == "powersgd" else 1),
    )
    reference, plain_handle, _ = accel.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    for step in range(12):
        for m, o in ((model, handle), (reference, plain_handle)):
            o.zero_grad()
            x = data(step, accel.rank())
            F.mse_loss(m(x), x[:, :2]).backward()
            o.step()
    assert equal_on_all_ranks(raw)
    pairs = list(zip(raw.parameters(), plain.parameters(), strict=True))
    return float(max((p - q).abs().max() for p, q in pairs))


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 1e-2), ("powersgd", 0.2)])
def test_comm_hooks_compress_and_keep_the_ranks_equal(hook: str, tolerance: float) -> None:
    for worst in run(2, compressed, hook):
        assert 0.0 < worst < tolerance


def refused_options() -> None:
    options: list[dict[str, Any]] = [{"comm_hook": "x"}, {"bucket_cap_mb": 0}, {"powersgd_rank": 4}]
    for wrong in options:
        with pytest.raises(accel.BackendError, match=next(iter(wrong))):
            accel.DDP(**wrong)
    with pytest.raises(accel.BackendError, match="accelerator"):
        accel.setup(net(bn=True), backend=accel.DDP(sync_batchnorm=True))
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(net(bn=True))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        accel.setup(synchronized, torch.optim.SGD(synchronized.parameters(), lr=0.1), backend="ddp")


def test_options_are_checked() -> None:
    run(2, refused_options)


class Averages(nn.Module):
    """Keeps statistics in a buffer that each forward replaces, and in a BatchNorm that only a method uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = net(), nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("wide", torch.full((1,), accel.rank()).expand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.count += int(accel.rank()) + 1
        return self.loss(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x)).square().mean()


def replaced_buffers(backend: str) -> None:
    raw = Averages()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    for step in range(4):
        optimizer.zero_grad()
        (model(data(step, accel.rank())) if step % 2 else model.loss(data(step, accel.rank()))).backward()
        optimizer.step()
        assert equal_on_all_ranks(raw)
        if accel.is_main():  # samples of a GAN in training mode, or an evaluation
            with torch.no_grad():
                model.train(step < 2)(data(9, 0))
            model.train()
    assert raw.mean.abs().sum() > 0


@pytest.mark.parametrize("backend", ["ddp", "sharded", "deepspeed:1", "deepspeed:2"])
def test_buffers_are_those_of_rank_0(backend: str) -> None:
    run(2, replaced_buffers, backend)


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mood = net(), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mood == "forward":
            raise ValueError("forward")
        y = self.inner(x)
        if self.mood == "backward":
            y.register_hook(lambda g: 1 / 0)
        if self.mood == "late":
            self.inner[0].weight.register_hook(self.late)
        if self.mood == "last":
            return self.inner(FailingBackward.apply(x.requires_grad_(True)))
        return y

    def late(self, gradient: torch.Tensor) -> None:
        if self.mood == "late":
            raise ZeroDivisionError


def exceptions() -> None:
    raw, other = Moody(), Moody()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    reference, ref_optimizer, _ = accel.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for step, mood in enumerate(["", "forward", "backward", "late", "last", "", "late", "last", ""]):
        raw.mood = mood
        optimizer.zero_grad()
        if mood:
            with pytest.raises((ValueError, ZeroDivisionError)):
                model(data(step, accel.rank())).square().mean().backward()
            continue
        for m, o in ((model, optimizer), (reference, ref_optimizer)):
            o.zero_grad()
            m(data(step, accel.rank())).square().mean().backward()
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), other.parameters(), strict=True))
    assert equal_on_all_ranks(raw)
    for mood in ("late", "last"):
        raw.mood = mood
        optimizer.zero_grad()
        with pytest.raises(ZeroDivisionError):
            model(data(0, accel.rank())).mean().backward()
        raw.mood = ""
        before = copy.deepcopy(raw.state_dict())
        with pytest.raises(accel.BackendError, match="ended a backward of Moody"):
            optimizer.step()
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
    assert accel.teardown(model) is raw
    accel.setup(raw, optimizer)


def test_an_exception_leaves_the_engine_usable() -> None:
    run(2, exceptions)


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
def test_join_ends_with_equal_weights_and_optimizer_state(bn: bool, first: int) -> None:
    run(2, uneven, bn, first)
