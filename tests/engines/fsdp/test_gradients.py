"""Gradients of sharded weights, and their precisions."""

from __future__ import annotations

import torch
from torch import nn

import accel
from tests.distributed import run
from tests.engines.fsdp.training import build


def reduced_in_float32() -> float:
    """A sum that bfloat16 rounds: 256 + 1."""
    raw = nn.Linear(2, 2, bias=False)
    options = accel.FSDP(param_dtype=torch.bfloat16)
    model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=options)
    model(torch.full((1, 2), 1.0 if accel.rank() else 256.0)).sum().backward()
    return float(raw.weight.grad.full_tensor()[0, 0])  # type: ignore[union-attr, operator]


def test_param_dtype_alone_reduces_in_float32() -> None:
    assert run(2, reduced_in_float32) == [128.5, 128.5]


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
