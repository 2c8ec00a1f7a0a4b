"""sharded: where weights lie, and that nothing notices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.distributed import run
from tests.engines.sharded.training import adamw, data, everywhere, loss_of, net, sharded
from tests.models import distance, equal_on_all_ranks


def places(raw: nn.Module) -> int:
    return len({p.untyped_storage().data_ptr() for p in raw.parameters()})


def train(raw: Any, handles: tuple[Any, Any], reference: Any, plain: Any, steps: range) -> None:
    model, handle = handles
    for step in steps:
        for o, m, x in ((handle, model, data(step, accel.rank())), (plain, reference, everywhere(step))):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()


def together() -> tuple[list[int], float]:
    """In how many places the weights lie before, during and after; the error."""
    raw, reference = net(), net()
    optimizer, plain = adamw(raw.parameters()), adamw(reference.parameters())
    found = [places(raw)]
    handles = sharded(raw, optimizer)
    found += [places(raw), places(copy.deepcopy(raw))]
    train(raw, handles, reference, plain, range(2))
    before = [p._version for p in raw.parameters()]
    stale = loss_of(handles[0], data(0, accel.rank()))
    train(raw, handles, reference, plain, range(2, 4))
    # A graph from before a step is as old on the ranks that did not step its weights themselves.
    assert all(p._version > version for p, version in zip(raw.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    del stale  # which uses the memory too
    handles[1].zero_grad()
    accel.teardown(handles[0])
    return [*found, places(raw)], distance(raw, reference)


def test_weights_lie_together_by_owner_until_teardown() -> None:
    for found, error in run(2, together):
        assert found == [10, 2, 10, 10]
        assert error <= 1e-5


class Used(nn.Module):
    """Each of its parameters but the last is used by something else, or is not laid out as in a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.known = nn.Parameter(torch.randn(4, 6))
        self.tied = nn.Parameter(self.known.data)
        self.shared = nn.Parameter(torch.randn(6).share_memory_())
        self.part = nn.Parameter(torch.randn(3, 6)[1])
        self.image = nn.Parameter(torch.randn(6, 2, 1, 2).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(2, 6).t())
        self.rest = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ (self.known + self.tied) / 2 + self.shared) * self.part
        wide = x[:, :2, None, None].expand(-1, -1, 1, 2)
        return self.rest((h + F.conv2d(wide, self.image).flatten(1)) @ self.turned)


def used_elsewhere() -> tuple[float, bool, list[int]]:
    """What one rank knows of stays where it is on all of them."""
    raw, reference = Used(), Used()
    alias = raw.rest.weight.data if accel.rank() == 1 else None
    before = [p.data_ptr() for p in raw.parameters()]
    plain = adamw(reference.parameters())
    handles = sharded(raw, adamw(raw.parameters()))
    moved = [n for (n, p), place in zip(raw.named_parameters(), before, strict=True) if p.data_ptr() != place]
    train(raw, handles, reference, plain, range(3))
    same = alias is None or torch.equal(alias, raw.rest.weight)
    return distance(raw, reference), same and torch.equal(raw.known, raw.tied), moved


def test_what_something_else_uses_stays_where_it_is() -> None:
    for error, same, moved in run(2, used_elsewhere):
        assert error <= 1e-5
        assert same
        assert moved == ["rest.bias"]


class Replaces(torch.optim.SGD):
    """Writes its parameters as optimizers of old did, to new memory."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


def replaced(split: bool) -> tuple[float, bool, list[bool]]:
    """Memory that the program gives to parameters, between steps and in steps, is what they have then."""
    raw, reference = net(), net()
    raws = Replaces(raw.parameters(), lr=0.1) if split else adamw(raw.parameters())
    plain = Replaces(reference.parameters(), lr=0.1) if split else adamw(reference.parameters())
    handles = sharded(raw, raws)
    train(raw, handles, reference, plain, range(2))
    given = [torch.empty_like(p).copy_(p.detach()) for p in raw[0].parameters()]
    for parameter, values in zip(raw[0].parameters(), given, strict=True):
        parameter.data = values
    train(raw, handles, reference, plain, range(2, 4))
    held = [torch.equal(p, v) for p, v in zip(raw[0].parameters(), given, strict=True)]
    equal = equal_on_all_ranks(raw)
    accel.teardown(handles[0])
    return distance(raw, reference), equal, held


@pytest.mark.parametrize("split", [False, True])
def test_memory_that_the_program_gives_to_parameters_is_theirs(split: bool) -> None:
    for error, equal, held in run(2, replaced, split):
        assert error <= 1e-5
        assert equal
        assert split or held == [True, True]


def kept() -> tuple[float, bool]:
    """What the program has kept of a parameter's memory is its own: other values there for a while, or another parameter's."""
    raw, reference = net(), net()
    optimizer, plain = adamw(raw.parameters()), adamw(reference.parameters())
    handles = sharded(raw, optimizer)
    for start in range(0, 4, 2):
        old = [(p, p.data) for m in (raw, reference) for p in m.parameters()]
        for parameter, _ in old:
            parameter.data = parameter.data.clone()
        train(raw, handles, reference, plain, range(start, start + 2))
        for parameter, values in old:
            parameter.data = values
    for module in (raw, reference):
        one, other = module[1][0].weight, module[2][0].weight
        one.data, other.data = other.data, one.data
    train(raw, handles, reference, plain, range(4, 6))
    aliases = [p.data for p in raw.parameters()]
    accel.teardown(handles[0])
    error = distance(raw, reference)
    for alias in aliases:
        alias.zero_()
    return error, not any(p.any() for p in raw.parameters())


def test_what_the_program_keeps_of_the_memory_is_its_own() -> None:
    for error, shared in run(2, kept):
        assert error <= 1e-5
        assert shared
