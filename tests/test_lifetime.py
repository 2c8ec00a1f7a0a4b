"""How long engines, models and memory live, and how engines end if ranks drop models at different moments."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import accel
from accel.handles import ModelHandle
from accel.registry import registry
from tests.backends import need
from tests.distributed import run
from tests.models import adamw, mlp, normalised, one_step

# -- memory -----------------------------------------------------------------------------------------------------------


def set_up_often() -> None:
    """Count torch's reducers and hooks. A leaked model would keep its own."""
    raw = mlp(4, 6, 2)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.01)
    gc.collect()
    hooks = len(_global_optimizer_pre_hooks)
    for _ in range(3):
        model: Any = accel.setup(raw, optimizer).model
        one_step(model, optimizer)
        assert type(model) is ModelHandle
        assert accel.teardown(model) is raw
        model = None
        gc.collect()
        assert not any(type(o) is DistributedDataParallel for o in gc.get_objects())
        assert not optimizer._optimizer_step_pre_hooks
        assert not any(p._post_accumulate_grad_hooks for p in raw.parameters())
        assert len(_global_optimizer_pre_hooks) == hooks
    assert inspect.getclosurevars(nn.utils.clip_grad_norm_).nonlocals["func"].__module__.startswith("torch")


def test_teardown_leaves_nothing() -> None:
    set_up_often()
    run(2, set_up_often)


def unreferenced(backend: Any = "auto") -> list[bool]:
    raw = normalised()
    optimizer = adamw(raw)
    model = accel.setup(raw, optimizer, backend=backend).model
    one_step(model, optimizer)
    model(torch.randn(4, 4)).mean().backward()
    alive = [weakref.ref(raw), weakref.ref(registry.engine(raw)), weakref.ref(raw[0].weight)]
    del raw, model, optimizer
    gc.collect()
    found = [r() is not None for r in alive]
    accel.teardown()
    assert len(_world.pg_map) <= 1  # DeepSpeed would make a copy of the process group for good
    return found


def test_a_dropped_model_is_collected() -> None:
    assert not any(unreferenced())
    for backend in ("ddp", accel.DDP(comm_hook="bf16"), "sharded", accel.DeepSpeed(stage=1), accel.DeepSpeed(stage=3)):
        need(backend, 2)
        assert not any(map(any, run(2, unreferenced, backend)))
    assert not registry.engines


# -- engines that live on some ranks only ------------------------------------------------------------------------------


def train(backend: Any, lr: float, seed: int) -> Any:
    """Return a model after two steps on the same data."""
    raw = mlp(5, 7, 6, 3, seed=seed)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=lr)
    model = accel.setup(raw, optimizer, backend=backend).model
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(torch.ones(4, 5)), torch.ones(4, 3)).backward()
        optimizer.step()
    return model


def search(backend: Any) -> list[Any]:
    """Return the weights of the best of several models. Only rank 1 collects garbage between them."""
    gc.collect()
    if accel.rank() == 0:
        gc.disable()
    try:
        for trial in range(4):
            model = train(backend, 10 ** -(trial + 1), trial)
            if trial == 2:
                best = model
            if accel.rank() == 1:
                gc.collect()
        del model
        return [value.tolist() for value in accel.full_state_dict(best).values()]
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", accel.DeepSpeed(stage=3)], ids=str)
def test_the_best_of_many_models(backend: Any) -> None:
    need(backend, 2)
    first, second = run(2, search, backend)
    assert first == second


def run_a_cell_twice() -> int:
    backbone = nn.Linear(4, 4)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            model: Any = nn.Sequential(backbone, nn.Linear(4, 2))
            optimizer = adamw(model)
            model = accel.setup(model, optimizer).model
            one_step(model, optimizer)
        return len(registry.engines)
    finally:
        gc.enable()


@pytest.mark.parametrize("world", [1, 2])
def test_a_cell_runs_twice(world: int) -> None:
    assert run(world, run_a_cell_twice) == [1] * world


def drop_on_one_rank() -> str:
    model: Any = train("fsdp", 0.1, 0)
    raw = accel.unwrap(model)
    if accel.rank() == 0:
        del model, raw
    with pytest.raises(accel.AccelError) as caught:
        accel.teardown()
    assert accel.rank() == 0 or bool(raw[0].weight.isnan().all())
    return str(caught.value)


def test_a_model_dropped_on_one_rank() -> None:
    for message in run(2, drop_on_one_rank):
        assert "dropped on rank 0" in message
