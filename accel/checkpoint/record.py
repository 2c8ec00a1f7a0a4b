"""The record: a JSON file that lists a checkpoint's content. Writing it is the commit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import CheckpointError
from ..shard import Box, expanded, flattened
from . import old_format
from .layout import Run
from .shards import Written, checksum
from .steps import explain, parsing
from .storage import read_whole, storage_of

NAME: Final = "accel.json"
FORMAT: Final = "accel-checkpoint"
VERSION: Final = 3
_BEGIN: Final = f'{{"format":"{FORMAT}"'.encode()
#: A record ends with this, the checksum of all bytes before it, and ``"}``.
_END: Final = b',"xxh3":"'
_TAIL: Final = len(_END) + 16 + len(b'"}')
#: The attributes of ``Record`` that the file contains unchanged.
_PLAIN: Final = ("id", "time", "world_size", "values", "ranks")
OTHER: Final = "Load a different checkpoint, for example accel.latest(...)."


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint: its dtype, its shape, and the files with its elements."""

    dtype: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    #: For files of other libraries and old versions: each box's key, and its start in the entry.
    keys: Mapping[tuple[int, Box], tuple[str, int]] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_flat(self) -> bool:
        """True if the boxes are ranges in row-major order."""
        return all(len(run.box) == 1 for run in self.runs)

    def overlaps(self, box: Box) -> Iterable[tuple[int, Box]]:
        """Return the files and stored boxes with elements of a box."""
        boxes = expanded(box, self.shape)
        if self.is_flat:
            # If the box is not a range, such as columns, take all files in the span around it.
            boxes = iter([flattened(box, self.shape) or (span(box, self.shape),)])
        found: dict[tuple[int, Box], None] = {}
        for one in boxes:
            for run in self.runs:
                found |= dict.fromkeys(run.overlaps(one))
        return found


def span(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the range in row-major order from the first to the last element of a box."""
    first = last = 0
    for (begin, end), size in zip(box, shape, strict=True):
        first, last = first * size + begin, last * size + end - 1
    return first, last + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of ``accel.json``."""

    #: The id of the save, which is part of its file names. Empty for other libraries' files.
    id: str = ""
    #: The time of the commit, in seconds since 1970.
    time: float = 0.0
    #: The number of ranks that saved.
    world_size: int = 1
    files: Sequence[Written]
    tensors: Mapping[str, Stored]
    #: The state without its tensors, as encoded by ``values.py``.
    values: Any
    #: For each rank, the values specific to it by the name of their object.
    ranks: Sequence[Mapping[str, Any]] = field(default_factory=list)
    #: The checksum of the record. Ranks compare it to detect that they see different checkpoints.
    digits: str = ""

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def encode(record: Record) -> bytes:
    """Return the bytes of ``accel.json``."""
    body: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for name in _PLAIN:
        body[name] = getattr(record, name)
    body["files"] = files = []
    for file in record.files:
        files.append({"name": file.name, "size": file.size, "xxh3": file.checksums})
    body["tensors"] = tensors = {}
    for name, stored in record.tensors.items():
        parts = []
        for run in stored.runs:
            rule = [run.count, run.step, run.dim, run.shift] if run.count > 1 else []
            parts.append([run.file, *zip(*run.box, strict=True), *rule])
        tensors[name] = {"dtype": stored.dtype, "shape": stored.shape, "parts": parts}
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")[:-1]
    return b"".join([text, _END, checksum(text).encode("ascii"), b'"}'])


def exists(directory: str) -> bool:
    """True if a directory has a record."""
    return bool(storage_of(directory).version(os.path.join(directory, NAME)))


def is_record(path: str) -> bool:
    """True if a file starts like a record of accel. It may be damaged."""
    with storage_of(path).open(path) as file:
        return file.read(0, min(len(_BEGIN), file.size)).startswith((_BEGIN, old_format.BEGIN))


def read(directory: str) -> Record:
    """Return the record of a checkpoint, or raise if it is missing, damaged or too new."""
    path = os.path.join(directory, NAME)
    try:
        if not exists(directory):
            raise CheckpointError(_absent(directory))
        return parse(read_whole(path), path)
    except OSError as error:
        raise CheckpointError(explain(error)) from error


def _absent(directory: str) -> str:
    storage = storage_of(directory)
    if not storage.is_directory(directory):
        problem = "is a file" if storage.version(directory) else "does not exist"
        return f"{directory} {problem}. Pass the directory of a checkpoint."
    for name in sorted(storage.names(directory), reverse=True):
        if exists(os.path.join(directory, name)):
            return f"{directory} contains checkpoints ({name}) but is not one. Load one of them."
    return f"{directory} has no {NAME}. Pass the directory of a checkpoint."


def parse(content: bytes, path: str) -> Record:
    """Return the record with this content, or raise like ``read``."""
    if content.startswith(old_format.BEGIN):
        digits, expected = old_format.checksums(content)
    elif content.startswith(_BEGIN):
        digits = content[-18:-2].decode("ascii", "replace")
        is_whole = content[-_TAIL:-18] == _END and content[-2:] == b'"}'
        expected = checksum(content[:-_TAIL]) if is_whole else ""
    else:
        raise CheckpointError(f"{path} was not written by accel. Load a checkpoint of accel.")
    if digits != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is wrong. {OTHER}")
    with parsing(f"{path} is not a record of accel"):
        body = json.loads(content)
        if body["version"] not in (1, 2, VERSION):
            raise CheckpointError(
                f"{path} has version {body['version']!r} of the format, but this accel reads "
                f"versions up to {VERSION}. Please update accel."
            )
        if body["version"] != VERSION:
            old_format.update(body)
        return _build(body, digits)


def _build(body: Mapping[str, Any], digits: str) -> Record:
    files = []
    for file in body["files"]:
        # A malicious record must not access files outside its directory.
        if "/" in file["name"]:
            raise ValueError(f"{file['name']!r} is not the name of a shard file")
        files.append(Written(file["name"], file["size"], tuple(file["xxh3"])))
    tensors = {}
    for name, value in body["tensors"].items():
        runs: list[Run] = []
        for file, low, high, *rule in value["parts"]:
            runs.append(Run(file, tuple(zip(low, high, strict=True)), *rule))
        keys = value.get("keys", {})
        tensors[name] = Stored(value["dtype"], tuple(value["shape"]), tuple(runs), keys)
    plain = {name: body[name] for name in _PLAIN}
    return Record(files=files, tensors=tensors, digits=digits, **plain)
