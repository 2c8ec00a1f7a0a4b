"""Values keep their types through JSON. Errors name the path of a value that can't be stored."""

from __future__ import annotations

import argparse
import collections
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import accel
from accel.checkpoint.values import Decoder, Encoder
from accel.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    kept: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, path: str) -> str:
        kept[f"~{len(kept)}"] = tensor.clone()
        return f"~{len(kept) - 1}"

    text = json.dumps(Encoder(keep).encode(value, "state"), allow_nan=False)
    return Decoder("test", kept.__getitem__).decode(json.loads(text))


VALUES: list[Any] = [
    {1: "a", "1": "b", (2, 3): None, 2.5: [], b"k": True, None: 0, "!": "tag"},
    (1, [2, (3,)], {4, "x", (5, 6)}, frozenset({7})),
    b"\x00\xff", bytearray(b"abc"), complex(1, -2), range(3, 9, 2),
    2**63, -(2**100), 1e308, 5e-324, -0.0, "\u2028 \x00",
    torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), Path("a/b"),
    collections.OrderedDict(b=1, a=2), collections.Counter({5: 2}), collections.deque([1, 2], maxlen=7),
    collections.defaultdict(list, {1: [2]}), collections.defaultdict(None, a=1),
    SimpleNamespace(a=1, b=(2,)), argparse.Namespace(lr=0.1, names=["x"]),
]  # fmt: skip


def test_types_are_kept() -> None:
    for value in VALUES:
        found = there_and_back(value)
        assert type(found) is type(value)
        assert found == value
        assert repr(found) == repr(value) or isinstance(value, set | frozenset | tuple)
        for attribute in ("maxlen", "default_factory"):
            assert getattr(found, attribute, None) is getattr(value, attribute, None)
    numbers = [math.nan, math.inf, -math.inf]
    assert repr(there_and_back(numbers)) == repr(numbers)


ARRAYS: list[Any] = [
    numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True), numpy.datetime64("2020-01-01"), numpy.str_("a"),
    numpy.arange(6, dtype=numpy.int16).reshape(2, 3), numpy.array(["ab", "c"]), numpy.zeros((0, 3)), numpy.array(5.0),
    numpy.arange(5000, dtype=numpy.complex64), numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)),
]  # fmt: skip


def test_numpy() -> None:
    for value in ARRAYS:
        found = there_and_back({"x": value})["x"]
        assert type(found) is type(value)
        assert found.dtype == value.dtype
        assert found.tobytes() == value.tobytes()
        numpy.testing.assert_array_equal(found, value)
        if isinstance(found, numpy.ndarray):
            assert found.flags.writeable


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
]  # fmt: skip


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def test_tensors(tmp_path: Path) -> None:
    """Of all dtypes, small and large: as values, and as leaves that are filled in place."""
    shapes = [(), (0, 3), (3, 2), (40, 50)]
    saved = {(str(dtype), shape): torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES for shape in shapes}
    accel.save(saved, tmp_path / "c")
    into = {key: torch.zeros(tensor.shape).to(tensor.dtype) for key, tensor in saved.items()}
    accel.load(tmp_path / "c", into)
    values = there_and_back(list(saved.values()))
    for (key, tensor), value in zip(saved.items(), values, strict=True):
        for found in (value, into[key]):
            assert found.dtype is tensor.dtype
            assert found.shape == tensor.shape
            assert raw_bytes(found) == raw_bytes(tensor)


def test_classes_and_requires_grad_are_kept() -> None:
    for size in (3, 3000):
        made = {
            "parameter": torch.nn.Parameter(torch.ones(size)),
            "frozen": torch.nn.Parameter(torch.ones(size), requires_grad=False),
            "log_alpha": torch.zeros(size, requires_grad=True),
            "loss": torch.ones(size, requires_grad=True) * 2,
            "plain": torch.ones(size),
        }
        found = there_and_back(made)
        assert {n: (type(t), t.requires_grad, t.grad_fn) for n, t in found.items()} == {
            "parameter": (torch.nn.Parameter, True, None),
            "frozen": (torch.nn.Parameter, False, None),
            "log_alpha": (torch.Tensor, True, None),
            "loss": (torch.Tensor, False, None),
            "plain": (torch.Tensor, False, None),
        }


class Odd:
    pass


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
    ({"a": [1, 2, {"b": Odd()}]}, r'state\["a"\]\[2\]\["b"\] is a .*Odd'),
    ({"a": {1: (0, lambda: 1)}}, r'state\["a"\]\[1\]\[1\] is a function'),
    ({"a": {Odd(): 1}}, r'the key .* of state\["a"\] is a .*Odd'),
    ({"a": collections.namedtuple("Point", "x")(1)}, r'state\["a"\] is a .*Point'),
    ({"a": collections.defaultdict(lambda: 1)}, "a collections.defaultdict"),
    ({"a": numpy.array([object()])}, "a numpy.ndarray, which"),
    ({"a": [torch.zeros(3).to_sparse()]}, "a tensor of layout torch.sparse_coo"),
    ({"a": torch.zeros(3, device="meta")}, "a tensor on the meta device"),
    ({"a": CYCLE}, "maximum recursion depth"),
    ({"a": {"b": Failing()}}, r"""state\["a"\]\["b"\]\.state_dict\(\) raised KeyError: 'lost'"""),
    ([1], "Expected the state as a dict"),
]


def test_refused_states_change_no_file(tmp_path: Path) -> None:
    accel.save({"n": 1}, tmp_path / "c")
    before = sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "c").iterdir())
    for value, message in REFUSED:
        for directory in ("c", "other"):
            with pytest.raises(CheckpointError, match=message):
                accel.save(value, tmp_path / directory)
        assert sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "c").iterdir()) == before
        assert not (tmp_path / "other").exists()
    assert accel.load(tmp_path / "c") == {"n": 1}


def test_a_failing_load_names_the_object(tmp_path: Path) -> None:
    state = {"a": {"b": Failing(1)}}
    accel.save(state, tmp_path)
    message = r"""state\["a"\]\["b"\]\.load_state_dict\(\) raised ValueError: not mine.*partly filled"""
    with pytest.raises(CheckpointError, match=message):
        accel.load(tmp_path, state)
