"""Threads that read and copy, if a node has more cores than ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.checkpoint import background, reader, shards
from accel.checkpoint.storage import CHUNK

pytestmark = pytest.mark.usefixtures("four_threads")


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "share", lambda: 4)


def make_state(number: float) -> dict[str, Any]:
    """More than six chunks: a tensor over several of them, small ones, and one that lies in another order."""
    large = torch.arange(6 * CHUNK // 4, dtype=torch.float32) * number
    small = {f"s{i}": torch.full((1000 + i,), number * i) for i in range(40)}
    return {"large": large, **small, "turned": (torch.arange(300_000.0).view(500, 600) * number).t()}


def test_every_value_comes_back(tmp_path: Path) -> None:
    saved, state = make_state(1.0), make_state(0.0)
    accel.save(saved, tmp_path)
    accel.load(tmp_path, state)
    assert all(torch.equal(state[name], saved[name]) for name in saved)


def test_threads_work_at_once_and_are_done_when_one_fails() -> None:
    meet, done = threading.Barrier(4, timeout=30), []

    def act(number: int) -> None:
        if number < 4:
            meet.wait()  # passes only if four are here together
        if number == 1:
            raise ValueError("the second")
        time.sleep(0.2)
        done.append(number)

    with pytest.raises(ValueError, match="the second"):
        reader.in_threads(act, range(100), 4)
    so_far = len(done)
    time.sleep(0.5)
    assert so_far == len(done) < 99


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_has_what_was_there_wherever_it_lies(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks and batches that are smaller than tensors, by several threads at once, and of elements that are moved first."""
    monkeypatch.setattr(background, "_BLOCK", 4096)
    monkeypatch.setattr(shards, "PIECE", 1500)
    monkeypatch.setattr(background.background, "_blocks", [])
    monkeypatch.setattr(reader, "share", lambda: threads)
    made = {f"t{n}": torch.randn(n, 7).t() for n in range(40)} | {f"c{n}": torch.randn(n * 11) for n in range(40)}
    state = made | {"bytes": torch.arange(255, dtype=torch.uint8), "one": torch.tensor(3.0, dtype=torch.float64)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    pending = accel.save(state, tmp_path, wait=False)
    for tensor in state.values():
        tensor.zero_()
    assert pending is not None
    pending.result(60)
    accel.load(tmp_path, state)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    monkeypatch.setattr(background.background, "_blocks", [])
