"""Values keep their types through JSON; what cannot be stored is named by its path."""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    2**63, -(2**100), 1e308, 5e-324, -0.0, "\ud800 \u2028 \x00",
    torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), Path("a/b"),
    collections.OrderedDict(b=1, a=2), collections.Counter({5: 2}), collections.deque([1, 2], maxlen=7),
    collections.defaultdict(list, {1: [2]}), collections.defaultdict(None, a=1),
    SimpleNamespace(a=1, b=(2,)), argparse.Namespace(lr=0.1, names=["x"]), argparse.Namespace(**{"a b": 1}),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_types_are_kept(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set | frozenset | tuple)
    if isinstance(value, collections.deque):
        assert found.maxlen == value.maxlen
    if isinstance(value, collections.defaultdict):
        assert found.default_factory is value.default_factory


NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(), st.binary())
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()), st.booleans(), st.none())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.text(), inner),
    ),
    max_leaves=20,
)


@given(TREES)
def test_any_tree(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_that_json_has_not(value: float) -> None:
    assert repr(there_and_back([value])) == repr([value])


@pytest.mark.parametrize(
    "value",
    [
        numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True), numpy.float64("nan"), numpy.datetime64("2020-01-01"),
        numpy.arange(6, dtype=numpy.int16).reshape(2, 3), numpy.array(["ab", "c"]), numpy.zeros((0, 3)), numpy.array(5.0),
        numpy.str_(""), numpy.bytes_(b""), numpy.datetime64("NaT", "s"), numpy.str_("a\0"), numpy.bytes_(b"b\0" * 2000),
        numpy.arange(5000, dtype=numpy.complex64), numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)),
        numpy.arange(5, dtype=">f8"), numpy.arange(5000, dtype=">i4"), numpy.zeros(2, "<M8[25s]"),
    ],
    ids=lambda v: f"{v.dtype}{v.shape}",
)  # fmt: skip
def test_numpy(value: Any) -> None:
    found = there_and_back({"x": value})["x"]
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    numpy.testing.assert_array_equal(found, value)
    assert found.tobytes() == value.tobytes()
    if isinstance(found, numpy.ndarray):
        assert found.flags.writeable


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
]  # fmt: skip


def test_very_many_values_take_few_calls() -> None:
    """Of Python, each way: one for a value that JSON has."""
    value = {
        "list": list(range(1000)),
        "dict": {str(i): i / 3 for i in range(1000)},
        "rows": [[i, "a"] for i in range(500)],
    }
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        encoded = Encoder(None).encode(value, "state")
        there, calls = calls, 0
        found = Decoder("test", {}.__getitem__).decode(encoded)
    finally:
        sys.setprofile(None)
    assert found == value
    assert there < 7000
    assert calls < 5500


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, math.inf, -0.0, True, "\ud800", "\u00e9", None, 2**64 - 1])
def test_values_at_the_edge_of_json_lie_in_any_container(value: Any) -> None:
    for container in ([1, value], {"a": 1, "b": value}, {1: value}, (value,), {value: 1}, {value}):
        assert repr(there_and_back(container)) == repr(container)


def test_a_namespace_may_have_any_name() -> None:
    value = argparse.Namespace()
    vars(value).update({"self": 1, "kwargs": 2})
    assert there_and_back(value) == value


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2), (40, 50)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """As a value, and as a leaf of its own that is filled in place."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    accel.save({"x": tensor}, tmp_path / "c")
    into = torch.zeros(shape).to(dtype)
    accel.load(tmp_path / "c", {"x": into})
    for found in (there_and_back([tensor])[0], into):
        assert found.dtype is dtype
        assert found.shape == tensor.shape
        assert raw_bytes(found) == raw_bytes(tensor)


class Holder:
    """An object whose state is one value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


LAZY: dict[str, Any] = {
    "conjugated": lambda: torch.complex(torch.ones(30), torch.arange(30.0)).conj(),
    "negated": lambda: torch.arange(30.0)._neg_view(),  # type: ignore[operator]
    "imaginary part": lambda: torch.complex(torch.ones(30), torch.arange(30.0)).conj().imag,
    "one number": lambda: torch.tensor(1 + 2j).conj(),
    "zeros": lambda: torch._efficientzerotensor(30),
    "large": lambda: torch.complex(torch.ones(3000), torch.arange(3000.0)).conj(),
}


@pytest.mark.parametrize("kind", LAZY)
def test_tensors_whose_memory_does_not_hold_their_values(kind: str, tmp_path: Path) -> None:
    """In a value, where their resolved copy is all that holds the bytes, and as a leaf."""
    for i in range(5):
        value = LAZY[kind]()
        expected = value.clone().resolve_conj().resolve_neg()
        state = {"object": Holder(value), "deque": collections.deque([value]), "leaf": value}
        accel.save(state, tmp_path / f"c{i}")
        accel.verify(tmp_path / f"c{i}")
        loaded = {"object": Holder(), "deque": None, "leaf": torch.zeros_like(expected)}
        accel.load(tmp_path / f"c{i}", loaded)
        for found in (loaded["object"].value, loaded["deque"][0], loaded["leaf"]):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [3, 3000])
def test_what_a_tensor_is_beside_its_numbers(size: int) -> None:
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


def test_random_states_are_values() -> None:
    import random

    state = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    found = there_and_back(state)
    assert found[0] == state[0]
    assert [type(x) for x in found[1]] == [type(x) for x in state[1]]
    random.setstate(found[0])
    numpy.random.set_state(found[1])
    torch.set_rng_state(found[2])


class Odd:
    pass


class Colour(int):
    pass


class Word(str):
    pass


class Level(enum.IntEnum):
    LOW = 1


CYCLE: list[Any] = []
PAIR = "\ud83d\ude00"  # which JSON joins
CYCLE.append({"a": CYCLE})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, 2, {"b": Odd()}]}, r'state\["a"\]\[2\]\["b"\] is a .*Odd'),
        ({"a": {1: (0, lambda: 1)}}, r'state\["a"\]\[1\]\[1\] is a function'),
        ({"a": Colour(3)}, r'state\["a"\] is a .*Colour'),
        ({"a": {Odd(): 1}}, r'the key .* of state\["a"\] is a .*Odd'),
        ({"a": collections.defaultdict(lambda: 1)}, r'state\["a"\]: a defaultdict'),
        ({"a": numpy.array([object()])}, r'state\["a"\]: a numpy array of dtype object'),
        ({"a": [torch.zeros(3).to_sparse()]}, r'state\["a"\]\[0\]: a tensor of layout torch.sparse_coo'),
        ({"a": torch.zeros(3, device="meta")}, r'state\["a"\]: a tensor on the meta device'),
        ({"a": CYCLE}, "nested more than 100 levels"),
        ({"a": collections.namedtuple("Point", "x")(1)}, r'state\["a"\] is a .*Point'),
        ({"a": torch.Generator()}, r'state\["a"\] is a .*Generator'),
        ([1], "expected the state as a dict, found a list"),
        (
            {"a": [numpy.ma.array([1.0, 2.0], mask=[True, False])]},
            r'state\["a"\]\[0\] is a numpy.ma.*MaskedArray, of which',
        ),
        ({"a": numpy.zeros((1, 1)).view(numpy.matrix)}, r'state\["a"\] is a numpy.*matrix, of which'),
        ({"a": numpy.array([(1, 2.0)], "i4,f8")}, r'state\["a"\]: a numpy array of dtype'),
        ({"a": numpy.rec.array([(1, 2.0)])}, r'state\["a"\]: a numpy array of dtype'),
        ({"a": numpy.zeros(3).view(numpy.recarray)}, r'state\["a"\] is a numpy.*recarray, of which'),
        ({"a": Word("x")}, r'state\["a"\] is a .*Word'),
        ({"a": {Word("x"): 1}}, r'the key .x. of state\["a"\] is a .*Word'),
        ({"a": Level.LOW}, r'state\["a"\] is a .*Level'),
        ({"a": {math.nan: 1}}, r'the key nan of state\["a"\] would be another one'),
        ({"a": {(1, math.nan): 1}}, r'the key \(1, nan\) of state\["a"\] would be another one'),
        ({"a": {numpy.datetime64("NaT", "s"): 1}}, r'the key .*NaT.* of state\["a"\] would be another one'),
        ({"a": {torch.ones(1): 1}}, r'the key tensor.* of state\["a"\] would be another one'),
        ({math.nan: torch.ones(2)}, r"the key nan of state would be another one"),
        ({"a": {math.nan, 1.0}}, r'the key nan of state\["a"\] would be another one'),
        ({"a": {i * (2**61 - 1) for i in range(200)}}, r'state\["a"\] cannot be stored: .* same hash'),
        ({"__metadata__": torch.ones(3)}, r'state\["__metadata__"\]: .* rename the key'),
        ({"": {"a": torch.ones(3)}, "a": torch.zeros(3)}, r'state\[""\]\["a"\] and state\["a"\] have the same name'),
        ({PAIR: torch.nn.Linear(1, 1)}, "surrogate pair"),
        ({"a": {"b": (torch.ones([1] * 65), 1)}}, r'state\["a"\]\["b"\]\[0\]: a tensor of 65 dimensions'),
        ({"": {"a": {"weight": torch.ones(1, 1)}}, "a": torch.nn.Linear(1, 1)}, "have the same name .*'a/weight'"),
    ],
)
def test_what_cannot_be_stored_is_named_before_anything_is_written(value: Any, message: str, tmp_path: Path) -> None:
    accel.save({"n": 1}, tmp_path / "c")
    before = sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "c").iterdir())
    with pytest.raises(CheckpointError, match=message):
        accel.save(value, tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        accel.save(value, tmp_path / "other")
    assert sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "c").iterdir()) == before
    assert not (tmp_path / "other").exists()
    assert accel.load(tmp_path / "c") == {"n": 1}


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda i: st.lists(i) | st.dictionaries(st.text() | st.just("!"), i)
    )
)
def test_foreign_json_is_refused_or_read(data: Any) -> None:
    """Whatever a file says, the answer is a value or a CheckpointError."""
    with contextlib.suppress(CheckpointError):
        Decoder("file", lambda name: torch.zeros(1)).decode(data)


@pytest.mark.parametrize(
    "data",
    [
        {"!": "tensor", "dtype": "F32", "shape": [2**40], "data": ""},
        {"!": "tensor", "dtype": "F32", "shape": [-1], "data": ""},
        {"!": "tensor", "dtype": "F33", "shape": [1], "data": "AAAAAA=="},
        {"!": "ndarray", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
        {"!": "ndarray", "dtype": "<f8", "shape": [10**9], "data": ""},
        {"!": "ndarray", "dtype": "0", "shape": [0], "data": ""},  # numpy evaluates it
        {"!": "ndarray", "dtype": "i4,i4", "shape": [0], "data": ""},
        {"!": "dtype", "value": "load"},
        {"!": "dtype", "value": "_inductor"},
        {"!": "no such type"},
        {"!": ["list"]},
        {"!": "set", "items": [[1]]},
        {"!": "namespace", "items": 3},
        {"!": "set", "items": "abc"},
        {"!": "set", "items": [1, 1.0]},
        {"!": "dict", "items": [["a", 1], ["a", 2]]},
        {"!": "dict", "items": ["ab"]},
        {"!": "dict", "items": [[{"!": "int", "value": hex(i * (2**61 - 1))}, i] for i in range(200)]},
        {"!": "deque", "items": [[1, 2, 3], 2]},
        {"!": "deque", "items": ["abc", None]},
        {"!": "complex", "items": ["1", "2"]},
        {"!": "range", "items": [1, 2]},
        {"!": "range", "items": ["1", 2, 3]},
        {"!": "int", "value": "ten"},
        {"!": "int", "value": " 0x1_0 "},
        {"!": "device", "value": 0},
        {"!": "path", "value": 3},
        {"!": "bytes", "data": ["AA=="]},
        {"!": "tensor", "dtype": "I64", "shape": [1], "data": "AAAAAAAAAAA=", "requires_grad": True},
        {"!": "tensor", "dtype": "F32", "shape": [1], "data": "AAAAAA==", "requires_grad": 1},
        {"!": "tensor", "dtype": "F32", "shape": [1], "data": "AAAAAA==", "class": "Module"},
        [float("inf")],
    ],
)
def test_crafted_values_are_refused(data: Any) -> None:
    with pytest.raises(CheckpointError, match="file"):
        Decoder("file", lambda name: torch.zeros(1)).decode(data)


@pytest.mark.parametrize("saved", [[1, 2], (3, 4), [torch.ones(2), torch.zeros(2)]])
@pytest.mark.parametrize("here", [{}, {0: 5, 1: 6}])
def test_a_list_is_no_dict(saved: Any, here: dict[Any, Any], tmp_path: Path) -> None:
    accel.save({"history": saved}, tmp_path)
    with pytest.raises(CheckpointError, match=r"history.* is a dict"):
        accel.load(tmp_path, {"history": dict(here)})


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("lost")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not mine")


class Keeping(Failing):
    def state_dict(self) -> dict[str, Any]:
        return {}


def test_whose_state_dict_failed_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"""state\["deep"\]\["one"\]\.state_dict\(\) raised KeyError: 'lost'"""):
        accel.save({"deep": {"one": Failing()}}, tmp_path)
    accel.save({"deep": {"one": Keeping()}}, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"""state\["deep"\]\["one"\]\.load_state_dict\(\) raised ValueError: not mine"""
    ):
        accel.load(tmp_path, {"deep": {"one": Keeping()}})


def test_a_link_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    accel.save({"a": 1}, tmp_path / "c")
    (tmp_path / "c" / "accel.json").rename(tmp_path / "elsewhere")
    (tmp_path / "c" / "accel.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link, which accel does not follow"):
        accel.load(tmp_path / "c")


def test_a_protocol_may_have_an_underscore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="my_store"):
        accel.save({"a": 1}, "my_store://bucket/run")
    assert not list(tmp_path.iterdir())
