"""A model changes its backend in the middle of training, as if nothing had happened.

Every pair of backends that keep one model on all ranks is run at 2 ranks. A backend that does not (``single``) refuses
an optimizer there, since each rank would train a separate model; so the pairs that it is in are run at world 1,
with the other backend at world 1 too. Backends, and the options with which they work differently, are found in the
engines' folder; one whose package or device is missing is skipped.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.backends import BACKENDS, engine_of, need
from tests.distributed import run
from tests.engines.matrix import OPTIMIZERS, apart, batches, build, parts

STEPS = 3


def train_raw(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range, batch_of: int) -> None:
    """One process on the whole batch of ``batch_of`` ranks."""
    for step in steps:
        optimizer.zero_grad()
        x, y = batches(step, 0, batch_of)
        F.mse_loss(model(x.flatten(0, 1)), y.flatten(0, 1)).backward()
        optimizer.step()
        scheduler.step()


def switch(backends: list[Any], kind: str) -> tuple[float, float, list[list[float]]]:
    """Trains with one backend after the other and then by itself; how far it is from an uninterrupted run.

    Also how far that run has come from its start, and both runs' learning rates.
    """
    world = accel.world_size()
    raw, raw_optimizer = build(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(raw_optimizer, 2, 0.7)
    end = 0
    for backend in backends:
        model, optimizer, _ = accel.setup(raw, raw_optimizer, backend=backend)
        replica, replicas = accel.data_parallel_place(model)
        for step in range(end, end + STEPS):
            optimizer.zero_grad()
            x, y = parts(step, 0, replicas)[replica]
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        end += STEPS
        assert accel.teardown(model) is raw
        assert [id(p) for g in raw_optimizer.param_groups for p in g["params"]] == [id(p) for p in raw.parameters()]
    # The user's own objects work by themselves again, where they are.
    train_raw(raw, raw_optimizer, scheduler, range(end, end + 2), world)

    reference, reference_optimizer = build(kind)
    start = [p.detach().clone() for p in reference.parameters()]
    reference.to(accel.device())
    reference_scheduler = torch.optim.lr_scheduler.StepLR(reference_optimizer, 2, 0.7)
    train_raw(reference, reference_optimizer, reference_scheduler, range(end + 2), world)
    moved = max(float((p.cpu() - q).detach().abs().max()) for p, q in zip(reference.parameters(), start, strict=True))
    rates = [[g["lr"] for g in o.param_groups] for o in (raw_optimizer, reference_optimizer)]
    return apart((raw, raw_optimizer), (reference, reference_optimizer)), moved, rates


def backends_of(synchronizes: tuple[bool, ...]) -> list[Any]:
    """Backends by whether they keep one model on all ranks."""
    return [backend for backend in BACKENDS if engine_of(backend).synchronizes in synchronizes]


def check(world: int, backends: list[Any]) -> None:
    for backend in backends:
        need(backend)
    for kind in OPTIMIZERS:
        for found, moved, (rates, expected) in run(world, switch, backends, kind):
            assert moved > 0.02
            assert rates == expected
            assert found <= 1e-5, f"{kind}: {found:.1e}"


SHARED = backends_of((True,))
#: Each after itself, after its neighbour and after one that is further away: between two engines the objects are raw.
PAIRS = [(first, SHARED[(i + step) % len(SHARED)]) for i, first in enumerate(SHARED) for step in (0, 1, 4)]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_switching_at_two_ranks(first: Any, second: Any) -> None:
    check(2, [first, second])


ALONE = [
    (first, second)
    for first, second in itertools.product(backends_of((True, False)), repeat=2)
    if any(backend in (first, second) for backend in backends_of((False,)))
]


@pytest.mark.parametrize(("first", "second"), ALONE, ids=str)
def test_switching_at_one_rank(first: Any, second: Any) -> None:
    check(1, [first, second])


def set_up_with_state() -> int:
    """The order of the state depends on the order in which a rank stepped its parameters."""
    raw, optimizer = build("adamw")
    parameters = list(raw.parameters())
    for p in parameters if accel.rank() == 0 else reversed(parameters):
        optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": p.detach() * 2, "exp_avg_sq": p.detach() ** 2}
    accel.setup(raw, optimizer, backend="ddp")
    return len(optimizer.state)


def test_state_may_have_any_order() -> None:
    assert run(2, set_up_with_state) == [8, 8]
