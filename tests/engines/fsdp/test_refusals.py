"""What cannot be sharded is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.distributed import run
from tests.engines.fsdp.training import Net, build

Kernels = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
#: What is changed before setup, the options, and words of the error.
REFUSALS: list[tuple[Callable[[Any], Any], accel.FSDP, str]] = [
    (lambda net: net.embed.weight.register_hook(lambda g: g), accel.FSDP(), "embed.weight has gradient hooks"),
    (lambda net: net.blocks[1].up.bfloat16(), accel.FSDP(), "uniform original parameter dtype"),
    (lambda net: None, accel.FSDP(wrap=(nn.ModuleList,)), "containers that do not implement forward"),
    (lambda net: Kernels(net.parameters()), accel.FSDP(), "AdamW8bit cannot train sharded parameters"),
]


def refused() -> None:
    for change, options, text in REFUSALS:
        net, optimizer = build()
        changed = change(net)
        optimizer = changed if isinstance(changed, torch.optim.Optimizer) else optimizer
        before = {k: v.clone() for k, v in net.state_dict().items()}
        with pytest.raises((accel.AccelError, AssertionError, ValueError), match=text):
            accel.setup(net, optimizer, backend=options)
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert type(net) is Net
        assert all(type(p) is nn.Parameter for g in optimizer.param_groups for p in g["params"])
        optimizer.state_dict()


def test_refusals_change_nothing() -> None:
    run(2, refused)
