"""sharded: where weights lie, and that nothing notices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

import accel
from tests.distributed import run
from tests.engines.sharded.training import adamw, data, everywhere, loss_of, net, sharded
from tests.models import distance


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
