"""sharded: gradients that appear, vanish or lie in odd places, optimizers that look at all of them, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.distributed import outcomes, run
from tests.models import distance, equal_on_all_ranks, rows


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 12), *layers, nn.Linear(12, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def data(step: int, rank: int) -> torch.Tensor:
    return rows(100 * step + rank, 8, 4)


def everywhere(step: int) -> torch.Tensor:
    return torch.cat([data(step, rank) for rank in range(accel.world_size())])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x[:, :2].sin())


def sharded(raw: nn.Module, optimizers: Any) -> Any:
    return accel.setup(raw, optimizers, backend="sharded")[:2]


class Branches(nn.Module):
    """Parameters of several dtypes and layouts, used by some ranks only, by none, or without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(4))
        self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.turning = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.image = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        h = self.body(x) * self.wide.float() * self.turning.abs()
        h = h + 0.1 * self.image.flatten(1).mean() + 0.1 * (self.turned**2).mean() + self.empty.sum()
        return self.heads[head](h)


def branch_loss(model: Any, step: int, rank: int) -> torch.Tensor:
    x = data(step, rank)
    return F.mse_loss(model(x, (rank + step) % 3), x[:, :2])


def two_optimizers(raw: Branches) -> list[torch.optim.Optimizer]:
    body = [p for n, p in raw.named_parameters() if not n.startswith("heads") and n != "unused"]
    return [adamw(body), torch.optim.SGD(raw.heads.parameters(), lr=0.05, momentum=0.9)]


def branches(clip: bool) -> None:
    """Each rank goes another way; in some steps one of them has no gradient at all, or one optimizer waits."""
    rank, world = accel.rank(), accel.world_size()
    raw, reference = Branches(), Branches()
    optimizers, plain = two_optimizers(raw), two_optimizers(reference)
    model, handles = sharded(raw, optimizers)
    for step in range(9):
        if step != 4:
            for o in (*handles, *plain):
                o.zero_grad(set_to_none=step % 2 == 0)
        idle = [0] if step == 5 else []
        if rank not in idle:
            branch_loss(model, step, rank).backward()
        for other in set(range(world)).difference(idle):
            (branch_loss(reference, step, other) / world).backward()
        if clip:
            norm = accel.clip_grad_norm_(model, 0.5)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        for k in range(2):
            if (step, k) != (3, 1):
                handles[k].step()
                plain[k].step()
    assert equal_on_all_ranks(raw)
    accel.teardown(model)
    assert distance(raw, reference) <= 1e-5
    for mine, theirs in zip(optimizers, plain, strict=True):
        assert distance(mine.state_dict()["state"], theirs.state_dict()["state"]) <= 1e-5


@pytest.mark.parametrize(("world", "clip"), [(2, False), (4, True)])
def test_branches_dtypes_layouts_and_optimizers(world: int, clip: bool) -> None:
    run(world, branches, clip)


class Global(torch.optim.Optimizer):
    """Scales each gradient by the norm of all of them: no rank can do its part alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p.sub_(0.1 * p.grad / norm)


def foreign_optimizer() -> None:
    raw, reference = net(), net()
    optimizer, plain = Global(raw.parameters()), Global(reference.parameters())
    model, handle = sharded(raw, optimizer)
    for step in range(3):
        for o, m, x in ((handle, model, data(step, accel.rank())), (plain, reference, everywhere(step))):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
    assert equal_on_all_ranks(raw)
    assert distance(raw, reference) <= 1e-5
    assert len(optimizer.state) == 10


def test_a_foreign_optimizer_steps_whole() -> None:
    run(2, foreign_optimizer)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused() -> None:
    raw = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    before = copy.deepcopy(raw.state_dict())
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    model, handle = sharded(raw, optimizer)
    with pytest.raises(accel.OptimizerError, match="holds only this rank's shard of its state"):
        copy.deepcopy(optimizer)
    model(torch.tensor([1])).mean().backward()
    with pytest.raises(accel.BackendError, match="sparse gradients of 0.weight"):
        handle.step()
    assert torch.equal(raw[0].weight, before["0.weight"])


def test_refusals_change_nothing() -> None:
    run(2, refused)


def after_the_end() -> None:
    accel.init(timeout=5)
    raw = net()
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    loss_of(model, data(0, accel.rank())).backward()
    handle.step()
    raw[accel.rank()].requires_grad_(False)
    with pytest.raises(accel.RankMismatchError, match="requires_grad"):
        model(data(1, accel.rank()))
    accel.teardown(model)
    loss_of(raw, data(2, accel.rank())).backward()
    with pytest.raises(accel.OptimizerError, match="has lost part of its state"):
        optimizer.step()


def test_partial_state_is_never_stepped() -> None:
    for outcome in outcomes(2, after_the_end, breaks=True):
        assert not outcome.error, outcome.trace


def resumed(directory: str) -> None:
    for step in range(2):
        raw = net()
        model, optimizer, _ = accel.setup(raw, adamw(raw.parameters()), backend="sharded")
        state = {"model": model, "optimizer": optimizer}
        if step:
            accel.load(directory, state)
            assert 0 < len(optimizer.state) < len([*raw.parameters()])
        loss_of(model, data(step, accel.rank())).backward()
        optimizer.step()
        accel.save(state, directory)
        accel.teardown()


def test_a_load_before_the_first_step_is_shared(tmp_path: Path) -> None:
    run(2, resumed, str(tmp_path))
