"""Checkpoints that another process replaces while they are read."""

from __future__ import annotations

from collections.abc import Callable
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


def replacing(target: Any, name: str, source: Path, directory: Path) -> Any:
    """Context: before the first call of a function, a checkpoint takes the place of the one in ``directory``."""
    real: Callable[..., Any] = getattr(target, name)
    sources = iter([source])

    def call(*args: Any) -> Any:
        if (one := next(sources, None)) is not None:
            for path in directory.iterdir():
                path.unlink()
            for path in one.iterdir():
                path.rename(directory / path.name)
        return real(*args)

    return mock.patch.object(target, name, call)


def save(value: float, directory: Path) -> Path:
    accel.save({"net": torch.nn.Linear(2, 2), "x": torch.full((5000,), value), "n": value}, directory)
    return directory


def load(directory: Path) -> float:
    found = accel.load(directory, {"net": torch.nn.Linear(2, 2), "x": torch.zeros(5000), "n": 0})
    assert found["x"].unique().tolist() == [found["n"]]
    return float(found["n"])


TARGETS = {"the sizes": (folder, "check_sizes"), "half-way": (Loading, "apply")}


def loaded_twice(root: Path, where: str) -> tuple[str, float]:
    directory, other = save(1.0, root / "c"), save(2.0, root / "other")
    with replacing(*TARGETS[where], other, directory) if accel.rank() == 0 else mock.patch.dict({}):
        with pytest.raises(CheckpointError) as caught:
            load(directory)
        return str(caught.value), load(directory)


@pytest.mark.parametrize("where", TARGETS)
def test_the_next_load_takes_the_new_one(where: str, tmp_path: Path) -> None:
    for text, value in run(2, loaded_twice, tmp_path, where):
        assert text == f"{tmp_path / 'c'} was replaced while it was read: load it again"
        assert value == 2.0


def test_others_say_so_and_latest_looks_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c"
    acts: list[Callable[[], Any]] = [
        lambda: accel.verify(path),
        lambda: accel.link(path, tmp_path / "second"),
        lambda: accel.export(path, tmp_path / "out"),
    ]
    for act in acts:
        save(1.0, path)
        with (
            replacing(folder, "check_sizes", save(2.0, tmp_path / "other"), path),
            pytest.raises(CheckpointError, match="was replaced while it was read"),
        ):
            act()
        act()
    with replacing(folder, "check_sizes", save(3.0, tmp_path / "other"), path):
        assert accel.latest(path) == str(path)
    assert load(tmp_path / "second") == 2.0
    assert load(path) == 3.0
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
