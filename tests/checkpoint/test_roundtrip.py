"""Any world size and backend to any other, and training goes on as if it had never stopped."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.checkpoint import record
from tests.backends import need, refused
from tests.checkpoint.helpers import differences, engines, resume, train_and_save
from tests.distributed import run

PLACES = [(world, backend) for world in (1, 2, 3, 4) for backend in engines(world)]


@functools.cache
def uninterrupted(world: int, backend: Any) -> tuple[str, dict[str, Any]]:
    """A checkpoint, and what the training that saved it has gone on to; made once in a process that runs tests."""
    directory = tempfile.mkdtemp(prefix="accel-test-")
    atexit.register(shutil.rmtree, directory)
    return f"{directory}/checkpoint", run(world, train_and_save, backend, f"{directory}/checkpoint", timeout=240)[0]


@pytest.mark.parametrize(("after", "other"), PLACES, ids=str)
def test_any_to_any(after: int, other: Any) -> None:
    """On one rank from each of them, on two from each of one and two ranks; otherwise each backend takes its turn."""
    need(other)
    places = [place for place in PLACES if place[0] != 3 and not refused(place[1])]
    own = [place for place in PLACES if place[0] == after]
    turn = own.index((after, other))
    if after > 2:  # three divide nothing evenly
        turns = len(own) if after == 3 else 3
        places = places[turn % turns :: turns]
    elif after == 2:
        wide = [place for place in places if place[0] == 4]
        places = [place for place in places if place[0] < 4] + wide[turn % 3 :: 3]
    befores = [uninterrupted(*place) for place in places]
    for rank, found in enumerate(run(after, resume, other, [directory for directory, _ in befores], timeout=240)):
        for place, (_, expected), result in zip(places, befores, found, strict=True):
            assert not differences(expected, result, tolerance=1e-5), f"{place}, rank {rank}"


@pytest.mark.parametrize("world", [1, 2])
def test_same_world_is_bit_equal(world: int, tmp_path: Path) -> None:
    """On equally many ranks nothing at all differs; saved in the background."""
    directory = str(tmp_path / "checkpoint")
    backend = engines(world)[0]
    expected = run(world, train_and_save, backend, directory, False)
    found = run(world, resume, backend, [directory])
    for rank in range(world):
        assert not differences(expected[rank], found[rank][0])


def stored_dtypes(directory: str) -> set[str]:
    return {t.dtype for name, t in record.read(directory).tensors.items() if name.startswith(("model/", "optimizer/"))}


@pytest.mark.parametrize("backend", [b for b in engines(2) if b != "pipeline"], ids=str)
def test_bf16_mixed_keeps_fp32(backend: Any, tmp_path: Path) -> None:
    need(backend)
    directory = str(tmp_path / "checkpoint")
    expected = run(2, train_and_save, backend, directory, True, "bf16-mixed", timeout=240)[0]
    assert stored_dtypes(directory) == {"F32", "I64"}  # I64: a buffer
    assert not differences(expected, run(2, resume, backend, [directory], "bf16-mixed", timeout=240)[0][0])
    for world, other in ((1, "single"), (4, "ddp")):
        found = run(world, resume, other, [directory], "bf16-mixed", timeout=240)
        assert not differences(expected, found[0][0], tolerance=2e-3), f"{other} on {world} ranks"


def halves(stage: int, directory: str, save: bool) -> Any:
    """bf16 weights whose fp32 copies are stepped; or the same model in fp32, from their checkpoint."""
    torch.manual_seed(0 if save else 1)
    net = nn.Sequential(nn.Linear(6, 17), nn.Linear(17, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    backend = accel.DeepSpeed(stage=stage, config={"bf16": {"enabled": True}}) if save else "single"
    model, handle, _ = accel.setup(net, optimizer, backend=backend, precision="bf16-true" if save else "auto")
    state = {"model": model, "optimizer": handle}
    if not save:
        accel.load(directory, state)
        return {n: p.detach().clone() for n, p in net.named_parameters()}
    for step in range(3):
        handle.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(8, 6, generator=generator).bfloat16()).float().square().mean().backward()
        handle.step()
    accel.save(state, directory)
    before = accel.full_state_dict(model)
    model(torch.ones(8, 6).bfloat16()).float().square().mean().backward()
    handle.step()
    accel.load(directory, state)
    again = accel.full_state_dict(model)
    assert all(torch.equal(again[name], value) for name, value in before.items())
    return before


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_copies_are_what_is_saved(stage: int, tmp_path: Path) -> None:
    need("deepspeed")
    directory = str(tmp_path / "checkpoint")
    rounded = run(2, halves, stage, directory, True)[0]
    assert stored_dtypes(directory) == {"F32"}
    exact = run(1, halves, stage, directory, False)[0]
    assert any(not torch.equal(v, v.bfloat16().float()) for v in exact.values())
    for name, value in rounded.items():
        assert torch.allclose(value.float(), exact[name], rtol=2**-8, atol=0)


def random_numbers(directory: str, load: bool) -> tuple[Any, Any]:
    accel.seed(3, per_rank=True)
    if load:
        accel.seed(9)
        accel.load(directory, {"rng": accel.rng_state()})
    else:
        accel.save({"rng": accel.rng_state()}, directory)
    return torch.rand(3).tolist(), random.random()


def test_random_numbers_continue(tmp_path: Path) -> None:
    """Each rank goes on with its own numbers; ranks that are new draw others than those of any rank."""
    directory = str(tmp_path / "checkpoint")
    before = run(2, random_numbers, directory, False)
    assert before[0] != before[1]
    assert run(2, random_numbers, directory, True) == before
    assert run(1, random_numbers, directory, True) == before[:1]
    wider = run(4, random_numbers, directory, True)
    assert wider[:2] == before
    assert len({str(numbers) for numbers in wider}) == 4
