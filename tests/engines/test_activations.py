"""``activation_checkpointing`` and ``activation_offload`` on every engine that has them: the weights of a plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.engines.base import activations
from tests.distributed import run
from tests.models import distance, rows

WIDTH = 16


class Block(nn.Module):
    """With dropout, statistics of batches, a buffer that it reads and writes, and a residual connection."""

    def __init__(self, computed: list[int]) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop, self.computed = nn.Dropout(0.25), computed
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.computed.append(1)
        self.seen.add_(0.125)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x))))) * self.seen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.computed: list[int] = []
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(self.computed) for _ in range(3))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


def train(backend: Any, precision: str) -> tuple[Net, int]:
    """Weights and buffers after steps with accumulation, ``no_sync`` and a frozen block; how often blocks computed."""
    net = Net()
    keys = list(net.state_dict())
    model, optimizer, _ = accel.setup(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), backend=backend, precision=precision
    )
    torch.manual_seed(accel.rank())
    for step in range(4):
        if step == 2:
            model.blocks[1].up.weight.requires_grad_(False)
        optimizer.zero_grad()
        with accel.no_sync(model):
            accel.backward(model(rows(step, 8, 4)).square().mean())
        accel.backward(model(rows(10 * step + accel.rank(), 8, 4)).square().mean())
        accel.clip_grad_norm_(model, 1.0)
        optimizer.step()
    assert list(accel.full_state_dict(model)) == keys
    calls = len(net.computed)
    accel.teardown(model)
    assert list(net.state_dict()) == keys
    assert not any("forward" in vars(module) for module in net.modules())
    return net, calls


#: By the package that they need, the engines, with the precisions to run beside fp32.
BACKENDS: dict[str, list[tuple[Any, dict[str, Any], str]]] = {
    "torch": [(accel.DDP, {}, "16-mixed"), (accel.FSDP, {}, "bf16-mixed")],
    "fairscale": [(accel.Sharded, {}, "")],
    "deepspeed": [(accel.DeepSpeed, {"stage": 2}, ""), (accel.DeepSpeed, {"stage": 3}, "bf16-mixed")],
    "horovod": [(accel.Horovod, {}, "")],
}


@contextlib.contextmanager
def everything_moved() -> Iterator[None]:
    """Inside, activations on the CPU go to the host's memory too: in it, other memory."""
    before = activations._HOSTS, activations._LEAST
    activations._HOSTS, activations._LEAST = frozenset(), 256  # type: ignore[misc]
    try:
        yield
    finally:
        activations._HOSTS, activations._LEAST = before  # type: ignore[misc]


def same_weights(backends: list[tuple[Any, dict[str, Any], str]]) -> None:
    with everything_moved():
        for kind, options, other in backends:
            for precision in filter(None, ("32-true", other)):
                plain, once = train(kind(**options), precision)
                for more, times in (
                    ({"activation_checkpointing": (Block,)}, 2),
                    ({"activation_checkpointing": True, "activation_offload": True}, 2),
                    ({"activation_offload": True}, 1),
                ):
                    net, calls = train(kind(**options, **more), precision)
                    what = f"{kind.__name__} {options} {more} {precision}"
                    assert calls == times * once, (what, calls, once)
                    assert not distance(net, plain), what
                    assert not distance(list(net.buffers()), list(plain.buffers())), what


@pytest.mark.parametrize("package", BACKENDS)
def test_weights_and_buffers_are_those_of_the_plain_engine(package: str) -> None:
    pytest.importorskip(package)
    run(2, same_weights, BACKENDS[package])
