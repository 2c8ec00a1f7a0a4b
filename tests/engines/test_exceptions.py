"""An exception in a forward, a backward or a step: the engine goes on after ``zero_grad``, and never with a part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.backends import need
from tests.distributed import run
from tests.models import FailingBackward, adamw, distance, mlp, rows

CONFIG = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
#: Backends, and the moods after which a step raises until ``zero_grad``.
BACKENDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ddp": (accel.DDP(), ("middle", "last")),
    "sharded": (accel.Sharded(), ()),
    "fsdp": (accel.FSDP(), ("middle",)),
    "zero-1": (accel.DeepSpeed(stage=1), ()),  # has reduced nothing yet, so nothing is incomplete
    "zero-2": (accel.DeepSpeed(stage=2), ("middle",)),
    "zero-3": (accel.DeepSpeed(stage=3, config=CONFIG), ("middle",)),
}


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mood = mlp(4, 6, 6), mlp(6, 6, 2), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mood == "last":
            x = FailingBackward.apply(x.requires_grad_())
        h = self.first(x)
        if self.mood == "forward":
            raise ZeroDivisionError("this forward fails")
        out: torch.Tensor = self.second(FailingBackward.apply(h) if self.mood == "middle" else h)
        return out


def exceptions(backend: Any, refused: tuple[str, ...]) -> None:
    raw, plain = Moody(), Moody()
    raw_optimizer, reference = adamw(raw), adamw(plain)
    model, optimizer, _ = accel.setup(raw, raw_optimizer, backend=backend)

    def fail(*_: Any) -> None:
        if raw.mood == "step":
            raise ZeroDivisionError("this step fails")

    raw_optimizer.register_step_pre_hook(fail)
    for step, mood in enumerate(("", "forward", "middle", "last", "", "step", "middle", "")):
        raw.mood = mood
        optimizer.zero_grad()
        x = rows(step, 8, 4)
        if mood:
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                model(x.chunk(2)[accel.rank()]).square().mean().backward()
                optimizer.step()
            raw.mood = ""
            if mood in refused:
                before = copy.deepcopy(accel.full_state_dict(model))
                with pytest.raises(accel.BackendError, match="zero_grad"):
                    optimizer.step()
                assert distance(accel.full_state_dict(model), before) == 0
            continue
        reference.zero_grad()
        plain(x).square().mean().backward()
        reference.step()
        model(x.chunk(2)[accel.rank()]).square().mean().backward()
        optimizer.step()
    assert distance(accel.full_state_dict(model), plain.state_dict()) < 1e-5
    assert accel.teardown(model) is raw
    accel.setup(raw, raw_optimizer, backend=backend)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_engine_goes_on(name: str) -> None:
    need("deepspeed" if "zero" in name else name, 2)
    run(2, exceptions, *BACKENDS[name])
