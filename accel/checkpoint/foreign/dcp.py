"""Directories of ``torch.distributed.checkpoint``, read without its pickles: what they name becomes inert objects."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ...errors import CheckpointError

METADATA: Final = ".metadata"
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
NewTensor = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def read(directory: str, new: NewTensor) -> dict[str, Any]:
    """The state as nested dicts; tensors are made by ``new``.

    Raises:
        CheckpointError: it is damaged, or not as DCP's file writer leaves it.
    """
    try:
        return _read(directory, new)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        EOFError,
        RuntimeError,
        pickle.PickleError,
    ) as error:
        raise CheckpointError(
            f"{directory} is no whole checkpoint of torch.distributed.checkpoint's file writer ({type(error).__name__}: {error})"
        ) from error


def _read(directory: str, new: NewTensor) -> dict[str, Any]:
    with open(os.path.join(directory, METADATA), "rb") as file:
        metadata = _Metadata(file).load().state
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata["storage_data"].items():
        offset = index.state.get("offset")
        places[index.state["fqn"], None if offset is None else tuple(offset)] = info.state
    paths = metadata.get("planner_data") or {}
    state: dict[Any, Any] = {}
    for name, described in metadata["state_dict_metadata"].items():
        facts = getattr(described, "state", None)
        if isinstance(facts, Mapping) and "chunks" in facts:
            value: Any = _tensor(directory, name, facts, places, new)
        else:
            value = _load(directory, name, places[name, None])
        _put(state, tuple(paths.get(name, (name,))), value)
    return {key: _lists(value) for key, value in state.items()}


def _tensor(
    directory: str, name: str, facts: Mapping[str, Any], places: Mapping[Any, Any], new: NewTensor
) -> torch.Tensor:
    size = tuple(facts["size"])
    dtype = facts["properties"].state[0]
    chunks = [(tuple(c.state["offsets"]), tuple(c.state["sizes"])) for c in facts["chunks"]]
    infos = [places[name, offsets] for offsets, _ in chunks]
    numels = [math.prod(sizes) for _, sizes in chunks]
    if not isinstance(dtype, torch.dtype) or any(type(n) is not int or n < 0 for n in size):
        raise ValueError(f"{name} has dtype {dtype} and size {size}")
    room = sum(os.path.getsize(os.path.join(directory, f)) for f in {_file(info) for info in infos})
    if sum(numels) != math.prod(size) or math.prod(size) * dtype.itemsize > room:
        raise ValueError(f"the parts of {name} do not make it up")
    whole = new(size, dtype)
    seen = torch.zeros(size, dtype=torch.bool, device="cpu") if len(chunks) > 1 else None
    for (offsets, sizes), info in zip(chunks, infos, strict=True):
        part = _load(directory, name, info)
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype is not dtype:
            raise ValueError(f"a part of {name} is not what {METADATA} says")
        box = tuple(slice(at, at + length) for at, length in zip(offsets, sizes, strict=True))
        whole[box].copy_(part)
        if seen is not None:
            seen[box] = True
    if seen is not None and not bool(seen.all()):
        raise ValueError(f"the parts of {name} overlap or leave a hole")
    return whole


def _file(info: Mapping[str, Any]) -> str:
    name = info["relative_path"]
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of a file of this directory")
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} was written through transforms ({info['transform_descriptors']})")
    return name


def _load(directory: str, name: str, info: Mapping[str, Any]) -> Any:
    path = os.path.join(directory, _file(info))
    if os.path.islink(path):
        raise ValueError(f"{path} is a link")
    offset, length = info["offset"], info["length"]
    with open(path, "rb") as file:
        if (
            type(offset) is not int
            or type(length) is not int
            or not 0 <= offset <= offset + length <= os.path.getsize(path)
        ):
            raise ValueError(f"{name} lies beyond the end of {path}")
        file.seek(offset)
        content = file.read(length)
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: {name} is a pickled object, which could run code when it is read: save it again without it"
        ) from error


def _put(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def _lists(value: Any) -> Any:
    """Dicts whose keys are 0, 1, 2, ... were lists."""
    if type(value) is not dict:
        return value
    parts = {key: _lists(item) for key, item in value.items()}
    if parts and all(type(key) is int for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[i] for i in range(len(parts))]
    return parts


class _Metadata(pickle.Unpickler):
    """Reads the record of a checkpoint. No class or function that it names is ever called, but sizes and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if found is torch.Size or isinstance(found, torch.dtype):
            return found
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name.rpartition(".")[2], (_Inert,), {})


class _Inert:
    """An object of the record: its arguments and state, and nothing else."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state
