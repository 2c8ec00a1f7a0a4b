"""Records and shard files of versions 1 and 2, as accel 0.1 wrote them.

There a tensor was a line of elements: in row-major order or, if it had cuts, block after block. The
record had the checksums of the headers, and each header had those of its data.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..errors import CheckpointError
from ..shard import Box, divided, shape_of
from .layout import Run
from .shards import METADATA, Written, checksum
from .storage import CHUNK

_START: Final = b'{"xxh3":"'
_ZEROS: Final = b"0" * 16
_DIGITS: Final = slice(len(_START), len(_START) + 16)


def is_old(content: bytes) -> bool:
    """True for a record of version 1 or 2."""
    return content.startswith(_START)


def checksums(content: bytes) -> tuple[str, str]:
    """Return the checksum in a record, and that of the record."""
    digits = content[_DIGITS].decode("ascii", "replace")
    return digits, checksum(_START + _ZEROS + content[_DIGITS.stop :])


def runs_of(
    name: str, value: Mapping[str, Any]
) -> tuple[list[Run], dict[tuple[int, Box], tuple[str, int]]]:
    """Return the boxes of a tensor, and their names and places in the entries of files."""
    shape = tuple(value["shape"])
    is_cut = "cuts" in value
    blocks: Iterator[Box] = iter([((0, math.prod(shape)),)])
    if is_cut:
        sides = []
        for cuts, size in zip(value["cuts"], shape, strict=True):
            sides.append(itertools.pairwise([0, *cuts, size]))
        blocks = itertools.product(*sides)
    runs, aliases = [], {}
    # The block on the line, and its range.
    begin = end = 0
    block: Box = ()
    for file, start, count, files in value["parts"]:
        for number in range(files):
            first = start + number * count
            while first >= end:
                block = next(blocks)
                begin, end = end, end + math.prod(shape_of(block))
            low, high = first - begin, first - begin + count
            key = name
            if is_cut:
                key += f"[{','.join(itertools.starmap('{}:{}'.format, block))}]"
            if count != end - begin:
                key += f"[{low}:{high}]"
            offset = 0
            for box in divided(block, low, high):
                runs.append(Run(file + number, box))
                aliases[file + number, box] = key, offset
                offset += math.prod(shape_of(box))
    return runs, aliases


def data_checksums(header: bytes, written: Written, path: str) -> Sequence[str]:
    """Return the checksums of the chunks behind a header, or raise if the header is damaged."""
    checksums = [checksum(header[at : at + CHUNK]) for at in range(0, len(header), CHUNK)]
    if checksums != list(written.checksums):
        raise CheckpointError(f"{path} is damaged in its header. Load another checkpoint.")
    return re.findall("." * 16, json.loads(header[8:])[METADATA]["xxh3"])
