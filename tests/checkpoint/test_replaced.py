"""Checkpoints that another process replaces while they are read."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import accel
from accel.checkpoint import folder
from accel.checkpoint.load import Loading
from accel.errors import CheckpointError
from tests.distributed import run
from tests.interpreters import executable
from tests.programs import clean_environ

_SAVER = """
import sys, torch, accel
for line in sys.stdin:
    accel.save({"net": torch.nn.Linear(2, 2), "x": torch.full((5000,), float(line)), "n": int(line)}, sys.argv[1])
    print("saved", flush=True)
"""


@contextlib.contextmanager
def saver(directory: str, python: str) -> Iterator[Callable[[], None]]:
    """Context: what lets another process save the next state into the directory; it has saved the first, whose number is 1."""
    numbers = iter(range(1, 100))
    command, pipe = [python, "-c", _SAVER, directory], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=clean_environ(), text=True) as job:
        assert job.stdin is not None
        assert job.stdout is not None

        def save() -> None:
            print(next(numbers), file=job.stdin, flush=True)
            assert job.stdout.readline() == "saved\n"

        save()
        yield save
        job.stdin.close()


@contextlib.contextmanager
def before(target: Any, name: str, save: Callable[[], None], times: int) -> Iterator[None]:
    """Context: another process saves before the first calls of a function, which comes after the record was read."""
    real, left = getattr(target, name), iter(range(times))

    def call(*args: Any) -> Any:
        if next(left, None) is not None:
            save()
        return real(*args)

    with mock.patch.object(target, name, call):
        yield


def load(directory: str, **options: Any) -> float:
    found = accel.load(directory, {"net": torch.nn.Linear(2, 2), "x": torch.zeros(5000), "n": 0}, **options)
    assert found["x"].unique().tolist() == [found["n"]]
    return float(found["n"])


TARGETS = {"the sizes": (folder, "check_sizes"), "half-way": (Loading, "apply")}


def loaded_twice(directory: str, where: str, python: str) -> tuple[str, float]:
    with contextlib.ExitStack() as stack:
        if accel.rank() == 0:
            stack.enter_context(before(*TARGETS[where], stack.enter_context(saver(directory, python)), 1))
        accel.barrier()
        with pytest.raises(CheckpointError) as caught:
            load(directory)
        return str(caught.value), load(directory)


@pytest.mark.parametrize("where", TARGETS)
def test_a_load_says_so_and_the_next_takes_the_new_one(where: str, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    for text, value in run(2, loaded_twice, path, where, executable()):
        assert text == f"{path} was replaced while it was read: load it again"
        assert value == 2.0


def test_others_say_so_and_latest_takes_the_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "c")
    with saver(path, executable()) as save:
        for act in (
            lambda: accel.verify(path),
            lambda: accel.link(path, tmp_path / "second"),
            lambda: accel.export(path, tmp_path / "out"),
        ):
            with (
                before(folder, "check_sizes", save, 1),
                pytest.raises(CheckpointError, match="was replaced while it was read"),
            ):
                act()
            act()
        with before(folder, "check_sizes", save, 2):
            assert accel.latest(path) == path
    assert load(str(tmp_path / "second")) == 3.0
    assert load(path) == 6.0
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
