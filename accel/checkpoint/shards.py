"""Shard files: plain safetensors files, written sequentially and hashed on the way."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

import torch
import xxhash

from ..errors import CheckpointError
from ..process.packing import row_of
from ..process.transfer import PIECE, on_host
from ..shard import Box, Shard, divided, flattened, intersection, relative, shape_of, slices
from .storage import CHUNK, File, storage_of

T = TypeVar("T")

#: The dtypes by their names in safetensors files.
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
ITEM_BYTES: Final[dict[str, int]] = {name: dtype.itemsize for dtype, name in NAMES.items()}


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy. They keep the tensor alive."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


def check_tensor(value: torch.Tensor, path: str) -> None:
    """Raise if a tensor is not plain, dense and of a known dtype."""
    if value.is_nested or value.layout is not torch.strided:
        problem = f"of layout {'nested' if value.is_nested else value.layout}"
    elif value.dtype not in NAMES:
        problem = f"of dtype {value.dtype}"
    elif value.is_meta:
        problem = "on the meta device"
    elif type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        problem = f"of class {type(value).__name__}"
    else:
        return
    is_shard = hasattr(value, "full_tensor")
    advice = "value.full_tensor(), called on every rank" if is_shard else "a plain dense tensor"
    raise CheckpointError(f"{path}: a tensor {problem} can't be stored. Store {advice}.")


def batched(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items in order, in batches of at most ``most`` in size or of a single item."""
    batch: list[T] = []
    room = most
    for item in items:
        size = size_of(item)
        if batch and size > room:
            yield batch
            batch, room = [], most
        batch.append(item)
        room -= size
    if batch:
        yield batch


# -- the entries of a file -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard on this rank, under its name in the checkpoint."""

    shard: Shard
    #: True if an engine keeps the values equal on all ranks with this shard.
    equal: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A box of a tensor, as stored in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        return math.prod(shape_of(self.box)) * ITEM_BYTES[self.dtype]


def key_of(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the name of a box in a file: ``name[0:5,3:6]``, or ``name`` for the full tensor."""
    if math.prod(shape_of(box)) == math.prod(shape):
        return name
    return f"{name}[{','.join(f'{begin}:{end}' for begin, end in box)}]"


@dataclass(frozen=True, slots=True)
class WriteItem:
    """An entry to write, and a tensor with its elements from index ``start``."""

    entry: Entry
    tensor: torch.Tensor
    start: int
    #: Copies of the bytes in host memory, made by a background save.
    copies: Sequence[torch.Tensor] = ()

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the elements in row-major order, as flat views or small contiguous copies."""
        if self.copies:
            yield from self.copies
            return
        # The memory of a lazily conjugated or negated tensor doesn't contain its values.
        tensor, start = self.tensor.resolve_conj().resolve_neg(), self.start
        stop = start + math.prod(shape_of(self.entry.box))
        if tensor.is_contiguous():
            yield row_of(tensor)[start:stop]
            return
        sides = tuple((0, size) for size in tensor.shape)
        step = max(1, PIECE // tensor.itemsize)
        for begin in range(start, stop, step):
            for box in divided(sides, begin, min(begin + step, stop)):
                # reshape() may return a strided view, which contiguous() copies.
                yield tensor[slices(box)].reshape(-1).contiguous()


def write_items(entries: Iterable[Entry], shards: Sequence[LocalShard]) -> list[WriteItem]:
    """Find the local tensor for each entry of this rank."""
    held: dict[str, list[Shard]] = {}
    for one in shards:
        held.setdefault(one.shard.name, []).append(one.shard)
    return [_item(entry, held[entry.name]) for entry in entries]


def _item(entry: Entry, shards: Sequence[Shard]) -> WriteItem:
    flat = flattened(entry.box, entry.shape)
    for shard in shards:
        region = shard.region
        box = flat if len(region) == 1 and flat is not None else entry.box
        if len(region) != len(box) or intersection(box, region) != box:
            continue
        if box is flat:
            return WriteItem(entry, shard.tensor, box[0][0] - region[0][0])
        inner = slices(relative(box, region))
        return WriteItem(entry, shard.tensor.view(shape_of(region))[inner], 0)
    raise AssertionError(f"{entry} is not on this rank")


METADATA: Final = "__metadata__"
_ALIGN: Final = 64
#: Bytes to hash and then write at once, so that they stay in a core's cache. Divides CHUNK.
_PART: Final = 1 << 20
_SMALL: Final = 128 << 10


def build_header(entries: Iterable[Entry]) -> bytes:
    """Return the header of a file with these entries, in this order."""
    table: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset = 0
    for entry in entries:
        key, dtype = key_of(entry.name, entry.shape, entry.box), entry.dtype
        shape = entry.shape if key == entry.name else shape_of(entry.box)
        if dtype == "C128":  # safetensors has no such dtype
            dtype, shape = "F64", (*shape, 2)
        end = offset + entry.nbytes
        table[key] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def read_header(file: File) -> bytearray:
    """Return the bytes of a file before its data, or fewer if the file is truncated."""
    size = 8 + int.from_bytes(file.read(0, min(8, file.size)), "little")
    return file.read(0, min(size, file.size))


def parse_header(content: bytes | bytearray) -> Mapping[str, dict[str, Any]]:
    """Return the entries by key. May raise any error if the header is damaged."""
    table: dict[str, Any] = json.loads(bytes(content[8:]))
    table.pop(METADATA, None)
    return table


@dataclass(frozen=True, slots=True)
class Written:
    """A file in the record: its name, size, and the checksum of each chunk."""

    name: str
    size: int
    checksums: tuple[str, ...]


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the XXH3-64 checksum as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def write(directory: str, name: str, items: Sequence[WriteItem]) -> Written:
    """Write ``items`` to a new file, durably. After an error, it doesn't exist."""
    # Wide dtypes go first, so that all tensors are aligned, as safetensors requires.
    items = sorted(items, key=lambda item: -ITEM_BYTES[item.entry.dtype])
    header = build_header(item.entry for item in items)
    size = len(header)
    for item in items:
        size += item.entry.nbytes
    checksums: list[str] = []

    def content() -> Iterator[bytes | bytearray | memoryview]:
        digest, at = xxhash.xxh3_64(), 0
        tensors = on_host(chain.from_iterable(map(WriteItem.pieces, items)))
        for block in blocks(chain([memoryview(header)], map(memory, tensors))):
            digest.update(block)
            at += len(block)
            if at % CHUNK == 0 or at == size:
                checksums.append(digest.hexdigest())
                digest.reset()
            yield block

    storage_of(directory).create(os.path.join(directory, name), size, content)
    return Written(name, size, tuple(checksums))


def blocks(parts: Iterable[memoryview]) -> Iterator[bytearray | memoryview]:
    """Yield the same bytes in few blocks. No block crosses a multiple of ``_PART``."""
    small, at = bytearray(), 0
    for part in parts:
        while part:
            block = part[: _PART - at % _PART]
            part = part[len(block) :]
            at += len(block)
            is_large = len(block) >= _SMALL
            if not is_large:
                small += block
            if small and (is_large or at % _PART == 0):
                yield small
                small = bytearray()
            if is_large:
                yield block
    if small:
        yield small
