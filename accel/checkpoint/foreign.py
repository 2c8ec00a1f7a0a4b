"""Checkpoints of other libraries, written again as accel's. Pickled files are read as ``weights_only``: nothing in them runs."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import math
import os
import pickle
import re
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch

from ..engines import ENGINES
from ..errors import CheckpointError
from ..process.control import locked
from ..shard import whole
from . import folder, record
from .background import background
from .objects import LocalRange, StateObject
from .safetensors import check_tensor
from .save import save_alone
from .steps import beside_others, naming, on_running_ranks, parsing
from .storage import reserve, storage_of
from .values import DEPTH, TAG, Encoder, Json, place
from .weights import is_weights_alone

logger = logging.getLogger("accel")

#: Makes a tensor of a shape and dtype.
NewTensor = Callable[[Sequence[int], torch.dtype], torch.Tensor]


@locked
def import_checkpoint(
    source: str | os.PathLike[str], dir: str | os.PathLike[str], *, optimizer: bool = True
) -> dict[str, list[str]]:
    """Write a checkpoint of another library as one of accel's, which ``load`` takes into any backend.

    ``source`` is a file of ``torch.save``, a directory of ``torch.distributed.checkpoint``, or one that a backend's own
    library wrote (ZeRO). Models, optimizers, tensors and plain values keep their keys; a state dict alone is ``"model"``.
    The prefixes ``module.`` and ``_orig_mod.`` of wrappers are taken off. Needs no process group; where accel
    runs on several ranks (``init``, ``setup``), rank 0 writes, and all wait and see its error.

    Args:
        source: what is read. Nothing in it is run: pickled objects other than tensors and plain values are refused.
        dir: a directory without a checkpoint.
        optimizer: take optimizers' state too.

    Returns:
        The keys that were found, under ``"models"``, ``"optimizers"``, ``"values"`` and ``"left out"``; empty but on rank 0.

    Raises:
        CheckpointError: ``source`` is none of these, is damaged, or holds what cannot be taken over rightly; names it.
    """

    def act(rank: int, world: int) -> dict[str, list[str]]:
        if rank:
            return {}
        return _convert(folder.absolute(source), folder.absolute(dir), optimizer)

    def look() -> dict[str, object]:
        return {"source": folder.named(source), "dir": folder.named(dir), "optimizer": optimizer}

    return on_running_ranks("accel.import_checkpoint", look, act)


def _convert(source: str, directory: str, optimizer: bool) -> dict[str, list[str]]:
    if record.exists(directory):
        raise CheckpointError(f"{directory} has a checkpoint already: import into another directory{beside_others()}")
    background.settle()
    workplace = storage_of(directory).workplace(directory)
    with tempfile.TemporaryDirectory(prefix=".accel-import-", dir=workplace) as scratch:
        here = storage_of(source).fetched(source, scratch)
        state, found = recognize(read(here, tensors_in(scratch)), source, optimizer=optimizer)
        save_alone(state, directory)
    return found


def read(source: str, new: NewTensor) -> Any:
    """The state as nested dicts of tensors and values; what is put together is made by ``new``."""
    if os.path.isfile(source):
        return load_pickled(source)
    if not os.path.isdir(source):
        raise CheckpointError(f"{source} does not exist")
    if os.path.isfile(os.path.join(source, _DCP_RECORD)):
        with parsing(f"{source} is no whole checkpoint of torch.distributed.checkpoint's file writer"):
            return _read_dcp(source, new)
    for engine in ENGINES.values():
        state = engine.holdings_type.read_foreign(source, load_pickled, new)
        if state is not None:
            return state
    if record.exists(source) or is_weights_alone(source):
        raise CheckpointError(f"{source} needs no import: accel.load reads it as it is")
    raise CheckpointError(
        f"{source} is no checkpoint that accel knows: expected a file of torch.save, a directory of "
        "torch.distributed.checkpoint (with .metadata), or one of a backend's own library"
    )


def load_pickled(path: str, inert: Sequence[str] = ()) -> Any:
    """What ``torch.save`` wrote, its tensors mapped from the file where they can be; refuses pickled objects, by name.

    ``inert`` are classes, by their full names, that are read as objects which hold their data and do nothing.
    """
    with parsing(f"{path} is no whole file of torch.save"):
        return _unpickled(path, path, inert)


def _unpickled(file: Any, name: str, inert: Sequence[str]) -> Any:
    zipped = zipfile.is_zipfile(file)
    if zipped:
        _refuse_damage(file, name)
    if not isinstance(file, str):
        file.seek(0)
    allowed: list[Any] = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in inert]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(
                file, map_location="cpu", weights_only=True, mmap=(zipped and isinstance(file, str)) or None
            )
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError("it is cut short") from error
    except pickle.UnpicklingError as error:
        objects: list[str] = []
        with contextlib.suppress(Exception):
            objects = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - set(inert))
        if not objects:
            raise CheckpointError(f"{name} is no file of torch.save with tensors and plain values only") from error
        raise CheckpointError(
            f"{name} holds pickled objects, which could run code when they are read ({', '.join(objects[:5])}): save it again "
            "with tensors and plain values only"
        ) from error


def _refuse_damage(file: Any, name: str) -> None:
    """Compare the checksums that ``torch.save`` writes, and ``torch.load`` does not read."""
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(
            f"{name} is damaged: {damaged} in it has another checksum (CRC32) than was written. If it was written with "
            "torch.serialization.set_crc32_options(False), torch.load it and torch.save it again without that"
        )


class Inert:
    """A pickled object of a class that is not to be used: its arguments and state, and nothing else."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def tensors_in(directory: str) -> NewTensor:
    """What makes tensors of zeros in files of a directory, so that they need not fit into memory."""
    numbers = itertools.count()

    def new(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        numel = math.prod(shape)
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        path = os.path.join(directory, str(next(numbers)))
        with naming(path), open(path, "xb") as file:
            reserve(file.fileno(), numel * dtype.itemsize)  # writing to its memory on a full disk would end the process
        return torch.from_file(path, shared=True, size=numel, dtype=dtype).view(tuple(shape))

    return new


# -- Directories of torch.distributed.checkpoint, read without its pickles: what they name becomes inert objects --------

#: What names everything else in such a directory.
_DCP_RECORD: Final = ".metadata"
_DCP_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def _read_dcp(directory: str, new: NewTensor) -> dict[str, Any]:
    with open(os.path.join(directory, _DCP_RECORD), "rb") as file:
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
            raise ValueError(f"a part of {name} is not what {_DCP_RECORD} says")
        box = tuple(slice(at, at + length) for at, length in zip(offsets, sizes, strict=True))
        whole[box].copy_(part)
        if seen is not None:
            seen[box] = True
    if seen is not None and not bool(seen.all()):
        raise ValueError(f"the parts of {name} overlap or leave a hole")
    return whole


def _file(info: Mapping[str, Any]) -> str:
    name = info["relative_path"]
    if not isinstance(name, str) or not _DCP_FILE.fullmatch(name):
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
        if not 0 <= offset <= offset + length <= os.path.getsize(path):
            raise ValueError(f"{name} lies beyond the end of {path}")
        file.seek(offset)
        return _unpickled(io.BytesIO(file.read(length)), f"{path}: {name}", ())


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
        return type(name.rpartition(".")[2], (Inert,), {})


# -- What is read as a state that accel saves: which dicts are models and optimizers, told by what is in them -----------

_PREFIXES: Final = ("module.", "_orig_mod.")
_EXTRA: Final = "_extra_state"


def recognize(state: Any, source: str, *, optimizer: bool) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The state to save, and the paths of what was found; refuses what is no dict, and optimizers' state that does not fit."""
    found: dict[str, list[str]] = {"models": [], "optimizers": [], "values": [], "left out": []}
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{source} holds a {type(state).__name__}; expected a dict with a state dict in it")
    if is_model(state):
        state = {"model": state}
    taken = {key: _recognize(value, str(key), source, optimizer, found, 0) for key, value in state.items()}
    return {key: value for key, value in taken.items() if value is not _LEFT_OUT}, found


_LEFT_OUT: Final = object()


def _recognize(value: Any, path: str, source: str, optimizer: bool, found: dict[str, list[str]], depth: int) -> Any:
    if depth > DEPTH:
        raise CheckpointError(f"{source}: {path} is nested more than {DEPTH} levels deep")
    if is_optimizer(value):
        found["optimizers" if optimizer else "left out"].append(path)
        with parsing(f"{source}: the optimizer's state {path} cannot be taken over; optimizer=False leaves it out"):
            return _optimizer(value) if optimizer else _LEFT_OUT
    if _is_flattened(value):
        if optimizer:
            raise CheckpointError(
                f"{source}: {path} is an optimizer's state that was flattened (flatten_optimizer_state_dict=True), in which "
                "accel does not know the parameters' names from the keys: save it without, or optimizer=False leaves it out"
            )
        found["left out"].append(path)
        return _LEFT_OUT
    if is_model(value):
        found["models"].append(path)
        return _model(value, f"{source}: {path}")
    if type(value) is dict or (isinstance(value, list | tuple) and type(value) in (list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        taken = [(k, _recognize(v, place(path, k), source, optimizer, found, depth + 1)) for k, v in items]
        if isinstance(value, dict):
            return {k: v for k, v in taken if v is not _LEFT_OUT}
        return type(value)(None if v is _LEFT_OUT else v for _, v in taken)
    found["values"].append(path)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_flattened(value: Any) -> bool:
    """Whether it is an optimizer's state dict with one key for each value."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and "." in key for key in value):
        return False
    return {key.partition(".")[0] for key in value} in ({"state", "param_groups"}, {"param_groups"})


def is_model(value: Any) -> bool:
    """Whether a value is a module's state dict: tensors by name."""
    if not isinstance(value, Mapping) or not value or not all(type(key) is str for key in value):
        return False
    tensors = [key for key in value if not key.endswith(_EXTRA)]
    return bool(tensors) and all(isinstance(value[key], torch.Tensor) for key in tensors)


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer's state dict."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return isinstance(groups, list) and all(isinstance(g, Mapping) and "params" in g for g in groups)


def _model(state: Mapping[str, Any], where_from: str) -> ImportedObject:
    prefix = ""
    while more := next((p for p in _PREFIXES if all(key.startswith(prefix + p) for key in state)), None):
        prefix += more
    if prefix:
        logger.info("the prefix %s was taken off the names of a model", prefix)
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    seen: set[tuple[Any, ...]] = set()
    for full, value in state.items():
        name = full[len(prefix) :]
        if name.rpartition(".")[2] == _EXTRA:
            extra[name] = value
            continue
        check_tensor(value, f"{where_from}, {full}")
        place_of = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        where = (*place_of, value.dtype, value.is_conj(), value.is_neg())
        if value.numel() and where in seen:
            continue  # tied: it is there under its first name
        seen.add(where)
        tensors[name] = value.detach()
    return ImportedObject("module", tensors, {"extra": extra})


def _optimizer(state: Mapping[str, Any]) -> ImportedObject:
    """Names are the state's own where it has some; else parameters are numbered, in the order of the groups."""
    groups: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    given = [n for g in state["param_groups"] for n in g.get("param_names", g["params"])]
    named = bool(given) and all(isinstance(name, str) for name in given)
    for group in state["param_groups"]:
        labels = group.get("param_names", group["params"]) if named else group["params"]
        for key, label in zip(group["params"], labels, strict=True):
            names[str(key)] = label if named else str(len(names))
        params = [names[str(key)] for key in group["params"]]
        groups.append({**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": params})
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for key, entries in state["state"].items():
        if str(key) not in names:
            raise ValueError(f"it has state of {key!r}, which is in no group")
        name = names[str(key)]
        rest[name] = {}
        number = all(v.dim() == 0 for v in entries.values() if isinstance(v, torch.Tensor))
        for what, value in entries.items():
            if isinstance(value, torch.Tensor) and (value.dim() or (number and what != "step")):
                tensors[f"{name}/{what}"] = value.detach()
            else:
                rest[name][what] = value
    node = {"class": "", "named": named, "groups": groups, "state": rest, "frozen": [], "scale": None}
    return ImportedObject("optimizer", tensors, node)


@final
class ImportedObject(StateObject):
    """A model or an optimizer of another library: it can only be saved. ``values`` are the rest of its node."""

    kind = "imported"

    def __init__(self, kind: str, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        super().__init__("", "")  # its place is known later
        self.node = {TAG: kind}
        self._tensors = tensors
        self._values = values

    def ranges(self) -> Iterator[LocalRange]:
        return (self.local_range(whole(name, tensor), True) for name, tensor in self._tensors.items())

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {key: encoder.encode(value, f"{self.path}.{key}") for key, value in self._values.items()}
