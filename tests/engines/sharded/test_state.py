"""Optimizer state on its owners: out, in, and to other worlds."""

from __future__ import annotations

import copy

import pytest

import accel
from tests.distributed import outcomes, run
from tests.engines.sharded.training import adamw, data, everywhere, loss_of, net, sharded, state_distance
from tests.models import distance


def full_states() -> list[float]:
    raw, reference = net(), net()
    optimizer, plain = adamw(raw[0].parameters()), adamw(reference[0].parameters())
    model, handle = sharded(raw, optimizer)
    for o, m in ((handle, raw), (plain, reference)):
        o.add_param_group({"params": list(m[1:].parameters()), "lr": 0.05})

    def steps(first: int) -> None:
        for step in range(first, first + 3):
            for o, m, x in ((handle, model, data(step, accel.rank())), (plain, reference, everywhere(step))):
                o.zero_grad()
                loss_of(m, x).backward()
                o.step()

    steps(0)
    mine = len(optimizer.state)
    full = accel.full_state_dict(handle)
    assert len(optimizer.state) == mine < 10
    found = [state_distance(full, plain.state_dict())]
    full, weights = copy.deepcopy(full), copy.deepcopy(accel.full_state_dict(model))
    steps(3)
    handle.load_state_dict(copy.deepcopy(full))
    model.load_state_dict(weights)
    assert len(optimizer.state) == mine
    again, other = net(), net()
    again.load_state_dict(weights)
    other_optimizer = adamw(again[0].parameters())
    other_optimizer.add_param_group({"params": list(again[1:].parameters())})
    other_optimizer.load_state_dict(copy.deepcopy(full))
    # A new model takes the state before its first step, when no gradient has given owners yet.
    fresh, fresh_optimizer = sharded(other, adamw(other[0].parameters()))
    fresh_optimizer.add_param_group({"params": list(other[1:].parameters())})
    fresh_optimizer.load_state_dict(full)
    fresh.load_state_dict(weights)
    for step in range(6, 9):
        for o, m, x in (
            (handle, model, data(step, accel.rank())),
            (fresh_optimizer, fresh, data(step, accel.rank())),
            (other_optimizer, again, everywhere(step)),
        ):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
    return [*found, distance(raw, again), distance(other, again)]


def test_full_states_go_out_and_in() -> None:
    for found in run(2, full_states):
        assert max(found) <= 1e-5


def after_the_end() -> str:
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
    try:
        optimizer.step()
    except accel.OptimizerError as error:
        return str(error)
    return "stepped"


def test_partial_state_is_never_stepped() -> None:
    for outcome in outcomes(2, after_the_end, breaks=True):
        assert "has lost a part of its state" in outcome.value, outcome
