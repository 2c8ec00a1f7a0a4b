"""What cannot be sharded is refused, and so is what would see a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import accel
from accel.engines.fsdp.plan import blocks
from tests.distributed import run
from tests.engines.fsdp.training import Block, Net, build

Kernels = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
#: What is changed before setup, and words of the error.
MODELS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda net: net.embed.weight.register_hook(lambda g: g), "embed.weight has gradient hooks"),
    (lambda net: net.blocks[1].up.bfloat16(), "uniform original parameter dtype"),
]


def check_refused(net: Any, optimizer: Any, options: Any, error: Any, text: str) -> None:
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(error, match=text):
        accel.setup(net, optimizer, backend=options)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert type(net) is Net
    assert all(type(p) is nn.Parameter for g in optimizer.param_groups for p in g["params"])
    optimizer.state_dict()


def refused() -> None:
    net, _ = build()
    kernels = "AdamW8bit cannot train sharded parameters"
    check_refused(net, Kernels(net.parameters()), accel.FSDP(), accel.OptimizerError, kernels)
    for change, text in MODELS:
        net, optimizer = build()
        change(net)
        check_refused(net, optimizer, accel.FSDP(), (accel.BackendError, AssertionError), text)
    containers = accel.FSDP(wrap=(nn.ModuleList,))
    check_refused(*build(), containers, ValueError, "containers that do not implement forward")


def test_refusals_change_nothing() -> None:
    run(2, refused)


def test_blocks_with_tied_parameters() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))) for _ in range(3)))
    assert {name for name, _ in blocks(net, None)} == {"0", "1", "2"}
    assert {name for name, _ in blocks(net, (nn.Sequential,))} == {"0", "1", "2", "0.1", "1.1", "2.1"}
    net[2][1][0].weight = net[0][0].weight
    assert {name for name, _ in blocks(net, None)} == {"1"}
    assert {name for name, _ in blocks(net, (nn.Sequential,))} == {"1", "1.1", "0.1"}


def test_options_are_checked() -> None:
    for wrong in ({"wrap": "Block"}, {"wrap": Block}, {"param_dtype": torch.float16}, {"reduce_dtype": torch.int8}):
        with pytest.raises(accel.BackendError, match=next(iter(wrong))):
            accel.FSDP(**wrong)


def shards() -> None:
    """DTensor alone would read a number of this rank's shard, or write to a copy."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    raw = nn.Linear(6, 7)
    model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="fsdp")
    model(torch.ones(2, 6)).sum().backward()
    weight, gradient = model.weight, model.weight.grad
    uses: list[Callable[[], Any]] = [
        lambda: gradient.norm().item(),
        lambda: float(weight.sum().detach()),
        lambda: weight.detach().narrow(0, 1, 3).fill_(1.0),
        lambda: weight.data.chunk(2)[0].zero_(),
        lambda: gradient[0].zero_(),
    ]
    # One rank alone would wait for the others, or end in gloo.
    if accel.is_main():
        uses.append(lambda: print(weight.data[0]))
    for use in uses:
        with pytest.raises(accel.BackendError, match="full_tensor"):
            use()
    # Reading with a graph cannot lose a write.
    assert torch.equal(weight[1].detach().full_tensor(), accel.full_state_dict(model)["weight"][1])
    accel.teardown(model)
    assert dict(handlers) == before


def test_shards_are_not_full_tensors() -> None:
    run(2, shards)
