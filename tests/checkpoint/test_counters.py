"""Where an optimizer's state lies after it was loaded or moved: by torch's rule. Meta stands for an accelerator."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from accel.precision import convert_optimizer
from accel.shard import Raw

KINDS: list[Any] = [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD]


def one_step(kind: Any, device: str, flags: dict[str, Any]) -> torch.optim.Optimizer:
    """Of a parameter on ``device``; what it has is on the CPU until then."""
    parameter, moved = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device=device))
    optimizer: torch.optim.Optimizer = kind([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0].update(flags, params=[moved])
    optimizer.state[moved] = optimizer.state.pop(parameter)
    return optimizer


def places(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    (state,) = optimizer.state.values()
    return {key: value.device.type for key, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_state_lies_where_torch_puts_it(kind: Any, flags: dict[str, Any]) -> None:
    by_torch, loaded, moved = (one_step(kind, "meta", flags) for _ in range(3))
    values = one_step(kind, "cpu", flags)
    by_torch.load_state_dict(values.state_dict())
    expected = places(by_torch)
    if kind is torch.optim.AdamW:
        assert expected["step"] == ("meta" if flags else "cpu")
    convert_optimizer(moved, ExitStack())  # as ``setup`` brings the state to where the model is
    assert places(moved) == expected
    saved, held = (Raw(None, {id(o.param_groups[0]["params"][0]): "p"}) for o in (values, loaded))
    loaded.state.clear()
    held.slots(loaded, {s.name: (s.shape, s.tensor.dtype) for s in saved.shards(values)})
    held.fill(loaded, saved.values(values))  # as a load does
    assert places(loaded) == expected
