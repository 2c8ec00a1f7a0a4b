"""A norm over gradients of which each rank has a part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import accel
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
    held = [holder.grad for holder in accel.registry.registry.of_handle(model).gradients.holders()]  # type: ignore[attr-defined]
    return [g.to_local() if hasattr(g, "to_local") else g for g in held if g is not None]


def norm_with_nan(backend: Any, order: float, by_torch: bool) -> float:
    raw = model_of()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    model(torch.ones(2, 4)).square().sum().backward()
    engine = accel.registry.registry.of_handle(model)  # type: ignore[attr-defined]
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


def clip_strictly() -> None:
    raw = model_of()
    model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="pipeline")
    model(torch.ones(2, 4)).square().sum().backward()
    if accel.rank() == 1:
        parts_of(model)[-1].view(-1)[0] = math.nan
    with pytest.raises(RuntimeError, match="norm of order 2.0 of the gradients is nan, so they cannot be clipped"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
    accel.teardown()


def test_error_if_nonfinite_is_of_all_ranks() -> None:
    run(2, clip_strictly)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.scale
        return out


def clip_with_a_gradient_of_its_own() -> float:
    raw = Scaled()
    model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="fsdp")
    model(torch.ones(2, 4)).square().sum().backward()
    raw.scale.grad = torch.tensor(float(accel.rank() + 1))
    norm = float(accel.clip_grad_norm_(model, 0.5))
    accel.teardown()
    return norm


def test_all_ranks_clip_alike_whatever_they_assigned() -> None:
    norms = run(2, clip_with_a_gradient_of_its_own)
    assert norms[0] == norms[1]
