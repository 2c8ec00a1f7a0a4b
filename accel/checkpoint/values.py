"""Plain Python values as JSON with their types. Decoding runs no code."""

from __future__ import annotations

import base64
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
from .shards import BY_NAME, NAMES, check_tensor, memory
from .steps import parsing

#: A JSON object with this key stores a value of the type named there. Others store dicts.
TAG: Final = "!"
#: Larger tensors and arrays are stored in the shard files.
INLINE_BYTES: Final = 1024

Json = Any
#: Takes a tensor and its path for errors. Stores the tensor and returns its name.
Store = Callable[[torch.Tensor, str], str]


def place(path: str, key: object) -> str:
    """Return the path of a container's item."""
    return f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]"


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Return the keys and items of a dict, list or tuple."""
    if isinstance(container, dict):
        return list(container.items())
    return list(enumerate(container))


class Kind(NamedTuple):
    """How the values of a type are stored: ``{"!": tag, key: content}``."""

    type: type
    tag: str
    take_apart: Callable[[Any], Any]
    rebuild: Callable[[Any], Any]
    #: Content under "items" is a list of values, or of the (key, value) pairs of a dict.
    key: str = "items"


def _to_base64(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytearray:
    return bytearray(base64.b64decode(text, validate=True))


_DTYPES: Final = {str(v)[6:]: v for v in vars(torch).values() if isinstance(v, torch.dtype)}
#: The supported default factories of a defaultdict, by their names in the JSON.
_FACTORIES: Final[dict[str | None, type | None]] = {
    None: None,
    **{kind.__name__: kind for kind in (list, dict, set, int, float, str, bool)},
}
_KINDS: Final = (
    # Only for numbers that JSON readers can't parse: over 64 bits, infinities and NaN.
    Kind(int, "int", hex, lambda text: int(text, 16), "value"),
    Kind(float, "float", repr, float, "value"),
    Kind(torch.dtype, "dtype", lambda v: str(v)[6:], _DTYPES.__getitem__, "value"),
    Kind(torch.device, "device", str, torch.device, "value"),
    Kind(type(Path()), "path", str, Path, "value"),
    Kind(bytes, "bytes", _to_base64, lambda text: bytes(_from_base64(text)), "data"),
    Kind(bytearray, "bytearray", _to_base64, _from_base64, "data"),
    Kind(complex, "complex", lambda v: [v.real, v.imag], lambda v: complex(*v)),
    Kind(range, "range", lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    Kind(deque, "deque", lambda v: [list(v), v.maxlen], lambda v: deque(*v)),
    Kind(tuple, "tuple", list, tuple),
    Kind(torch.Size, "size", list, torch.Size),
    Kind(set, "set", list, set),
    Kind(frozenset, "frozenset", list, frozenset),
    Kind(dict, "dict", dict, dict),
    Kind(OrderedDict, "OrderedDict", dict, OrderedDict),
    Kind(Counter, "Counter", dict, lambda v: Counter(dict(v))),
    Kind(defaultdict, "defaultdict", dict, dict),
    Kind(SimpleNamespace, "namespace", vars, lambda v: SimpleNamespace(**dict(v))),
    Kind(Namespace, "arguments", vars, lambda v: Namespace(**dict(v))),
)
_BY_TYPE: Final = {kind.type: kind for kind in _KINDS}
_BY_TAG: Final = {kind.tag: kind for kind in _KINDS}
_ARRAYS: Final = ("tensor", "ndarray", "numpy")
#: Numbers, strings and dates. Arrays of objects contain pointers and would need pickle.
_NUMPY_KINDS: Final = "biufcSUMm"


def is_json(value: Any) -> bool:
    """True if JSON stores the value as it is."""
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is float:
        return math.isfinite(value)
    return kind is str or kind is bool or value is None


class Placeholder:
    """An object in a state, with its own JSON."""

    node: Json


class Encoder:
    """Turns values into JSON. Large tensors go to ``store``, unless it is None."""

    def __init__(self, store: Store | None) -> None:
        self._store = store

    def encode(self, value: Any, path: str) -> Json:
        """Return the JSON of a value. Errors name the path of the item."""
        if is_json(value):
            return value
        if isinstance(value, Placeholder):
            return value.node
        if type(value) is list:
            return self._encode_items(enumerate(value), path)
        if type(value) is dict and TAG not in value and set(map(type, value)) <= {str}:
            nodes = self._encode_items(value.items(), path)
            return dict(zip(value, nodes, strict=True))
        return self._encode_tagged(value, path)

    def _encode_items(self, items: Iterable[tuple[Any, Any]], path: str) -> list[Json]:
        # Histories are long lists of plain values, so build a path only for other values.
        return [v if is_json(v) else self.encode(v, place(path, k)) for k, v in items]

    def _encode_tagged(self, value: Any, path: str) -> dict[str, Json]:
        kind = _BY_TYPE.get(type(value))
        factory = value.default_factory if type(value) is defaultdict else None
        if kind is not None and factory in _FACTORIES.values():
            content = self._encode_content(kind, value, path)
            tagged = {TAG: kind.tag, kind.key: content}
            if kind.type is defaultdict:
                tagged["factory"] = factory and factory.__name__
            return tagged
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        numpy = sys.modules.get("numpy")
        # Subclasses such as masked arrays have data besides their elements.
        is_array = numpy and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
        if is_array and value.dtype.kind in _NUMPY_KINDS:
            return self._encode_numpy(value, path)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(
            f"{path} is a {name.removeprefix('builtins.')}, which can't be stored without "
            "pickle. Save its content as numbers, strings, containers or tensors, or give "
            "it state_dict() and load_state_dict()."
        )

    def _encode_content(self, kind: Kind, value: Any, path: str) -> Json:
        content = kind.take_apart(value)
        if kind.key != "items":
            return content
        if isinstance(content, list):
            return self._encode_items(enumerate(content), path)
        pairs = []
        for key, item in content.items():
            if key != key:
                raise CheckpointError(f"{path} has the key NaN, which never matches. Use a string.")
            name = self.encode(key, f"the key {key!r} of {path}")
            pairs.append([name, self.encode(item, place(path, key))])
        return pairs

    def _encode_tensor(self, value: torch.Tensor, path: str) -> dict[str, Json]:
        check_tensor(value, path)
        tagged: dict[str, Json] = {TAG: "tensor"}
        if type(value) is torch.nn.Parameter:
            tagged["class"] = "Parameter"
        # A non-leaf tensor requires grad because of its graph, which isn't stored.
        if value.is_leaf and value.requires_grad:
            tagged["requires_grad"] = True
        data = self._encode_data(value.detach(), path)
        if "data" in data:
            tagged |= {"dtype": NAMES[value.dtype], "shape": [*value.shape]}
        return tagged | data

    def _encode_numpy(self, value: Any, path: str) -> dict[str, Json]:
        import numpy

        tagged: dict[str, Json] = {TAG: "numpy", "dtype": value.dtype.str}
        if isinstance(value, numpy.ndarray):
            tagged |= {TAG: "ndarray", "shape": [*value.shape]}
        data = numpy.array(value, order="C").reshape(-1).view(numpy.uint8)
        return tagged | self._encode_data(torch.from_numpy(data), path)

    def _encode_data(self, tensor: torch.Tensor, path: str) -> dict[str, Json]:
        if self._store is not None and tensor.nbytes > INLINE_BYTES:
            return {"name": self._store(tensor, path)}
        plain = tensor.cpu().contiguous().resolve_conj().resolve_neg()
        return {"data": _to_base64(memory(plain))}


class Decoder:
    """Turns JSON into values. ``fetch`` returns a stored tensor by its name."""

    def __init__(self, source: str, fetch: Callable[[str], torch.Tensor]) -> None:
        self._source = source
        self._fetch = fetch

    def decode(self, data: Json) -> Any:
        """Return the value. Raise CheckpointError for unknown JSON."""
        with parsing(f"{self._source} has a value that accel did not write"):
            return self._decode(data)

    def children(self, node: Json) -> dict[Any, Json] | list[Json] | None:
        """Return the items of a container, or None for other values."""
        if not isinstance(node, dict) or TAG not in node:
            return node if isinstance(node, dict | list) else None
        if node[TAG] == "tuple":
            return list(node["items"])
        if node[TAG] in ("dict", "OrderedDict", "defaultdict", "Counter"):
            return {self.decode(key): item for key, item in node["items"]}
        return None

    def _decode(self, data: Json) -> Any:
        if isinstance(data, list):
            return [self._decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        if TAG not in data:
            return {key: self._decode(item) for key, item in data.items()}
        if data[TAG] in _ARRAYS:
            is_tensor = data[TAG] == "tensor"
            decode = self._decode_tensor if is_tensor else self._decode_numpy
            return decode(data)
        kind = _BY_TAG[data[TAG]]
        content = data[kind.key]
        if kind.key == "items":
            content = self._decode(content)
        value = kind.rebuild(content)
        if kind.type is defaultdict:
            return defaultdict(_FACTORIES[data["factory"]], value)
        return value

    def _decode_tensor(self, data: dict[str, Json]) -> torch.Tensor:
        if "name" in data:
            tensor = self._fetch(data["name"])
        else:
            dtype = BY_NAME[data["dtype"]]
            tensor = torch.empty(data["shape"], dtype=dtype, device="cpu")
            memory(tensor)[:] = _from_base64(data["data"])
        requires_grad = data.get("requires_grad", False)
        if data.get("class") == "Parameter":
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)

    def _decode_numpy(self, data: dict[str, Json]) -> Any:
        import numpy

        dtype = numpy.dtype(data["dtype"])
        if dtype.kind not in _NUMPY_KINDS:
            raise TypeError(f"a numpy array of dtype {dtype}")
        content = _from_base64(data.get("data", ""))
        if "name" in data:
            content = bytearray(memory(self._fetch(data["name"])))
        # numpy allocates the memory of an empty array itself.
        array: Any = numpy.ndarray(data.get("shape", ()), dtype, content or None)
        return array if data[TAG] == "ndarray" else array[()]


def stored_tensors(node: Json) -> Iterator[str]:
    """Yield the names of the stored tensors in the JSON of a value."""
    if isinstance(node, dict):
        if node.get(TAG) in _ARRAYS and "name" in node:
            yield node["name"]
        node = node.values()
    elif not isinstance(node, list):
        return
    for child in node:
        if isinstance(child, dict | list):
            yield from stored_tensors(child)
