"""Read tensors from shard files, each chunk once and with its checksum.

A chunk is read directly into contiguous CPU tensors of the same dtype. Other chunks go through
a staging buffer, and their elements are copied to the targets.
"""

from __future__ import annotations

import contextlib
import functools
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
from ..shard import Box, Shard, expanded, intersection, relative, shape_of, slices, whole
from .record import OTHER, Record, Stored, span
from .shards import BY_NAME, Written, key_of, memory, parse_header, read_header
from .steps import parsing
from .storage import CHUNK, STEP, storage_of

T = TypeVar("T")

_MAX_THREADS: Final = 8
#: The minimum number of chunks in the staging buffer. There is at least one per thread.
_STAGED: Final = 4
_ALIGN: Final = 64


def cores() -> int:
    """Return the number of cores this process can use."""
    # macOS has no sched_getaffinity.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def share() -> int:
    """Return the threads for this rank. A node's ranks share its cores."""
    process = running()
    ranks = 1 if process is None else process.place.local_world_size
    return max(1, min(_MAX_THREADS, cores() // ranks))


def in_threads(act: Callable[[T], object], items: Sequence[T], threads: int) -> None:
    """Call ``act`` for all items. Raise the first error."""
    if threads == 1 or len(items) < 2:
        for item in items:
            act(item)
        return
    with ThreadPoolExecutor(threads, "accel.read") as pool:
        # Iterate over map(), because it raises errors and then cancels the remaining items.
        for _ in pool.map(act, items):
            pass


@dataclass(slots=True)
class _Piece:
    """Elements to read from a stored box, and their target tensor."""

    key: str
    dtype: torch.dtype
    #: The index of the stored box's first element in its entry.
    first: int
    sizes: tuple[int, ...]
    #: The elements to read, as a box inside the stored box. The target has its shape.
    wanted: Box
    target: torch.Tensor
    #: The position of the stored box in the file in bytes, once the header is read.
    start: int = 0

    def byte_of(self, element: int) -> int:
        """Return the position of an element in the file in bytes."""
        return self.start + element * self.dtype.itemsize

    def view(self, begin: int, end: int) -> memoryview | None:
        """Return the target's memory for a range, or None if its layout differs."""
        target, size = self.target, self.dtype.itemsize
        first, last = span(self.wanted, self.sizes)
        if target.device.type != "cpu" or target.dtype is not self.dtype:
            return None
        if target.is_conj() or target.is_neg() or not target.is_contiguous():
            return None
        if last - first != target.numel():
            return None
        return memory(target)[(begin - first) * size : (end - first) * size]

    def blocks(self, begin: int, end: int) -> Iterator[tuple[int, Box, Box]]:
        """Yield each box of a range: its start in it, the box, and the part to read."""
        at = 0
        for box in expanded(((begin, end),), self.sizes):
            common = intersection(box, self.wanted)
            if common is not None:
                yield at, box, common
            at += math.prod(shape_of(box))

    def copy_from(self, data: torch.Tensor, begin: int, end: int) -> None:
        """Copy the elements to read from the bytes of a range to the target."""
        if data.storage_offset() % self.dtype.itemsize:
            data = data.clone()  # view() needs alignment
        values = data.view(self.dtype)
        for at, box, common in self.blocks(begin, end):
            sizes = shape_of(box)
            block = values[at : at + math.prod(sizes)].view(sizes)
            part = self.target[slices(relative(common, self.wanted))]
            source = block[slices(relative(common, box))]
            part.copy_(source, non_blocking=is_remote(self.target))


def _pieces_of(shard: Shard, stored: Stored) -> Iterator[tuple[int, _Piece]]:
    """Yield the pieces of a shard, each with the number of its file."""
    shape, region, tensor = stored.shape, shard.region, shard.tensor
    if stored.is_flat and len(region) == 1 and tensor.is_contiguous():
        # Treat the tensor as 1-D. Most tensors are stored as ranges in row-major order.
        shape = (stored.numel,)
    targets = list(_targets(tensor, expanded(region, shape)))
    dtype = BY_NAME[stored.dtype]
    for file, box in stored.overlaps(region):
        known = stored.keys.get((file, box))
        key, first = known or (key_of(shard.name, stored.shape, box), 0)
        for source in expanded(box, shape):
            sizes = shape_of(source)
            for own, target in targets:
                common = intersection(source, own)
                if common is not None:
                    part = target
                    if common != own:
                        part = target[slices(relative(common, own))]
                    wanted = relative(common, source)
                    yield file, _Piece(key, dtype, first, sizes, wanted, part)
            first += math.prod(sizes)


def _targets(tensor: torch.Tensor, boxes: Iterable[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a shard with views of its tensor."""
    start = 0
    for box in boxes:
        sizes = shape_of(box)
        count = math.prod(sizes)
        if count == tensor.numel():
            # view(-1) would raise for strides such as those of channels_last.
            yield box, tensor.view(sizes)
        else:
            yield box, tensor.view(-1)[start : start + count].view(sizes)
        start += count


@dataclass(slots=True)
class _Chunk:
    """The bytes with one checksum, and the ranges of pieces in them."""

    number: int
    begin: int
    end: int
    segments: Sequence[tuple[_Piece, int, int]] = ()
    #: The memory to read the chunk into.
    views: Sequence[memoryview] = ()

    def find_views(self) -> bool:
        """Set ``views`` to the targets' memory. True if it fits the full chunk."""
        views, at = [], self.begin
        for piece, begin, end in self.segments:
            view = piece.view(begin, end)
            if view is None or piece.byte_of(begin) != at:
                return False
            views.append(view)
            at += len(view)
        self.views = views
        return at == self.end

    def copy_from(self, room: torch.Tensor) -> None:
        """Copy the bytes of the chunk to the targets."""
        data = memory(room)
        for piece, begin, end in self.segments:
            first = piece.byte_of(begin) - self.begin
            last = piece.byte_of(end) - self.begin
            view = piece.view(begin, end)
            if view is None:
                piece.copy_from(room[first:last], begin, end)
            else:
                view[:] = data[first:last]


@final
class _ShardFile:
    """A shard file. The header is read when needed."""

    def __init__(self, path: str, written: Written) -> None:
        self._path = path
        self._size = written.size
        self._entries: Mapping[str, dict[str, Any]] = {}
        self._header_size = 0
        #: The checksum of each chunk. Empty for other libraries and old versions.
        self.checksums = written.checksums
        #: The keys of the entries to read, for errors.
        self._keys: Sequence[str] = ()
        #: The chunks that contain the header, until the file is closed.
        self.kept: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def opened(self, pieces: Sequence[_Piece]) -> Iterator[None]:
        """Open the file, and read the header if there are pieces to find."""
        with storage_of(self._path).open(self._path) as self.file:
            self.threads = self.file.in_flight or share()
            self._keys = [piece.key for piece in pieces]
            if pieces and not self._header_size:
                self._read_header()
            yield
        self.kept.clear()

    def _read_header(self) -> None:
        content, size = b"", 8
        while self.checksums and len(content) < size:
            chunk = self.chunk(len(self.kept))
            room = host_memory(chunk.end - chunk.begin, pinned=False)
            self.kept[chunk.number] = room
            chunk.views = [memory(room)]
            self.read(chunk)
            content += chunk.views[0]
            size = 8 + int.from_bytes(content[:8], "little")
        content = content[:size] or bytes(read_header(self.file))
        with parsing(f"{self._path} has a damaged header"):
            self._entries = parse_header(content)
        self._header_size = len(content)

    def chunk(self, number: int) -> _Chunk:
        begin = number * CHUNK
        return _Chunk(number, begin, min(begin + CHUNK, self._size))

    def chunks(self, pieces: Iterable[_Piece]) -> Iterator[_Chunk]:
        """Yield the chunks with elements of pieces, in order."""
        found: dict[int, list[tuple[_Piece, int, int]]] = {}
        for piece in pieces:
            size, (begin, last) = piece.dtype.itemsize, span(piece.wanted, piece.sizes)
            start = self._entries[piece.key]["data_offsets"][0]
            piece.start = self._header_size + start + piece.first * size
            is_range = last - begin == piece.target.numel()
            while begin < last:
                number = piece.byte_of(begin) // CHUNK
                limit = (number + 1) * CHUNK
                # In unaligned files of other libraries, an element may end in the next chunk.
                end = min(last, -(-(limit - piece.start) // size))
                if is_range or any(piece.blocks(begin, end)):
                    found.setdefault(number, []).append((piece, begin, end))
                begin = end
        for number, segments in sorted(found.items()):
            segments.sort(key=lambda segment: segment[0].byte_of(segment[1]))
            chunk = self.chunk(number)
            chunk.segments = segments
            if not self.checksums:
                chunk.begin = segments[0][0].byte_of(segments[0][1])
                chunk.end = max(piece.byte_of(end) for piece, _, end in segments)
            yield chunk

    def read(self, chunk: _Chunk) -> None:
        """Fill the views of a chunk, and check its checksum."""
        file = self.file
        checksums = self.checksums
        for _ in range(file.tries):
            digest = xxhash.xxh3_64()
            for part in file.fill(chunk.begin, chunk.views):
                if checksums:
                    digest.update(part)
            if not checksums or digest.hexdigest() == checksums[chunk.number]:
                return
        names = [piece.key for piece, _, _ in chunk.segments] or self._keys
        inside = f", in {', '.join(dict.fromkeys(names[:3]))}" if names else ""
        place = f"between bytes {chunk.begin} and {chunk.end}{inside}"
        raise CheckpointError(f"{file.path} is damaged {place}. {OTHER}")


@final
class BoxReader:
    """A reader of a checkpoint's files."""

    def __init__(self, directory: str, record: Record) -> None:
        self._record = record
        self._stage = host_memory(0, pinned=False)
        self._copies: list[Any] = []
        #: The devices of the tensors to fill.
        self._devices = set[torch.device]()

        # Keep headers for the next read, but only a few, because they may have many entries.
        @functools.lru_cache(maxsize=16)
        def file(number: int) -> _ShardFile:
            written = record.files[number]
            # For files of other libraries, the name is already a full path or URL.
            path = written.name
            if not is_url(path):
                path = os.path.join(directory, path)
            return _ShardFile(path, written)

        self._file = file

    def fill(self, shards: Iterable[Shard]) -> None:
        """Fill shards, named as in the record, on any device."""
        wanted: dict[int, list[_Piece]] = {}
        self._devices.clear()
        for shard in shards:
            if not shard.tensor.numel():
                continue
            if is_remote(shard.tensor):
                self._devices.add(shard.tensor.device)
            for number, piece in _pieces_of(shard, self._record.tensors[shard.name]):
                wanted.setdefault(number, []).append(piece)
        for number, pieces in sorted(wanted.items()):
            file = self._file(number)
            with file.opened(pieces):
                self._read(file, file.chunks(pieces))
        finish(begun(self._devices))

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read tensors into new full tensors on the CPU."""
        tensors = {}
        for name in names:
            stored = self._record.tensors[name]
            dtype = BY_NAME[stored.dtype]
            tensors[name] = torch.empty(stored.shape, dtype=dtype, device="cpu")
        self.fill(whole(name, tensor) for name, tensor in tensors.items())
        return tensors

    def verify(self, number: int, start: int, step: int) -> None:
        """Compare every ``step``-th chunk of a file with its checksum."""
        file = self._file(number)

        def compare(number: int) -> None:
            chunk = file.chunk(number)
            size = chunk.end - chunk.begin
            # All views are the same memory of one step, so that it stays in the core's cache.
            room = memoryview(bytearray(min(size, STEP)))
            chunk.views = [room[: size - at] for at in range(0, size, len(room))]
            file.read(chunk)

        with file.opened(()):
            in_threads(compare, range(start, len(file.checksums), step), file.threads)

    def _read(self, file: _ShardFile, chunks: Iterable[_Chunk]) -> None:
        ready, staged = [], []
        for chunk in chunks:
            if chunk.number in file.kept:
                chunk.copy_from(file.kept[chunk.number])
            elif chunk.find_views():
                ready.append(chunk)
            else:
                staged.append(chunk)
        places = max(_STAGED, file.threads)
        pinned = bool(self._devices)
        if staged and (not len(self._stage) or pinned > self._stage.is_pinned()):
            self._stage = host_memory(places * (CHUNK + _ALIGN), pinned=pinned)
        rooms = self._stage.split(CHUNK + _ALIGN)
        for at in range(0, len(staged), places):
            batch = staged[at : at + places]
            finish(self._copies)  # these still read the buffer
            for chunk, room in zip(batch, rooms, strict=False):
                chunk.views = [memory(room)[: chunk.end - chunk.begin]]
            in_threads(file.read, batch, file.threads)
            for chunk, room in zip(batch, rooms, strict=False):
                chunk.copy_from(room)
            self._copies = begun(self._devices)
        in_threads(file.read, ready, file.threads)
