"""Where the state of an optimizer lies after it was loaded, given back or moved: by torch's own rule, on every road.

The meta device stands for an accelerator.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from accel.engines.base.holdings import Holdings
from accel.precision import convert_optimizer
from accel.shard import Raw

FLAGS = [{}, {"fused": True}, {"capturable": True}]
META = torch.device("meta")


def one_step(kind: type[torch.optim.Optimizer], device: str, flags: dict[str, Any]) -> torch.optim.Optimizer:
    """Of a parameter on ``device``; what it has is on the CPU until then."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1)  # type: ignore[call-arg]
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0].update(flags)
    if device != "cpu":
        moved = nn.Parameter(torch.ones(3, device=device))
        optimizer.param_groups[0]["params"], optimizer.state[moved] = [moved], optimizer.state.pop(parameter)
    return optimizer


def places(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    (state,) = optimizer.state.values()
    return {key: value.device.type for key, value in state.items() if isinstance(value, torch.Tensor)}


def by_torch(kind: type[torch.optim.Optimizer], flags: dict[str, Any]) -> dict[str, str]:
    """Where ``load_state_dict`` of a state on the CPU puts it."""
    there = one_step(kind, "meta", flags)
    there.load_state_dict(one_step(kind, "cpu", flags).state_dict())
    return places(there)


def by_load(kind: type[torch.optim.Optimizer], flags: dict[str, Any]) -> dict[str, str]:
    """As a checkpoint fills the numbers in a state; the rest is filled in memory that is made for it."""
    there, values = one_step(kind, "meta", flags), one_step(kind, "cpu", flags)
    (parameter,) = there.param_groups[0]["params"]
    there.state.clear()
    from_file = Raw(None, {id(p): "p" for p in values.param_groups[0]["params"]})
    here = Raw(None, {id(parameter): "p"})
    here.slots(there, {s.name: (s.shape, s.tensor.dtype) for s in from_file.shards(values)})
    here.fill(there, from_file.values(values))
    return places(there)


def by_parts(kind: type[torch.optim.Optimizer], flags: dict[str, Any]) -> dict[str, str]:
    """As ``load_state_dict`` of a model that is divided."""
    there = one_step(kind, "meta", flags)
    (parameter,) = there.param_groups[0]["params"]
    (state,) = one_step(kind, "cpu", flags).state.values()
    model = nn.ParameterDict({"p": parameter})

    class Engine:
        module, named, parameters = model, {"p": parameter}, [parameter]

    Holdings(Engine()).take(there, {"p": state})  # type: ignore[arg-type]
    return places(there)


def by_move(kind: type[torch.optim.Optimizer], flags: dict[str, Any]) -> dict[str, str]:
    """As ``setup`` brings an optimizer's state to where its model is now."""
    there = one_step(kind, "meta", flags)
    convert_optimizer(there, ExitStack())
    return places(there)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_state_lies_where_torch_puts_it(flags: dict[str, Any]) -> None:
    assert by_torch(torch.optim.AdamW, flags)["step"] == ("meta" if flags else "cpu")
    for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD):
        for road in (by_load, by_parts, by_move):
            assert road(kind, flags) == by_torch(kind, flags)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_numbers_come_back_from_an_offload(flags: dict[str, Any]) -> None:
    """They lie where the parts were, and the whole weights lie on the device."""

    parameter = nn.Parameter(torch.ones(3, device=META))
    state = {"step": torch.tensor(3.0), "mu_product": torch.tensor(0.5), "history": [torch.tensor(1.0)]}

    class Engine:
        module, named, label = nn.Module(), {"p": parameter}, "Net"

        class process:
            device = META

    class Offloaded(Holdings):
        def _full_optimizer_state(self, *_: Any, **__: Any) -> dict[str, dict[Any, Any]]:
            return {"p": state}

    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0].update(flags)
    Offloaded(Engine()).give_back("the end", optimizer, {"p": parameter})  # type: ignore[arg-type]
    placed = optimizer.state[parameter]
    assert placed["step"].device.type == ("meta" if flags else "cpu")
    assert placed["mu_product"].device == placed["history"][0].device == META
