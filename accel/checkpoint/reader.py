"""Read tensors out of shard files: each chunk once, and its checksum is compared on the way.

A chunk that consists of plain host memory is read into its place. Any other chunk is read into a
staging buffer, and its elements are copied from there to devices, other dtypes and cut boxes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import torch
import xxhash

from ..errors import CheckpointError, is_url
from ..process import running
from ..process.transfer import begun, finish, host_memory, is_remote
from ..shard import Box, Shard, divided, expanded, intersection, relative, shape_of, slices, whole
from . import old_format
from .record import OTHER, VERSION, Record, Stored, span
from .shards import BY_NAME, Written, batched, is_lazy, key_of, memory, parse_header
from .steps import parsing
from .storage import CHUNK, File, storage_of

T = TypeVar("T")

_MAX_THREADS: Final = 8
#: Chunks in the staging buffer, or more if more threads read.
_STAGED: Final = 4
_ALIGN: Final = 64
#: Headers that are not read again. Each may have very many entries.
_MAX_HEADERS: Final = 16

# -- threads ---------------------------------------------------------------------------------------


def share() -> int:
    """Return the number of threads for this rank, so that a node's ranks share its cores."""
    process = running()
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    ranks = 1 if process is None else process.place.local_world_size
    return max(1, min(_MAX_THREADS, cores // ranks))


def in_threads(act: Callable[[T], object], items: Sequence[T], threads: int) -> None:
    """Call ``act`` for all items. Raises the error of the first item that failed."""
    if threads == 1 or len(items) < 2:
        for item in items:
            act(item)
        return
    with ThreadPoolExecutor(threads, "accel.read") as pool:
        try:
            for _ in pool.map(act, items):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


# -- from a shard to elements of files -------------------------------------------------------------


@dataclass(slots=True)
class _Piece:
    """Wanted elements of a stored box, and the tensor that they go to."""

    key: str
    dtype: torch.dtype
    #: The stored box begins at this element of its entry.
    first: int
    sizes: tuple[int, ...]
    #: In the stored box. The target has its shape.
    wanted: Box
    target: torch.Tensor
    #: The byte of the file at which the stored box begins, once the header is read.
    start: int = 0

    def byte_of(self, element: int) -> int:
        """Return the byte of the file at which an element of the stored box begins."""
        return self.start + element * self.dtype.itemsize

    def view(self, begin: int, end: int) -> memoryview | None:
        """Return the memory for a range of elements if their bytes can be read into the target."""
        target, size = self.target, self.dtype.itemsize
        first, last = span(self.wanted, self.sizes)
        is_plain = target.device.type == "cpu" and target.is_contiguous() and not is_lazy(target)
        if not is_plain or target.dtype is not self.dtype or last - first != target.numel():
            return None
        return memory(target)[(begin - first) * size : (end - first) * size]

    def blocks(self, begin: int, end: int) -> Iterator[tuple[int, Box, Box]]:
        """Give the boxes of a range of elements: the place in it, the box, and its wanted part."""
        at = 0
        for box in divided(tuple((0, size) for size in self.sizes), begin, end):
            common = intersection(box, self.wanted)
            if common is not None:
                yield at, box, common
            at += math.prod(shape_of(box))

    def copy_from(self, data: torch.Tensor, begin: int, end: int) -> None:
        """Copy the wanted ones of a range of elements, with these bytes, to the target."""
        if data.storage_offset() % self.dtype.itemsize:
            data = data.clone()  # a file of another library
        values = data.view(self.dtype)
        for at, box, common in self.blocks(begin, end):
            block = values[at : at + math.prod(shape_of(box))].view(shape_of(box))
            part = self.target[slices(relative(common, self.wanted))]
            source = block[slices(relative(common, box))]
            part.copy_(source, non_blocking=is_remote(self.target))


def _pieces_of(shard: Shard, stored: Stored) -> Iterator[tuple[int, _Piece]]:
    """Give the elements of a shard, each with the number of its file."""
    shape, region = stored.shape, shard.region
    targets: list[tuple[Box, torch.Tensor]]
    if stored.is_flat and len(region) == 1 and shard.tensor.is_contiguous():
        # Ranges in row-major order need no dimensions. Most tensors are stored as such ranges.
        shape = (stored.numel,)
        targets = [(region, shard.tensor.view(-1))]
    else:
        targets = list(_targets(shard, region))
    for file, box in stored.overlaps(region):
        alias = stored.aliases.get((file, box))
        key, first = alias or (key_of(shard.name, stored.shape, box), 0)
        for source in expanded(box, shape):
            sizes = shape_of(source)
            for own, target in targets:
                common = intersection(source, own)
                if common is not None:
                    part = target[slices(relative(common, own))]
                    wanted = relative(common, source)
                    yield file, _Piece(key, BY_NAME[stored.dtype], first, sizes, wanted, part)
            first += math.prod(sizes)


def _targets(shard: Shard, region: Box) -> Iterator[tuple[Box, torch.Tensor]]:
    """Give the boxes of a shard, with a side for each dimension, and their views."""
    tensor, boxes = shard.tensor, list(expanded(region, shard.shape))
    if len(boxes) == 1:
        # It may have any strides, as the parameter of a convolution in channels_last.
        yield boxes[0], tensor.view(shape_of(boxes[0]))
        return
    start, flat = 0, tensor if tensor.dim() == 1 else tensor.view(-1)
    for box in boxes:
        count = math.prod(shape_of(box))
        yield box, flat[start : start + count].view(shape_of(box))
        start += count


# -- files -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Chunk:
    """The bytes under one checksum, with ranges of elements of the pieces that lie in them."""

    number: int
    begin: int
    end: int
    segments: Sequence[tuple[_Piece, int, int]] = ()

    def views(self) -> list[memoryview] | None:
        """Return the memory of the targets if the chunk consists of it."""
        views, at = [], self.begin
        for piece, begin, end in self.segments:
            view = piece.view(begin, end)
            if view is None or piece.byte_of(begin) != at:
                return None
            views.append(view)
            at += len(view)
        return views if at == self.end else None


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of a file."""

    size: int
    entries: Mapping[str, dict[str, Any]]
    #: The offset of the first chunk.
    base: int
    #: The checksum of each chunk. Empty: the file has none.
    checksums: Sequence[str]


@final
class _ShardFile:
    """A shard file that is open. ``keys`` names the wanted entries in errors."""

    def __init__(self, file: File, header: _Header, keys: Sequence[str]) -> None:
        self.file = file
        self.header = header
        self._keys = keys
        #: The chunks that have the header.
        self.kept: dict[int, torch.Tensor] = {}

    def read_header(self, written: Written, version: int) -> _Header:
        """Read the header, as the version of the record has it."""
        file, base, checksums = self.file, 0, self.header.checksums
        if version == VERSION:
            size = 8 + int.from_bytes(self._keep(0)[:8], "little")
            for number in range(1, -(-size // CHUNK)):
                self._keep(number)
            content = b"".join(map(memory, self.kept.values()))[:size]
        else:
            size = base = 8 + int.from_bytes(file.read(0, min(8, file.size)), "little")
            content = bytes(file.read(0, min(size, file.size)))
            if version:
                checksums = old_format.data_checksums(content, written, file.path)
        with parsing(f"{file.path} has a damaged header"):
            self.header = _Header(size, parse_header(content), base, checksums)
        return self.header

    def _keep(self, number: int) -> memoryview:
        """Read a chunk into memory of its own."""
        chunk = self.chunk(number)
        self.kept[number] = host_memory(chunk.end - chunk.begin, pinned=False)
        self.read(chunk, [memory(self.kept[number])])
        return memory(self.kept[number])

    def chunk(self, number: int) -> _Chunk:
        begin = self.header.base + number * CHUNK
        return _Chunk(number, begin, min(begin + CHUNK, self.file.size))

    def chunks(self, pieces: Iterable[_Piece]) -> Iterator[_Chunk]:
        """Give the chunks that have elements of pieces, in order."""
        header = self.header
        found: dict[int, list[tuple[_Piece, int, int]]] = {}
        for piece in pieces:
            size, (begin, last) = piece.dtype.itemsize, span(piece.wanted, piece.sizes)
            start, stop = header.entries.get(piece.key, {}).get("data_offsets", (0, 0))
            piece.start = header.size + start + piece.first * size
            if piece.byte_of(last) > header.size + stop:
                raise CheckpointError(
                    f"{self.file.path} does not hold {piece.key!r} as the record says. {OTHER}"
                )
            is_range = last - begin == piece.target.numel()
            while begin < last:
                number = (piece.byte_of(begin) - header.base) // CHUNK
                limit = header.base + (number + 1) * CHUNK
                # Without checksums, an element may end in the next chunk.
                end = min(last, -(-(limit - piece.start) // size))
                if is_range or any(piece.blocks(begin, end)):
                    found.setdefault(number, []).append((piece, begin, end))
                begin = end
        for number, segments in sorted(found.items()):
            segments.sort(key=lambda segment: segment[0].byte_of(segment[1]))
            chunk = self.chunk(number)
            chunk.segments = segments
            if not header.checksums:
                chunk.begin = segments[0][0].byte_of(segments[0][1])
                chunk.end = max(piece.byte_of(end) for piece, _, end in segments)
            yield chunk

    def read(self, chunk: _Chunk, views: Sequence[memoryview]) -> None:
        """Fill memory with a chunk, and compare its checksum."""
        file, checksums = self.file, self.header.checksums
        if not checksums:
            file.fill(chunk.begin, views)
            return
        # A step is hashed while it is in the caches of the core.
        parts = [
            view[at : at + file.step] for view in views for at in range(0, len(view), file.step)
        ]
        steps = list(batched(parts, len, file.step))
        for _ in range(file.tries):
            offset, digest = chunk.begin, xxhash.xxh3_64()
            for step in steps:
                file.fill(offset, step)
                for part in step:
                    digest.update(part)
                    offset += len(part)
            if digest.hexdigest() == checksums[chunk.number]:
                return
        names = [piece.key for piece, _, _ in chunk.segments] or self._keys
        inside = f", in {', '.join(dict.fromkeys(names[:3]))}" if names else ""
        raise CheckpointError(
            f"{file.path} is damaged between bytes {chunk.begin} and {chunk.end}{inside}. {OTHER}"
        )


# -- checkpoints -----------------------------------------------------------------------------------


@final
class Reader:
    """The files of one checkpoint."""

    def __init__(self, directory: str, record: Record) -> None:
        self._directory = directory
        self._record = record
        self._stage = host_memory(0, pinned=False)
        self._copies: list[Any] = []
        self._headers: dict[int, _Header] = {}

    def fill(self, shards: Iterable[Shard]) -> None:
        """Read shards, each named as its tensor in the record, into memory of any device."""
        files: dict[int, list[_Piece]] = {}
        for shard in shards:
            if shard.tensor.numel():
                for number, piece in _pieces_of(shard, self._record.tensors[shard.name]):
                    files.setdefault(number, []).append(piece)
        for number, pieces in sorted(files.items()):
            with self._open(number, pieces) as file:
                self._read(file, file.chunks(pieces))
        finish(self._copies)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return full tensors, new and on the CPU."""
        found = {}
        for name in names:
            stored = self._record.tensors[name]
            dtype = BY_NAME[stored.dtype]
            found[name] = torch.empty(stored.shape, dtype=dtype, device="cpu")
        self.fill(whole(name, tensor) for name, tensor in found.items())
        return found

    def verify(self, number: int, start: int, step: int) -> None:
        """Compare every ``step``-th chunk of a file with its checksum."""
        with self._open(number, ()) as file:

            def compare(number: int) -> None:
                chunk = file.chunk(number)
                size = chunk.end - chunk.begin
                # Memory of one step, again and again, stays in the caches of the core.
                room = memoryview(bytearray(min(size, file.file.step)))
                views = [room[: size - at] for at in range(0, size, len(room))]
                file.read(chunk, views)

            chunks = range(start, len(file.header.checksums), step)
            in_threads(compare, chunks, file.file.in_flight or share())

    @contextlib.contextmanager
    def _open(self, number: int, pieces: Sequence[_Piece]) -> Iterator[_ShardFile]:
        written, version = self._record.files[number], self._record.version
        # The files of other libraries have full paths.
        path = written.name
        if not is_url(path):
            path = os.path.join(self._directory, path)
        with storage_of(path).open(path, written.size) as opened:
            keys = [piece.key for piece in pieces]
            header = self._headers.get(number)
            file = _ShardFile(opened, header or _Header(0, {}, 0, written.checksums), keys)
            if header is None and (pieces or version != VERSION):
                if len(self._headers) == _MAX_HEADERS:
                    self._headers.clear()
                self._headers[number] = file.read_header(written, version)
            yield file

    def _read(self, file: _ShardFile, chunks: Iterable[_Chunk]) -> None:
        threads = file.file.in_flight or share()
        places = max(_STAGED, threads)
        ready: list[tuple[_Chunk, list[memoryview]]] = []
        staged: list[_Chunk] = []
        for chunk in chunks:
            views = None if chunk.number in file.kept else chunk.views()
            if views is not None:
                ready.append((chunk, views))
                continue
            staged.append(chunk)
            if len(staged) == places:
                self._read_staged(file, staged, threads)
                staged = []
        self._read_staged(file, staged, threads)
        in_threads(lambda one: file.read(*one), ready, threads)

    def _read_staged(self, file: _ShardFile, chunks: Sequence[_Chunk], threads: int) -> None:
        """Read chunks into the staging buffer, and copy their elements."""
        finish(self._copies)  # they read the buffer
        missing = [chunk for chunk in chunks if chunk.number not in file.kept]
        targets = [piece.target for chunk in chunks for piece, _, _ in chunk.segments]
        devices = {target.device for target in targets if is_remote(target)}
        size, rooms = CHUNK + _ALIGN, dict(file.kept)
        if missing and (not len(self._stage) or (devices and not self._stage.is_pinned())):
            self._stage = host_memory(max(_STAGED, threads) * size, pinned=bool(devices))
        for number, chunk in enumerate(missing):
            rooms[chunk.number] = self._stage[number * size :][: chunk.end - chunk.begin]
        reads = [(chunk, [memory(rooms[chunk.number])]) for chunk in missing]
        in_threads(lambda one: file.read(*one), reads, threads)
        for chunk in chunks:
            for piece, begin, end in chunk.segments:
                at, stop = piece.byte_of(begin) - chunk.begin, piece.byte_of(end) - chunk.begin
                view = piece.view(begin, end)
                if view is None:
                    piece.copy_from(rooms[chunk.number][at:stop], begin, end)
                else:
                    view[:] = memory(rooms[chunk.number])[at:stop]
        self._copies = begun(devices)
