"""The record: one JSON file that names everything in a checkpoint. A checkpoint exists once its record does."""

from __future__ import annotations

import json
import math
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, Final

from ..errors import CheckpointError
from ..shard import Cuts
from .layout import Part
from .safetensors import DIGITS, ITEM_BYTES, no_duplicates
from .shards import Written, checksum, checksum_of
from .steps import explain, parsing
from .storage import RECORD, read_whole, storage_of

NAME: Final = RECORD
FORMAT: Final = "accel-checkpoint"
#: Of the format; the second has tensors that are cut into boxes, and is written only where there are some.
VERSIONS: Final = (1, 2)
#: Names that a record may give to shard files: of this folder, and hidden to nobody.
FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_START: Final = b'{"xxh3":"'
_ZEROS: Final = b"0" * DIGITS
_FIRST: Final = itemgetter(1)  # element of a part
_DAMAGED: Final = "{} is damaged: its checksum does not fit; load another checkpoint"
#: Of a record, written or read: 16,384 ranks' files take 4 MB, a tensor about 100 bytes and 25 for each range of it.
MAX_BYTES: Final = 1 << 30


#: The time of the newest record that this process knows of. The clocks of hosts differ, and a new one shall be newer.
_newest = 0.0


def later_than(time: float) -> float:
    """Note the time of a record; returns that of the newest."""
    global _newest
    _newest = max(_newest, time)
    return _newest


def next_time() -> float:
    """Of a new one."""
    return later_than(max(time.time(), _newest + 1e-3))


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor: its dtype and shape, where its elements are, in the order of its grid's line, and how it is cut."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    cuts: Cuts = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where elements ``start`` to ``stop`` of the line are: (file, first element that it holds, their number), in order."""
        at = max(bisect_right(self.parts, start, key=_FIRST) - 1, 0)
        for file, begin, count, files in islice(self.parts, at, None):
            for i in range(max(start - begin, 0) // count, min(files, -(-(stop - begin) // count))):
                yield file + i, begin + i * count, count
            if begin + count * files >= stop:
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What ``accel.json`` says."""

    id: str  # of the save, in the names of its files
    time: float  # of the commit, in seconds since 1970
    world_size: int  # how many ranks saved
    files: Sequence[Written]
    tensors: Mapping[str, Stored]  # by name
    values: Any  # the state with what is no tensor, as ``values.py`` writes it
    ranks: Sequence[Mapping[str, Any]] = field(
        default_factory=list
    )  # what each rank has of its own, by path
    #: The nodes on whose own disks accel 0.1 has left the files; else empty.
    hosts: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def encode(record: Record) -> bytes:
    """The content of the file."""
    body = {
        "format": FORMAT,
        "version": VERSIONS[any(t.cuts for t in record.tensors.values())],
        "id": record.id,
        "time": record.time,
        "world_size": record.world_size,
        "files": [{"name": f.name, "size": f.size, "header": list(f.header)} for f in record.files],
        "tensors": {
            name: {"dtype": t.dtype, "shape": list(t.shape), "parts": [list(p) for p in t.parts]}
            | ({"cuts": [list(places) for places in t.cuts]} if t.cuts else {})
            for name, t in record.tensors.items()
        },
        "values": record.values,
        "ranks": list(record.ranks),
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    content = _START + _ZEROS + b'",' + text[1:]
    if len(content) > MAX_BYTES:
        values = len(json.dumps([record.values, list(record.ranks)], separators=(",", ":")))
        raise CheckpointError(
            f"the record ({NAME}) would have {len(content):,} bytes, {values:,} of them plain values, and {MAX_BYTES:,} are the "
            "most that is read again: keep long lists of numbers as tensors or numpy arrays, which lie in files of their own"
        )
    return _START + checksum(content).encode("ascii") + content[len(_START) + DIGITS :]


def exists(directory: str) -> bool:
    """Whether a directory has a record; raises where the system does not tell."""
    try:
        storage_of(directory).size(os.path.join(directory, NAME))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(explain(error)) from error
    return True


def read(directory: str) -> tuple[Record, str]:
    """The record of a checkpoint, and its checksum; raises where there is none, or it is damaged, of another format or newer."""
    path = os.path.join(directory, NAME)
    if not exists(directory):
        raise CheckpointError(_absent(directory))
    return parse(_content(path), path)


def _content(path: str) -> bytes:
    return read_whole(path, MAX_BYTES, "the record of a checkpoint of accel")


def is_damaged(path: str) -> bool:
    """Whether a file begins as accel's records do, and is not whole; one that is whole may be of a newer version."""
    content = _content(path)
    return content.startswith(_START) and not _is_whole(content)


def _is_whole(content: bytes) -> bool:
    """True if a record has the checksum that it names."""
    end = len(_START) + DIGITS
    return (
        checksum_of([_START + _ZEROS, memoryview(content)[end:]]).encode("ascii")
        == content[len(_START) : end]
    )


def _absent(directory: str) -> str:
    storage = storage_of(directory)
    if not storage.is_directory(directory):
        file = storage.exists(directory)
        what = "is a file" if file else "does not exist"
        return f"{directory} {what}; expected the directory of a checkpoint that accel.save wrote"
    try:
        names = sorted(storage.names(directory))
    except OSError as error:
        return f"{directory}: {error.strerror}"
    inside = [name for name in names if storage.exists(os.path.join(directory, name, NAME))]
    if inside:
        return f"{directory} holds checkpoints ({', '.join(inside[-5:])}) but is none: name one, or accel.latest({directory!r})"
    return (
        f"{directory} has no {NAME}, so that it is no complete checkpoint of accel: the save did not finish, it has weights "
        "alone, as accel.export writes them (accel.load takes these), or another library wrote it; it holds "
        f"{', '.join(names[:5]) or 'nothing'}"
    )


def parse(content: bytes, path: str) -> tuple[Record, str]:
    """The record that is in these bytes, and its checksum; raises as ``read``."""
    ours, end = content.startswith(_START), len(_START) + DIGITS
    if ours and not _is_whole(content):
        raise CheckpointError(_DAMAGED.format(path))
    with parsing(f"{path} is not the record of a checkpoint of accel"):
        body = json.loads(content, object_pairs_hook=no_duplicates, parse_constant=_refuse_constant)
    if not ours or not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not the record of a checkpoint of accel: it has another format"
        )
    if body.get("version") not in VERSIONS:
        raise CheckpointError(
            f"{path} has version {body.get('version')!r} of the format, and this accel knows those to {VERSIONS[-1]}: "
            "update accel"
        )
    with parsing(f"{path} does not keep to the format of accel's checkpoints"):
        return _build(body), content[len(_START) : end].decode("ascii")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _build(body: dict[str, Any]) -> Record:
    files = []
    for file in body["files"]:
        if not FILE_NAME.fullmatch(file["name"]):
            raise ValueError(f"{file['name']!r} is not a name of a shard file of this directory")
        files.append(Written(file["name"], file["size"], tuple(file["header"])))
    sizes = list(accumulate((file.size for file in files), initial=0))
    tensors = {name: _stored(name, value, sizes) for name, value in body["tensors"].items()}
    later_than(body["time"])
    return Record(
        id=body["id"],
        time=body["time"],
        world_size=body["world_size"],
        files=files,
        tensors=tensors,
        values=body["values"],
        ranks=body["ranks"],
        hosts=[str(host["name"]) for host in body.get("hosts", [])],
    )


def _stored(name: str, value: dict[str, Any], sizes: Sequence[int]) -> Stored:
    """A tensor whose parts follow one another and fit into their files, the first n of which have ``sizes[n]`` bytes."""
    dtype, shape, at = value["dtype"], tuple(value["shape"]), 0
    parts = []
    for file, start, count, repeat in value["parts"]:
        if start != at or count < 1 or repeat < 1:
            raise ValueError(f"the parts of tensor {name!r} overlap or leave a hole")
        if count * repeat * ITEM_BYTES[dtype] > sizes[file + repeat] - sizes[file]:
            raise ValueError(f"a part of tensor {name!r} is larger than its files")
        at += count * repeat
        parts.append((file, start, count, repeat))
    if at != math.prod(shape):
        raise ValueError(
            f"tensor {name!r} has {math.prod(shape)} elements, and its parts have {at}"
        )
    return Stored(
        dtype, shape, tuple(parts), tuple(tuple(places) for places in value.get("cuts", ()))
    )
