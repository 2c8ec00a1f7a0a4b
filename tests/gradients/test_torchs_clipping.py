"""Torch's own clipping, imported by name before any engine lives, equals one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import accel
from tests.backends import need
from tests.distributed import refusals, run

BACKENDS: list[Any] = ["ddp", "sharded", "fsdp", "pipeline", *(accel.DeepSpeed(stage=stage) for stage in (1, 2, 3))]


def nets() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2))
    return first, second


def clipped(backend: Any) -> Iterator[tuple[str, Any]]:
    """Norms and weights after steps clipped in each way, over all, a part, and the parameters of two models."""
    raws, optimizers, models = nets(), [], []
    for raw, kind in zip(raws, (backend, backend if backend == "single" else "ddp"), strict=True):
        optimizer = torch.optim.SGD(raw.parameters(), lr=0.5)
        model, optimizer, _ = accel.setup(raw, optimizer, backend=kind)
        models.append(model)
        optimizers.append(optimizer)
    one, other = models
    both = [*one.parameters(), *other.parameters()]
    ways = {
        "all": lambda: clip_grad_norm_(one.parameters(), 0.05),
        "largest": lambda: clip_grad_norm_(one.parameters(), 0.01, norm_type=float("inf")),
        "order 1": lambda: clip_grad_norm_(one.parameters(), 0.05, norm_type=1),
        "above": lambda: clip_grad_norm_(one.parameters(), 1e3),
        "head": lambda: clip_grad_norm_(one[2].parameters(), 0.05),
        "two models": lambda: clip_grad_norm_(both, 0.05),
        "value": lambda: clip_grad_value_(one.parameters(), 0.01),
        "value of a head": lambda: clip_grad_value_(list(one[2].parameters()), 0.01),
    }
    world, rank = accel.world_size(), accel.rank()
    for number, (name, clip) in enumerate(ways.items()):
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        for model in models:
            all_of_it = model is one and backend == "pipeline"
            (model(batch if all_of_it else batch.chunk(world)[rank]).square().mean() * 3).backward()
        norm = clip()
        yield name, None if norm is None else float(norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield f"weights after {name}", [{n: t.clone() for n, t in model.state_dict().items()} for model in models]
    if backend in ("single", "ddp", "fsdp"):
        return
    one(torch.ones(2, 4)).sum().backward()
    having: list[Any] = [p for p in one.parameters() if p.grad is not None]
    for clip_ in [] if having else [clip_grad_norm_, clip_grad_value_]:
        with pytest.raises(accel.BackendError, match="accel.clip_grad_norm_"):
            clip_(having, 0.1)


def results(backend: Any) -> dict[str, Any]:
    found = dict(clipped(backend))
    accel.teardown()
    return found


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: getattr(backend, "stage", backend))
def test_torchs_clipping_is_that_of_one_process(backend: Any) -> None:
    need(backend, 2)
    expected = run(1, results, "single")[0]
    for found in run(2, results, backend):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def other_parameters() -> None:
    """Each rank clips what has a gradient there, which is not the same."""
    net, _ = nets()
    model, _, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.5), backend="ddp")
    with accel.no_sync(model):
        model(torch.ones(2, 4)).square().sum().backward()
    clip_grad_norm_([p for p in model.parameters() if p.dim() > accel.rank()], 0.1)


def test_ranks_that_clip_other_parameters_are_refused() -> None:
    messages = refusals(2, other_parameters, error="RankMismatchError", breaks=True)
    assert all("some were not given 0.bias, 2.bias" in message for message in messages)


def clip_two(backend: str) -> tuple[float, float]:
    """Torch's norm of two models' gradients together, and that of one process."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 4), nn.Linear(4, 2)]
    plain = [copy.deepcopy(net) for net in nets]
    first, second = (accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend=backend).model for net in nets)
    second(first(torch.ones(8, 4))).square().sum().backward()
    plain[1](plain[0](torch.ones(8, 4))).square().sum().backward()
    found = nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 1e9)
    return float(found), float(nn.utils.get_total_norm([p.grad for net in plain for p in net.parameters()]))


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", "deepspeed:1", "deepspeed:2", "deepspeed:3"])
def test_two_models_are_clipped_by_one_norm(backend: str) -> None:
    for found, expected in run(2, clip_two, backend):
        assert found == pytest.approx(expected, rel=1e-5)
