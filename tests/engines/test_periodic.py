"""``accel.DDP(sync_every=n, outer=...)``: weights beside a reference in plain torch.distributed, and what is between averages."""

from __future__ import annotations

import copy
import logging
import pathlib
import pickle
import unittest
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
            mean = p.detach() / accel.world_size()
            if accel.world_size() > 1:
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
        model, optimizer, _ = accel.setup(
            raw, adam(raw), backend=accel.DDP(sync_every=every, outer=outer, drift_check=1)
        )
        group, counts = dist.group.WORLD, []
        for step in range(3 * every):
            counts.append(step // every if group is None else group._get_sequence_number_for_group())
            train(model, optimizer, range(step, step + 1))
        assert len(set(counts)) == 3  # nothing is sent between averages
        assert close(raw, reference), (every, outer)
        assert equal_on_all_ranks(raw)
        accel.teardown(model)


def of_the_outer_optimizer() -> None:
    model, optimizer, _ = set_up(every=2)
    with unittest.TestCase().assertLogs("accel", "WARNING") as logged:
        logging.getLogger("accel").warning("this one")
        train(model, optimizer, range(4))
    assert not [line for line in logged.output if "in no model" in line]


def test_the_outer_optimizer_is_no_unknown_one() -> None:
    run(2, of_the_outer_optimizer)


def test_weights_are_those_of_the_papers() -> None:
    run(2, train_beside_reference)
    run(1, train_beside_reference)


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
    assert near(unbroken.state_dict(), means)
    assert near(whole.state_dict(), means)
    for copied in (pickle.loads(pickle.dumps(unbroken)), copy.deepcopy(unbroken)):
        assert near(copied.state_dict(), means)
        assert near(copied[0].state_dict(), {"weight": means["0.weight"]})
    for refused in (whole[0].state_dict, lambda: copy.deepcopy(whole)):
        with pytest.raises(accel.BackendError, match="full_state_dict"):
            refused()
    train(unbroken, o, range(10, 16))
    assert equal_on_all_ranks(whole)
    whole.state_dict()
    accel.teardown(unbroken)
    resume(path, whole, means, moments)


def resume(path: pathlib.Path, whole: nn.Module, means: dict[str, torch.Tensor], moments: torch.Tensor) -> None:
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


class Branches(nn.Module):
    """Each rank uses a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.hand = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.parts[accel.rank() % 2](x) * self.hand
        return out


def other_loops(path: pathlib.Path) -> None:
    # With SGD an average after each step is ddp.
    found = []
    for backend in (accel.DDP(), accel.DDP(sync_every=1)):
        raw = net()
        model, o, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.5), backend=backend)
        train(model, o, range(4), clip=lambda *_: None)
        found.append(raw)
        accel.teardown(model)
    assert close(*found)
    # A part that one rank alone uses; a parameter in no optimizer; two optimizers; frozen between two averages.
    raw = Branches()
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in raw.parts]
    model, optimizers, _ = accel.setup(raw, optimizers, backend=accel.DDP(sync_every=3, outer=NESTEROV))
    for step in range(7):
        for o in optimizers:
            o.zero_grad()
        raw.hand.grad = None
        loss(model, step).backward()
        grads = accel.all_gather(raw.hand.grad[None])
        assert torch.equal(grads[0], grads[1])
        for o in optimizers:
            o.step()
        raw.parts[1].bias.requires_grad_(step != 4)
        if step % 3 == 2:
            assert equal_on_all_ranks(raw)
            accel.save({"model": model, "o": optimizers}, path)
    accel.load(path, {"model": model, "o": optimizers})
    assert equal_on_all_ranks(raw)
    assert not optimizers[accel.rank() - 1].state[raw.parts[accel.rank() - 1].bias]
    accel.teardown(model)


def more_loops() -> None:
    # A frozen weight stays, bit for bit, until it is trained; setup again is the same; a copy between intervals is one.
    model, o, raw = set_up(2)
    before = raw[0].weight.requires_grad_(False).clone()
    train(model, o, range(4))
    assert torch.equal(copy.deepcopy(raw)[0].weight, before)
    raw[0].weight.requires_grad_(True)
    assert accel.setup(raw, backend=accel.DDP(sync_every=2, outer=dict(NESTEROV))).model is model
    train(model, o, range(2))
    assert equal_on_all_ranks(raw)
    assert not torch.equal(raw[0].weight, before)
    accel.teardown(model)
    # Buffers are rank 0's after an average; the step of an interval that a scaled loss skips is one of it.
    raw = net(bn=True)
    model, o, _ = set_up(2, NESTEROV, raw)
    train(model, o, range(2))
    assert equal_on_all_ranks(raw)
    rows_here = accel.memory_report(model, ranks=(2,), measured=True).rows[-2:]
    assert rows_here[0].use == rows_here[1].use
    accel.teardown(model)
    raw = net()
    model, o, _ = accel.setup(raw, adam(raw), backend=accel.DDP(sync_every=2, outer=NESTEROV), precision="16-mixed")
    for step in range(2):
        accel.backward(loss(model, step) * (1e30 if step == accel.rank() == 0 else 1.0))
        o.step()
        o.zero_grad()
    assert o.skipped_steps == 1
    assert equal_on_all_ranks(raw)
    accel.teardown(model)


def refusals() -> None:
    model, o, raw = set_up(3, None)
    loss(model, 0).backward()
    for refused, error, text in (
        (lambda: o.step(lambda: loss(model, 0)), accel.OptimizerError, "steps with a closure"),
        (adam(raw).step, accel.OptimizerError, "not given to accel.setup"),
        (lambda: accel.setup(model, adam(raw)), accel.OptimizerError, "two optimizers"),
        (lambda: accel.join(model).__enter__(), accel.BackendError, "sync_every"),
        (lambda: accel.setup(model, backend="ddp"), accel.AlreadySetUpError, "sync_every"),
    ):
        with pytest.raises(error, match=text):
            refused()
    o.step()
    accel.teardown(model)


def load_in_an_interval(outer: dict[str, Any] | None) -> None:
    """Each rank loads the same whole state, from which a new interval begins."""
    raw, reference = net(), by_hand(2, outer, 2)
    start = net().state_dict()
    model, o, _ = accel.setup(raw, adam(raw), backend=accel.DDP(sync_every=2, outer=outer))
    train(model, o, range(1))
    before = o.state_dict()["state"]
    assert before
    model.load_state_dict(start)
    assert close(raw, net())
    assert not accel.unwrap(model).state_dict().keys() - start.keys()
    fresh = adam(net())
    o.load_state_dict(fresh.state_dict())
    train(model, o, range(2))
    assert close(raw, reference)
    train(model, o, range(1))
    with pytest.raises(accel.BackendError, match="of the handle"):
        raw.load_state_dict(start)
    accel.teardown(model)


def test_a_whole_state_is_loaded_between_averages() -> None:
    run(2, load_in_an_interval, None)
    run(2, load_in_an_interval, {"lr": 1.0})


def load_on_one_rank() -> None:
    model, o, raw = set_up(2, None)
    train(model, o, range(2))
    if accel.rank() == 1:
        raw.load_state_dict(net().state_dict())
    train(model, o, range(2, 70))


def let_go_on_one_rank() -> None:
    model, o, raw = set_up(3)
    train(model, o, range(2))
    if accel.rank() == 1:
        del model, o, raw
    accel.teardown()


def leave_on_one_rank() -> None:
    model, o, _ = set_up(3)
    train(model, o, range(1))
    if accel.rank() == 1:
        accel.barrier()
    train(model, o, range(1, 3))


def test_other_loops(tmp_path: pathlib.Path) -> None:
    run(2, other_loops, tmp_path / "c")
    run(2, more_loops)
    run(2, refusals)
    run(1, refusals)


def test_errors_reach_every_rank() -> None:
    for one in outcomes(2, load_on_one_rank):
        assert one.error[0] == "RankMismatchError"
        assert "outside of steps" in one.message
    for one in outcomes(2, let_go_on_one_rank):
        assert "rank 1 let go of the model" in one.message
    for one in outcomes(2, leave_on_one_rank, breaks=True):
        assert "AccelError" in one.error
        assert "the average after 3 steps of AdamW" in one.message


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "number of steps"),
        ({"outer": NESTEROV}, "number of steps"),
        ({"sync_every": 2, "outer": {"lrr": 1}}, "lrr"),
        ({"sync_every": 2, "outer": torch.optim.SGD}, "options of torch.optim.SGD"),
        ({"sync_every": 2, "comm_hook": "fp16"}, "comm_hook"),
        ({"sync_every": 2, "static_graph": True}, "static_graph"),
        ({"sync_every": 2, "sync_batchnorm": True}, "sync_batchnorm"),
        ({"sync_every": 2, "sequence_parallel": 2}, "sequence"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(accel.BackendError, match=text):
        accel.DDP(**options)
