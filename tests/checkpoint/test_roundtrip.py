"""Any world size and backend to any other, and training goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accel
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


CASES = [
    (before, after, one, other)
    for before in (1, 2, 4)
    for after in (1, 2, 4)
    for one in engines(before)
    for other in engines(after)
]


@pytest.mark.parametrize(("before", "one"), [(w, e) for w in (1, 2, 4) for e in engines(w)])
def test_any_to_any(before: int, one: str, tmp_path: Path) -> None:
    """A checkpoint of one world size and backend continues in all others, to what was never interrupted."""
    directory = str(tmp_path / "checkpoint")
    expected = run(before, train_and_save, one, directory, timeout=240)[0]
    for case in CASES:
        if (case[0], case[2]) == (before, one):
            for rank, found in enumerate(run(case[1], resume, case[3], directory, "first", timeout=240)):
                assert not differences(expected, found, tolerance=1e-5), f"{case} rank {rank}"


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
