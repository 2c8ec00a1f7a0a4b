"""The header of a shard file: a valid safetensors header that also carries the checksums of the data. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import CheckpointError
from .dtypes import STORED, element_bytes

#: In a safetensors header, where a tensor cannot have this name.
METADATA: Final = "__metadata__"
CHUNK: Final = 4 << 20  # bytes of data, or of the header, under one checksum
_ALIGN: Final = 64
_DIGITS: Final = 16
#: What other readers of safetensors accept, and far more than a rank's tensors need.
MAX_HEADER: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A range of a tensor in a file: its first element, and how many follow."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.start == 0 and self.count == math.prod(self.shape)

    @property
    def key(self) -> str:
        """Its name in the file: the tensor's where it is whole, else with the range behind it."""
        return self.name if self.whole else f"{self.name}[{self.start}:{self.start + self.count}]"

    @property
    def nbytes(self) -> int:
        """The size of the data."""
        return self.count * element_bytes(self.dtype)

    def described(self, offset: int) -> dict[str, Any]:
        """What the header says of it."""
        dtype, per_element = STORED[self.dtype]
        shape = list(self.shape) if self.whole else [self.count]
        if per_element > 1:
            shape.append(per_element)
        return {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + self.nbytes]}


def chunks_of(nbytes: int) -> int:
    """How many checksums so many bytes have."""
    return -(-nbytes // CHUNK)


def arrange(entries: Sequence[Entry]) -> list[int]:
    """The order of the entries in a file: wide elements first, so that all are aligned."""
    return sorted(range(len(entries)), key=lambda i: -element_bytes(entries[i].dtype))


def build(entries: Sequence[Entry], checksums: str) -> bytes:
    """The first bytes of a file of these entries, in this order.

    Args:
        entries: what the file holds.
        checksums: of each chunk of the data, as hexadecimal digits; the size of the result depends on their number only.
    """
    table: dict[str, Any] = {METADATA: {"format": "pt", "accel": "1", "xxh3": checksums}}
    offset = 0
    for entry in entries:
        key = entry.key
        if key in table:
            raise CheckpointError(f"two tensors have the name {key!r} in one checkpoint; rename one")
        table[key] = entry.described(offset)
        offset += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"a shard of {len(entries)} tensors has a header of {len(text)} bytes, over {MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Header:
    """What a file's first bytes say.

    Args:
        size: of the header in bytes, which is where the data begins.
        offsets: where in the file each entry's data lies (first byte, byte after the last).
        checksums: of the data, by chunk.
    """

    size: int
    offsets: Mapping[str, tuple[int, int]]
    described: Mapping[str, Any]
    checksums: Sequence[str]


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless it has a key twice, of which readers would take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def parse(content: bytes, file_size: int) -> Header:
    """Read a header; the caller has compared its checksums.

    Raises:
        ValueError: it is not a header that accel wrote.
    """
    table = json.loads(content[8:], object_pairs_hook=no_duplicates)
    metadata = table.pop(METADATA)
    digits = metadata["xxh3"]
    size = len(content)
    checksums = [digits[i : i + _DIGITS] for i in range(0, len(digits), _DIGITS)]
    if metadata["accel"] != "1" or len(checksums) != chunks_of(file_size - size):
        raise ValueError("its number of checksums does not fit its size")
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    for key, described in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = described["data_offsets"]
        if type(begin) is not int or type(end) is not int or begin != at or end < begin:
            raise ValueError(f"the data of {key!r} overlaps another's, or leaves a hole")
        offsets[key] = (size + begin, size + end)
        at = end
    if size + at != file_size:
        raise ValueError(f"its entries end at byte {size + at}, the file at {file_size}")
    return Header(size, offsets, table, checksums)
