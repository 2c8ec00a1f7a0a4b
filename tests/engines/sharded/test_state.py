"""Optimizer state on its owners: out, in, and to other worlds."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

import accel
from accel.registry import registry
from tests.distributed import outcomes, run
from tests.engines.sharded.training import adamw, data, everywhere, loss_of, net, sharded, state_distance
from tests.models import distance

SETUPS: list[Any] = ["sharded", "ddp", accel.Sharded(broadcast_buffers=False), "sharded"]


def handovers() -> list[float]:
    """From a plain optimizer through several engines and back, in mid-training, with gradients kept once."""
    raw, reference = net(), net()
    optimizer, plain = adamw(raw.parameters()), adamw(reference.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for o in (optimizer, plain)]
    for turn, backend in enumerate([None, *SETUPS, None]):
        model: Any = raw
        handle: Any = optimizer
        if backend is not None:
            model, handle, _ = accel.setup(raw, optimizer, backend=backend)
        for step in range(3 * turn, 3 * turn + 3):
            x = everywhere(step) if backend is None else data(step, accel.rank())
            for o, m, batch in ((handle, model, x), (plain, reference, everywhere(step))):
                if step % 3 != 0:  # the gradients of a turn's last step are added to, across the change of engine
                    o.zero_grad()
                loss_of(m, batch).backward()
                o.step()
            for scheduler in schedulers:
                scheduler.step()
        if backend is not None:
            accel.teardown(model)
    return [distance(raw, reference), state_distance(optimizer.state_dict(), plain.state_dict())]


@pytest.mark.parametrize("world", [2, 4])
def test_handovers_in_mid_training(world: int) -> None:
    for found in run(world, handovers):
        assert max(found) <= 1e-5


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


def state_set_by_the_loop() -> None:
    """As in one process: on every process for every parameter, of which each steps some."""
    raw, reference = net(), net()
    optimizer, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (raw, reference))
    model, handle = sharded(raw, optimizer)
    for step in range(3):
        for o, m, x in ((handle, model, data(step, accel.rank())), (plain, reference, everywhere(step))):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
            for p in m.parameters() if step == 1 else ():
                o.state[p]["momentum_buffer"] = torch.full_like(p, 0.5)
    assert distance(raw, reference) <= 1e-5
    assert state_distance(accel.full_state_dict(handle), plain.state_dict()) <= 1e-5


def test_state_that_the_loop_sets_is_that_of_the_owner() -> None:
    run(2, state_set_by_the_loop)


def shards_and_slots() -> list[Any]:
    """The shards of all ranks together are one process's; filled into another engine they continue its training."""
    raw, other, reference = net(), net(), net()
    engines = []
    for m in (raw, other):
        optimizer = adamw(m.parameters())
        model, handle = sharded(m, optimizer)
        engines.append((registry.of_handle(model), model, optimizer, handle))
    engine, model, optimizer, handle = engines[0]
    plain = adamw(reference.parameters())
    for o, m, x in ((handle, model, data(0, accel.rank())), (plain, reference, everywhere(0))):
        loss_of(m, x).backward()
        o.step()
    mine = engine.holdings.shards(optimizer)
    manifest = {
        f"{n}/{k}": (tuple(p.shape), p.dtype) for n, p in raw.named_parameters() for k in ("exp_avg", "exp_avg_sq")
    }
    target, other_model, other_optimizer, other_handle = engines[1]
    slots = target.holdings.slots(other_optimizer, manifest)
    assert [s.name for s in slots] == [s.name for s in sorted(mine, key=lambda s: list(manifest).index(s.name))]
    by_name = {s.name: s for s in mine}
    for slot in slots:
        slot.tensor.copy_(by_name[slot.name].tensor)
    full = copy.deepcopy(plain.state_dict())
    names = [n for n, _ in raw.named_parameters()]
    values = engine.holdings.values(optimizer)
    merged = {names[i]: {"step": entries["step"]} for i, entries in full["state"].items()}
    target.holdings.fill(other_optimizer, {**values, "state": merged})
    assert len(other_optimizer.state) == len(optimizer.state) == len(values["state"])
    other_model.load_state_dict(raw.state_dict())
    for step in range(1, 3):
        for o, m, x in (
            (handle, model, data(step, accel.rank())),
            (other_handle, other_model, data(step, accel.rank())),
            (plain, reference, everywhere(step)),
        ):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
    return [distance(raw, other), distance(raw, reference), [s.name for s in mine]]


def test_shards_are_each_ranks_own() -> None:
    found = run(2, shards_and_slots)
    assert max(*found[0][:2], *found[1][:2]) <= 1e-5
    assert not set(found[0][2]) & set(found[1][2])
    assert len(found[0][2]) + len(found[1][2]) == 20


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


def test_a_part_of_the_state_is_never_taken_for_the_whole() -> None:
    for outcome in outcomes(2, after_the_end, breaks=True):
        assert "only this rank's part" in outcome.value, outcome


def freed() -> bool:
    raw = net()
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    loss_of(model, data(0, accel.rank())).backward()
    handle.step()
    copied = copy.deepcopy(raw)
    assert not any(p._backward_hooks for p in copied.parameters())
    engine = weakref.ref(registry.of_handle(model))
    weight = weakref.ref(raw[0].weight)
    del raw, optimizer, model, handle
    gc.collect()
    return engine() is None and weight() is None


def test_nothing_keeps_a_model_that_is_not_used_any_more() -> None:
    assert run(2, freed) == [True, True]


def alone() -> bool:
    raw, reference = net(), net()
    optimizer, plain = adamw(raw.parameters()), adamw(reference.parameters())
    model, handle = sharded(raw, optimizer)
    for step in range(3):
        for o, m in ((handle, model), (plain, reference)):
            o.zero_grad()
            loss_of(m, data(step, 0)).backward()
            o.step()
    assert not any(p._backward_hooks for p in raw.parameters())
    assert state_distance(handle.state_dict(), plain.state_dict()) == 0.0
    return distance(raw, reference) == 0.0


def test_one_process_is_passed_through() -> None:
    assert run(1, alone) == [True]
