"""``torch.compile`` before and after ``setup``: one graph, no break, nothing compiled again, the same weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel
from tests.distributed import run
from tests.models import distance, rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.block, self.last = nn.Linear(4, 8), Block(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.block(self.first(x)))
        return out


def _nothing(module: Any) -> Any:
    return module


def _whole(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def _in_place(module: Any) -> Any:
    module.compile(backend="eager")
    return module


def _block(module: Any) -> Any:
    module.block.compile(backend="eager")
    return module


def _exchanged_block(module: Any) -> Any:
    module.block = torch.compile(module.block, backend="eager")
    return module


def train(model: Any, optimizer: Any, graphs: int | None = None) -> None:
    """Train a few steps. Each step has this number of graphs and no graph break."""
    counters = importlib.import_module("torch._dynamo").utils.counters
    replica = accel.data_parallel_place(model).rank
    for step in range(4):
        optimizer.zero_grad()
        model(rows(10 * step + replica, 8, 4)).square().mean().backward()
        optimizer.step()
        assert graphs is None or counters["stats"]["unique_graphs"] == graphs
        assert graphs is None or not counters["graph_break"]


def trained(backend: str, before: Callable[[Any], Any], after: Callable[[Any], Any]) -> nn.Module:
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()
    dynamo.utils.counters.clear()
    raw = Net()
    given = before(raw)
    model, optimizer, _ = accel.setup(given, torch.optim.AdamW(raw.parameters(), lr=0.01), backend=backend)
    train(after(model), optimizer, graphs=int(before is not _nothing or after is not _nothing))
    accel.teardown(model)
    assert (raw._compiled_call_impl is None) == (before is not _in_place)
    return raw


def compare(backend: str) -> None:
    plain = trained(backend, _nothing, _nothing)
    befores = [(way, _nothing) for way in (_whole, _in_place, _block, _exchanged_block)]
    for before, after in [*befores, (_nothing, _in_place), (_nothing, _whole), (_nothing, _block)]:
        assert distance(trained(backend, before, after), plain) < 1e-5, (before, after)


def wrapped_in_stage_3() -> None:
    for way in (_whole, _exchanged_block):
        with pytest.raises(
            accel.BackendError, match=r"DeepSpeed stage 3 can't gather weights inside a torch\.compile wrapper"
        ):
            accel.setup(way(Net()), backend=accel.DeepSpeed(stage=3))


def test_stage_3_raises_for_wrappers() -> None:
    pytest.importorskip("deepspeed")
    run(2, wrapped_in_stage_3)


@pytest.mark.parametrize(
    ("backend", "world"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("sharded", 2), ("horovod", 2), ("deepspeed", 2)]
)
def test_compiled_before_or_after_setup(backend: str, world: int) -> None:
    if backend in ("sharded", "horovod", "deepspeed"):
        pytest.importorskip({"sharded": "fairscale"}.get(backend, backend))
    run(world, compare, backend)


def train_in_pieces(backend: Any, compiler: str = "eager", steps: bool = False) -> None:
    """Compare a model that is compiled in several graphs with plain training. Nothing compiles again after step 2."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    weights = []
    for compiles in (False, True):
        dynamo.reset()
        raw = Net()
        optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
        if compiles and steps:
            optimizer.step = torch.compile(optimizer.step, backend=compiler)  # type: ignore[method-assign]
        elif compiles:
            raw.compile(backend=compiler)
        model = accel.setup(raw, optimizer, backend=backend).model
        train(model, optimizer)
        graphs = dynamo.utils.counters["stats"]["unique_graphs"]
        train(model, optimizer)
        assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        weights.append({name: value.clone() for name, value in accel.full_state_dict(model).items()})
        accel.teardown(model)
    assert distance(*weights) < 1e-6


def test_stage_3_is_compiled_in_pieces() -> None:
    pytest.importorskip("deepspeed")
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    run(2, train_in_pieces, accel.DeepSpeed(config=config))


def test_sharded_layers_are_compiled() -> None:
    plan = {"first": ColwiseParallel(), "block.inner": RowwiseParallel()}
    run(2, train_in_pieces, accel.FSDP(tensor_parallel=2, plan=plan), "aot_eager")


@pytest.mark.parametrize("backend", ["fsdp", "sharded"])
def test_compiled_steps(backend: str) -> None:
    if backend == "sharded":
        pytest.importorskip("fairscale")
    run(2, train_in_pieces, backend, "eager", True)
