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
        cuts = zip(value["cuts"], shape, strict=True)
        blocks = itertools.product(*(itertools.pairwise([0, *own, size]) for own, size in cuts))
    runs, aliases = [], {}
    begin = end = 0  # of the block on the line
    block: Box = ()
    for file, start, count, files in value["parts"]:
        for number in range(files):
            first = start + number * count
            while first >= end:
                block = next(blocks)
                begin, end = end, end + math.prod(shape_of(block))
            sides = f"[{','.join(f'{low}:{high}' for low, high in block)}]" if is_cut else ""
            is_part = count != end - begin
            part = f"[{first - begin}:{first - begin + count}]" if is_part else ""
            offset = 0
            for box in divided(block, first - begin, first - begin + count):
                runs.append(Run(file + number, box))
                aliases[file + number, box] = f"{name}{sides}{part}", offset
                offset += math.prod(shape_of(box))
    return runs, aliases


def data_checksums(header: bytes, written: Written, path: str) -> Sequence[str]:
    """Return the checksums of each chunk behind a header, once the header is known to be right."""
    found = [checksum(header[at : at + CHUNK]) for at in range(0, len(header), CHUNK)]
    if found != list(written.checksums):
        raise CheckpointError(f"{path} is damaged in its header. Load another checkpoint.")
    digits = json.loads(header[8:])[METADATA]["xxh3"]
    return [digits[at : at + 16] for at in range(0, len(digits), 16)]
