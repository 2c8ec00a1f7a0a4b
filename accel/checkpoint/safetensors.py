"""Tensors as safetensors files have them: dtypes by name, their bytes, and the header, in which accel adds checksums. Pure."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..errors import CheckpointError

#: As safetensors names them. Where it has no name for a dtype, an entry of a file has another one: see ``_PARTS``.
BY_NAME: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in BY_NAME.items()}
#: The size of one element.
ITEM_BYTES: Final[dict[str, int]] = {name: dtype.itemsize for name, dtype in BY_NAME.items()}
#: Those that a file's entry has as several elements of another one.
_PARTS: Final[dict[str, tuple[str, int]]] = {"C64": ("F32", 2), "C128": ("F64", 2)}


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; the tensor lives as long as they are in use."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory does not hold its values as they are: they are conjugated, negated, or all zero."""
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory as they are; ``tensor`` itself where they lie so."""
    return (tensor.clone() if tensor._is_zerotensor() else tensor).resolve_conj().resolve_neg()


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a contiguous CPU tensor."""
    tensor = resolve(tensor)
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def from_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these bytes."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    memory(tensor)[:] = content
    return tensor


def check_tensor(value: torch.Tensor, path: str) -> None:
    """Refuse a tensor whose bytes are not all there is to it."""
    problem = ""
    if value.layout is not torch.strided or value.is_nested:
        problem = f"of layout {'nested' if value.is_nested else value.layout}"
    elif value.dtype not in NAMES:
        problem = f"of dtype {value.dtype}"
    elif value.is_meta:
        problem = "on the meta device"
    elif type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        problem = f"of class {type(value).__name__}"
    if problem:
        whole = hasattr(value, "full_tensor")
        advice = "value.full_tensor(), called on every rank" if whole else "a plain dense tensor"
        raise CheckpointError(f"{path}: a tensor {problem} cannot be stored; store {advice}")


# -- The header of a file ----------------------------------------------------------------------------------------------

#: In a header, where a tensor cannot have this name.
METADATA: Final = "__metadata__"
#: What other readers of safetensors accept, and far more than a rank's tensors need.
MAX_HEADER: Final = 100_000_000
CHUNK: Final = 4 << 20  # bytes of data, or of the header, under one checksum
DIGITS: Final = 16  # of a checksum
_ALIGN: Final = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """A range of a tensor in a file: its first element, and how many follow."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    def described(self, offset: int) -> tuple[str, dict[str, Any]]:
        """Its name in the file (with the range, if it is not all of the tensor), and what the header says of it.

        ``offset`` is where its bytes begin, behind the header.
        """
        dtype, parts = _PARTS.get(self.dtype, (self.dtype, 1))
        whole = self.start == 0 and self.count == math.prod(self.shape)
        shape = [*self.shape] if whole else [self.count]
        if parts > 1:
            shape.append(parts)
        key = self.name if whole else f"{self.name}[{self.start}:{self.start + self.count}]"
        end = offset + self.count * ITEM_BYTES[self.dtype]
        return key, {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}


@dataclass(frozen=True, slots=True)
class Header:
    """What a file's first bytes say."""

    size: int  # of the header in bytes, which is where the data begins
    entries: Mapping[str, dict[str, Any]]
    checksums: Sequence[str] = ()  # of the data, by chunk; other libraries' files have none

    def locate(self, entry: Entry) -> tuple[str, int | None]:
        """Its name in the file, and where in the file its data begins; None where the file has it not, or otherwise."""
        key, expected = entry.described(0)
        found = self.entries.get(key, {})
        begin = found.get("data_offsets", [0])[0]
        expected["data_offsets"] = [begin, begin + expected["data_offsets"][1]]
        return key, self.size + begin if found == expected else None

    def inside(self, begin: int, end: int) -> list[str]:
        """The entries with data between two bytes of the file."""
        places = ((key, described["data_offsets"]) for key, described in self.entries.items())
        return [
            key for key, (low, high) in places if self.size + low < end and self.size + high > begin
        ]


def chunks_of(nbytes: int) -> int:
    """How many checksums so many bytes have."""
    return -(-nbytes // CHUNK)


def build_header(
    entries: Sequence[Entry], metadata: Mapping[str, str], align: int = _ALIGN
) -> bytes:
    """The first bytes of a file of these entries, in this order; the data begins at a multiple of ``align`` bytes."""
    table: dict[str, Any] = {METADATA: {"format": "pt", **metadata}}
    offset = 0
    for entry in entries:
        key, described = entry.described(offset)
        if key in table:
            raise CheckpointError(
                f"two tensors have the name {key!r} in one checkpoint; rename one"
            )
        table[key] = described
        offset = described["data_offsets"][1]
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"a file of {len(entries)} tensors has a header of {len(text)} bytes, over {MAX_HEADER}: divide them over more files"
        )
    return len(text).to_bytes(8, "little") + text


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless it has a key twice, of which readers would take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def parse_table(content: bytes, file_size: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries and the metadata of a header. MALFORMED if the entries don't fill the file one after the other."""
    table = json.loads(content[8:], object_pairs_hook=no_duplicates)
    metadata = table.pop(METADATA, {})
    end = len(content)
    for key, described in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = described["data_offsets"]
        if (
            type(begin) is not int
            or type(stop) is not int
            or begin != end - len(content)
            or stop < begin
        ):
            raise ValueError(f"the data of {key!r} overlaps another's, or leaves a hole")
        end = len(content) + stop
    if end != file_size:
        raise ValueError(f"its entries end at byte {end}, the file at {file_size}")
    return table, metadata


def parse_header(content: bytes, file_size: int) -> Header:
    """Read the header of a file that accel wrote. MALFORMED if it is damaged."""
    table, metadata = parse_table(content, file_size)
    digits = metadata["xxh3"]
    checksums = [digits[i : i + DIGITS] for i in range(0, len(digits), DIGITS)]
    if metadata["accel"] != "1" or len(checksums) != chunks_of(file_size - len(content)):
        raise ValueError("its number of checksums does not fit its size")
    return Header(len(content), table, checksums)
