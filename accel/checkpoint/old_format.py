"""Records and shard files of versions 1 and 2, as accel 0.1 wrote them.

There a tensor was a line of elements: in row-major order or, if it had cuts, block after block. The
record had the checksums of the headers, and each header had those of its data.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..errors import CheckpointError
from ..shard import Box, divided, shape_of
from .layout import Run
from .record import OTHER, DamagedRecordError, Record, Stored, check_version, checked_name
from .shards import METADATA, Written, checksum
from .steps import parsing
from .storage import CHUNK

_START: Final = b'{"xxh3":"'
_ZEROS: Final = b"0" * 16
_DIGITS: Final = slice(len(_START), len(_START) + 16)


def is_old(content: bytes) -> bool:
    """True for a record of version 1 or 2."""
    return content.startswith(_START)


def parse(content: bytes, path: str) -> tuple[Record, str]:
    """Return a record and its checksum."""
    digits = content[_DIGITS].decode("ascii", "replace")
    if checksum(_START + _ZEROS + content[_DIGITS.stop :]) != digits:
        raise DamagedRecordError(f"{path} is damaged: its checksum is wrong. {OTHER}")
    with parsing(f"{path} is not a record of accel"):
        body = json.loads(content)
        check_version(body, path)
        files = [
            Written(checked_name(file["name"]), file["size"], tuple(file["header"]))
            for file in body["files"]
        ]
        record = Record(
            id=body["id"],
            time=body["time"],
            world_size=body["world_size"],
            files=files,
            tensors={name: _stored(name, value) for name, value in body["tensors"].items()},
            values=body["values"],
            ranks=body["ranks"],
            version=body["version"],
        )
        return record, digits


def _stored(name: str, value: Mapping[str, Any]) -> Stored:
    """Return a tensor, with the names that its boxes have in files."""
    shape = tuple(value["shape"])
    cuts = value.get("cuts", [()] * len(shape))
    sides = [itertools.pairwise([0, *own, size]) for own, size in zip(cuts, shape, strict=True)]
    blocks: Iterator[Box] = itertools.product(*sides)
    is_cut = "cuts" in value
    if not is_cut:
        blocks = iter([((0, math.prod(shape)),)])
    runs, aliases = [], {}
    begin = end = 0  # of the block on the line
    block: Box = ()
    for file, start, count, files in value["parts"]:
        for number in range(files):
            first = start + number * count
            while first >= end:
                block = next(blocks)
                begin, end = end, end + math.prod(shape_of(block))
            key = _key(name, block, is_cut, first - begin, count)
            offset = 0
            for box in divided(block, first - begin, first - begin + count):
                runs.append(Run(file + number, box))
                aliases[file + number, box] = key, offset
                offset += math.prod(shape_of(box))
    return Stored(value["dtype"], shape, tuple(runs), aliases)


def _key(name: str, block: Box, is_cut: bool, start: int, count: int) -> str:
    """Return the name of a range of a block in a file."""
    key = name
    if is_cut:
        key += f"[{','.join(f'{begin}:{end}' for begin, end in block)}]"
    whole = count == math.prod(shape_of(block))
    return key if whole else f"{key}[{start}:{start + count}]"


def data_checksums(header: bytes, written: Written, path: str) -> Sequence[str]:
    """Return the checksums of each chunk behind a header, once the header is known to be right."""
    found = [checksum(header[at : at + CHUNK]) for at in range(0, len(header), CHUNK)]
    if found != list(written.checksums):
        raise CheckpointError(f"{path} is damaged in its header. {OTHER}")
    digits = json.loads(header[8:])[METADATA]["xxh3"]
    return [digits[at : at + 16] for at in range(0, len(digits), 16)]
