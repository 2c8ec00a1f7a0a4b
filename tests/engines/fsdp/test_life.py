"""fsdp from setup to teardown, optimizers of whole matrices, and refusals. tests/test_loop.py has its loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests import models
from tests.distributed import refusals, run
from tests.engines.fsdp.training import Block, Net, build, distance, local_loss, mean_loss, train


def life(options: Any, optimizer: str = "adamw") -> None:
    reference, ref_optimizer = build(optimizer=optimizer)
    initial = copy.deepcopy(reference.state_dict())
    net, raw = build(seed=7 if accel.is_main() else 8, optimizer=optimizer)
    parameters = list(net.parameters())
    for first in (0, 3):
        model, handle, _ = accel.setup(net, raw, backend=options)
        if not first:
            assert distance(accel.full_state_dict(model), initial) == 0.0
        train(model, handle, range(first, first + 3))
        train(reference, ref_optimizer, range(first, first + 3), mean_loss)
        assert models.distance(accel.full_state_dict(handle), ref_optimizer.state_dict()) < 1e-5
        assert accel.teardown(model) is net
        assert (type(net), type(net.blocks[0])) == (Net, Block)
        assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
        assert distance(net.state_dict(), reference.state_dict()) < 1e-5
        assert models.distance(raw.state_dict(), ref_optimizer.state_dict()) < 1e-5


def lives() -> None:
    life(accel.FSDP(), "sgd")
    life(accel.FSDP(cpu_offload=True))
    life(accel.FSDP(reshard_after_forward=False))


@pytest.mark.parametrize("world", [1, 2])
def test_setup_and_teardown_twice(world: int) -> None:
    run(world, lives, timeout=180)


def evaluation_then_training() -> float:
    reference, ref_optimizer = build()
    net, raw = build()
    old = list(net.parameters())
    model = accel.setup(net, backend="fsdp").model
    with torch.no_grad():
        assert not local_loss(model, 0).requires_grad
    # Of objects that setup replaced, of gathered ones, and of shards.
    local_loss(model, 0)
    optimizer = torch.optim.AdamW([{"params": raw.param_groups[0]["params"], "lr": 0.02}], lr=0.01)
    optimizer.add_param_group({"params": [p for p in old if all(p is not q for q in raw.param_groups[0]["params"])]})
    handle = accel.setup(model, optimizer).optimizers
    late = torch.optim.Adagrad(model.parameters(), lr=0.0)  # which has state, of parts, from the start
    accel.setup(model, late)
    train(model, handle, range(4))
    train(reference, ref_optimizer, range(4), mean_loss)
    return distance(accel.full_state_dict(model), reference.state_dict())


def test_an_optimizer_after_evaluation() -> None:
    assert max(run(2, evaluation_then_training)) < 1e-5


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: torch.Tensor, *chosen: int) -> torch.Tensor:
        for number in chosen:
            x = self.blocks[number](x)
        return x + self.empty.sum()


def branches(differ: str) -> None:
    model = Branches()
    handles = accel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="fsdp")
    other = accel.rank() if differ else 0
    for chosen in ((0, 1), (0, 1), (2,), (1, 0) if differ == "order" and other else (0, 1 + other)):
        with torch.set_grad_enabled(differ != "evaluation"):
            loss = handles.model(torch.ones(2, 4), *chosen).square().mean()
        if loss.requires_grad:
            loss.backward()
            handles.optimizers.step()
            handles.optimizers.zero_grad()


def test_ranks_with_different_blocks() -> None:
    run(2, branches, "")
    for differ in ("order", "training", "evaluation"):
        messages = refusals(2, branches, differ, error="RankMismatchError", breaks=True)
        assert all("the gathering of blocks." in message for message in messages)


def matrices() -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    """Rows that the ranks share unevenly, or of which some get none; one layer is frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))
    net[2].requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    muon = torch.optim.Muon([p for p in trained if p.dim() == 2], lr=0.02)
    return net, [muon, torch.optim.AdamW([p for p in trained if p.dim() != 2], lr=0.01)]


def muon(directory: str) -> None:
    """Weights and momenta are those of one process; a checkpoint in the middle goes on in other objects."""
    (plain, references), (net, raws) = matrices(), matrices()
    model, optimizers, _ = accel.setup(net, raws, backend="fsdp")
    world, rank = accel.world_size(), accel.rank()
    for step in range(6):
        if step == 3:
            accel.save({"model": model, "optimizers": list(optimizers)}, directory)
            accel.teardown(model)
            net, raws = matrices()
            model, optimizers, _ = accel.setup(net, raws, backend="fsdp")
            accel.load(directory, {"model": model, "optimizers": list(optimizers)})
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        for m, found, mine in ((plain, references, x), (model, optimizers, x[rank::world])):
            for o in found:
                o.zero_grad()
            m(mine).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            for o in found:
                o.step()
    assert distance(accel.full_state_dict(model), plain.state_dict()) <= 1e-5
    momenta = accel.full_state_dict(optimizers[0]), references[0].state_dict()
    assert models.distance(*momenta) <= 1e-5


@pytest.mark.parametrize("world", [2, 4])
def test_muon(world: int, tmp_path: Path) -> None:
    run(world, muon, str(tmp_path))


# -- refusals ---------------------------------------------------------------------------------------------------------

Kernels = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
#: What is changed before setup, the options, and words of the error.
REFUSALS: list[tuple[Callable[[Any], Any], accel.FSDP, str]] = [
    (lambda net: net.embed.weight.register_hook(lambda g: g), accel.FSDP(), "embed.weight has gradient hooks"),
    (lambda net: net.blocks[1].up.bfloat16(), accel.FSDP(), "uniform original parameter dtype"),
    (lambda net: None, accel.FSDP(wrap=(nn.ModuleList,)), "containers that do not implement forward"),
    (lambda net: Kernels(net.parameters()), accel.FSDP(), "AdamW8bit cannot train sharded parameters"),
]


def refused() -> None:
    for change, options, text in REFUSALS:
        net, optimizer = build()
        changed = change(net)
        optimizer = changed if isinstance(changed, torch.optim.Optimizer) else optimizer
        before = {k: v.clone() for k, v in net.state_dict().items()}
        with pytest.raises((accel.AccelError, AssertionError, ValueError), match=text):
            accel.setup(net, optimizer, backend=options)
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert type(net) is Net
        assert all(type(p) is nn.Parameter for g in optimizer.param_groups for p in g["params"])
        optimizer.state_dict()


def test_refusals_change_nothing() -> None:
    run(2, refused)
