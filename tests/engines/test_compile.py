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
from tests.backends import need
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


def nothing(module: Any) -> Any:
    return module


def whole(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def in_place(module: Any) -> Any:
    module.compile(backend="eager")
    return module


def block(module: Any) -> Any:
    module.block.compile(backend="eager")
    return module


def exchanged_block(module: Any) -> Any:
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
    train(after(model), optimizer, graphs=int(before is not nothing or after is not nothing))
    accel.teardown(model)
    assert (raw._compiled_call_impl is None) == (before is not in_place)
    return raw


def compare(backend: str) -> None:
    plain = trained(backend, nothing, nothing)
    befores = [(way, nothing) for way in (whole, in_place, block, exchanged_block)]
    for before, after in [*befores, (nothing, in_place), (nothing, whole), (nothing, block)]:
        assert distance(trained(backend, before, after), plain) < 1e-5, (before, after)


def wrapped_in_stage_3() -> None:
    for way in (whole, exchanged_block):
        with pytest.raises(accel.BackendError, match=r"can't gather weights inside a torch\.compile wrapper"):
            accel.setup(way(Net()), backend=accel.DeepSpeed(stage=3))


def test_stage_3_raises_for_wrappers() -> None:
    need("deepspeed", 2)
    run(2, wrapped_in_stage_3)


@pytest.mark.parametrize("backend", ["single", "ddp", "fsdp", "sharded", "horovod", "deepspeed"])
def test_compiled_before_or_after_setup(backend: str) -> None:
    world = 1 if backend == "single" else 2
    need(backend, world)
    run(world, compare, backend)


def train_in_pieces(backend: Any, compiler: str, steps: bool) -> None:
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


PLAN = {"first": ColwiseParallel(), "block.inner": RowwiseParallel()}
ALL_SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
PIECES: dict[str, tuple[Any, str, bool]] = {
    "deepspeed": (accel.DeepSpeed(stage=3, config=ALL_SHARDED), "eager", False),
    "fsdp": (accel.FSDP(tensor_parallel=2, plan=PLAN), "aot_eager", False),
    "fsdp steps": (accel.FSDP(), "eager", True),
    "sharded steps": (accel.Sharded(), "eager", True),
}


@pytest.mark.parametrize("name", PIECES)
def test_several_graphs_compile_once(name: str) -> None:
    need(name.partition(" ")[0], 2)
    run(2, train_in_pieces, *PIECES[name])
