"""A norm over gradients of which each rank has a part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.backends import need
from tests.distributed import run

DIVIDED = ["sharded", "fsdp", "pipeline", accel.DeepSpeed(stage=2), accel.DeepSpeed(stage=3)]


def model_of(scale: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if scale:
        model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    return model


def parts_of(model: Any) -> list[torch.Tensor]:
    """The gradients, or parts of them, that lie on this rank."""
    held = [holder.grad for holder in accel.registry.registry.find_engine(model).gradients.holders()]  # type: ignore[attr-defined]
    return [g.to_local() if hasattr(g, "to_local") else g for g in held if g is not None]


def norm_with_nan(backend: Any, order: float, by_torch: bool) -> float:
    raw = model_of()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    model(torch.ones(2, 4)).square().sum().backward()
    engine = accel.registry.registry.find_engine(model)  # type: ignore[attr-defined]
    if backend == "sharded":
        accel.clip_grad_norm_(model, 1e9)  # so that each gradient is its owner's
    if not isinstance(backend, str):
        engine.gradients.settle()
    spoiled = [part for part in parts_of(model) if part.numel()]
    if accel.rank() == 1 and spoiled:
        spoiled[-1].view(-1)[0] = math.nan
    clip = nn.utils.clip_grad_norm_ if by_torch else None
    norm = clip(model.parameters(), 0.5, order) if clip else accel.clip_grad_norm_(model, 0.5, order)
    accel.teardown()
    return float(norm)


@pytest.mark.parametrize("backend", DIVIDED, ids=str)
def test_a_nan_on_one_rank_is_in_the_norm_of_all(backend: Any) -> None:
    for order in (math.inf, 2.0):
        assert all(math.isnan(norm) for norm in run(2, norm_with_nan, backend, order, False)), order


def test_torchs_clipping_of_a_pipeline_sees_a_nan_of_another_stage() -> None:
    assert all(math.isnan(norm) for norm in run(2, norm_with_nan, "pipeline", math.inf, True))


def clip_strictly(backend: Any) -> None:
    """Each of the two functions raises on every rank, and leaves the gradients as they were."""
    for by_torch in (True, False):
        raw = model_of()
        model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
        inputs = torch.ones(2, 4)
        inputs[0, 0] = math.nan if accel.rank() == 1 or backend == "pipeline" else 1.0
        model(inputs).square().sum().backward()
        clip, clipped = (nn.utils.clip_grad_norm_, model.parameters()) if by_torch else (accel.clip_grad_norm_, model)
        with pytest.raises(RuntimeError, match="norm of order 2.0 .*clipped"):
            clip(clipped, 0.5, error_if_nonfinite=True)  # type: ignore[operator]
        accel.teardown()


@pytest.mark.parametrize("backend", ["ddp", *DIVIDED], ids=str)
def test_error_if_nonfinite_raises_on_all_ranks(backend: Any) -> None:
    need(backend, 2)
    run(2, clip_strictly, backend)


def norms_of_one_number(backend: Any) -> list[torch.Tensor]:
    raw = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double().requires_grad_(False)
    raw[1].bias.requires_grad_(True)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    norms = []
    for clip in (lambda: accel.clip_grad_norm_(model, 0.1), lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)):
        optimizer.zero_grad()
        (model(torch.ones(2, 4, dtype=torch.float64)).sum() / 6).backward()
        norms.append(clip())
    accel.teardown()
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]


@pytest.mark.parametrize("backend", ["sharded", "fsdp", "pipeline", accel.FSDP(replicas=2)], ids=str)
def test_a_rank_without_gradients_clips_by_the_others_number(backend: Any) -> None:
    """Of float64, where a rank that counts no gradient does not see that they are."""
    first, other = run(2, norms_of_one_number, backend)
    for one, its in zip(first, other, strict=True):
        assert one.dtype is its.dtype is torch.float64
        assert one == its == 2 / 6
