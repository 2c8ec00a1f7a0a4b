"""Values keep their types through JSON. Errors name the path of a value that can't be stored."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.checkpoint.helpers import Extra, differences

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
]  # fmt: skip


def test_tensors_of_all_dtypes(tmp_path: Path) -> None:
    shapes = [(), (0, 3), (3, 2), (40, 50)]
    saved = {f"{dtype} {shape}": torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES for shape in shapes}
    accel.save({"leaves": saved, "net": Extra(saved)}, tmp_path)
    into = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    state = accel.load(tmp_path, {"leaves": into, "net": Extra(None)})
    assert not differences(saved, into)
    assert not differences(saved, state["net"].extra)


def test_classes_and_requires_grad_are_kept(tmp_path: Path) -> None:
    for size in (3, 3000):
        ones = torch.ones(size)
        made = {
            "parameter": nn.Parameter(ones),
            "frozen": nn.Parameter(ones, requires_grad=False),
            "log_alpha": ones.clone().requires_grad_(),
            "loss": ones.clone().requires_grad_() * 2,
            "plain": ones,
        }
        accel.save({"net": Extra(made)}, tmp_path)
        found = accel.load(tmp_path, {"net": Extra(None)})["net"].extra
        assert not any(t.grad_fn for t in found.values())
        assert {n: type(t) for n, t in found.items()} == {n: type(t) for n, t in made.items()}
        assert [n for n, t in found.items() if t.requires_grad] == ["parameter", "log_alpha"]


class Failing:
    """An object that fails to give its state if it has none, and to load it."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        if self.state is None:
            raise KeyError("lost")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not mine")


CYCLE: list[Any] = []
CYCLE.append({"a": CYCLE})
REFUSED: list[tuple[Any, str]] = [
    ({"a": [1, 2, {"b": object()}]}, r'state\["a"\]\[2\]\["b"\] is a object'),
    ({"a": {1: (0, lambda: 1)}}, r'state\["a"\]\[1\]\[1\] is a function'),
    ({"a": {object(): 1}}, r'the key .* of state\["a"\]'),
    ({"a": collections.namedtuple("Point", "x")(1)}, r'state\["a"\] is a .*Point'),
    ({"a": collections.defaultdict(lambda: 1)}, "defaultdict"),
    ({"a": numpy.array([object()])}, "numpy.ndarray"),
    ({"a": [torch.zeros(3).to_sparse()]}, "torch.sparse_coo"),
    ({"a": torch.zeros(3, device="meta")}, "meta device"),
    ({"a": CYCLE}, "recursion"),
    ({"a": {"b": Failing()}}, r"""state\["a"\]\["b"\]\.state_dict\(\) raised KeyError: 'lost'"""),
    ([1], "as a dict"),
]


def test_refused_states_change_no_file(tmp_path: Path) -> None:
    accel.save({"n": 1}, tmp_path / "c")
    before = [(p.name, p.stat().st_mtime_ns) for p in (tmp_path / "c").iterdir()]
    for value, message in REFUSED:
        for directory in ("c", "other"):
            with pytest.raises(CheckpointError, match=message):
                accel.save(value, tmp_path / directory)
        assert [(p.name, p.stat().st_mtime_ns) for p in (tmp_path / "c").iterdir()] == before
        assert not (tmp_path / "other").exists()
    assert accel.load(tmp_path / "c") == {"n": 1}


def test_a_failing_load_names_the_object(tmp_path: Path) -> None:
    state = {"a": {"b": Failing(1)}}
    accel.save(state, tmp_path)
    message = r"""state\["a"\]\["b"\]\.load_state_dict\(\) raised ValueError: not mine.*partly filled"""
    with pytest.raises(CheckpointError, match=message):
        accel.load(tmp_path, state)
