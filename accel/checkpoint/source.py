"""What a load reads from: a checkpoint, or weights alone as other libraries write them (a safetensors file, or an index)."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from torch import nn

from ..errors import CheckpointError
from . import record
from .match import objects_in
from .record import FILE_NAME, Record, Stored
from .safetensors import BY_NAME, MAX_DIMS, Entry, Header, no_duplicates
from .shards import Written, checksum
from .state import State
from .steps import parsing
from .storage import File, read_whole, storage_of
from .values import TAG, Json, place
from .verify import check_record

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
    objects: Container[int]  # the ids of the nodes of the record's values that are, or hold, objects of a state
    headers: Sequence[Header] | None = None  # of the files, where another library wrote them, without checksums

    @property
    def path(self) -> str:
        """What errors name."""
        return self.directory if self.headers is not None else os.path.join(self.directory, record.NAME)


def open_checkpoint(directory: str, state: Any) -> Checkpoint:
    """A checkpoint, or weights for the one model of ``state``; raises where there is neither, or it is damaged."""
    if not is_weights_alone(directory):
        whole, digits = record.read(directory)
        return Checkpoint(directory, whole, digits, check_record(whole, os.path.join(directory, record.NAME)))
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
    return Checkpoint(directory, whole, digits, objects_in(values), headers)


def present(directory: str) -> list[str]:
    """Which of the names that other libraries read weights by are in a directory."""
    names = [name for stem in STEMS.values() for name in (whole_file(stem), index_file(stem))]
    return [name for name in names if storage_of(directory).exists(os.path.join(directory, name))]


def is_named(path: str) -> bool:
    """Whether a path is that of a file of weights, or of an index, itself: under any name, such as a variant's."""
    return (
        path.endswith((".safetensors", ".json"))
        and storage_of(path).exists(path)
        and not storage_of(path).is_directory(path)
    )


def is_weights_alone(directory: str) -> bool:
    """Whether a directory has weights under other libraries' names, and no checkpoint; raises where its directories have some."""
    if record.exists(directory):
        return False
    if is_named(directory) or present(directory):
        return True
    try:
        inside = [
            name for name in sorted(storage_of(directory).names(directory)) if present(os.path.join(directory, name))
        ]
    except OSError:
        inside = []  # `record.read` tells
    if inside:
        raise CheckpointError(
            f"{directory} has no weights itself, but in its directories {', '.join(inside[:10])}, each for a model of its own: "
            f"name one, such as {os.path.join(directory, inside[0])!r}"
        )
    return False


def _models(state: Any) -> list[tuple[str, str]]:
    """Name and path of each module in nested dicts."""
    modules = [(name, path) for value, name, path in State(state).objects() if isinstance(value, nn.Module)]
    return [(name, path) for name, path in modules if not any(part.startswith("[") for part in name.split("/"))]


def _values(value: Any, target: str, path: str = "state") -> Any:
    """The nested dict in which only the model is."""
    if path == target:
        return {TAG: "module", "extra": {}}
    kept: dict[str, Json] = {}
    for key, item in value.items():
        below = place(path, key)
        if isinstance(key, str) and target.startswith(below) and isinstance(item, dict | nn.Module):
            kept[key] = _values(item, target, below)
    return kept


# -- the files --------------------------------------------------------------------------------------------------------


#: A file by its path, its header, and the entries that count.
_File = tuple[Written, Header, dict[str, Entry]]


def read_weights(path: str) -> tuple[list[_File], str]:
    """The files, and a checksum of all headers; raises where one is missing, damaged, elsewhere, or not as the index says."""
    directory, names = (os.path.dirname(path), [os.path.basename(path)]) if is_named(path) else (path, present(path))
    if len(names) > 1:
        raise CheckpointError(
            f"{directory} has {' and '.join(names)}, of which libraries take different ones: name the file that counts, or "
            "remove the other"
        )
    if names[0].endswith(".safetensors"):
        file, own = _read_file(directory, names[0])
        return [file], own
    content = read_whole(inside(directory, names[0]), _MAX_INDEX, "an index")
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


def inside(directory: str, name: str) -> str:
    """The path of a file of a directory; refuses a link elsewhere, but where a hub's cache keeps its files."""
    storage = storage_of(directory)
    real = storage.real(directory)
    path = storage.real(os.path.join(real, name))
    # <cache>/snapshots/<revision>, and in it the directory of a pipeline's component
    caches = [above.parent for above in PurePath(real).parents[:2] if above.name == "snapshots"]
    if os.path.dirname(path) not in (real, *(str(cache / "blobs") for cache in caches)):
        raise CheckpointError(
            f"{os.path.join(directory, name)} is a link to {path}, outside of the directory: copy the file there"
        )
    return path


def _read_file(directory: str, name: str) -> tuple[_File, str]:
    path = inside(directory, name)
    entries: dict[str, Entry] = {}
    forms, end = {}, 0
    with storage_of(path).open(path, None) as file, _header(file) as header:
        for key in header.offset_keys():
            described = header.get_slice(key)
            dtype, shape = described.get_dtype(), tuple(described.get_shape())
            if dtype not in BY_NAME or len(shape) > MAX_DIMS:
                raise CheckpointError(
                    f"{path}: {key!r} has dtype {dtype} and {len(shape)} dimensions, which accel cannot load"
                )
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
