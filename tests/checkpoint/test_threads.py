"""Reading with several threads, as where a host has more cores than ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.checkpoint import crew
from accel.checkpoint.header import CHUNK
from accel.errors import CheckpointError
from tests.checkpoint.crafting import shard_of

pytestmark = pytest.mark.usefixtures("four_threads")


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "share", lambda: 4)


def make_state(number: float) -> dict[str, Any]:
    """More than six chunks: a tensor over several of them, small ones, and one that lies in another order."""
    large = torch.arange(6 * CHUNK // 4, dtype=torch.float32) * number
    small = {f"s{i}": torch.full((1000 + i,), number * i) for i in range(40)}
    return {"large": large, **small, "turned": (torch.arange(300_000.0).view(500, 600) * number).t()}


@pytest.mark.parametrize("check", ["first", "stream"])
def test_every_value_comes_back(check: Any, tmp_path: Path) -> None:
    saved, state = make_state(1.0), make_state(0.0)
    accel.save(saved, tmp_path)
    accel.load(tmp_path, state, check=check)
    assert all(torch.equal(state[name], saved[name]) for name in saved)


def test_the_first_damage_is_named_and_nothing_is_filled(tmp_path: Path) -> None:
    accel.save(make_state(1.0), tmp_path)
    path = shard_of(tmp_path)
    content = bytearray(path.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    for chunk in (5, 2):
        content[data + chunk * CHUNK + 7] ^= 1
    path.write_bytes(content)
    state = make_state(0.0)
    with pytest.raises(CheckpointError, match=f"between bytes {data + 2 * CHUNK} and {data + 3 * CHUNK}, in large"):
        accel.load(tmp_path, state)
    assert all(not tensor.any() for tensor in state.values())


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
        crew.Crew().each(act, range(100))
    so_far = len(done)
    time.sleep(0.5)
    assert so_far == len(done) < 99
