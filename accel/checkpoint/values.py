"""Python values as JSON that keeps their types, and back. Nothing here imports or calls what a file names."""

from __future__ import annotations

import argparse
import base64
import collections
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from ..errors import CheckpointError
from .safetensors import BY_NAME, ITEM_BYTES, NAMES, check_tensor, from_bytes, to_bytes
from .steps import MALFORMED

#: A JSON object with this key is not a dict, but the value of the type that it names.
TAG: Final = "!"
#: How deeply values may be nested.
DEPTH: Final = 100
#: Tensors and arrays of more bytes are stored in the shards.
INLINE_BYTES: Final = 1024

Json = Any
#: Stores a tensor under a name of its own, and returns that name.
Store = Callable[[torch.Tensor, str], str]
_NUMPY: Final = re.compile(r"[<>|][biufcSUMm][0-9]{1,9}(\[[0-9]*[A-Za-z\u03bc]{1,9}\])?")
_FACTORIES: Final[dict[str, Callable[[], Any]]] = {t.__name__: t for t in (list, dict, set, int, float, str, bool)}


def place(path: str, key: object) -> str:
    """The path of what ``key`` leads to in a container."""
    return f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class Encoder:
    """Turns values into JSON; ``store`` takes tensors of more than ``INLINE_BYTES``, or none where it is None."""

    def __init__(self, store: Store | None) -> None:
        self._store = store

    def encode(self, value: Any, path: str, depth: int = 0) -> Json:
        """The JSON of a value; refuses what cannot be stored, by its path."""
        if depth > DEPTH:
            raise CheckpointError(f"{path}: nested more than {DEPTH} levels deep, or a container that holds itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _CONTAINERS:
            return self._container(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        return self._rare(value, path)

    def _rare(self, value: Any, path: str) -> Json:
        if type(value) in (Path, type(Path())):
            return {TAG: "path", "value": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return self._numpy(value, path, isinstance(value, numpy.generic))
        if isinstance(value, torch.utils.data.DataLoader):
            raise CheckpointError(
                f"{path} is a raw DataLoader, which knows no position: give the one that accel.setup returned"
            )
        raise CheckpointError(
            f"{path} is a {_kind(value)}, which cannot be stored without pickle; store what it consists of (numbers, strings, "
            "bytes, dicts, lists, tuples, sets, tensors, numpy arrays), or give it state_dict() and load_state_dict()"
        )

    def _container(self, value: Any, path: str, depth: int) -> Json:
        kind = type(value)
        if kind in _NAMESPACES:
            return {TAG: _NAMESPACES[kind], "items": self._items(vars(value), path, depth)}
        if kind is collections.deque:
            return {TAG: "deque", "items": [self.encode(list(value), path, depth + 1), value.maxlen]}
        if kind in (set, frozenset):
            # In an order that is the same on every rank.
            items = self.keys(value, path, depth)
            return {
                TAG: kind.__name__,
                "items": sorted(items, key=None if {*map(type, items)} == {int} else json.dumps),
            }
        if kind in _SEQUENCES:
            items = self._each(enumerate(value), path, depth)
            return items if kind is list else {TAG: _SEQUENCES[kind], "items": items}
        return self._mapping(value, path, depth)

    def _mapping(self, value: Any, path: str, depth: int) -> Json:
        kind = type(value)
        if kind is dict and {*map(type, value)} <= {str} and TAG not in value:
            names = list(value)
            return dict(zip(names, self._each(value.items(), path, depth), strict=True))
        tagged = {TAG: kind.__name__, "items": self._items(value, path, depth)}
        if kind is collections.defaultdict:
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise CheckpointError(
                    f"{path}: a defaultdict whose factory is {factory!r} cannot be stored; use a dict"
                )
            tagged["factory"] = None if factory is None else factory.__name__
        return tagged

    def _each(self, items: Iterable[tuple[Any, Any]], path: str, depth: int) -> list[Json]:
        """The JSON of each item by its key; for most of very many there is nothing to do, and no path to be made."""
        return [item if _is_json(item) else self.encode(item, place(path, key), depth + 1) for key, item in items]

    def _items(self, value: Any, path: str, depth: int) -> Json:
        items = self._each(value.items(), path, depth)
        return [list(pair) for pair in zip(self.keys(value, path, depth), items, strict=True)]

    def keys(self, value: Any, path: str, depth: int = 0) -> list[Json]:
        """The JSON of a dict's keys, or of a set's members; refuses those that could not be found again under it."""
        for key in value:
            if not _is_json(key) and not _is_known_by_value(key):
                raise CheckpointError(
                    f"the key {key!r} of {path} would be another one when it is loaded: NaN, NaT and tensors are equal to "
                    "nothing else; use a number or a string"
                )
        return [key if _is_json(key) else self.encode(key, f"the key {key!r} of {path}", depth + 1) for key in value]

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        check_tensor(value, path)
        tagged: dict[str, Json] = {TAG: "tensor"}
        if type(value) is torch.nn.Parameter:
            tagged["class"] = "Parameter"
        if value.is_leaf and value.requires_grad:  # else it has a graph, which is not stored
            tagged["requires_grad"] = True
        value = value.detach()
        if self._store is not None and value.nbytes > INLINE_BYTES:
            return {**tagged, "name": self._store(value, path)}
        value = value.cpu().contiguous()
        return {**tagged, "dtype": NAMES[value.dtype], "shape": list(value.shape), "data": _text(to_bytes(value))}

    def _numpy(self, value: Any, path: str, scalar: bool) -> Json:
        if value.dtype.kind not in "biufcSUMm":
            raise CheckpointError(f"{path}: a numpy array of dtype {value.dtype} cannot be stored without pickle")
        if type(value) is not (value.dtype.type if scalar else sys.modules["numpy"].ndarray):
            raise CheckpointError(
                f"{path} is a {_kind(value)}, of which more than its numbers would be lost (a mask, a class): store "
                "numpy.asarray(value), and what it has beside as values of their own"
            )
        tagged: dict[str, Json] = {TAG: "numpy" if scalar else "ndarray", "dtype": value.dtype.str}
        data = value.tobytes()[: value.nbytes]  # numpy gives an empty text one character
        if not scalar:
            tagged["shape"] = list(value.shape)
        if self._store is not None and len(data) > INLINE_BYTES:
            return {**tagged, "name": self._store(torch.frombuffer(bytearray(data), dtype=torch.uint8), path)}
        return {**tagged, "data": _text(data)}


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _is_known_by_value(key: Any) -> bool:
    """Whether what is decoded of a key is equal to it."""
    if isinstance(key, tuple | frozenset):
        return all(map(_is_known_by_value, key))
    return not isinstance(key, torch.Tensor) and bool(key == key)


#: Of the types that JSON has: whether a value surely is as it stands in a file.
_AS_IT_IS: Final[dict[type, Callable[[Any], bool]]] = {
    type(None): operator.not_,
    bool: range(2).__contains__,
    int: range(-(2**63), 2**64).__contains__,
    float: math.isfinite,
    str: str.isascii,
}


def _is_json(value: Any) -> bool:
    check = _AS_IT_IS.get(type(value))
    return check is not None and check(value)


def _float(value: float) -> Json:
    return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}


_SCALARS: Final[dict[type, Callable[[Any], Json]]] = {
    # JSON readers of other languages know 64 bits, and Python's own at most 4,300 digits.
    int: lambda v: v if -(2**63) <= v < 2**64 else {TAG: "int", "value": hex(v)},
    float: _float,
    complex: lambda v: {TAG: "complex", "items": [_float(v.real), _float(v.imag)]},
    bytes: lambda v: {TAG: "bytes", "data": _text(v)},
    bytearray: lambda v: {TAG: "bytearray", "data": _text(bytes(v))},
    range: lambda v: {TAG: "range", "items": [v.start, v.stop, v.step]},
    torch.dtype: lambda v: {TAG: "dtype", "value": str(v).removeprefix("torch.")},
    torch.device: lambda v: {TAG: "device", "value": str(v)},
}
_NAMESPACES: Final[dict[type, str]] = {SimpleNamespace: "namespace", argparse.Namespace: "arguments"}
_MAPPINGS: Final = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_SEQUENCES: Final[dict[type, str]] = {list: "list", tuple: "tuple", torch.Size: "size"}
_CONTAINERS: Final = frozenset({set, frozenset, collections.deque, *_MAPPINGS, *_SEQUENCES, *_NAMESPACES})


class Decoder:
    """Turns JSON of ``Encoder`` into values; ``source`` is the file, for errors.

    ``fetch`` gives a stored tensor by its name. ``objects``: the ids of the nodes that are objects of the state, or hold some;
    they are not decoded as a whole.
    """

    def __init__(self, source: str, fetch: Callable[[str], torch.Tensor], objects: Container[int] = ()) -> None:
        self.source = source
        self._fetch = fetch
        self._objects = objects

    def holds_object(self, data: Json) -> bool:
        """Whether a node is, or holds, what can only be filled into an object of the state."""
        return id(data) in self._objects

    def decode(self, data: Json) -> Any:
        """The value; raises where ``data`` is no such JSON."""
        try:
            return self._decode(data, 0)
        except MALFORMED as error:
            raise CheckpointError(
                f"{self.source}: a value that accel did not write ({type(error).__name__}: {error})"
            ) from error

    def _decode(self, data: Json, depth: int) -> Any:
        if depth > 2 * DEPTH:
            raise ValueError("nested too deeply")
        if isinstance(data, list):
            return [item if _is_json(item) else self._decode(item, depth + 1) for item in data]
        if not isinstance(data, dict):
            if type(data) is float and not math.isfinite(data):
                raise ValueError("a number beyond those of 64 bits")
            return data
        if TAG not in data:
            return {key: item if _is_json(item) else self._decode(item, depth + 1) for key, item in data.items()}
        return self._tagged(data, depth)

    def _tagged(self, data: Json, depth: int) -> Any:
        tag = data[TAG]
        if tag == "tensor":
            return self._tensor(data)
        if tag in ("ndarray", "numpy"):
            return self._array(data, scalar=tag == "numpy")
        if tag in _DECODERS:
            return _DECODERS[tag](data)
        items = self._decode(items_in(data), depth)
        if tag == "defaultdict":
            factory = None if data["factory"] is None else _FACTORIES[data["factory"]]
            return collections.defaultdict(factory, _pairs(items))
        return _COLLECTIONS[tag](items)

    def _tensor(self, data: Json) -> torch.Tensor:
        if "name" in data:
            tensor = self._fetch(_of(str, data, "name"))
        else:
            dtype, content, shape = BY_NAME[data["dtype"]], _bytes(data), _shape(data)
            if math.prod(shape) * ITEM_BYTES[data["dtype"]] != len(content):
                raise ValueError("a tensor whose shape does not fit its bytes")
            tensor = from_bytes(content, dtype, shape)
        grad, kind = data.get("requires_grad", False), data.get("class", "")
        if type(grad) is not bool or kind not in ("", "Parameter"):
            raise ValueError(f"a tensor of class {kind!r} with requires_grad {grad!r}")
        return torch.nn.Parameter(tensor, grad) if kind else tensor.requires_grad_(grad)

    def _array(self, data: Json, *, scalar: bool) -> Any:
        import numpy

        stored = self._fetch(_of(str, data, "name")) if "name" in data else None
        if not _NUMPY.fullmatch(_of(str, data, "dtype")):  # numpy would evaluate some of what it does not know
            raise ValueError(f"numpy dtype {data['dtype']!r}")
        kind: Any = numpy.dtype(data["dtype"])
        shape = () if scalar else _shape(data)
        content = b"" if stored is not None else _bytes(data)
        if math.prod(shape) * kind.itemsize != (len(content) if stored is None else stored.nbytes):
            raise ValueError("an array whose shape does not fit its bytes")
        if stored is not None:
            content = to_bytes(stored)
        if scalar and kind.kind in "SU":  # an array would take zeros off the end
            order = "be" if data["dtype"][0] == ">" else "le"
            return kind.type(content if kind.kind == "S" else content.decode(f"utf-32-{order}", "surrogatepass"))
        array: Any = numpy.ndarray(shape, kind, buffer=bytearray(content) if content else None)
        return array[()] if scalar else array


def _of(kind: type, data: Json, key: str) -> Any:
    found = data[key]
    if type(found) is not kind:
        raise ValueError(f"{key!r} is a {type(found).__name__}, and not a {kind.__name__}")
    return found


def items_in(data: Json) -> list[Json]:
    """What a container's JSON has of its items; a ValueError where that is no list."""
    return list(_of(list, data, "items"))


def _bytes(data: Json) -> bytes:
    return base64.b64decode(_of(str, data, "data"), validate=True)


def _shape(data: Json) -> tuple[int, ...]:
    shape = _of(list, data, "shape")
    if not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise ValueError(f"shape {shape!r}")
    return tuple(shape)


def _known_dtype(data: Json) -> torch.dtype:
    dtype = vars(torch).get(data["value"])  # getattr would import some of torch's modules
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {data['value']!r}")
    return dtype


def _arguments(items: dict[str, Any]) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(items)  # "self" is a name too
    return made


def _numbers(items: Sequence[Any], count: int, *kinds: type) -> Sequence[Any]:
    if len(items) != count or not all(type(item) in kinds for item in items):
        raise ValueError(f"expected {count} numbers")
    return items


def members(items: list[Any]) -> list[Any]:
    """Return the keys of a dict or the members of a set. ValueError if two are equal."""
    if len(set(items)) != len(items):
        raise ValueError("a set or dict has the same key twice")
    return items


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """A dict of its items."""
    if not all(type(item) is list and len(item) == 2 for item in items):
        raise ValueError("the items of a dict are no pairs")
    members([key for key, _ in items])
    return dict(items)


_DECODERS: Final[dict[str, Callable[[Json], Any]]] = {
    "int": lambda d: int(_of(str, d, "value"), 16),
    "float": lambda d: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[d["value"]],
    "bytes": _bytes,
    "bytearray": lambda d: bytearray(_bytes(d)),
    "range": lambda d: range(*_numbers(d["items"], 3, int)),
    "dtype": _known_dtype,
    "device": lambda d: torch.device(_of(str, d, "value")),
    "path": lambda d: Path(_of(str, d, "value")),
}
_COLLECTIONS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "tuple": tuple,
    "size": torch.Size,
    "deque": lambda items: collections.deque(*items),
    "set": lambda items: set(members(items)),
    "frozenset": lambda items: frozenset(members(items)),
    "complex": lambda items: complex(*_numbers(items, 2, float, int)),
    "dict": _pairs,
    "OrderedDict": lambda items: collections.OrderedDict(_pairs(items)),
    "Counter": lambda items: collections.Counter(_pairs(items)),
    "namespace": lambda items: SimpleNamespace(**_pairs(items)),
    "arguments": lambda items: _arguments(_pairs(items)),
}
