"""What every backend must do: the parity matrix, over each engine that is found, at 1, 2 and 4 ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.registry import registry
from tests.backends import BACKENDS, engine_of, need, replica_of
from tests.distributed import run

BATCH = 4


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    backend: Any
    optimizer: str = "adamw"
    accumulation: int = 1
    no_sync: bool = False
    freeze: bool = False
    clip: bool = False
    precision: str = "32-true"
    set_to_none: bool = True

    @property
    def steps(self) -> int:
        """So many that the last one has what it shows: the second learning rate, or what was frozen trained again."""
        return 7 if self.freeze else 4


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
}


def build(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))
    layers = list(model.children())
    first = [*layers[0].parameters(), *layers[1].parameters()]
    second = [p for layer in layers[2:] for p in layer.parameters()]
    return model, OPTIMIZERS[optimizer]([{"params": first}, {"params": second, "lr": 0.02}])


def batches(step: int, micro: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch as (world, BATCH, ...)."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    x = torch.randn(world, BATCH, 6, generator=generator)
    y = torch.randn(world, BATCH, 3, generator=generator)
    return x.to(accel.device()), y.to(accel.device())


def set_trainable(model: nn.Module, step: int) -> None:
    parameters = list(model.parameters())
    if step == 2:
        parameters[0].requires_grad_(False)
        parameters[5].requires_grad_(False)
    if step == 4:
        parameters[0].requires_grad_(True)
    if step == 5:
        for p in parameters[:-2]:
            p.requires_grad_(False)
    if step == 6:
        for p in parameters:
            p.requires_grad_(True)


def parts(step: int, micro: int, replicas: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The global batch as each replica of the model gets it."""
    x, y = (t.flatten(0, 1).chunk(replicas) for t in batches(step, micro, accel.world_size()))
    return list(zip(x, y, strict=True))


@functools.cache  # for the backends that come after in this worker process
def train_reference(cell: Cell, replicas: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One process on the whole batch; under bf16 it averages the replicas' micro-batches."""
    model, optimizer = build(cell.optimizer)
    model.to(accel.device())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(cell.steps):
        if cell.freeze:
            set_trainable(model, step)
        optimizer.zero_grad(set_to_none=cell.set_to_none)
        for micro in range(cell.accumulation):
            for x, y in parts(step, micro, replicas):
                with torch.autocast(accel.device().type, torch.bfloat16, enabled=cell.precision == "bf16-mixed"):
                    out = model(x).float()
                (F.mse_loss(out, y) / cell.accumulation / replicas).backward()
        if cell.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return model, optimizer


def train_accel(cell: Cell, replica: int, replicas: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    raw, raw_optimizer = build(cell.optimizer)
    model, optimizer, _ = accel.setup(raw, raw_optimizer, backend=cell.backend, precision=cell.precision)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(cell.steps):
        if cell.freeze:
            set_trainable(model, step)
        optimizer.zero_grad(set_to_none=cell.set_to_none)
        for micro in range(cell.accumulation):
            x, y = parts(step, micro, replicas)[replica]
            last = micro == cell.accumulation - 1
            with accel.no_sync(model) if cell.no_sync and not last else contextlib.nullcontext():
                (F.mse_loss(model(x), y) / cell.accumulation).backward()
        if cell.clip:
            accel.clip_grad_norm_(model, 0.1)
        optimizer.step()
        scheduler.step()
    accel.teardown(model)
    return raw, raw_optimizer


def distance(a: Any, b: Any) -> float:
    """The largest difference between two models' weights and two optimizers' states."""
    (model, optimizer), (other, other_optimizer) = a, b
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    worst = max(float((p - q).detach().abs().max()) for p, q in pairs)
    for p, q in pairs:
        mine, theirs = optimizer.state[p], other_optimizer.state[q]
        assert mine.keys() == theirs.keys()
        for key in mine:
            if isinstance(mine[key], torch.Tensor):
                worst = max(worst, float((mine[key] - theirs[key]).abs().max()))
    return worst


def check_cells(cells: list[Cell]) -> list[str]:
    failures = []
    replica, replicas = replica_of(cells[0].backend)
    for cell in cells:
        pieces = replicas if cell.precision == "bf16-mixed" else 1
        reference = train_reference(replace(cell, backend=None), pieces)
        start = build(cell.optimizer)[0].to(accel.device())
        assert any(not torch.equal(p, q) for p, q in zip(reference[0].parameters(), start.parameters(), strict=True))
        found = distance(train_accel(cell, replica, replicas), reference)
        if not found <= (2e-3 if cell.precision == "bf16-mixed" else 1e-5):
            failures.append(f"{cell}: {found:.1e}")
    return failures


def cells_of(backend: Any) -> list[Cell]:
    accumulations = [(1, False), (4, False), (4, True)]
    return [
        Cell(backend, optimizer, count, no_sync, freeze, clip, precision)
        for optimizer, (count, no_sync), freeze, clip, precision in itertools.product(
            OPTIMIZERS, accumulations, (False, True), (False, True), ("32-true", "bf16-mixed")
        )
    ] + [Cell(backend, freeze=freeze, set_to_none=False) for freeze in (False, True)]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_parity(backend: Any, world: int) -> None:
    """N steps on any number of ranks give the weights and optimizer state of one process on the whole batch."""
    need(backend)
    if world > 1 and not engine_of(backend).synchronizes:
        with pytest.raises(AssertionError, match="each process would train a model"):
            run(world, check_cells, cells_of(backend)[:1])
        return
    for rank, failures in enumerate(run(world, check_cells, cells_of(backend), timeout=240)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


# -- state --------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Has of everything that a state can hold: tied, scalar and lonely parameters, both kinds of buffers, extra state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.scale, self.row = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1, size))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.register_parameter("none", None)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return torch.tanh(self.second(torch.relu(self.first(x)))) * self.scale * self.row + self.passing.sum()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "tensors": [torch.full((2,), float(self.calls))]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def build_odd() -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), Odd(6), nn.BatchNorm1d(6), Odd(6), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    model[4].requires_grad_(False)  # in no optimizer
    model.register_state_dict_post_hook(lambda module, state, *_: state.__setitem__("total", sum(state["0.bias"])))
    groups = [{"params": [*model[1].parameters(), *model[0].parameters()]}, {"params": [*model[3].parameters()]}]
    groups[1]["lr"] = 0.02  # type: ignore[assignment]
    return model, [torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]


def differences(a: Any, b: Any, path: str, tolerance: float = 1e-5) -> list[str]:
    """Where two states are not the same, in values or in the order of their keys."""
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype is b.dtype and a.shape == b.shape
        return [] if alike and torch.allclose(a, b, rtol=0, atol=tolerance) else [f"{path}: {a} and {b}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{path}: {list(a)} and {list(b)}"]
        return [text for key in a for text in differences(a[key], b[key], f"{path}.{key}", tolerance)]
    if isinstance(a, list | tuple):
        return differences(dict(enumerate(a)), dict(enumerate(b)), path, tolerance)
    return [] if a == b else [f"{path}: {a} and {b}"]


def train_odd(model: Any, optimizers: Any, steps: range) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(accel.device())
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def states(model: Any, optimizers: Any) -> list[Any]:
    return [copy.deepcopy(accel.full_state_dict(one)) for one in (model, *optimizers)]


def check_state(backend: Any) -> None:
    """The whole state is one process's, in and out; what does not fit is refused in torch's words, and changes nothing."""
    plain, references = build_odd()
    plain.to(accel.device())
    train_odd(plain, references, range(3))
    expected = [one.state_dict() for one in (plain, *references)]
    raw, raws = build_odd()
    model, optimizers, _ = accel.setup(raw, raws, backend=backend)
    train_odd(model, optimizers, range(3))
    full = states(model, optimizers)
    assert not [text for a, b in zip(full, expected, strict=True) for text in differences(a, b, "")]
    assert full[0]._metadata == expected[0]._metadata
    assert full[0]["1.first.weight"].data_ptr() == full[0]["1.second.weight"].data_ptr()

    train_odd(model, optimizers, range(3, 5))
    moved = states(model, optimizers)
    assert differences(moved[0], full[0], "", 0.0)
    weights = {name: value for name, value in full[0].items() if name != "total"}
    if registry.of_handle(model).holdings.partial(None):
        for wrong, message in (
            (weights | {"3.row": torch.ones(7)}, "size mismatch for 3.row: .*torch.Size\\(\\[7\\]\\)"),
            ({name: value for name, value in weights.items() if name != "2.bias"}, 'Missing key.*"2.bias"'),
            (weights | {"more": torch.ones(1)}, 'Unexpected key.*"more"'),
        ):
            with pytest.raises(RuntimeError, match=message):
                model.load_state_dict(wrong)
        now = accel.full_state_dict(model)
        assert not [n for n, value in now.items() if "extra" not in n and differences(value, moved[0][n], n, 0.0)]
    heard: list[bool] = []
    hook = raw.register_load_state_dict_post_hook(
        lambda module, keys: heard.append(type(module[1].row).__name__ != "Target")
    )
    assert model.load_state_dict(weights).missing_keys == []
    hook.remove()
    for optimizer, state in zip(optimizers, full[1:], strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))
    assert heard == [True]
    assert not [
        text for a, b in zip(states(model, optimizers), full, strict=True) for text in differences(a, b, "", 0.0)
    ]

    train_odd(model, optimizers, range(3, 6))
    train_odd(plain, references, range(3, 6))
    accel.teardown(model)
    for one, other in zip((raw, *raws), (plain, *references), strict=True):
        assert not differences(one.state_dict(), other.state_dict(), "")
    assert torch.equal(raw[1].passing, plain[1].passing)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_whole_state(backend: Any) -> None:
    world = 2 if engine_of(backend).synchronizes else 1
    need(backend, world)
    run(world, check_state, backend)
