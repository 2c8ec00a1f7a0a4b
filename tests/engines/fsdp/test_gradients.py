"""Gradients of sharded weights, and their precisions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel
from accel.registry import registry
from tests.distributed import refusals, run
from tests.engines.fsdp.training import build, distance, local_loss, mean_loss, start, train
from tests.models import FailingBackward

# -- gradients --------------------------------------------------------------------------------------------------------


def exceptions() -> float:
    model, handle, net, _ = start()
    reference, ref_optimizer = build()
    train(model, handle, range(1))
    train(reference, ref_optimizer, range(1), mean_loss)
    net.blocks[1].fails = True
    with pytest.raises(ValueError, match="this block fails"):
        local_loss(model, 1)
    net.blocks[1].fails = False
    train(model, handle, range(1, 2))
    train(reference, ref_optimizer, range(1, 2), mean_loss)
    hook = net.blocks[1].register_forward_hook(lambda m, a, out: FailingBackward.apply(out))
    with pytest.raises(ZeroDivisionError, match="this backward fails"):
        local_loss(model, 2).backward()
    hook.remove()
    with pytest.raises(accel.BackendError, match="an exception ended a backward"):
        handle.step()
    train(model, handle, range(2, 4))
    train(reference, ref_optimizer, range(2, 4), mean_loss)
    return distance(accel.full_state_dict(model), reference.state_dict())


def test_an_exception_needs_zero_grad() -> None:
    assert max(run(2, exceptions)) < 1e-5


def backward_after_a_step() -> None:
    model, handle, _, _ = start()
    first, second = local_loss(model, 0), local_loss(model, 1)
    first.backward()
    handle.step()
    second.backward()


def test_a_backward_after_the_step_raises() -> None:
    for message in refusals(2, backward_after_a_step, error="RuntimeError"):
        assert "modified by an inplace operation" in message


# -- precision --------------------------------------------------------------------------------------------------------


def precisions() -> dict[str, float]:
    found = {}
    for precision, options in (("16-mixed", accel.FSDP()), ("32-true", accel.FSDP(param_dtype=torch.bfloat16))):
        model, handle, _, _ = start(options, "sgd", precision=precision)
        reference, ref_optimizer = build(optimizer="sgd")
        registry.loss_scale.value = 256.0
        for step in range(4):
            handle.zero_grad()
            out = local_loss(model, step)
            assert out.dtype is torch.float32
            accel.backward(out)
            handle.step()
            train(reference, ref_optimizer, range(step, step + 1), mean_loss)
        found[f"{precision} {options.param_dtype}"] = distance(accel.full_state_dict(model), reference.state_dict())
        accel.teardown()
    return found


def test_half_precision_is_near_to_full() -> None:
    for found in run(2, precisions):
        assert all(v < 2e-2 for v in found.values()), found


def reduced_in_float32() -> float:
    """A sum that bfloat16 rounds: 256 + 1."""
    raw = nn.Linear(2, 2, bias=False)
    options = accel.FSDP(param_dtype=torch.bfloat16)
    model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=options)
    model(torch.full((1, 2), 1.0 if accel.rank() else 256.0)).sum().backward()
    return float(raw.weight.grad.full_tensor()[0, 0])  # type: ignore[union-attr, operator]


def test_param_dtype_alone_reduces_in_float32() -> None:
    assert run(2, reduced_in_float32) == [128.5, 128.5]


def overflow() -> tuple[bool, float, float]:
    """One rank's gradient overflows in its own shard: all ranks skip the step."""
    model, handle, _, _ = start(None, "sgd", precision="16-mixed")
    registry.loss_scale.value = 256.0
    accel.backward(local_loss(model, 0))
    if accel.rank() == 1:
        next(p for p in model.parameters() if p.dim()).grad.to_local().view(-1)[0] = float("inf")
    before, scale = accel.full_state_dict(model), registry.loss_scale.value
    handle.step()
    skipped = distance(accel.full_state_dict(model), before) == 0.0
    handle.zero_grad()
    accel.backward(local_loss(model, 1))
    handle.step()
    return skipped, registry.loss_scale.value / scale, distance(accel.full_state_dict(model), before)


def test_an_overflow_in_one_shard() -> None:
    for skipped, factor, moved in run(2, overflow):
        assert skipped
        assert factor == 0.5
        assert moved > 0.0


def asked_for() -> dict[str, torch.Tensor]:
    """A second loss weighed by gradients of a layer, as VQGAN has it, and gradients of all parameters."""
    net, optimizer = build()
    net.unused = nn.Linear(2, 2)
    last = net.blocks[-1].down.weight
    model, optimizer, _ = accel.setup(net, optimizer, backend="fsdp")
    found = {}
    for step in range(3):
        tokens = (torch.arange(16).view(2, 8) * (step + 3)) % 10  # the same on all ranks
        first, second = (nn.functional.cross_entropy(model(row), row.flip(0)) for row in tokens)
        ratio = torch.autograd.grad(first, last, retain_graph=True)[0].norm()
        ratio /= torch.autograd.grad(second, [last], retain_graph=True)[0].norm()
        every = torch.autograd.grad(first, model.parameters(), retain_graph=True, allow_unused=True)
        names = [name for name, _ in model.named_parameters()]
        found |= {f"{step}.{n}": g.clone() for n, g in zip(names, every, strict=True) if g is not None}
        optimizer.zero_grad()
        (first + ratio * second).backward()
        optimizer.step()
    return found | accel.full_state_dict(model)


def test_autograd_grad_of_parameters() -> None:
    (alone,) = run(1, asked_for)
    for found in run(2, asked_for):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
