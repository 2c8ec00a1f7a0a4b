"""What fsdp holds on each rank, and models built without memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel
from accel.registry import registry
from tests.distributed import run
from tests.engines.fsdp.training import Block, distance

# -- models built without memory --------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, 0.25)


class Mixed(nn.Module):
    """A tied head, attention with a private reset, a module whose reset covers its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.extra = Scaled(8, 8)


def deferred(backend: str) -> None:
    torch.manual_seed(5)
    eager = Mixed()
    with accel.deferred_init():
        net = Mixed()
    assert all(p.is_meta for p in net.parameters())
    assert not any(b.is_meta for b in net.buffers())
    raw = torch.optim.SGD(net.parameters(), lr=0.1)
    parameters = list(net.parameters())
    torch.manual_seed(5 if accel.is_main() else 6)
    model, handle, _ = accel.setup(net, raw, backend=backend)
    assert distance(accel.full_state_dict(model), eager.state_dict()) == 0.0
    model.extra(torch.ones(2, 8)).sum().backward()
    handle.step()
    assert not torch.equal(accel.full_state_dict(model)["extra.weight"], eager.extra.weight)
    accel.teardown(model)
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    assert not any(p.is_meta for p in parameters)


@pytest.mark.parametrize(("backend", "world"), [("fsdp", 1), ("fsdp", 2), ("ddp", 2), ("single", 1)])
def test_deferred_equals_eager(backend: str, world: int) -> None:
    run(world, deferred, backend)


def deferred_peak() -> tuple[int, int]:
    """The most bytes that were whole at once while a model got its first values, and the model's bytes."""
    peak = 0
    original = nn.Linear.reset_parameters
    with accel.deferred_init():
        net = Tower(blocks=6)

    def watch(module: nn.Linear) -> None:
        nonlocal peak
        original(module)
        parts = [p for m in net.modules() for p in m._parameters.values() if type(p) is nn.Parameter and not p.is_meta]
        peak = max(peak, sum(p.nbytes for p in parts))

    nn.Linear.reset_parameters = watch
    try:
        accel.setup(net, backend="fsdp")
    finally:
        nn.Linear.reset_parameters = original
    return peak, sum(p.nbytes for p in Tower(blocks=6).parameters())


def test_deferred_models_are_never_full() -> None:
    for peak, num_bytes in run(2, deferred_peak):
        assert 0 < peak <= num_bytes / 6


# -- memory -----------------------------------------------------------------------------------------------------------


class Tower(nn.Sequential):
    def __init__(self, blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        for _ in range(blocks):
            self.append(Block(width))


def bytes_per_rank(frozen: bool) -> float:
    net = Tower()
    if frozen:
        for block in list(net)[:3]:
            block.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters())
    num_bytes = sum(p.nbytes for p in net.parameters())
    model, handle, _ = accel.setup(net, optimizer, backend="fsdp")
    for step in range(2):
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        handle.step()
    engine = registry.find_engine(model)
    here = [s.tensor for s in engine.holdings.shards(None) + engine.holdings.shards(handle)]
    here += [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    for param in engine.sharded.params:
        assert param.unsharded_param.untyped_storage().nbytes() == 0
        shard = param._sharded_param_data
        assert shard.untyped_storage().nbytes() <= shard.nbytes
    return sum(t.nbytes for t in here) / num_bytes


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_per_rank(world: int) -> None:
    """Parameters, gradients and AdamW's two moments: 4 N over the ranks; what is frozen costs its shard only."""
    for found in run(world, bytes_per_rank, False):
        assert abs(found - 4 / world) <= 0.02 * 4 / world
    for found in run(world, bytes_per_rank, True):
        assert abs(found - 1.75 / world) <= 0.02 * 1.75 / world
