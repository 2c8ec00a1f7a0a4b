"""The end of engines, where the ranks' garbage collectors and programs let go of models at different moments."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.registry import registry
from tests.backends import need
from tests.distributed import outcomes, run
from tests.models import mlp
from tests.programs import by_hand, free_port, scripts


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Linear(6, 3))


def train(backend: Any, lr: float, seed: int) -> tuple[Any, Any]:
    """The handles of a model after two steps on the same data."""
    torch.manual_seed(seed)
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), lr=lr), backend=backend)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(torch.ones(4, 5)), torch.ones(4, 3)).backward()
        optimizer.step()
    return model, optimizer


@contextlib.contextmanager
def collecting_on_rank_1_only() -> Iterator[None]:
    gc.collect()
    if accel.rank() == 0:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect() -> None:
    if accel.rank() == 1:
        gc.collect()


def values(state: Any) -> list[Any]:
    return [v.tolist() for v in state.values()]


# -- engines that live on some ranks only ---------------------------------------------------------------------------------


def search(backend: Any) -> tuple[bool, list[Any]]:
    """A search of learning rates; whether the best model is right after ``teardown()``, and its weights."""
    with collecting_on_rank_1_only():
        for trial in range(6):
            model, optimizer = train(backend, 10 ** -(trial % 5 + 1), trial)
            if trial == 4:
                best = model
            collect()
        del model, optimizer
        collect()
        full, raw = values(accel.full_state_dict(best)), accel.unwrap(best)
        accel.teardown()
        return values(raw.state_dict()) == full, full


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", accel.DeepSpeed(stage=3)], ids=str)
def test_the_best_of_many_models_keeps_its_weights(backend: Any) -> None:
    need(backend, 2)
    (right, first), (also, second) = run(2, search, backend)
    assert right
    assert also
    assert first == second


# -- what the collector must not decide -------------------------------------------------------------------------------------


def run_a_cell_twice() -> int:
    backbone = nn.Linear(4, 4)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            model = nn.Sequential(backbone, nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, _ = accel.setup(model, optimizer)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return len(registry.engines)
    finally:
        gc.enable()


@pytest.mark.parametrize("world", [1, 2])
def test_a_cell_runs_twice_around_one_backbone(world: int) -> None:
    assert run(world, run_a_cell_twice) == [1] * world


def without_optimizer(backend: Any) -> list[Any]:
    with collecting_on_rank_1_only():
        for seed in range(3):
            torch.manual_seed(seed)
            raw = net()
            model = accel.setup(raw, backend=backend).model
            with torch.no_grad():
                model(torch.ones(4, 5))
            collect()
        del model
        accel.teardown()
        return values(raw.state_dict())


@pytest.mark.parametrize("backend", ["ddp", "fsdp", accel.DeepSpeed(stage=3)], ids=str)
def test_models_that_are_only_called_come_back_too(backend: Any) -> None:
    need(backend, 2)
    first, second = run(2, without_optimizer, backend)
    torch.manual_seed(2)
    assert first == second == values(net().state_dict())


def alone_in_an_error() -> str:
    """Rank 1 comes to ``teardown()`` with an error, and rank 0 is in another call."""
    model, _ = train("fsdp", 0.1, 0)
    if accel.rank() == 0:
        accel.full_state_dict(model)
        return ""
    try:
        raise ValueError("rank 1 has had enough")
    finally:
        accel.teardown()


def test_a_rank_that_tears_down_after_an_error_frees_the_others() -> None:
    first, second = outcomes(2, alone_in_an_error, breaks=True)
    assert "RankMismatchError" in first.error
    assert "rank 1 is in 'accel.teardown'" in first.message
    assert "rank 1 has had enough" in second.trace


# -- the end of the process -------------------------------------------------------------------------------------------------

PROGRAM = """
import atexit, os
import torch
from torch import nn

def threads():
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print("left:", sum("gloo" in name for name in names))

atexit.register(threads)
import accel
kept = []
for trial in range(9):
    raw = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    backend = ("sharded", accel.DeepSpeed(stage=2), accel.DeepSpeed(stage=3))[trial % 3]
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters()), backend=backend)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if trial < 3:
        kept.append(model)
import gc
gc.disable()
ring = [torch.distributed.group.WORLD]
ring.append(ring)
del ring
"""


def test_no_thread_of_gloo_outlives_the_process_groups() -> None:
    """One that is the last to let go of a tensor while the interpreter ends aborts the process."""
    for name in ("fairscale", "deepspeed"):
        pytest.importorskip(name)
    port = free_port()
    environs = [by_hand(rank, 2, port) | {"LOCAL_RANK": str(rank)} for rank in range(2)]
    for result in scripts(PROGRAM, *environs):
        assert "left: 0" in result.stdout, result.stdout + result.stderr


def added_groups(backend: Any) -> None:
    """New groups count at once, with the objects that were the parameters before setup."""
    raw = mlp(4, 8, 3)
    parameters = list(raw.parameters())
    optimizer = torch.optim.Adam(parameters[:2], lr=0.1)
    model = accel.setup(raw, optimizer, backend=backend).model
    optimizer.add_param_group({"params": parameters[2:]})
    assert [len(group["params"]) for group in accel.full_state_dict(optimizer)["param_groups"]] == [2, 2]
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [nn.Parameter(torch.ones(3))]})
    for refused in (lambda: accel.full_state_dict(optimizer), lambda: accel.teardown(model)):
        with pytest.raises(accel.OptimizerError, match=r"param_groups\[2\]\['params'\]\[0\] of shape \(3,\)"):
            refused()
    del optimizer.param_groups[2]
    accel.teardown(model)
    assert [p for group in optimizer.param_groups for p in map(id, group["params"])] == list(map(id, parameters))


@pytest.mark.parametrize("backend", ["sharded", "fsdp", "pipeline", accel.DeepSpeed(stage=2), accel.DeepSpeed(stage=3)])
def test_groups_added_since_the_last_step(backend: Any) -> None:
    need(backend, 2)
    run(2, added_groups, backend)
