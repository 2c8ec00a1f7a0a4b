"""Whatever the files of a checkpoint say, reading them ends in values or a ``CheckpointError``.

Their checksums are right, as an attacker would make them. No other exception, nothing imported or run, no file opened outside
of the directory, no memory beyond what the files could fill. ``ACCEL_TEST_FUZZ`` is the number of examples of each test.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import shutil
import sys
import tempfile
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.errors import CheckpointError
from tests.checkpoint.crafting import body_of, header_of, shard_of, write_header, write_record

EXAMPLES = int(os.environ.get("ACCEL_TEST_FUZZ", "60"))
#: For readers' buffers, and Python objects, which take more than their JSON; sizes that a file only claims are far larger.
MARGIN = 48 << 20


class Extra(nn.Linear):
    """A module with a value of its own."""

    extra: Any = (1, b"x")

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def make_state(value: float) -> dict[str, Any]:
    net = nn.Sequential(Extra(6, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(net.parameters())
    if value:
        net(torch.full((3, 6), value)).sum().backward()
        optimizer.step()
    values = [
        (1, {2}, frozenset(), 2**70, float("nan"), 1j, b"b", bytearray(2), range(3), torch.float32, torch.device("cpu")),
        deque([1], 3), {1: value}, defaultdict(list), OrderedDict(a=1), Counter("aab"), SimpleNamespace(a=1),
        Path("a"), torch.Size([2]), torch.ones(2), torch.ones(500), numpy.ones(3), numpy.ones(500), numpy.float32(2),
    ]  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"net": net, "opt": optimizer, "sched": scheduler, "x": torch.full((30,), value), "rng": accel.rng_state()}
    return {**state, "values": values, "n": value, "nested": {"a": {"b": [value]}}}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "c"
    accel.save(make_state(1.0), path)
    with Watched(path):
        read_all(path)
    return path


# -- what reading may not do ------------------------------------------------------------------------------------------


class Sizes(TorchDispatchMode):
    """Notes tensors that are asked for in a size larger than the files; an error here would become a ``CheckpointError``."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        real = torch.device((kwargs or {}).get("device") or "cpu").type != "meta"
        if func.overloadpacket is torch.ops.aten.empty and real and math.prod(args[0]) > self.limit:
            Watched.found.append(f"empty {args[0]}")
        return func(*args, **(kwargs or {}))


class Watched:
    """Files opened, modules imported and code compiled meanwhile are errors, and so is too much memory."""

    allowed = ""
    found: list[str] = []
    hooked = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sizes = Sizes(sum(p.stat().st_size for p in directory.iterdir()))

    @classmethod
    def hear(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if not cls.allowed:
            return
        if event in ("import", "compile", "os.system", "subprocess.Popen", "pickle.find_class"):
            cls.found.append(f"{event} {arguments[0]!r:.100}")
        elif event in ("open", "os.listdir", "os.symlink", "os.link", "os.rename", "os.remove"):
            path = os.path.normpath(str(arguments[0]))
            if isinstance(arguments[0], str) and PurePath(cls.allowed) not in (PurePath(path), *PurePath(path).parents):
                cls.found.append(f"{event} {path}")

    def __enter__(self) -> None:
        if not Watched.hooked:
            sys.addaudithook(Watched.hear)
            Watched.hooked = True
        tracemalloc.start()
        Watched.found.clear()
        Watched.allowed = str(self.directory)
        self.sizes.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.sizes.__exit__(*error)
        Watched.allowed = ""
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if error[0] is None:
            assert not Watched.found
            assert peak < MARGIN + 20 * self.sizes.limit


def read_all(directory: Path) -> list[bool]:
    """Read a checkpoint in every way there is; which of them succeeded."""
    done = []
    state = make_state(0.0)
    for read in (
        lambda: accel.load(directory),
        lambda: accel.verify(directory),
        lambda: accel.latest(directory),
        lambda: accel.load(
            directory, {"opt": state["opt"], "x": state["x"]}, strict=False, check="stream", convert=True
        ),
        lambda: accel.load(directory, state),
    ):
        try:
            read()
            done.append(True)
        except CheckpointError:
            done.append(False)
    return done


# -- what files may say -----------------------------------------------------------------------------------------------


class Pairs(dict[str, Any]):
    """A JSON object that is written with a key twice."""


ODD_NUMBERS = [-1, 0, 1, 2, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**64, 10**30, -(2**70), 1e308, -0.5, 1.0]
ODD_TEXT = ["", "..", "../c", "../../etc/passwd", "/etc/passwd", "a\\b", "a\0b", "\ud800", "accel.json", "~0", "~", "/", "%",
    "../x.safetensors", "/etc/x.safetensors", "..\\x.safetensors", "x.safetensors\0", "eval", "os.system", "float32",
    "_inductor", "cuda:99", "S1000000000", "U100000000", "<U100000000", "O", "V9", "M8[ns]", "i4,i4", "C128", "F64", "0" * 16,
]  # fmt: skip
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, float("nan"), float("inf"), float("-inf"), *ODD_NUMBERS, *ODD_TEXT]),
    st.integers(),
    st.text(max_size=20),
)
TAGS = (
    "dict OrderedDict Counter defaultdict tuple set frozenset size deque namespace arguments int float complex bytes bytearray "
    "range dtype device path tensor ndarray numpy module optimizer stateful ranks nothing"
)
KEYS = st.sampled_from(
    [
        "!",
        "items",
        "value",
        "data",
        "dtype",
        "shape",
        "name",
        "factory",
        "extra",
        "state",
        "groups",
        "params",
        "class",
        "frozen",
        "scale",
    ]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4),
        st.builds(
            lambda tag, rest: {**rest, "!": tag},
            st.sampled_from(TAGS.split()),
            st.dictionaries(KEYS, inner, max_size=4),
        ),
    ),
    max_leaves=6,
)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
    for key, item in items:
        yield node, key
        yield from places(item)


def mutate(draw: st.DataObject, body: dict[str, Any]) -> None:
    """One change at some place."""
    everywhere = list(places(body))
    container, key = draw.draw(st.sampled_from(everywhere))
    kind = draw.draw(st.sampled_from(["replace", "remove", "double", "exchange", "deep", "number", "text", "twice"]))
    if kind == "replace":
        container[key] = draw.draw(JSON)
    elif kind == "number":
        container[key] = draw.draw(st.sampled_from(ODD_NUMBERS))
    elif kind == "text":
        container[key] = draw.draw(st.sampled_from(ODD_TEXT))
    elif kind == "remove":
        del container[key]
    elif kind == "double" and isinstance(container, list):
        container.insert(key, container[key])
    elif kind == "double":
        container[draw.draw(st.sampled_from(ODD_TEXT))] = container[key]
    elif kind == "twice" and isinstance(container[key], dict):
        container[key] = Pairs(container[key])
    elif kind == "deep":
        lists = draw.draw(st.booleans())
        for _ in range(draw.draw(st.sampled_from([1, 90, 250]))):
            container[key] = [container[key]] if lists else {"a": container[key]}
    else:
        other, at = draw.draw(st.sampled_from(everywhere))
        container[key] = copy.deepcopy(other[at])


def text_of(node: Any) -> str:
    """JSON, with what Python's writer refuses to write: objects that have a key twice."""
    if isinstance(node, dict):
        items = [*node.items(), *(list(node.items())[:1] if isinstance(node, Pairs) else ())]
        return "{" + ",".join(f"{json.dumps(key)}:{text_of(item)}" for key, item in items) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(text_of, node)) + "]"
    return json.dumps(node)


# -- the tests --------------------------------------------------------------------------------------------------------

# A failing example is not made smaller: that takes minutes, and the seed printed with it brings it back.
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@contextlib.contextmanager
def copied(good: Path) -> Iterator[Path]:
    """A copy that may be changed, of which everything is watched that reads it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(good, Path(folder) / "c"))


@given(st.data())
@fuzz
def test_records(good: Path, draw: st.DataObject) -> None:
    with copied(good) as copy_of:
        body = body_of(good)
        for _ in range(draw.draw(st.integers(1, 3))):
            mutate(draw, body)
        write_record(copy_of, text_of(body))
        with Watched(copy_of):
            read_all(copy_of)


def test_a_size_that_only_the_record_claims(good: Path) -> None:
    """The optimizer's state, which is made for the load, is not made in that size."""
    with copied(good) as copy_of:
        body, numel = body_of(good), 2**34
        body["files"][0]["size"] = 5 * numel
        body["tensors"]["opt/0.weight/exp_avg"].update(shape=[numel], parts=[[0, 0, numel, 1]])
        write_record(copy_of, json.dumps(body))
        with Watched(copy_of):
            done = read_all(copy_of)
        assert done == [False, False, True, False, False]


@given(st.data())
@fuzz
def test_headers(good: Path, draw: st.DataObject) -> None:
    with copied(good) as copy_of:
        header = header_of(good)
        for _ in range(draw.draw(st.integers(1, 3))):
            mutate(draw, header)
        text = text_of(header).encode()
        lie = draw.draw(
            st.sampled_from([None, None, None, 0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1])
        )
        write_header(copy_of, text, lie)
        with Watched(copy_of):
            read_all(copy_of)


@given(st.data())
@fuzz
def test_bytes(good: Path, draw: st.DataObject) -> None:
    """Bytes that are changed without a thought for the checksums are always found."""
    with copied(good) as copy_of:
        path = draw.draw(st.sampled_from([shard_of(copy_of), copy_of / "accel.json"]))
        content = path.read_bytes()
        at = draw.draw(st.integers(0, len(content) - 1))
        length = draw.draw(st.sampled_from([0, 1, 1, 8, 100]))
        new = content[:at] + draw.draw(st.binary(max_size=20)) + content[at + length :]
        path.write_bytes(new)
        with Watched(copy_of):
            done = read_all(copy_of)
        assert done[1] is done[4] is (new == content)
