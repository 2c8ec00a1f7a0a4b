"""``accel.DDP(sync_every=n, outer=...)``: weights as a reference in plain torch.distributed makes them, and what lies between averages."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accel
from tests.distributed import outcomes, run
from tests.models import equal_on_all_ranks, rows

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
Reference = tuple[nn.Module, Callable[[int], None]]


def net(bn: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm1d(6) if bn else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def loss(model: Any, step: int) -> torch.Tensor:
    x = rows(10 * step + dist.get_rank() if dist.is_initialized() else step, 5, 4)
    return (model(x) - x[:, :2]).square().mean()


def train(model: Any, optimizer: Any, steps: range, clip: Any = nn.utils.clip_grad_norm_) -> None:
    for step in steps:
        optimizer.zero_grad()
        for micro in range(2):
            loss(model, 2 * step + micro).backward()
        clip(model.parameters(), 0.5)
        optimizer.step()


def by_hand(every: int, outer: dict[str, Any] | None, steps: int) -> nn.Module:
    """Local SGD and DiLoCo as their papers write them."""
    model = net()
    optimizer = adam(model)
    before = [p.detach().clone() for p in model.parameters()]
    outside = torch.optim.SGD(before, **outer) if outer else None
    for first in range(0, steps, every):
        train(model, optimizer, range(first, first + every))
        for p, old in zip(model.parameters(), before, strict=True):
            mean = p.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            old.grad = old - mean
            if outside is None:
                old.copy_(mean)
        if outside is not None:
            outside.step()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
    return model


def close(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=0, atol=1e-6) for p, q in pairs)


def train_beside_reference() -> None:
    for every, outer in ((4, None), (4, NESTEROV), (1, {"lr": 1.0}), (2, {"lr": 0.5, "weight_decay": 0.1})):
        reference = by_hand(every, outer, 3 * every)
        raw = net()
        model, optimizer, _ = accel.setup(raw, adam(raw), backend=accel.DDP(sync_every=every, outer=outer, drift_check=1))
        train(model, optimizer, range(3 * every))
        assert close(raw, reference), (every, outer)
        assert equal_on_all_ranks(raw)
        accel.teardown(model)


def test_weights_are_those_of_the_papers() -> None:
    run(2, train_beside_reference)


def set_up(every: int = 4, outer: Any = NESTEROV, raw: nn.Module | None = None) -> tuple[Any, Any, nn.Module]:
    raw = net() if raw is None else raw
    model, optimizer, _ = accel.setup(raw, adam(raw), backend=accel.DDP(sync_every=every, outer=outer))
    return model, optimizer, raw


def mean(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.detach() / accel.world_size() for name, p in module.named_parameters()}
    for p in found.values():
        dist.all_reduce(p)
    return found


def near(state: dict[str, torch.Tensor], means: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(state[name], p, rtol=0, atol=1e-7) for name, p in means.items())


def save_and_resume(path: pathlib.Path) -> None:
    unbroken, o, whole = set_up()
    train(unbroken, o, range(8))
    accel.save({"model": unbroken, "o": o}, path / "at")
    train(unbroken, o, range(8, 10))
    means, own = mean(whole), copy.deepcopy([p.detach() for p in whole.parameters()])
    assert not near(dict(whole.named_parameters()), means)
    # In an interval a checkpoint has the means, and the run goes on as if none had been written.
    accel.save({"model": unbroken, "o": o}, path / "between")
    accel.save({"model": unbroken, "o": o}, path / "behind", wait=False).result()
    assert near(accel.full_state_dict(unbroken), means)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), own, strict=True))
    moments = accel.full_state_dict(o)["state"][0]["exp_avg"]
    dist.broadcast(moments_of_rank_0 := o.state[next(whole.parameters())]["exp_avg"].clone(), 0)
    assert torch.equal(moments, moments_of_rank_0)
    for refused in (whole.state_dict, whole[0].state_dict, unbroken.state_dict, lambda: copy.deepcopy(whole)):
        with pytest.raises(accel.BackendError, match="full_state_dict"):
            refused()
    train(unbroken, o, range(10, 16))
    assert equal_on_all_ranks(whole)
    whole.state_dict()
    accel.teardown(unbroken)
    # After an average it goes on as if it had never ended: each rank's moments, and the outer momentum.
    model, o, raw = set_up()
    train(model, o, range(50, 52))
    accel.load(path / "at", {"model": model, "o": o})
    train(model, o, range(8, 16))
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), whole.parameters(), strict=True))
    # In an interval: from the means, in a new one.
    for name in ("between", "behind"):
        accel.load(path / name, {"model": model, "o": o})
        assert equal_on_all_ranks(raw)
        assert near(dict(raw.named_parameters()), means)
    train(model, o, range(4))
    assert equal_on_all_ranks(raw)
    train(model, o, range(1))
    means = mean(raw)
    accel.teardown(model)
    assert near(dict(raw.named_parameters()), means)
    # Without sync_every: rank 0's moments, as a raw optimizer has them after the end.
    model, o, _ = accel.setup(raw, o_raw := adam(raw), backend="ddp")
    accel.load(path / "between", {"model": model, "o": o})
    assert torch.equal(o_raw.state[next(raw.parameters())]["exp_avg"], moments)
    train(model, o, range(2))
    accel.save({"model": model, "o": o}, path / "ddp")
    accel.teardown(model)
    model, o, raw = set_up(outer=None)
    accel.load(path / "ddp", {"model": model, "o": o})
    train(model, o, range(4))
    accel.save({"model": model, "o": o}, path / "local")


def resume_elsewhere(path: pathlib.Path, world: int) -> None:
    for name in ("at", "between", "local"):
        model, o, raw = set_up(outer=None if name == "local" else NESTEROV)
        accel.load(path / name, {"model": model, "o": o})
        train(model, o, range(4))
        assert equal_on_all_ranks(raw)
        accel.teardown(model)
    model = accel.setup(net(), backend="ddp").model
    accel.load(path / "between", {"model": model})


def test_checkpoints(tmp_path: pathlib.Path) -> None:
    run(2, save_and_resume, tmp_path)
    run(1, resume_elsewhere, tmp_path, 1)
    run(4, resume_elsewhere, tmp_path, 4)
    assert accel.verify(tmp_path / "between") is None
