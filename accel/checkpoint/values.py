"""Python values as JSON that keeps their types, and back. Nothing here imports or calls what a file names."""

from __future__ import annotations

import argparse
import base64
import binascii
import collections
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch

from ..errors import CheckpointError
from .dtypes import BY_NAME, MAX_DIMS, NAMES, check_tensor, element_bytes, from_bytes, to_bytes

#: A JSON object with this key is not a dict, but the value of the type that it names.
TAG: Final = "!"
#: How deeply values may be nested.
DEPTH: Final = 100
#: Tensors and arrays of more bytes are stored in the shards.
INLINE_BYTES: Final = 1024

Json = Any
#: Stores a tensor under a name of its own, and returns that name.
Keep = Callable[[torch.Tensor, str], str]
_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_NUMPY: Final = re.compile(r"[<|][biufcSUMm][0-9]{1,9}(\[[0-9]*[A-Za-z\u03bc]{1,9}\])?")
_FACTORIES: Final[dict[str, Callable[[], Any]]] = {t.__name__: t for t in (list, dict, set, int, float, str, bool)}


def place(path: str, key: object) -> str:
    """The path of what ``key`` leads to in a container."""
    return f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class Encoder:
    """Turns values into JSON.

    Args:
        keep: where tensors of more than ``INLINE_BYTES`` go; None keeps all of them in the JSON.
    """

    def __init__(self, keep: Keep | None) -> None:
        self._keep = keep

    def encode(self, value: Any, path: str, depth: int = 0) -> Json:
        """The JSON of a value.

        Raises:
            CheckpointError: it cannot be stored; names the path of the leaf.
        """
        if depth > DEPTH:
            raise CheckpointError(f"{path}: nested more than {DEPTH} levels deep, or a container that holds itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _string(value, path)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _CONTAINERS:
            return self._container(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        return self._rare(value, path)

    def key(self, key: Any, path: str, depth: int = 0) -> Json:
        """The JSON of a key of the dict at ``path``.

        Raises:
            CheckpointError: it cannot be stored, or what is loaded would be another key.
        """
        here = f"the key {key!r} of {path}"
        encoded = Encoder(None).encode(key, here, depth)
        if type(key) not in (str, int) and hash(Decoder(here, _no_tensor).decode(encoded)) != hash(key):
            raise CheckpointError(f"{here} equals no other, so that what is saved under it could not be found again")
        return encoded

    def _rare(self, value: Any, path: str) -> Json:
        if type(value) in (Path, type(Path())):
            return {TAG: "path", "value": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return self._numpy(value, path, isinstance(value, numpy.generic))
        return refuse(value, path)

    def _container(self, value: Any, path: str, depth: int) -> Json:
        kind = type(value)
        if kind in _NAMESPACES:
            return {TAG: _NAMESPACES[kind], "items": self._items(vars(value), path, depth)}
        if kind is collections.deque:
            return {TAG: "deque", "items": [self.encode(list(value), path, depth + 1), value.maxlen]}
        if kind in (set, frozenset):
            # In an order that is the same on every rank.
            items = sorted((self.encode(item, path, depth + 1) for item in value), key=json.dumps)
            return {TAG: kind.__name__, "items": items}
        if kind in _SEQUENCES:
            items = [self.encode(item, place(path, i), depth + 1) for i, item in enumerate(value)]
            return items if kind is list else {TAG: _SEQUENCES[kind], "items": items}
        return self._mapping(value, path, depth)

    def _mapping(self, value: Any, path: str, depth: int) -> Json:
        kind = type(value)
        if kind is dict and all(type(key) is str for key in value) and TAG not in value:
            return {_string(k, path): self.encode(v, place(path, k), depth + 1) for k, v in value.items()}
        tagged = {TAG: kind.__name__, "items": self._items(value, path, depth)}
        if kind is collections.defaultdict:
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise CheckpointError(
                    f"{path}: a defaultdict whose factory is {factory!r} cannot be stored; use a dict"
                )
            tagged["factory"] = None if factory is None else factory.__name__
        return tagged

    def _items(self, value: Any, path: str, depth: int) -> Json:
        return [
            [self.key(key, path, depth + 1), self.encode(item, place(path, key), depth + 1)]
            for key, item in value.items()
        ]

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        check_tensor(value, path)
        if self._keep is not None and value.nbytes > INLINE_BYTES:
            return {TAG: "tensor", "name": self._keep(value.detach(), path)}
        value = value.detach().cpu().contiguous()
        return {TAG: "tensor", "dtype": NAMES[value.dtype], "shape": list(value.shape), "data": _text(to_bytes(value))}

    def _numpy(self, value: Any, path: str, scalar: bool) -> Json:
        import numpy

        if value.dtype.kind not in "biufcSUMm":
            raise CheckpointError(f"{path}: a numpy array of dtype {value.dtype} cannot be stored without pickle")
        if not scalar and type(value) not in (numpy.ndarray, numpy.memmap):
            raise CheckpointError(
                f"{path}: a {type(value).__name__} cannot be stored as one; store the plain arrays that it consists of"
            )
        tagged: dict[str, Json] = {TAG: "numpy" if scalar else "ndarray", "dtype": value.dtype.newbyteorder("<").str}
        data = value.astype(tagged["dtype"]).tobytes()
        if not scalar:
            tagged["shape"] = list(value.shape)
        if self._keep is not None and len(data) > INLINE_BYTES:
            return {**tagged, "name": self._keep(torch.frombuffer(bytearray(data), dtype=torch.uint8), path)}
        return {**tagged, "data": _text(data)}


def _no_tensor(name: str) -> NoReturn:
    raise ValueError(f"no tensor {name!r} here")


def refuse(value: Any, path: str) -> NoReturn:
    """Say that a value cannot be stored, and what could be."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise CheckpointError(
        f"{path} is a {kind}, which cannot be stored without pickle; store what it consists of (numbers, strings, "
        "bytes, dicts, lists, tuples, sets, tensors, numpy arrays), or give it state_dict() and load_state_dict()"
    )


def _string(value: str, path: str) -> str:
    if not value.isascii() and _PAIR.search(value):
        raise CheckpointError(f"{path}: text with a surrogate pair cannot be stored: JSON has one character for it")
    return value


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
    """Turns JSON of ``Encoder`` into values.

    Args:
        source: the file, for errors.
        fetch: gives a kept tensor by its name.
    """

    def __init__(self, source: str, fetch: Callable[[str], torch.Tensor]) -> None:
        self.source = source
        self._fetch = fetch

    def decode(self, data: Json) -> Any:
        """The value.

        Raises:
            CheckpointError: it is not such JSON.
        """
        try:
            return self._decode(data, 0)
        except (KeyError, ValueError, TypeError, OverflowError, RuntimeError, AttributeError, binascii.Error) as error:
            raise CheckpointError(
                f"{self.source}: a value that accel did not write ({type(error).__name__}: {error})"
            ) from error

    def _decode(self, data: Json, depth: int) -> Any:
        if depth > 2 * DEPTH:
            raise ValueError("nested too deeply")
        if isinstance(data, list):
            return [self._decode(item, depth + 1) for item in data]
        if not isinstance(data, dict):
            return data
        if TAG not in data:
            return {key: self._decode(item, depth + 1) for key, item in data.items()}
        return self._tagged(data, depth)

    def _tagged(self, data: Json, depth: int) -> Any:
        tag = data[TAG]
        if tag in ("tensor", "ndarray", "numpy"):
            return self._array(tag, data)
        if tag in _DECODERS:
            return _DECODERS[tag](data)
        items = [self._decode(item, depth + 1) for item in data["items"]]
        if tag == "defaultdict":
            return collections.defaultdict(None if data["factory"] is None else _FACTORIES[data["factory"]], items)
        return _COLLECTIONS[tag](items)

    def _array(self, tag: str, data: Json) -> Any:
        if tag == "tensor":
            if "name" in data:
                return self._fetch(data["name"])
            dtype, content = BY_NAME[data["dtype"]], _bytes(data)
            if math.prod(_shape(data)) * element_bytes(data["dtype"]) != len(content):
                raise ValueError("a tensor whose shape does not fit its bytes")
            return from_bytes(content, dtype, _shape(data))
        import numpy

        content = to_bytes(self._fetch(data["name"])) if "name" in data else _bytes(data)
        if not _NUMPY.fullmatch(data["dtype"]):  # numpy would evaluate some of what it does not know
            raise ValueError(f"numpy dtype {data['dtype']!r}")
        kind: Any = numpy.dtype(data["dtype"])
        if kind.itemsize == 0:  # of an empty text, whose bytes are those of one character
            kind = numpy.dtype(f"{data['dtype'][:2]}1")
        shape = () if tag == "numpy" else _shape(data)
        if math.prod(shape) * kind.itemsize != len(content):
            raise ValueError("an array whose shape does not fit its bytes")
        array: Any = numpy.ndarray(shape, kind, buffer=bytearray(content) if content else None)
        return array[()] if tag == "numpy" else array


def _bytes(data: Json) -> bytes:
    return base64.b64decode(data["data"], validate=True)


def _shape(data: Json) -> tuple[int, ...]:
    shape = data["shape"]
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMS
        or not all(type(n) is int and 0 <= n < 2**48 for n in shape)
    ):
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


_DECODERS: Final[dict[str, Callable[[Json], Any]]] = {
    "int": lambda d: int(d["value"], 16),
    "float": lambda d: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[d["value"]],
    "bytes": _bytes,
    "bytearray": lambda d: bytearray(_bytes(d)),
    "range": lambda d: range(*d["items"]),
    "dtype": _known_dtype,
    "device": lambda d: torch.device(d["value"]),
    "path": lambda d: Path(d["value"]),
}
_COLLECTIONS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "tuple": tuple,
    "size": torch.Size,
    "deque": lambda items: collections.deque(*items),
    "set": set,
    "frozenset": frozenset,
    "complex": lambda items: complex(*items),
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda items: collections.Counter(dict(items)),
    "namespace": lambda items: SimpleNamespace(**dict(items)),
    "arguments": lambda items: _arguments(dict(items)),
}
