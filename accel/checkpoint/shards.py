"""The bytes of shard files, written with their checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

import torch
import xxhash

from ..process.packing import row_of
from ..process.transfer import PIECE, on_host
from .safetensors import (
    CHUNK,
    DIGITS,
    ITEM_BYTES,
    Entry,
    build_header,
    chunks_of,
    is_lazy,
    memory,
    resolve,
)
from .storage import Write, storage_of

_WRITE: Final = 1 << 20  # bytes that are hashed, and then written while they are in the caches


@dataclass(frozen=True, slots=True)
class WriteItem:
    """An entry of a file to be, and the tensor that holds it from element ``offset`` on."""

    entry: Entry
    tensor: torch.Tensor
    offset: int

    @property
    def address(self) -> int:
        """Where its first element lies, if its tensor is contiguous."""
        return self.tensor.data_ptr() + self.offset * self.tensor.itemsize

    def pieces(self) -> Iterable[torch.Tensor]:
        return pieces(self.tensor, self.offset, self.offset + self.entry.count)


@dataclass(frozen=True, slots=True)
class CopiedItem:
    """The same where the elements were copied: their bytes in flat tensors on the CPU, one after the other."""

    entry: Entry
    copies: Sequence[torch.Tensor]

    def pieces(self) -> Iterable[torch.Tensor]:
        return self.copies


#: What a file is made of.
Item = WriteItem | CopiedItem
AnyItem = TypeVar("AnyItem", WriteItem, Item)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Written:
    """What the record says of a file: its name, its size, and the checksums of its header's chunks."""

    name: str
    size: int
    header: tuple[str, ...]


def checksum(data: bytes | memoryview) -> str:
    """XXH3-64 of some bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def checksum_of(parts: Iterable[bytes | memoryview]) -> str:
    """The same of bytes that come in parts, which need not be there at once."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def checksums_of(data: bytes | memoryview) -> tuple[str, ...]:
    """Of each chunk."""
    view = memoryview(data)
    return tuple(checksum(view[at : at + CHUNK]) for at in range(0, len(view), CHUNK))


def pieces(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Elements ``start`` to ``stop`` in row-major order, as flat contiguous tensors where they are; copies are small."""
    if start >= stop:
        return
    step = PIECE // tensor.element_size()
    if tensor.is_contiguous() and not is_lazy(tensor):
        yield row_of(tensor) if stop - start == tensor.numel() else tensor.view(-1)[start:stop]
    elif tensor.numel() <= step:
        # reshape() of one dimension is a view, which may skip elements.
        yield resolve(tensor).reshape(-1)[start:stop].contiguous()
    else:
        row = tensor.numel() // tensor.shape[0]
        rows = max(1, step // row)
        for at in range(start // row, -(-stop // row), rows):
            block = tensor[at : at + rows] if rows > 1 else tensor[at]
            first = at * row
            yield from pieces(block, max(start - first, 0), min(stop - first, block.numel()))


def batched(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in their order, as many at a time as have no more than this size together, or one; the last may be none."""
    batch: list[T] = []
    room = most
    for item in items:
        size = size_of(item)
        if batch and size > room:
            yield batch
            batch, room = [], most
        batch.append(item)
        room -= size
    yield batch


def _arranged(items: Sequence[AnyItem]) -> list[AnyItem]:
    """In the order of a file: wide elements first, so that all are aligned."""
    return sorted(items, key=lambda item: -ITEM_BYTES[item.entry.dtype])


def _header(items: Sequence[Item], checksums: str) -> bytes:
    return build_header([item.entry for item in items], {"accel": "1", "xxh3": checksums})


def write(directory: str, name: str, items: Sequence[Item]) -> Written:
    """Write a new file of ``items``, durably; after an error it is not there."""
    items = _arranged(items)
    size = sum(item.entry.nbytes for item in items)
    blank = "0" * (DIGITS * chunks_of(size))  # the checksums are known last, and as long
    header = _header(items, blank)

    def content(write: Write) -> bytes:
        return header.replace(blank.encode(), _stream(items, write).encode(), 1)

    path, whole = os.path.join(directory, name), len(header) + size
    header = storage_of(directory).create(path, whole, len(header), content)
    return Written(name, whole, checksums_of(header))


def _stream(items: Sequence[Item], write: Write) -> str:
    """Write the items' data into a file; returns the checksums that belong into its header."""
    hashed, room, checksums = xxhash.xxh3_64(), CHUNK, []
    for piece in on_host(chain.from_iterable(item.pieces() for item in items)):
        data = memory(piece)
        while data:
            part = data[: min(_WRITE, room)]
            hashed.update(part)
            write(part)
            data, room = data[len(part) :], room - len(part)
            if not room:
                checksums.append(hashed.hexdigest())
                hashed.reset()
                room = CHUNK
    if room < CHUNK:
        checksums.append(hashed.hexdigest())
    return "".join(checksums)
