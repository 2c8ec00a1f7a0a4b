"""Any world size and backend to any other, and training goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from tests.backends import need
from tests.checkpoint.helpers import Run, differences, engines
from tests.distributed import run

BEFORE, AFTER = 4, 5  # mid-epoch, then over its end


def train_and_save(backend: str, directory: str, wait: bool = True) -> dict[str, Any]:
    training = Run(backend, seed=1)
    training.steps(BEFORE)
    pending = accel.save(training.state, directory, wait=wait)
    training.steps(AFTER)
    if pending is not None:
        pending.result(60)
    return training.result()


def resume(backend: str, directory: str, check: str) -> dict[str, Any]:
    training = Run(backend, seed=2)
    training.steps(2)  # a state that must be replaced
    assert accel.load(directory, training.state, check=check) is training.state  # type: ignore[arg-type]
    training.batches = iter(())
    assert training.state["step"] == BEFORE
    training.steps(AFTER)
    return training.result()


PLACES = [(world, backend) for world in (1, 2, 3, 4) for backend in engines(world)]


@pytest.mark.parametrize(("before", "one"), [place for place in PLACES if place[0] != 3], ids=str)
def test_any_to_any(before: int, one: Any, tmp_path: Path) -> None:
    """A checkpoint of one world size and backend continues in all others, to what was never interrupted."""
    need(one)
    directory = str(tmp_path / "checkpoint")
    expected = run(before, train_and_save, one, directory, timeout=240)[0]
    # At 3 ranks, which divide nothing evenly, one backend for each: the next one's turn.
    turn = PLACES.index((before, one))
    third = [place for place in PLACES if place[0] == 3]
    for after, other in [p for p in PLACES if p[0] != 3] + [third[turn % len(third)]]:
        for rank, found in enumerate(run(after, resume, other, directory, "first", timeout=240)):
            assert not differences(expected, found, tolerance=1e-5), f"{other} on {after} ranks, rank {rank}"


@pytest.mark.parametrize("world", [1, 2])
def test_same_world_is_bit_equal(world: int, tmp_path: Path) -> None:
    """On equally many ranks nothing at all differs; read in one pass, saved in the background."""
    directory = str(tmp_path / "checkpoint")
    backend = engines(world)[0]
    expected = run(world, train_and_save, backend, directory, False)
    found = run(world, resume, backend, directory, "stream")
    for rank in range(world):
        assert not differences(expected[rank], found[rank])


def random_numbers(directory: str, load: bool) -> tuple[Any, Any]:
    import random

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
