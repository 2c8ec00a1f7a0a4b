"""What ZeRO cannot do is refused, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from tests.distributed import run
from tests.engines.deepspeed.training import Net, zero
from tests.models import logged


class Extra(nn.Module):
    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.ones(2)), nn.Parameter(extra)


@dataclass(frozen=True)
class Refusal:
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    build: Callable[[], nn.Module] = Net
    optimizer: Any = torch.optim.AdamW


def section(**options: Any) -> dict[str, Any]:
    return {"config": {"zero_optimization": options}}


REFUSALS = [
    Refusal("'optimizer' is .*Give accel.setup the optimizer", {"config": {"optimizer": {"type": "Adam"}}}),
    Refusal("'fp16' is .*precision=", {"config": {"fp16": {"enabled": True}}}),
    Refusal("'gradient_accumulation_steps' is 4", {"config": {"gradient_accumulation_steps": 4}}),
    Refusal("precision='bf16-true'", {"config": {"bf16": {"enabled": True}}}),
    Refusal("zero_optimization.stage", {"stage": 2, **section(stage=1)}),
    Refusal("Use {'device': 'cpu'}", section(offload_optimizer={"device": "nvme"})),
    Refusal("Use sparse=False", {"stage": 2}, lambda: nn.Embedding(4, 2, sparse=True)),
    Refusal("can't shard extra", {"stage": 3}, lambda: Extra(torch.ones(2, dtype=torch.complex64))),
    Refusal("extra is torch.bfloat16", {"stage": 3}, lambda: Extra(torch.ones(2, dtype=torch.bfloat16))),
    Refusal(r"can't step flat shards.*AdamW\(fused=True\)", {"stage": 2}, optimizer=torch.optim.LBFGS),
    Refusal(r"can't step flat shards.*AdamW\(fused=True\)", {"stage": 3}, optimizer=torch.optim.Adafactor),
]


def refused() -> None:
    for case in REFUSALS:
        raw = case.build()
        optimizer = case.optimizer(raw.parameters())
        with pytest.raises(accel.AccelError, match=case.text):
            accel.setup(raw, optimizer, backend=DeepSpeed(**case.options))
        assert "zero_grad" not in vars(optimizer)
        assert "zero_grad" not in vars(raw)
        assert all(type(p) is nn.Parameter for p in raw.parameters())


def test_refusals_change_nothing() -> None:
    run(2, refused)


def never_dropped() -> list[str]:
    raw = nn.Linear(4, 2)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=zero(2))
    with logged() as told:
        for drop in (True, False, False):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if drop:
                model.zero_grad()
                assert not told
            for p in raw.parameters():
                p.grad = None
    return told


def test_warning_of_gradients_never_dropped() -> None:
    for told in run(2, never_dropped):
        assert len(told) == 1
        assert "Call optimizer.zero_grad()" in told[0]
