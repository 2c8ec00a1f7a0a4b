"""Weights alone, as other libraries have them: read as a checkpoint is, and written of a model in one, for them to load."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from ..errors import CheckpointError
from ..precision import dtype_of
from ..process.control import locked
from . import folder, record
from .background import background
from .match import children_of
from .reader import Reader
from .record import FILE_NAME, Record, Stored
from .safetensors import (
    BY_NAME,
    ITEM_BYTES,
    METADATA,
    NAMES,
    Entry,
    Header,
    build_header,
    memory,
    no_duplicates,
)
from .shards import Written, batched, checksum
from .state import State, component, join, leaves
from .steps import beside_others, log_end, on_running_ranks, parsing
from .storage import File, Write, read_whole, storage_of
from .values import TAG, Decoder, Json, place

#: What a library calls its files: ``<stem>.safetensors``; or parts, ``<stem>-00001-of-00002.safetensors``, and their index.
STEMS: Final = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
_MAX_INDEX: Final = 1 << 28


def whole_file(stem: str) -> str:
    """The file of all weights."""
    return f"{stem}.safetensors"


def index_file(stem: str) -> str:
    """The file that says which part has which tensor."""
    return f"{stem}.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a load reads from."""

    directory: str
    record: Record
    digits: str  # equal where two ranks see the same
    headers: Sequence[Header] | None = None  # of the files, where another library wrote them, without checksums

    @property
    def path(self) -> str:
        """What errors name."""
        return self.directory if self.headers is not None else os.path.join(self.directory, record.NAME)


def open_checkpoint(directory: str, state: Any) -> Checkpoint:
    """A checkpoint, or weights for the one model of ``state``; raises where there is neither, or it is damaged."""
    if not is_weights_alone(directory):
        whole, digits = record.read(directory)
        return Checkpoint(directory, whole, digits)
    models = [] if state is None else _models(state)
    if state is not None and len(models) != 1:
        found = ", ".join(path for _, path in models) or "none"
        raise CheckpointError(
            f"{directory} has the weights of one model, and the state has {len(models)} models ({found}): give one, such as "
            "{'model': model}"
        )
    name = models[0][0] if models else "model"
    files, digits = read_weights(directory)
    tensors: dict[str, Stored] = {}
    for number, (_, _, entries) in enumerate(files):
        for key, e in entries.items():
            tensors[f"{name}/{key}"] = Stored(e.dtype, e.shape, ((number, 0, e.count, 1),) if e.count else ())
    headers = [Header(h.size, {f"{name}/{key}": told for key, told in h.entries.items()}) for _, h, _ in files]
    values = _values(state, models[0][1]) if models else {}
    written = [file for file, *_ in files]
    whole = Record(id="", time=0.0, world_size=1, files=written, tensors=tensors, values=values)
    return Checkpoint(directory, whole, digits, headers)


def present(directory: str) -> list[str]:
    """Which of the names that other libraries read weights by are in a directory."""
    names = [name for stem in STEMS.values() for name in (whole_file(stem), index_file(stem))]
    return [name for name in names if storage_of(directory).exists(os.path.join(directory, name))]


def is_named(path: str) -> bool:
    """Whether a path is that of a file of weights, or of an index, itself: under any name, such as a variant's."""
    return (
        path.endswith((".safetensors", ".json"))
        and os.path.basename(path) != record.NAME
        and storage_of(path).exists(path)
        and not storage_of(path).is_directory(path)
    )


def is_weights_alone(directory: str) -> bool:
    """True if a directory has weights under other libraries' names, and no checkpoint."""
    return not record.exists(directory) and (is_named(directory) or bool(present(directory)))


def _models(state: Any) -> list[tuple[str, str]]:
    """Name and path of each module in nested dicts."""
    modules = [(one.name, one.path) for one in leaves(State(state).tree) if isinstance(one.value, nn.Module)]
    return [(name, path) for name, path in modules if not any(part.startswith("[") for part in name.split("/"))]


def _values(value: Any, target: str, path: str = "state") -> Any:
    """The nested dict in which only the model is."""
    if path == target:
        return {TAG: "module", "extra": {}}
    kept: dict[str, Json] = {}
    for key, item in value.items():
        where = place(path, key)
        if isinstance(key, str) and target.startswith(where) and isinstance(item, dict | nn.Module):
            kept[key] = _values(item, target, where)
    return kept


# -- the files --------------------------------------------------------------------------------------------------------


#: A file by its path, its header, and the entries that count.
_File = tuple[Written, Header, dict[str, Entry]]


def read_weights(path: str) -> tuple[list[_File], str]:
    """The files, and a checksum of all headers; raises where one is missing, damaged, or not as the index says."""
    directory, names = (os.path.dirname(path), [os.path.basename(path)]) if is_named(path) else (path, present(path))
    if len(names) > 1:
        raise CheckpointError(
            f"{directory} has {' and '.join(names)}, of which libraries take different ones: name the file that counts, or "
            "remove the other"
        )
    if names[0].endswith(".safetensors"):
        file, own = _read_file(directory, names[0])
        return [file], own
    content = read_whole(_real(directory, names[0]), _MAX_INDEX, "an index")
    by_file: dict[str, set[str]] = {}
    for key, name in _weight_map(content, os.path.join(directory, names[0])).items():
        by_file.setdefault(name, set()).add(key)
    found, digits = [], [checksum(content)]
    for name, keys in sorted(by_file.items()):
        (written, header, entries), own = _read_file(directory, name)
        if lacking := sorted(keys - entries.keys()):
            raise CheckpointError(f"{written.name}: has no {', '.join(lacking[:5])}, which {names[0]} says is in it")
        found.append((written, header, {key: entry for key, entry in entries.items() if key in keys}))
        digits.append(own)
    return found, checksum("".join(digits).encode())


def _weight_map(content: bytes, path: str) -> Mapping[str, str]:
    with parsing(f"{path} is no index of weights"):
        places = json.loads(content, object_pairs_hook=no_duplicates)["weight_map"]
        for file in places.values():
            if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
                raise ValueError(f"{file!r} is not a name of a file of this directory")
        if not places:
            raise ValueError("it names no tensor")
        return dict(places)


def _real(directory: str, name: str) -> str:
    """The path of a file of a directory, behind links: hubs' caches have them, and weights on a disk that many share."""
    return storage_of(directory).real(os.path.join(directory, name))


def _read_file(directory: str, name: str) -> tuple[_File, str]:
    path = _real(directory, name)
    entries: dict[str, Entry] = {}
    forms, end = {}, 0
    with storage_of(path).open(path, None) as file, _header(file) as header:
        for key in header.offset_keys():
            described = header.get_slice(key)
            dtype, shape = described.get_dtype(), tuple(described.get_shape())
            if dtype not in BY_NAME:
                raise CheckpointError(f"{path}: {key!r} has dtype {dtype}, which accel cannot load")
            entry = entries[key] = Entry(key, dtype, shape, 0, math.prod(shape))
            forms[key], end = entry.described(end)[1], end + entry.nbytes
    # The package has made sure that the data fills the rest of the file.
    found = Written(path, file.size, ()), Header(file.size - end, forms), entries
    return found, checksum(repr((file.size, forms)).encode())


@contextlib.contextmanager
def _header(file: File) -> Iterator[Any]:
    """Context: what the package safetensors reads in a header; of a file elsewhere in a copy that has nothing behind it."""
    try:
        library: Any = importlib.import_module("safetensors")
        if not hasattr(library.safe_open, "offset_keys"):
            raise ImportError(f"safetensors {library.__version__} does not tell in which order tensors lie")
    except ImportError as error:
        raise CheckpointError(
            f"{file.path}: its header is read by the package safetensors, 0.6.2 or newer: pip install -U safetensors ({error})"
        ) from error
    with contextlib.ExitStack() as stack:
        path = file.path
        if not os.path.exists(path):
            copy = stack.enter_context(tempfile.NamedTemporaryFile())
            copy.write(file.read_header())
            copy.truncate(file.size)
            copy.flush()
            path = copy.name
        try:
            header = stack.enter_context(library.safe_open(path, framework="pt"))
        except library.SafetensorError as error:
            raise CheckpointError(f"{file.path} is not a whole safetensors file ({error})") from error
        yield header


# -- Which tensors of a checkpoint an export writes, and into which files. Writes nothing ------------------------------

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Export:
    """What is written: the entries of each file, in its order; ``prefix`` stands before their names in the checkpoint."""

    reader: Reader
    prefix: str
    files: list[list[Entry]]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entries in self.files for entry in entries)


def _plan(directory: str, name: str | None, max_shard_size: int | str, dtype: str | torch.dtype | None) -> Export:
    limit, wanted = _parse_size(max_shard_size), _parse_dtype(dtype)
    found, _ = record.read(directory)
    folder.check_sizes(directory, found)
    chosen, node = choose(directory, found, name)
    if extra := node.get("extra"):
        raise CheckpointError(
            f"{directory}: {', '.join(list(extra)[:5])} of the model {chosen!r} is state that is no tensor (get_extra_state), "
            "which these files cannot hold"
        )
    own = f"{chosen}/"
    entries = []
    for full, stored in found.tensors.items():
        if not full.startswith(own):
            continue
        kind = BY_NAME[stored.dtype]
        if full == own + METADATA:
            raise CheckpointError(f"{directory}: {full} is no name that a tensor of these files can have")
        if kind.is_complex:
            raise CheckpointError(f"{directory}: {full} is {kind}, which these files cannot hold")
        written_as = wanted if wanted and kind.is_floating_point and kind.itemsize > 1 else stored.dtype
        entries.append(Entry(full[len(own) :], written_as, stored.shape, 0, stored.numel))
    if not entries:
        raise CheckpointError(
            f"{directory}: the model {own[:-1]!r} has no tensors in it (they were filtered when it was saved)"
        )
    return Export(Reader(directory, found), own, _divide(entries, limit))


def _divide(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """The entries of each file, in order: as many as fit, wide elements first so that all are aligned."""
    files = batched(entries, lambda entry: entry.nbytes, limit)
    return [sorted(file, key=lambda entry: -ITEM_BYTES[entry.dtype]) for file in files]


def _parse_size(size: int | str) -> int:
    """``"5GB"`` (10^9 each) or ``"5GiB"`` (2^30) in bytes; raises where it is no size."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        power = " KMGT".index(match[2].upper() or " ")
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    elif isinstance(size, str) and size.isdecimal():
        size = int(size)
    if type(size) is not int or size < 1:
        raise CheckpointError(f"max_shard_size={size!r}: expected a number of bytes, or text such as '5GB'")
    return size


def _parse_dtype(dtype: str | torch.dtype | None) -> str | None:
    if dtype is None:
        return None
    found = dtype_of(dtype)
    if found is None or not found.is_floating_point or found not in NAMES:
        raise CheckpointError(f"dtype={dtype!r}: expected a floating-point dtype such as 'bfloat16'")
    return NAMES[found]


def models_in(node: Json, decoder: Decoder, name: str = "") -> Iterator[tuple[str, dict[str, Json]]]:
    """The models of a saved state, with their names."""
    if isinstance(node, dict) and node.get(TAG) == "module":
        yield name, node
        return
    for key, child in (children_of(node, decoder) or {}).items():
        yield from models_in(child, decoder, join(name, component(key)))


def choose(directory: str, found: Record, name: str | None) -> tuple[str, dict[str, Json]]:
    """The name and the node of the model that is asked for, or of the only one; raises where it is none, or one of several."""

    def refuse(tensor: str) -> torch.Tensor:
        raise CheckpointError(f"{directory}: the key of a dict is the tensor {tensor!r}")

    decoder = Decoder(os.path.join(directory, record.NAME), refuse)
    models = dict(models_in(found.values, decoder))
    known = ", ".join(map(repr, models)) or "none"
    if not models:
        raise CheckpointError(f"{directory} has no model")
    if name is None and len(models) != 1:
        raise CheckpointError(
            f"{directory} has {len(models)} models ({known}): say which one with name={next(iter(models))!r}"
        )
    chosen = next(iter(models)) if name is None else name
    if chosen not in models:
        raise CheckpointError(f"{directory} has no model {name!r}; it has {known}")
    return chosen, models[chosen]


_PIECE: Final = 32 << 20  # bytes on their way
_STEM: Final = "|".join(STEMS.values())
_TEMPORARY: Final = re.compile(rf"\.({_STEM})[^/]*\.[0-9a-f]{{12}}\.tmp")
_SHARD: Final = re.compile(rf"({_STEM})-\d{{5,}}-of-\d{{5,}}\.safetensors")


@locked
def export(
    dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    max_shard_size: int | str = "50GB",
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    library: Literal["transformers", "diffusers"] = "transformers",
) -> None:
    """Write a model of the checkpoint ``dir`` as ``out/model.safetensors``, or in parts with ``model.safetensors.index.json``.

    That is what transformers and vLLM load, and with ``library="diffusers"`` it has the names that diffusers loads
    (``diffusion_pytorch_model.safetensors``); a ``config.json`` of theirs belongs beside it. Tied weights are there once,
    under the first of their names. Needs no process group; where accel runs on several ranks, rank 0 writes, and all wait and see
    its error.

    Args:
        dir: a checkpoint.
        out: a directory, made if need be. The files come into it whole, the index last.
        name: which model of the state that was saved, such as ``"model"`` or ``"gan/generator"``; needed where it has several.
        max_shard_size: of a file, in bytes, or as text such as ``"5GB"``; a tensor is never divided.
        dtype: convert floating-point tensors to it, such as ``"bfloat16"``.
        overwrite: replace weights that ``out`` has, of either name.
        library: whose names the files get.

    Raises:
        CheckpointError: the checkpoint is damaged, has no such model, or ``out`` cannot be written or has weights already.
    """

    def write() -> None:
        background.wait()
        with folder.reporting_replacement(dir):
            planned = _plan(folder.absolute(dir), name, max_shard_size, dtype)
            _export(planned, folder.absolute(out), library, overwrite)

    def act(rank: int, world: int) -> None:
        if rank == 0:
            write()

    def look() -> dict[str, object]:
        places = {"dir": folder.named(dir), "out": folder.named(out)}
        asked = {"max_shard_size": _parse_size(max_shard_size), "dtype": _parse_dtype(dtype)}
        return {**places, **asked, "name": name, "overwrite": overwrite, "library": library}

    on_running_ranks("accel.export", look, act)


def _export(planned: Export, out: str, library: str, overwrite: bool) -> None:
    if library not in STEMS:
        raise CheckpointError(f"library={library!r}: expected {' or '.join(map(repr, STEMS))}")
    if record.exists(out):
        raise CheckpointError(f"{out} is a checkpoint itself: export into another directory")
    if (there := _weights(out)) and not overwrite:
        known = f"{out} has weights already ({', '.join(there[:3])}); overwrite=True replaces them"
        raise CheckpointError(known + beside_others())
    storage = storage_of(out)
    storage.make(out)
    claim = storage.claim(out)
    try:
        if claim.exclusive:
            for left in filter(_TEMPORARY.fullmatch, storage.names(out)):
                storage.remove(os.path.join(out, left))
        begin = time.monotonic()
        _write(planned, out, STEMS[library])
        log_end(out, "exported", planned.nbytes, begin)
    finally:
        claim.remove()


# -- writing ----------------------------------------------------------------------------------------------------------


def _weights(out: str) -> list[str]:
    """The files of an export that are there, the one that names the others first."""
    names = storage_of(out).names(out) if storage_of(out).is_directory(out) else []
    return present(out)[::-1] + sorted(n for n in names if _SHARD.fullmatch(n))


def _write(planned: Export, out: str, stem: str) -> None:
    count, storage = len(planned.files), storage_of(out)
    names = [whole_file(f"{stem}-{i + 1:05d}-of-{count:05d}" if count > 1 else stem) for i in range(count)]
    contents: dict[str, Callable[[Write], bytes]] = {
        name: functools.partial(_write_file, planned, entries)
        for name, entries in zip(names, planned.files, strict=True)
    }
    if count > 1:
        contents[index_file(stem)] = functools.partial(_write_index, planned, names)
    temporaries = {name: os.path.join(out, f".{name}.{secrets.token_hex(6)}.tmp") for name in contents}
    try:
        for name, content in contents.items():
            storage.create(temporaries[name], 0, 0, content)
        _exchange(out, temporaries)
    except BaseException:
        for path in temporaries.values():
            with contextlib.suppress(OSError):
                storage.remove(path)
        raise


def _write_file(planned: Export, entries: Sequence[Entry], write: Write) -> bytes:
    write(memoryview(build_header(entries, {}, align=8)))
    pieces = []
    for entry in entries:
        name, dtype = f"{planned.prefix}{entry.name}", BY_NAME[entry.dtype]
        step = _PIECE // dtype.itemsize
        pieces += [(name, at, min(step, entry.count - at), dtype) for at in range(0, entry.count, step)]
    for piece in planned.reader.in_turn(pieces):
        write(memory(piece))
    return b""


def _write_index(planned: Export, names: Sequence[str], write: Write) -> bytes:
    files = zip(names, planned.files, strict=True)
    places = {entry.name: name for name, entries in files for entry in entries}
    count = sum(entry.count for entries in planned.files for entry in entries)
    metadata = {"total_parameters": count, "total_size": planned.nbytes}
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, indent=2)
    write(memoryview(f"{text}\n".encode()))
    return b""


def _exchange(out: str, temporaries: dict[str, str]) -> None:
    """Give the files their names, the one that readers look for last; the old ones never stand among the new."""
    storage = storage_of(out)
    storage.sync(out)
    for old in _weights(out):
        if old not in temporaries or len(temporaries) > 1:
            storage.remove(os.path.join(out, old))
    for name, path in temporaries.items():
        storage.rename(path, os.path.join(out, name))
    storage.sync(out)
