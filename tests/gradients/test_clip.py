"""Clipping by ``accel`` and by torch's own functions, imported by name before setup, equals one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import accel
from accel.registry import registry
from tests.backends import need
from tests.distributed import refusals, run
from tests.models import mlp

DIVIDED: list[Any] = ["sharded", "fsdp", "pipeline", accel.DeepSpeed(stage=2), accel.DeepSpeed(stage=3)]
BACKENDS: list[Any] = ["ddp", accel.DeepSpeed(stage=1), *DIVIDED]


def start(backend: Any, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    raw = mlp(4, 5, 3, seed=seed)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.5)
    return accel.setup(raw, optimizer, backend=backend).model, optimizer


def clipped(backend: Any) -> Iterator[tuple[str, Any]]:
    """Norms and weights after steps clipped in each way, over all, a part, and the parameters of three models."""
    kinds = (backend, backend if backend == "single" else "ddp", backend)
    models, optimizers = zip(*(start(kind, seed) for seed, kind in enumerate(kinds)), strict=True)
    one = models[0]
    every = [p for model in models for p in model.parameters()]
    ways = {
        "all": lambda: clip_grad_norm_(one.parameters(), 0.05),
        "largest": lambda: clip_grad_norm_(one.parameters(), 0.01, norm_type=float("inf")),
        "order 1": lambda: clip_grad_norm_(one.parameters(), 0.05, norm_type=1),
        "above": lambda: clip_grad_norm_(one.parameters(), 1e3),
        "head": lambda: clip_grad_norm_(one[2].parameters(), 0.05),
        "three models": lambda: clip_grad_norm_(every, 0.05),
        "value": lambda: clip_grad_value_(one.parameters(), 0.01),
        "value of a head": lambda: clip_grad_value_(list(one[2].parameters()), 0.01),
    }
    world, rank = accel.world_size(), accel.rank()
    for number, (name, clip) in enumerate(ways.items()):
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        for model, kind in zip(models, kinds, strict=True):
            x = batch if kind == "pipeline" else batch.chunk(world)[rank]
            (model(x).square().mean() * 3).backward()
        norm = clip()
        yield name, None if norm is None else float(norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield f"weights after {name}", [{n: t.clone() for n, t in model.state_dict().items()} for model in models]
    one(torch.ones(2, 4)).sum().backward()
    having: list[Any] = [p for p in one.parameters() if p.grad is not None]
    for clip_ in () if having else (clip_grad_norm_, clip_grad_value_):
        with pytest.raises(accel.BackendError, match="accel.clip_grad_norm_"):
            clip_(having, 0.1)


def results(backend: Any) -> dict[str, Any]:
    found = dict(clipped(backend))
    accel.teardown()
    return found


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_clipping_equals_one_process(backend: Any) -> None:
    need(backend, 2)
    expected = run(1, results, "single")[0]
    for found in run(2, results, backend):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def other_parameters() -> None:
    """Each rank clips the parameters with a gradient there, which are not the same."""
    model, _ = start("ddp")
    with accel.no_sync(model):
        model(torch.ones(2, 4)).square().sum().backward()
    clip_grad_norm_([p for p in model.parameters() if p.dim() > accel.rank()], 0.1)


def test_clipping_other_parameters_raises() -> None:
    for message in refusals(2, other_parameters, error="RankMismatchError", breaks=True):
        assert "some were not given 0.bias, 2.bias" in message


def norm_with_nan(backend: Any, order: float, by_torch: bool) -> float:
    model, _ = start(backend)
    model(torch.ones(2, 4)).square().sum().backward()
    gradients = registry.find_engine(model).gradients
    if backend == "sharded":
        accel.clip_grad_norm_(model, 1e9)  # so that each gradient is its owner's
    if not isinstance(backend, str):
        gradients.settle()
    shards = [holder.grad for holder in gradients.holders() if holder.grad is not None]
    local = [shard.to_local() if hasattr(shard, "to_local") else shard for shard in shards]
    spoiled = [shard for shard in local if shard.numel()]
    if accel.rank() == 1 and spoiled:
        spoiled[-1].view(-1)[0] = math.nan
    clip, of = (clip_grad_norm_, model.parameters()) if by_torch else (accel.clip_grad_norm_, model)
    norm = clip(of, 0.5, order)  # type: ignore[operator]
    accel.teardown()
    return float(norm)


@pytest.mark.parametrize("backend", DIVIDED, ids=str)
def test_nan_of_one_rank_is_everywhere(backend: Any) -> None:
    need(backend, 2)
    for order in (math.inf, 2.0):
        assert all(math.isnan(norm) for norm in run(2, norm_with_nan, backend, order, backend == "pipeline")), order


def clip_strictly(backend: Any) -> None:
    """Each of the two functions raises on every rank, and leaves the gradients as they were."""
    for by_torch in (True, False):
        model, _ = start(backend)
        inputs = torch.ones(2, 4)
        inputs[0, 0] = math.nan if accel.rank() == 1 or backend == "pipeline" else 1.0
        model(inputs).square().sum().backward()
        clip, of = (clip_grad_norm_, model.parameters()) if by_torch else (accel.clip_grad_norm_, model)
        with pytest.raises(RuntimeError, match="norm of order 2.0 .*clipped"):
            clip(of, 0.5, error_if_nonfinite=True)  # type: ignore[operator]
        accel.teardown()


@pytest.mark.parametrize("backend", ["ddp", *DIVIDED], ids=str)
def test_error_if_nonfinite_raises_on_all(backend: Any) -> None:
    need(backend, 2)
    run(2, clip_strictly, backend)


def norms_of_one_number(backend: Any) -> list[torch.Tensor]:
    raw = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double().requires_grad_(False)
    raw[1].bias.requires_grad_(True)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    norms: list[Any] = []
    for clip in (lambda: accel.clip_grad_norm_(model, 0.1), lambda: clip_grad_norm_(model.parameters(), 0.1)):
        optimizer.zero_grad()
        (model(torch.ones(2, 4, dtype=torch.float64)).sum() / 6).backward()
        norms.append(clip())
    accel.teardown()
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]


@pytest.mark.parametrize("backend", ["sharded", "fsdp", "pipeline", accel.FSDP(replicas=2)], ids=str)
def test_a_rank_without_gradients_clips(backend: Any) -> None:
    """By the other rank's float64 number, though it counts no gradient of this dtype."""
    for norms in run(2, norms_of_one_number, backend):
        for norm in norms:
            assert norm.dtype is torch.float64
            assert norm == 2 / 6
