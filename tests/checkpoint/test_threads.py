"""Threads: those that read, as where a host has more cores than ranks, and those of a user who saves in several."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.checkpoint import background, folder, reader, record, storage
from accel.checkpoint.safetensors import CHUNK
from accel.errors import CheckpointError
from accel.shard import Shard
from tests.checkpoint.crafting import shard_of

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


def test_what_is_wanted_twice_or_in_part(tmp_path: Path) -> None:
    """Also over the end of a chunk, and with gaps in between."""
    saved = make_state(1.0)
    accel.save(saved, tmp_path)
    places = [
        ("large", 0),
        ("large", CHUNK // 4 - 300),
        ("large", CHUNK // 4 - 300),
        ("large", CHUNK),
        ("s3", 10),
        ("s30", 1),
    ]
    wanted = [Shard(name, tuple(saved[name].shape), start, torch.zeros(900)) for name, start in places]
    reader.Reader(str(tmp_path), record.read(str(tmp_path))[0]).fill(wanted)
    assert all(torch.equal(one.tensor, saved[one.name][one.start : one.start + 900]) for one in wanted)


def test_the_first_damage_is_named(tmp_path: Path) -> None:
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
        reader.WorkerThreads().each(act, range(100))
    so_far = len(done)
    time.sleep(0.5)
    assert so_far == len(done) < 99


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_has_what_was_there_wherever_it_lies(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks and batches that are smaller than tensors, by several threads at once, and of elements that are moved first."""
    for name, value in {"_BLOCK": 4096, "PIECE": 1500}.items():
        monkeypatch.setattr(background, name, value)
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


def test_old_files_are_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"accel-0123456789ab-{rank:05d}.safetensors" for rank in range(4)]
    for name in (*names, "mine.safetensors"):
        (tmp_path / name).touch()
    meet, remove = threading.Barrier(3, timeout=30), storage.Local.remove

    def met(self: storage.Local, path: str) -> None:
        meet.wait()  # passes only if three are here together
        remove(self, path)

    monkeypatch.setattr(storage.Local, "remove", met)
    folder.sweep(str(tmp_path), os.listdir(tmp_path), names[:1])
    assert sorted(os.listdir(tmp_path)) == [names[0], "mine.safetensors"]


def save_and_load(directory: Path, value: float, number: int) -> list[str]:
    """Saves of one thread, each into a directory of its own; returns what went wrong."""
    problems = []
    for i in range(number):
        saved, found = {"x": torch.full((200_000,), value + i)}, {"x": torch.zeros(200_000)}
        pending = accel.save(saved, directory / str(i), wait=i % 4 == 3)
        if pending is not None:
            pending.result(60)
        accel.load(directory / str(i), found)
        if not torch.equal(saved["x"], found["x"]):
            problems.append(f"{value + i} was saved, and {found['x'].unique().tolist()} is there")
    return problems


def in_threads(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """What the calls return, or the errors that they raise, in threads of these names."""
    results: dict[str, Any] = {}

    def act(name: str) -> None:
        try:
            results[name] = calls[name]()
        except accel.AccelError as error:
            results[name] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=act, args=(name,), name=name) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_each_thread_saves_its_own_values(tmp_path: Path) -> None:
    calls = {n: functools.partial(save_and_load, tmp_path / n, 1000.0 * i, 15) for i, n in enumerate("abc")}
    assert in_threads(calls) == {"a": [], "b": [], "c": []}
