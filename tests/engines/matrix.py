"""The parity matrix: ways to train, each by a backend and by one process on the whole batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.backends import replica_of
from tests.models import distance

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


def apart(a: Any, b: Any) -> float:
    """The largest difference between two models' weights and two optimizers' states."""
    both = [(model, [optimizer.state[p] for p in model.parameters()]) for model, optimizer in (a, b)]
    return distance(*both)


def check_cells(cells: list[Cell]) -> list[str]:
    failures = []
    replica, replicas = replica_of(cells[0].backend)
    for cell in cells:
        pieces = replicas if cell.precision == "bf16-mixed" else 1
        reference = train_reference(replace(cell, backend=None), pieces)
        start = build(cell.optimizer)[0].to(accel.device())
        assert any(not torch.equal(p, q) for p, q in zip(reference[0].parameters(), start.parameters(), strict=True))
        found = apart(train_accel(cell, replica, replicas), reference)
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


def in_pairs(cells: list[Cell], number: int = 2) -> list[Cell]:
    """Choose cells so that each combination of this many settings' values is there."""

    def groups(cell: Cell) -> set[Any]:
        settings = [(f.name, getattr(cell, f.name)) for f in fields(Cell) if f.name != "backend"]
        return set(itertools.combinations(settings, number))

    chosen: list[Cell] = []
    left = set().union(*map(groups, cells))
    while left:
        chosen.append(max(cells, key=lambda cell: len(groups(cell) & left)))
        left -= groups(chosen[-1])
    return chosen
