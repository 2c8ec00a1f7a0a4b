"""Saves in the background: what is saved is what was there, training goes on, and no failure stays silent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.checkpoint import record, shards, storage
from accel.errors import CheckpointError
from tests.checkpoint.helpers import filled, value_of
from tests.distributed import outcomes, run
from tests.faults import Fault, full_disk
from tests.interpreters import executable


def large(value: float) -> dict[str, Any]:
    return {**filled(value, 3_000_000), "deep": {"list": [value]}}


def overwritten(directory: str) -> float:
    """The state changes, and the ranks meet in collectives, while the save is under way."""
    state = large(1.0)
    pending = accel.save(state, directory, wait=False)
    assert pending is not None
    state["x"]["0"].fill_(2.0)
    state["n"] = state["deep"]["list"][0] = 2.0
    totals = {accel.all_reduce(torch.ones(1)).item() for _ in range(20)}
    assert totals == {accel.world_size()}
    pending.result(60)
    assert accel.load(directory)["deep"] == {"list": [1.0]}
    return value_of(directory)


@pytest.mark.parametrize("world", [1, 2])
def test_later_changes_are_not_saved(world: int, tmp_path: Path) -> None:
    assert run(world, overwritten, str(tmp_path / "c")) == [1.0] * world


def test_it_returns_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes files durable comes later. The next save, loads and ``latest`` wait for it."""
    gate, directory = threading.Event(), tmp_path / "run" / "step-1"
    synced: set[str] = set()
    write, fsync = shards.write, os.fsync

    def slow(*args: Any) -> Any:
        assert gate.wait(60)
        return write(*args)

    def noted(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def begin(value: float, directory: Path) -> Any:
        gate.clear()
        return accel.save(large(value), directory, wait=False)

    def end_later() -> None:
        threading.Timer(0.2, gate.set).start()

    monkeypatch.setattr(shards, "write", slow)
    monkeypatch.setattr(os, "fsync", noted)
    first = begin(1.0, directory)
    assert not first.done()
    assert not first.cancel()  # it has begun
    assert not (directory / "accel.json").exists()
    assert str(directory) not in synced
    end_later()
    second = accel.save(large(2.0), directory, wait=False)
    assert first.done()
    assert synced >= {str(tmp_path), str(tmp_path / "run"), str(directory)}
    assert second is not None
    second.result(30)
    begin(3.0, directory)
    end_later()
    assert accel.load(directory)["n"] == 3.0
    begin(4.0, tmp_path / "run" / "step-2")
    end_later()
    assert accel.latest(tmp_path / "run") == str(tmp_path / "run" / "step-2")


def test_failures_are_told_twice(tmp_path: Path) -> None:
    accel.save(large(1.0), tmp_path)
    with full_disk(1000):
        pending = accel.save(large(2.0), tmp_path, wait=False)
        assert pending is not None
        with pytest.raises(CheckpointError, match="File too large"):
            pending.result(30)
    with pytest.raises(CheckpointError, match="the last background save failed: .*File too large"):
        accel.save(large(3.0), tmp_path)
    assert value_of(tmp_path) == 1.0
    accel.save(large(4.0), tmp_path)
    assert value_of(tmp_path) == 4.0


SCRIPT = """
import resource, sys, time, torch, accel
from concurrent.futures import ThreadPoolExecutor
from accel.checkpoint import shards

executor, write = ThreadPoolExecutor(), shards.write

def late(*args):  # the clients of object stores use executors, to find hosts by name
    time.sleep(0.5)
    return executor.submit(write, *args).result()

shards.write = late
accel.save({"n": 1}, sys.argv[1])
if sys.argv[2] == "fails":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
accel.save({"x": torch.zeros(5_000_000), "n": 2}, sys.argv[1], wait=False)
"""


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason="this Python starts no thread once the main one has ended (gh-113964)",
)
@pytest.mark.parametrize(("how", "status", "value"), [("fails", 1, 1), ("works", 0, 2)])
def test_exit_waits_and_tells(how: str, status: int, value: int, tmp_path: Path) -> None:
    command = [executable(), "-c", SCRIPT, str(tmp_path), how]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == status, found.stderr
    assert ("File too large" in found.stderr) is (how == "fails")
    assert accel.load(tmp_path)["n"] == value


def fails_after_the_commit(directory: Path, wait: bool) -> tuple[str, float]:
    """The record has its name when rank 0's disk fails to make that durable."""
    accel.init()
    accel.save(filled(1.0), directory)
    replace, sync = os.replace, storage.Local.sync

    def fail(self: Any, path: str) -> None:
        raise OSError(5, "the directory is not durable", path)

    def replaced(old: Any, new: Any) -> None:
        replace(old, new)
        if str(new).endswith(record.NAME):
            storage.Local.sync = fail

    os.replace = replaced
    try:
        pending = accel.save(filled(2.0), directory, wait=wait)
        assert pending is not None
        pending.exception(30)
        accel.save(filled(3.0), directory)
    except CheckpointError as error:
        text = str(error)
    finally:
        os.replace, storage.Local.sync = replace, sync
    return text, value_of(directory)


@pytest.mark.parametrize("wait", [True, False])
def test_failures_after_the_commit(wait: bool, tmp_path: Path) -> None:
    for text, value in run(2, fails_after_the_commit, tmp_path / "c", wait):
        assert "the directory is not durable" in text
        assert value == 2.0


def in_the_background(directory: Path, begun: Path) -> str:
    pending = accel.save(large(2.0), directory, wait=False)
    assert pending is not None
    if accel.is_main():
        begun.touch()
    return str(pending.exception(30))  # this thread is in no collective, which the end of the other rank would break


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named(rank: int, tmp_path: Path) -> None:
    accel.save(large(1.0), tmp_path / "c")
    begun = tmp_path / "begun"
    end = Fault("exit 1", at="accel.checkpoint.storage:Local.sync", rank=rank, when=str(begun))
    results = outcomes(2, in_the_background, tmp_path / "c", begun, breaks=True, fails=[end])
    assert f"rank {rank} " in results[1 - rank].value
    assert value_of(tmp_path / "c") == 1.0
