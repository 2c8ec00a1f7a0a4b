"""Plain Python values as JSON that keeps their types.

Decoding builds only the types in ``_KINDS``, tensors and numpy arrays. It never imports or calls
anything that a file names.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch

from ..errors import CheckpointError
from .shards import BY_NAME, NAMES, check_tensor, to_bytes
from .steps import parsing

#: A JSON object with this key is a value of the type that it names. Other JSON objects are dicts.
TAG: Final = "!"
#: The deepest nesting of values.
DEPTH: Final = 100
#: Larger tensors and arrays are stored in the shards.
INLINE_BYTES: Final = 1024

Json = Any
#: Takes a tensor and its path, stores the tensor, and returns the name it is stored under.
Store = Callable[[torch.Tensor, str], str]


def place(path: str, key: object) -> str:
    """Return the path of a container's item."""
    return f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]"


# -- the table of types ----------------------------------------------------------------------------


class Kind(NamedTuple):
    """How the values of a type are stored: ``{"!": tag, key: content}``."""

    tag: str
    type: type
    #: "value" holds text, "data" bytes in base64, "items" a list of values.
    key: str
    take_apart: Callable[[Any], Any]
    rebuild: Callable[[Any], Any]


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items())


def _attributes(value: Any) -> list[tuple[Any, Any]]:
    return list(vars(value).items())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES: Final = {_dtype_name(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_KINDS: Final = (
    # Only numbers that JSON doesn't have. Its readers in other languages know 64-bit integers.
    Kind("int", int, "value", hex, lambda text: int(text, 16)),
    Kind("float", float, "value", repr, float),
    Kind("dtype", torch.dtype, "value", _dtype_name, _DTYPES.__getitem__),
    Kind("device", torch.device, "value", str, torch.device),
    Kind("path", type(Path()), "value", str, Path),
    Kind("bytes", bytes, "data", bytes, bytes),
    Kind("bytearray", bytearray, "data", bytes, bytearray),
    Kind("complex", complex, "items", lambda v: [v.real, v.imag], lambda v: complex(*v)),
    Kind("range", range, "items", lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    Kind("deque", deque, "items", lambda v: [list(v), v.maxlen], lambda v: deque(*v)),
    Kind("tuple", tuple, "items", list, tuple),
    Kind("size", torch.Size, "items", list, torch.Size),
    Kind("set", set, "items", list, set),
    Kind("frozenset", frozenset, "items", list, frozenset),
    Kind("dict", dict, "items", _pairs, dict),
    Kind("OrderedDict", OrderedDict, "items", _pairs, OrderedDict),
    Kind("Counter", Counter, "items", _pairs, lambda v: Counter(dict(v))),
    Kind("defaultdict", defaultdict, "items", _pairs, dict),
    Kind("namespace", SimpleNamespace, "items", _attributes, lambda v: SimpleNamespace(**dict(v))),
    Kind("arguments", Namespace, "items", _attributes, lambda v: Namespace(**dict(v))),
)
_BY_TYPE: Final = {kind.type: kind for kind in _KINDS}
_BY_TAG: Final = {kind.tag: kind for kind in _KINDS}
#: Types with code of their own.
_ARRAYS: Final = ("tensor", "ndarray", "numpy")
#: Numbers, strings and dates: arrays of objects are pointers, and need pickle.
_NUMPY_KINDS: Final = "biufcSUMm"
_FACTORIES: Final = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool)}


def _is_json(value: Any) -> bool:
    """True if JSON stores the value as it is."""
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is float:
        return math.isfinite(value)
    return kind is str or kind is bool or value is None


# -- values to JSON --------------------------------------------------------------------------------


class Encoder:
    """Turns values into JSON.

    Args:
        store: takes tensors of more than ``INLINE_BYTES``. None: all tensors become JSON.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store

    def encode(self, value: Any, path: str, depth: int = 0) -> Json:
        """Return the JSON of a value, or raise with the path of a part that can't be stored."""
        if _is_json(value):
            return value
        if depth > DEPTH:
            raise CheckpointError(
                f"{path} is nested more than {DEPTH} levels deep. Does a container contain itself?"
            )
        if type(value) is list:
            return self._encode_items(enumerate(value), path, depth)
        if type(value) is dict and all(type(key) is str for key in value) and TAG not in value:
            return dict(zip(value, self._encode_items(value.items(), path, depth), strict=True))
        kind = _BY_TYPE.get(type(value))
        if kind is not None:
            return self._encode_kind(kind, value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._encode_numpy(value, path)
        raise CheckpointError(f"{path} is a {_not_storable(value)}")

    def _encode_items(self, items: Iterable[tuple[Any, Any]], path: str, depth: int) -> list[Json]:
        # Most values need no path, and histories are long.
        return [v if _is_json(v) else self.encode(v, place(path, k), depth + 1) for k, v in items]

    def encode_key(self, key: Any, path: str, depth: int = 0) -> Json:
        """Return the JSON of a key of the dict at ``path``."""
        if key != key:
            raise CheckpointError(f"{path} has the key NaN, which equals no key. Use a string.")
        return key if _is_json(key) else self.encode(key, f"the key {key!r} of {path}", depth + 1)

    def _encode_kind(self, kind: Kind, value: Any, path: str, depth: int) -> Json:
        content = kind.take_apart(value)
        if kind.key == "data":
            content = _base64(content)
        elif kind.take_apart in (_pairs, _attributes):
            keys = [self.encode_key(key, path, depth) for key, _ in content]
            items = self._encode_items(content, path, depth)
            content = [list(pair) for pair in zip(keys, items, strict=True)]
        elif kind.key == "items":
            content = self._encode_items(enumerate(content), path, depth)
        if kind.type in (set, frozenset):
            # Processes have different orders, and ranks compare what they save.
            numbers = all(type(item) is int for item in content)
            content.sort(key=None if numbers else json.dumps)
        tagged = {TAG: kind.tag, kind.key: content}
        if kind.type is defaultdict:
            factory = value.default_factory
            if factory is not None and factory not in _FACTORIES.values():
                raise CheckpointError(
                    f"{path} is a defaultdict with the factory {factory!r}, which can't be stored. "
                    "Save dict(value) instead."
                )
            tagged["factory"] = None if factory is None else factory.__name__
        return tagged

    def _encode_tensor(self, value: torch.Tensor, path: str) -> Json:
        check_tensor(value, path)
        tagged: dict[str, Json] = {TAG: "tensor"}
        if type(value) is torch.nn.Parameter:
            tagged["class"] = "Parameter"
        # The graph of a tensor that is not a leaf isn't stored.
        if value.is_leaf and value.requires_grad:
            tagged["requires_grad"] = True
        value = value.detach()
        if self._store is not None and value.nbytes > INLINE_BYTES:
            return {**tagged, "name": self._store(value, path)}
        data = to_bytes(value.cpu().contiguous())
        form = {"dtype": NAMES[value.dtype], "shape": [*value.shape]}
        return {**tagged, **form, "data": _base64(data)}

    def _encode_numpy(self, value: Any, path: str) -> Json:
        if value.dtype.kind not in _NUMPY_KINDS:
            raise CheckpointError(
                f"{path} is a numpy array of dtype {value.dtype}, which needs pickle. "
                "Use an array of numbers or strings."
            )
        tagged: dict[str, Json] = {TAG: "numpy", "dtype": value.dtype.str}
        if type(value).__name__ == "ndarray":
            tagged |= {TAG: "ndarray", "shape": [*value.shape]}
        data = value.tobytes()
        if self._store is not None and len(data) > INLINE_BYTES:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return {**tagged, "name": self._store(flat, path)}
        return {**tagged, "data": _base64(data)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _not_storable(value: object) -> str:
    if isinstance(value, torch.utils.data.DataLoader):
        return "raw DataLoader, which has no position. Save the loader that accel.setup returned."
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return (
        f"{kind}, which can't be stored without pickle. Save its content as numbers, strings, "
        "containers or tensors, or give it state_dict() and load_state_dict()."
    )


# -- JSON to values --------------------------------------------------------------------------------


class Decoder:
    """Turns the JSON of ``Encoder`` into values.

    Args:
        source: the path of the file, for errors.
        fetch: returns a stored tensor by its name.
    """

    def __init__(self, source: str, fetch: Callable[[str], torch.Tensor]) -> None:
        self.source = source
        self._fetch = fetch

    def decode(self, data: Json) -> Any:
        """Return the value, or raise a CheckpointError if ``Encoder`` did not write ``data``."""
        with parsing(f"{self.source} has a value that accel did not write"):
            return self._decode(data)

    def _decode(self, data: Json) -> Any:
        if not isinstance(data, dict | list):
            return data
        if isinstance(data, list):
            return [v if _is_json(v) else self._decode(v) for v in data]
        if TAG not in data:
            return {k: v if _is_json(v) else self._decode(v) for k, v in data.items()}
        if data[TAG] in _ARRAYS:
            return self._decode_tensor(data) if data[TAG] == "tensor" else self._decode_numpy(data)
        kind = _BY_TAG[data[TAG]]
        content = data[kind.key]
        if kind.key == "data":
            content = _bytes(content)
        elif kind.key == "items":
            content = self._decode(content)
        if kind.type is defaultdict:
            factory = data["factory"]
            return defaultdict(None if factory is None else _FACTORIES[factory], content)
        return kind.rebuild(content)

    def _decode_tensor(self, data: dict[str, Json]) -> torch.Tensor:
        if "name" in data:
            tensor = self._fetch(data["name"])
        else:
            content, dtype = _bytes(data["data"]), BY_NAME[data["dtype"]]
            empty = torch.empty(0, dtype=dtype, device="cpu")  # frombuffer takes no empty buffer
            flat = torch.frombuffer(content, dtype=dtype) if content else empty
            tensor = flat.reshape(data["shape"])
        requires_grad = data.get("requires_grad", False)
        if data.get("class") == "Parameter":
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)

    def _decode_numpy(self, data: dict[str, Json]) -> Any:
        import numpy

        dtype = numpy.dtype(data["dtype"])
        if dtype.kind not in _NUMPY_KINDS:
            raise TypeError(f"a numpy array of dtype {dtype}")
        stored = to_bytes(self._fetch(data["name"])) if "name" in data else _bytes(data["data"])
        content = bytearray(stored) or None  # an empty array takes no buffer
        array: Any = numpy.ndarray(data.get("shape", ()), dtype, content)
        return array if data[TAG] == "ndarray" else array[()]


def _bytes(data: str) -> bytearray:
    return bytearray(base64.b64decode(data, validate=True))


def stored_tensors(node: Json) -> Iterator[str]:
    """Yield the names of the stored tensors in the JSON of a value."""
    todo = [node] if type(node) is dict or type(node) is list else []
    while todo:
        node = todo.pop()
        if type(node) is dict and node.get(TAG) in _ARRAYS and "name" in node:
            yield node["name"]
        children = node.values() if type(node) is dict else node
        todo += [child for child in children if type(child) is dict or type(child) is list]
