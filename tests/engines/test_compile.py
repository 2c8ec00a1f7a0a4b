"""``torch.compile`` before and after ``setup``: one graph, no break, nothing compiled again, the same weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
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


def _returned(module: Any) -> Any:
    compiled = torch.compile(module, backend="eager")
    assert compiled is module
    assert compiled._orig_mod is accel.unwrap(module)
    return compiled


def _block(module: Any) -> Any:
    module.block.compile(backend="eager")
    return module


def _exchanged_block(module: Any) -> Any:
    module.block = torch.compile(module.block, backend="eager")
    return module


def trained(backend: str, before: Callable[[Any], Any], after: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The weights after some steps, in which exactly one graph was compiled if any, and none broke."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    counters = dynamo.utils.counters
    dynamo.reset()
    counters.clear()
    raw = Net()
    given = before(raw)
    model, optimizer, _ = accel.setup(given, torch.optim.AdamW(raw.parameters(), lr=0.01), backend=backend)
    model = after(model)
    for step in range(4):
        optimizer.zero_grad()
        model(rows(10 * step + accel.rank(), 8, 4)).square().mean().backward()
        optimizer.step()
        compiled = before is not _nothing or after is not _nothing
        assert counters["stats"]["unique_graphs"] == compiled
        assert not counters["graph_break"]
    accel.teardown(model)
    assert (raw._compiled_call_impl is None) == (before is not _in_place)
    return [p.detach() for p in raw.parameters()]


def alike(backend: str) -> None:
    plain = trained(backend, _nothing, _nothing)
    befores = [(way, _nothing) for way in (_whole, _in_place, _block, _exchanged_block)]
    for before, after in [*befores, (_nothing, _in_place), (_nothing, _returned), (_nothing, _block)]:
        for p, q in zip(trained(backend, before, after), plain, strict=True):
            torch.testing.assert_close(p, q, msg=f"{before.__name__}, {after.__name__}")


def wrapped_one_by_one() -> None:
    """Each block in a wrapper of its own: fsdp gathers them one by one as without, and activations are computed again."""
    found = []
    for compiles in (False, True):
        raw = nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(3)))
        for p, number in zip(raw.parameters(), range(100), strict=False):
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(number))
        for number in (1, 2, 3) if compiles else ():
            raw[number] = torch.compile(raw[number], backend="eager")
        optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
        model, optimizer, _ = accel.setup(raw, optimizer, backend=accel.FSDP(activation_checkpointing=True))
        for step in range(2):
            optimizer.zero_grad()
            model(rows(10 * step + accel.rank(), 8, 4)).square().mean().backward()
            optimizer.step()
        groups = [name.replace("._orig_mod", "") for name, m in raw.named_modules() if isinstance(m, FSDPModule)]
        accel.teardown(model)
        found.append((groups, [p.detach() for p in raw.parameters()]))
    (plain, expected), (groups, weights) = found
    assert groups == plain == ["", "1", "2", "3"]
    for p, q in zip(weights, expected, strict=True):
        torch.testing.assert_close(p, q)


def test_blocks_that_are_wrapped_one_by_one_stay_blocks() -> None:
    run(2, wrapped_one_by_one)


def wrapped_in_stage_3() -> None:
    for way in (_whole, _exchanged_block):
        with pytest.raises(
            accel.BackendError, match=r"DeepSpeed stage 3 can't gather weights inside a torch\.compile wrapper"
        ):
            accel.setup(way(Net()), backend=accel.DeepSpeed(stage=3))


def test_wrappers_are_refused_where_weights_come_and_go() -> None:
    pytest.importorskip("deepspeed")
    run(2, wrapped_in_stage_3)


@pytest.mark.parametrize(
    ("backend", "world"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("sharded", 2), ("horovod", 2), ("deepspeed", 2)]
)
def test_compiled_before_or_after_setup(backend: str, world: int) -> None:
    if backend in ("sharded", "horovod", "deepspeed"):
        pytest.importorskip({"sharded": "fairscale"}.get(backend, backend))
    run(world, alike, backend)


def in_pieces() -> None:
    """At stage 3, where weights are divided: in pieces, none of them again."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    weights = []
    for way in (_nothing, _in_place):
        dynamo.utils.counters.clear()
        raw = way(Net())
        optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
        model, optimizer, _ = accel.setup(raw, optimizer, backend=accel.DeepSpeed(config=config))
        graphs = []
        for step in range(4):
            optimizer.zero_grad()
            model(rows(10 * step + accel.rank(), 8, 4)).square().mean().backward()
            optimizer.step()
            graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
        assert graphs[1] == graphs[3]
        assert bool(graphs[3]) == (way is _in_place)
        weights.append(list(accel.full_state_dict(model).values()))
        accel.teardown(model)
    for p, q in zip(*weights, strict=True):
        torch.testing.assert_close(p, q)


def test_a_divided_model_is_compiled_in_pieces() -> None:
    pytest.importorskip("deepspeed")
    run(2, in_pieces)


def compiled_steps(backend: str) -> float:
    """How far the weights are from those of steps that are not compiled."""
    weights = []
    for compiles in (False, True):
        importlib.import_module("torch._dynamo").reset()
        raw = Net()
        optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
        if compiles:
            optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        model, optimizer, _ = accel.setup(raw, optimizer, backend=backend)
        for step in range(3):
            optimizer.zero_grad()
            model(rows(10 * step + accel.rank(), 8, 4)).square().mean().backward()
            optimizer.step()
        accel.teardown(model)
        weights.append(raw)
    return distance(*weights)


@pytest.mark.parametrize("backend", ["fsdp", "sharded"])
def test_compiled_steps(backend: str) -> None:
    if backend == "sharded":
        pytest.importorskip("fairscale")
    assert max(run(2, compiled_steps, backend)) < 1e-6


def exported() -> float:
    model = accel.setup(Net(), backend="ddp").model
    program = torch.export.export(model, (rows(0, 8, 4),))
    return float((program.module()(rows(1, 8, 4)) - model(rows(1, 8, 4))).detach().abs().max())


def test_a_handle_of_ddp_is_exported() -> None:
    assert run(2, exported) == [0, 0]


def in_parts() -> None:
    """Autograd's part of the compiler too, which asks for the classes of the parts."""
    weights = []
    for compiled in (False, True):
        raw = Net()
        given = torch.compile(raw, backend="aot_eager") if compiled else raw
        plan = {"first": ColwiseParallel(), "block.inner": RowwiseParallel()}
        optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
        model, optimizer, _ = accel.setup(given, optimizer, backend=accel.FSDP(tensor_parallel=2, plan=plan))
        for step in range(2):
            optimizer.zero_grad()
            model(rows(step, 8, 4)).square().mean().backward()
            optimizer.step()
        accel.teardown(model)
        weights.append(raw)
    assert distance(*weights) < 1e-6


def test_layers_that_are_cut_are_compiled() -> None:
    run(2, in_parts)


def test_a_compiled_pipeline_calls_its_children() -> None:
    for compiled in (_in_place, lambda module: torch.compile(module, backend="eager")):
        raw = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        expected = raw(rows(0, 8, 4))
        before = accel.setup(compiled(raw), backend="pipeline").model
        assert compiled(before) is before
        assert torch.equal(before(rows(0, 8, 4)), expected)
        accel.teardown(before)
