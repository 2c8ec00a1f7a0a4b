"""sharded: the memory and messages that it saves, and how weights lie."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

import accel
from tests.distributed import run
from tests.engines.sharded.training import adamw, data, everywhere, loss_of, net, sharded
from tests.models import distance


def nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


def bytes_after_a_step() -> float:
    raw = net(64, 40)
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    for step in range(2):
        handle.zero_grad()
        loss_of(model, data(step, accel.rank())).backward()
        handle.step()
    parameters = nbytes(raw.parameters())
    gradients = nbytes(p.grad for p in raw.parameters() if p.grad is not None)
    state = nbytes(v for entries in optimizer.state.values() for v in entries.values() if v.dim() > 0)
    return (parameters + gradients + state) / parameters


@pytest.mark.parametrize(("world", "expected"), [(2, 2.5), (4, 1.75)])
def test_bytes_per_rank_are_those_of_theory(world: int, expected: float) -> None:
    for found in run(world, bytes_after_a_step):
        assert found == pytest.approx(expected, rel=0.02)


def frozen_from_the_start() -> int:
    raw = net()
    raw[:-1].requires_grad_(False)
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    loss_of(model, data(0, accel.rank())).backward()
    handle.step()
    assert all(any(p is q for q in raw[-1].parameters()) for p in optimizer.state)
    return len(optimizer.state)


def test_frozen_parameters_have_no_state() -> None:
    # Two tensors are trainable: one for each rank, however many frozen ones there are.
    assert run(2, frozen_from_the_start) == [1, 1]


def places(raw: nn.Module) -> int:
    return len({p.untyped_storage().data_ptr() for p in raw.parameters()})


def together() -> tuple[list[int], float]:
    """In how many places the weights lie before, during and after; the error."""
    raw, reference = net(), net()
    optimizer, plain = adamw(raw.parameters()), adamw(reference.parameters())
    found = [places(raw)]
    model, handle = sharded(raw, optimizer)
    found += [places(raw), places(copy.deepcopy(raw))]
    stale = loss_of(model, data(0, accel.rank()))
    for step in range(3):
        for o, m, x in ((handle, model, data(step, accel.rank())), (plain, reference, everywhere(step))):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
    # A graph from before a step is as old on the ranks that did not step its weights themselves.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    del stale  # which uses the memory too
    handle.zero_grad()
    accel.teardown(model)
    return [*found, places(raw)], distance(raw, reference)


def test_weights_lie_together_by_owner() -> None:
    for found, error in run(2, together):
        assert found == [10, 2, 10, 10]
        assert error <= 1e-5
