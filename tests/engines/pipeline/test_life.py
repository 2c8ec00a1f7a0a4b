"""Precisions, several pipelines, and the end."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.registry import registry
from tests.distributed import outcomes, run
from tests.engines.pipeline.training import apart, batch, net, one_step
from tests.faults import Fault
from tests.models import sgd


def fp16() -> float:
    """The loss is scaled on every stage alike, and an overflow in one stage skips the step in all."""
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2), precision="16-mixed")
    reference = sgd(plain)
    for step in range(4):
        x, y = batch(step)
        before = accel.full_state_dict(model)
        for m, o, backward in ((model, optimizer, accel.backward), (plain, reference, torch.Tensor.backward)):
            o.zero_grad()
            backward(F.mse_loss(m(x), y))
        accel.clip_grad_norm_(model, 0.1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if step == 2:
            # Of the last stage alone, as it lies on one rank.
            bias = raw[-1].bias
            if bias.grad is not None:
                bias.grad.fill_(float("inf"))
            optimizer.step()
            torch.testing.assert_close(accel.full_state_dict(model), before, rtol=0, atol=0)
        else:
            optimizer.step()
            reference.step()
        assert optimizer.skipped_steps == (step >= 2)
    optimizer.zero_grad()
    F.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(accel.PrecisionError, match=r"accel\.backward"):
        optimizer.step()
    accel.teardown(model)
    return apart(raw, plain)


@pytest.mark.parametrize("world", [1, 2])
def test_fp16(world: int) -> None:
    assert max(run(world, fp16)) < 2e-3


def two_models() -> float:
    """A pipeline after a pipeline: the gradient of the second one's batch is the first one's."""
    torch.manual_seed(1)
    head = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    plain, plain_head = net(), copy.deepcopy(head)
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2))
    last, last_optimizer, _ = accel.setup(head, sgd(head), backend=accel.Pipeline(chunks=3, checkpoint="always"))
    both = ((model, last, optimizer, last_optimizer), (plain, plain_head, sgd(plain), sgd(plain_head)))
    for step in range(3):
        for first, second, *optimizers in both:
            x, y = batch(step)
            F.mse_loss(second(first(x)), y).backward()  # type: ignore[operator]
            for o in optimizers:
                o.step()
                o.zero_grad()
    accel.teardown()
    return max(apart(raw, plain), apart(head, plain_head))


def test_a_pipeline_may_follow_a_pipeline() -> None:
    assert max(run(2, two_models)) < 1e-5


def two_forwards() -> None:
    raw = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3))
    model = accel.setup(raw, backend=accel.Pipeline(balance=[1, 1, 1, 1])).model
    model(batch(0)[0])
    model(batch(1)[0])


def test_the_end_of_a_rank_ends_the_others_with_an_error() -> None:
    end = Fault("exit 3", at="torch.nn:Identity.forward", rank=2, turn=2)
    results = outcomes(4, two_forwards, breaks=True, fails=[end])
    assert results[2].error == ("Died",)
    for rank in (0, 1, 3):
        assert "AccelError" in results[rank].error, results[rank].trace
        assert results[rank].seconds < 50  # the group's own timeout is 60 s


def collected() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2))
    one_step(model, optimizer, 0)
    engine, parameters = weakref.ref(registry.find_engine(model)), [weakref.ref(p) for p in raw.parameters()]
    del raw, model, optimizer
    gc.collect()
    assert engine() is None
    assert not any(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_dies_with_its_model(world: int) -> None:
    run(world, collected)


def convert() -> None:
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend="pipeline")
    for kind in (torch.ones(1), "cpu", torch.float32):  # as it is already
        assert model.to(kind) is model
    elsewhere = (raw[0] if accel.rank() else raw[5]).weight
    with pytest.raises(accel.BackendError, match="which is on rank"):
        elsewhere.double()
    one_step(model, optimizer, 0)
    one_step(plain, sgd(plain), 0)
    accel.teardown(model)
    assert apart(raw, plain) < 1e-5
    assert {type(p) for p in raw.parameters()} == {nn.Parameter}


def test_a_model_is_moved_to_where_it_is() -> None:
    run(2, convert)
