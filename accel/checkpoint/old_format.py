"""Records of versions 1 and 2, written by accel 0.1.

They store a tensor as a sequence of elements, in row-major order or, with cuts, block by
block. The checksums of the data are in the shard files, and are not compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..shard import Box, divided, shape_of
from .shards import checksum

BEGIN: Final = b'{"xxh3":"'
_DIGITS: Final = slice(len(BEGIN), len(BEGIN) + 16)


def checksums(content: bytes) -> tuple[str, str]:
    """Return the checksum in a record, and the expected checksum."""
    digits = content[_DIGITS].decode("ascii", "replace")
    return digits, checksum(BEGIN + b"0" * 16 + content[_DIGITS.stop :])


def update(body: Mapping[str, Any]) -> None:
    """Convert the files and tensors of a record to version 3."""
    for file in body["files"]:
        file["xxh3"] = ()
    for name, tensor in body["tensors"].items():
        parts, tensor["parts"], tensor["keys"] = tensor["parts"], [], {}
        blocks, begin, end = _blocks(tensor), 0, 0
        block: Box = ()
        for first_file, start, count, files in parts:
            for file in range(first_file, first_file + files):
                while start >= end:
                    block = next(blocks)
                    begin, end = end, end + math.prod(shape_of(block))
                low, high, key, offset = start - begin, start - begin + count, name, 0
                if "cuts" in tensor:
                    key += f"[{','.join(itertools.starmap('{}:{}'.format, block))}]"
                if count != end - begin:
                    key += f"[{low}:{high}]"
                for box in divided(block, low, high):
                    tensor["parts"].append((file, *zip(*box, strict=True)))
                    tensor["keys"][file, box] = key, offset
                    offset += math.prod(shape_of(box))
                start += count


def _blocks(tensor: Mapping[str, Any]) -> Iterator[Box]:
    """Return the blocks of a tensor. Without cuts, it is one block."""
    if "cuts" not in tensor:
        return iter([((0, math.prod(tensor["shape"])),)])
    sides = []
    for cuts, size in zip(tensor["cuts"], tensor["shape"], strict=True):
        sides.append(itertools.pairwise([0, *cuts, size]))
    return itertools.product(*sides)
