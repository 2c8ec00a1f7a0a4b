"""The drift guard: a difference between ranks raises on every rank."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines import ENGINES
from accel.engines.base.digest import digest, sums
from tests.backends import need
from tests.distributed import outcomes, run

EVERY = 3
DRIFT_AT = 4
ZERO3 = ("deepspeed", {"stage": 3})
DIVIDING: list[tuple[str, dict[str, Any]]] = [("sharded", {}), ("fsdp", {}), ("deepspeed", {"stage": 1})]
WATCHED = [("ddp", {}), *DIVIDING, ZERO3]
PIPELINE = ("pipeline", {"balance": (3, 2)})
BACKENDS = [*WATCHED, PIPELINE]


def options(backend: tuple[str, dict[str, Any]], every: int | None) -> Any:
    name, rest = backend
    return ENGINES[name].options_type(drift_check=every, **rest)


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def step(model: Any, optimizer: Any, number: int) -> None:
    place = accel.data_parallel_place(model).rank
    generator = torch.Generator().manual_seed(2 * number + place)
    optimizer.zero_grad()
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def by_weight(model: Any, optimizer: Any) -> None:
    if accel.rank() == 1:
        model[2].weight.data.mul_(1.5)


def by_scheduler(model: Any, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for metric in (1.0, 2.0 * (1 - accel.rank())):
        scheduler.step(metric)


def by_group(model: Any, optimizer: Any) -> None:
    if accel.rank() == 1:
        optimizer.param_groups[0]["weight_decay"] = 0.25


def drifting(backend: Any, drift: Callable[[Any, Any], None]) -> str:
    """Return the error of the next check after a drift."""
    raw = build()
    plain = torch.optim.AdamW(raw.parameters(), lr=1e-3)
    model, optimizer, _ = accel.setup(raw, plain, backend=options(backend, EVERY))
    for number in range(DRIFT_AT):
        step(model, optimizer, number)
    drift(model, optimizer)
    for number in range(EVERY - 1):
        step(model, optimizer, DRIFT_AT + number)
    with pytest.raises(accel.RankMismatchError) as error:
        step(model, optimizer, DRIFT_AT + EVERY)
    return str(error.value)


DRIFTS = [
    *((backend, by_scheduler, r"lr of group 0 of AdamW is 0\.0005 on rank 0; 0\.001 on rank 1") for backend in WATCHED),
    (("fsdp", {}), by_group, r"weight_decay of group 0 of AdamW is 0\.01 on rank 0; 0\.25 on rank 1"),
    (("ddp", {}), by_weight, r"at step 7: 2\.weight is \w+ on rank 0; \w+ on rank 1\."),
]


@pytest.mark.parametrize(("backend", "drift", "text"), DRIFTS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_drift_is_named(backend: Any, drift: Any, text: str) -> None:
    need(backend[0], 2)
    ours, theirs = run(2, drifting, backend, drift)
    assert ours == theirs
    assert re.search(text, ours), ours


def load_alone(backend: Any, what: str) -> None:
    accel.init(timeout=4)
    raw = build()
    plain = torch.optim.AdamW(raw.parameters())
    model, optimizer, _ = accel.setup(raw, plain, backend=options(backend, 0))
    step(model, optimizer, 0)
    state = accel.full_state_dict(optimizer)
    for _ in range(2):  # on every rank
        model.load_state_dict(build(3).state_dict())
        optimizer.load_state_dict(state)
    if accel.is_main():
        loads = {"model": model, "raw model": raw, "optimizer": optimizer}
        loads[what].load_state_dict(state if what == "optimizer" else build(7).state_dict())
    for number in range(2):
        step(model, optimizer, number)


LOADS = [("model", backend) for backend in BACKENDS]
LOADS += [("optimizer", backend) for backend in WATCHED]
LOADS += [("raw model", ("ddp", {})), ("raw model", ("sharded", {}))]  # the other backends raise for raw models


@pytest.mark.parametrize(("what", "backend"), LOADS, ids=str)
def test_a_load_on_one_rank(what: str, backend: Any) -> None:
    need(backend[0], 2)
    results = outcomes(2, load_alone, backend, what, breaks=True)
    assert all(result.error for result in results)
    assert any("load_state_dict" in result.message for result in results)


def schedule(model: Any, optimizer: Any) -> Iterator[None]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    while True:
        yield
        scheduler.step()
        plateau.step(1.0)


def clamp(model: Any, optimizer: Any) -> Iterator[None]:
    while True:
        yield
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05)


def reload(model: Any, optimizer: Any) -> Iterator[None]:
    directory = accel.broadcast(tempfile.mkdtemp(), objects=True)
    state = {"model": model, "optimizer": optimizer}
    yield
    model.load_state_dict(accel.broadcast(build(accel.rank()).state_dict()))
    yield
    optimizer.load_state_dict(accel.full_state_dict(optimizer))
    accel.save(state, directory)
    yield
    accel.load(directory, state)
    accel.barrier()
    if accel.is_main():
        shutil.rmtree(directory)
    while True:
        yield


def pass_through(backend: Any, programs: list[Any]) -> None:
    for program in programs:
        raw = build()
        plain = torch.optim.AdamW(raw.parameters(), lr=1e-3)
        model, optimizer, _ = accel.setup(raw, plain, backend=options(backend, 1))
        between = program(model, optimizer)
        for number in range(6):
            next(between)
            step(model, optimizer, number)
        accel.teardown(model)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_usual_programs_raise_nothing(backend: Any) -> None:
    need(backend[0], 2)
    # ZeRO-3 and pipeline raise for weights that this rank doesn't hold.
    programs = [schedule, reload] if backend in (ZERO3, PIPELINE) else [schedule, reload, clamp]
    run(2, pass_through, backend, programs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("take", [digest, lambda tensor: int(sums(tensor))], ids=["cpu", "accelerator"])
def test_a_digest_sees_values_and_order(dtype: torch.dtype, take: Callable[[torch.Tensor], int]) -> None:
    values = torch.arange(3500).remainder(100).to(dtype)
    before = take(values)
    assert take(values.clone()) == before
    for place in (0, 1023, 1024, 3499):
        edited = values.clone()
        edited[place] += 1
        assert take(edited) != before
    for other in (2, 1 + 1024):  # the next column and the next row of the table
        swapped = values.clone()
        swapped[[1, other]] = values[[other, 1]]
        assert take(swapped) != before


def test_a_digest_sees_no_strides() -> None:
    image = torch.randn(8, 3, 5, 5)
    assert digest(image.to(memory_format=torch.channels_last)) == digest(image)
    assert digest(image[::2]) == digest(image[::2].clone())
