"""Read tensors out of shard files: each byte once, in chunks whose checksums are compared.

What lies in plain host memory is read into its place. What belongs to a device, has another dtype
or is a box of columns goes through one staging buffer.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
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
from .record import OTHER, VERSION, Record, Stored
from .shards import BY_NAME, Written, batched, is_lazy, key_of, memory, parse_header
from .steps import parsing
from .storage import CHUNK, File, storage_of

T = TypeVar("T")

# -- threads ---------------------------------------------------------------------------------------

_MOST_THREADS: Final = 8


def share() -> int:
    """Return the number of threads for this rank, so that a node's ranks share its cores."""
    process = running()
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    ranks = 1 if process is None else process.place.local_world_size
    return max(1, min(_MOST_THREADS, cores // ranks))


def in_threads(act: Callable[[T], object], items: Sequence[T], threads: int = 0) -> None:
    """Call ``act`` for all items. Raises the error of the first item that failed."""
    threads = threads or share()
    # At the end of the program no thread can start.
    if threads == 1 or len(items) < 2 or not threading.main_thread().is_alive():
        for item in items:
            act(item)
        return
    with ThreadPoolExecutor(threads, "accel.read") as pool:
        try:
            for _ in pool.map(act, items):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


_local: Final = threading.local()


def _scratch() -> memoryview:
    """Return memory for one chunk, of the calling thread."""
    if not hasattr(_local, "scratch"):
        _local.scratch = memoryview(bytearray(CHUNK))
    found: memoryview = _local.scratch
    return found


# -- the elements of a shard in files --------------------------------------------------------------

#: Bytes of the staging buffer.
_STAGE: Final = 16 << 20
_ALIGN: Final = 64
#: Headers that are not read again. Each may have very many entries.
_HEADERS: Final = 16


@dataclass(slots=True)
class _Piece:
    """Elements of an entry in a file, and the tensor that they go to."""

    key: str
    #: In elements of the entry.
    start: int
    dtype: torch.dtype
    #: The distances of the elements in the file. The target has as many dimensions.
    strides: tuple[int, ...]
    target: torch.Tensor
    #: The first byte in the file, once its header is known.
    offset: int = 0
    #: The memory to read into: the target's, or of the staging buffer.
    view: memoryview | None = None

    @property
    def count(self) -> int:
        """The elements from the first one to the last one."""
        distances = zip(self.target.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in distances)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def staged(self) -> int:
        """The bytes in the staging buffer."""
        return 0 if self.view is not None else -(-self.nbytes // _ALIGN) * _ALIGN

    @property
    def is_plain(self) -> bool:
        """True if the bytes of the file can be read into the target."""
        target = self.target
        return (
            target.device.type == "cpu"
            and target.dtype is self.dtype
            and target.is_contiguous()
            and self.count == target.numel()
            and not is_lazy(target)
        )

    def halves(self) -> Iterator[_Piece]:
        """Give the piece in parts that fit into the staging buffer."""
        if self.nbytes <= _STAGE or self.target.numel() == 1:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.target.shape) if size > 1)
        start = self.start
        for half in self.target.chunk(2, dim):
            yield from _Piece(self.key, start, self.dtype, self.strides, half).halves()
            start += half.shape[dim] * self.strides[dim]


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _targets(shard: Shard, region: Box) -> Iterator[tuple[Box, torch.Tensor]]:
    """Give the boxes of a shard, with a side for each dimension, and their views."""
    tensor, shape = shard.tensor, shard.shape
    row_size = math.prod(shape[1:])
    if len(region) == len(shape):
        yield region, tensor.view(shape_of(region))
    elif tensor.shape[1:] == shape[1:] and region[0][0] % max(row_size, 1) == 0:
        # It may have any strides, as the parameter of a convolution in channels_last.
        row = region[0][0] // max(row_size, 1)
        sides = ((row, row + len(tensor)), *((0, size) for size in shape[1:])) if shape else ()
        yield sides, tensor
    else:
        start, flat = 0, tensor if tensor.dim() == 1 else tensor.view(-1)
        for box in expanded(region, shape):
            count = math.prod(shape_of(box))
            yield box, flat[start : start + count].view(shape_of(box))
            start += count


def _pieces_of(shard: Shard, stored: Stored) -> Iterator[tuple[int, _Piece]]:
    """Give the elements of a shard, each with the number of its file."""
    dtype, shape, region = BY_NAME[stored.dtype], stored.shape, shard.region
    flat = stored.is_flat and len(region) == 1
    targets = [] if flat else list(_targets(shard, region))
    for file, box in stored.overlaps(region):
        key, first = stored.aliases.get((file, box)) or (key_of(shard.name, shape, box), 0)
        if flat:
            common = intersection(box, region)
            assert common is not None
            start = first + common[0][0] - box[0][0]
            ((begin, end),) = relative(common, region)
            for target in _ranges(shard.tensor, begin, end):
                yield file, _Piece(key, start, dtype, _row_major(target.shape), target)
                start += target.numel()
            continue
        for source in expanded(box, shape):
            strides = _row_major(shape_of(source))
            for own, target in targets:
                common = intersection(source, own)
                if common is not None:
                    corner = [begin for begin, _ in relative(common, source)]
                    start = first + sum(map(int.__mul__, corner, strides))
                    part = target[slices(relative(common, own))]
                    yield file, _Piece(key, start, dtype, strides, part)
            first += math.prod(shape_of(source))


def _ranges(tensor: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Give elements in row-major order as views."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[begin:end]
        return
    for box in divided(tuple((0, size) for size in tensor.shape), begin, end):
        yield tensor[slices(box)]


# -- files -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of a file."""

    size: int
    entries: Mapping[str, dict[str, Any]]
    #: The offset of the first chunk.
    base: int
    #: The checksum of each chunk. None: the file has none.
    checksums: Sequence[str] | None


@final
class _ShardFile:
    """A shard file that is open."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.header = _Header(0, {}, 0, None)
        #: Chunks in memory, which need not be read again.
        self._kept: dict[int, memoryview] = {}

    def read_header(self, written: Written, version: int) -> _Header:
        """Read the header, as the version of the record has it."""
        file = self.file
        checksums: Sequence[str] | None = None
        if version == VERSION:
            self.header = _Header(0, {}, 0, written.checksums)
            size = 8 + int.from_bytes(self._keep(0)[:8], "little")
            for number in range(1, -(-size // CHUNK)):
                self._keep(number)
            content, base = b"".join(self._kept.values())[:size], 0
            checksums = written.checksums
        else:
            size = base = 8 + int.from_bytes(file.read(0, min(8, file.size)), "little")
            content = bytes(file.read(0, min(size, file.size)))
            if version:
                checksums = old_format.data_checksums(content, written, file.path)
        with parsing(f"{file.path} has a damaged header"):
            self.header = _Header(size, parse_header(content), base, checksums)
        return self.header

    def locate(self, piece: _Piece) -> int:
        """Return the offset of a piece in the file."""
        begin, end = self.header.entries.get(piece.key, {}).get("data_offsets", (0, 0))
        offset = int(begin) + piece.start * piece.dtype.itemsize
        if offset + piece.nbytes > end:
            raise CheckpointError(
                f"{self.file.path} does not hold {piece.key!r} as the record says. {OTHER}"
            )
        return self.header.size + offset

    def chunk_of(self, offset: int) -> int:
        """Return the number of the chunk that has a byte."""
        return (offset - self.header.base) // CHUNK

    def read(self, pieces: Sequence[_Piece], following: int | None = None) -> None:
        """Read pieces into their memory. ``following`` is the offset of the next one to read."""
        segments: dict[int, list[tuple[int, memoryview]]] = {}
        for piece in pieces:
            view, at = piece.view, piece.offset
            while view:
                number = self.chunk_of(at)
                part = view[: self.header.base + (number + 1) * CHUNK - at]
                segments.setdefault(number, []).append((at, part))
                view, at = view[len(part) :], at + len(part)
        last = max(segments)
        # Then it begins in the last chunk of this one.
        if following is not None and self.chunk_of(following) <= last and self.header.checksums:
            self._keep(last)
        self.read_chunks(segments)
        self._kept = {number: view for number, view in self._kept.items() if number >= last}

    def read_chunks(self, segments: Mapping[int, list[tuple[int, memoryview]]]) -> None:
        """Read chunks into the wanted views, by their offsets, and compare their checksums."""
        in_threads(
            lambda number: self._read_chunk(number, segments[number]),
            sorted(segments),
            self.file.in_flight,
        )

    def _read_chunk(self, number: int, wanted: list[tuple[int, memoryview]]) -> None:
        if self.header.checksums is None:
            for offset, view in wanted:
                self.file.fill(offset, [view])
            return
        begin = self.header.base + number * CHUNK
        scratch = _scratch()[: min(CHUNK, self.file.size - begin)]
        views, at = [], 0
        for offset, view in sorted(wanted, key=lambda one: one[0]):
            # Scratch memory takes what lies between the wanted bytes.
            views += [scratch[at : offset - begin], view]
            at = offset - begin + len(view)
        views.append(scratch[at:])
        content = self._kept.get(number)
        if content is None and sum(map(len, views)) == len(scratch):
            self._compare(number, views)
            return
        # It is here already, or boxes of columns overlap in it.
        if content is None:
            self._compare(number, [scratch])
            content = scratch
        for offset, view in wanted:
            view[:] = content[offset - begin : offset - begin + len(view)]

    def _keep(self, number: int) -> memoryview:
        """Return a chunk in memory of its own."""
        if number not in self._kept:
            size = min(CHUNK, self.file.size - self.header.base - number * CHUNK)
            content = memoryview(bytearray(size))
            self._compare(number, [content])
            self._kept[number] = content
        return self._kept[number]

    def _compare(self, number: int, views: Sequence[memoryview]) -> None:
        """Read a chunk into views that cover it. A wrong one may be read again."""
        header, file = self.header, self.file
        assert header.checksums is not None
        begin = header.base + number * CHUNK
        # Hashed in steps, while the bytes are in the caches of the core that has read them.
        parts = (
            view[at : at + file.step] for view in views for at in range(0, len(view), file.step)
        )
        steps = list(batched(parts, len, file.step))
        for _ in range(file.tries):
            offset, digest = begin, xxhash.xxh3_64()
            for step in steps:
                file.fill(offset, step)
                for view in step:
                    digest.update(view)
                    offset += len(view)
            if digest.hexdigest() == header.checksums[number]:
                return
        inside = []
        for key, entry in header.entries.items():
            first, last = (header.size + at for at in entry["data_offsets"])
            if first < begin + CHUNK and last > begin:
                inside.append(key)
        raise _DamagedChunkError(file.path, begin, min(begin + CHUNK, file.size), inside)


class _DamagedChunkError(CheckpointError):
    """A chunk has a wrong checksum."""

    def __init__(self, path: str, begin: int, end: int, tensors: Sequence[str]) -> None:
        self.place, self.tensors = (path, begin, end), tensors
        more = ", ..." if len(tensors) > 3 else ""
        names = f", in {', '.join(tensors[:3])}{more}" if tensors else ""
        super().__init__(f"{path} is damaged between bytes {begin} and {end}{names}. {OTHER}")


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
                for file, piece in _pieces_of(shard, self._record.tensors[shard.name]):
                    files.setdefault(file, []).append(piece)
        for number, pieces in sorted(files.items()):
            try:
                with self._open(number) as opened:
                    self._fill_from(opened, pieces)
            except _DamagedChunkError as error:
                if error.tensors:
                    raise
                # The header, which names the tensors in a chunk, is in the chunk itself.
                names = list(dict.fromkeys(piece.key for piece in pieces))
                raise _DamagedChunkError(*error.place, names) from None
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
        with self._open(number, header=self._record.version != VERSION) as file:
            chunks = range(start, len(file.header.checksums or ()), step)
            file.read_chunks({chunk: [] for chunk in chunks})

    @contextlib.contextmanager
    def _open(self, number: int, *, header: bool = True) -> Iterator[_ShardFile]:
        written = self._record.files[number]
        # The files of other libraries have full paths.
        path = written.name
        if not is_url(path):
            path = os.path.join(self._directory, path)
        with storage_of(path).open(path, written.size) as opened:
            file = _ShardFile(opened)
            file.header = self._headers.get(number, _Header(0, {}, 0, written.checksums))
            if header and number not in self._headers:
                if len(self._headers) == _HEADERS:
                    self._headers.clear()
                self._headers[number] = file.read_header(written, self._record.version)
            yield file

    def _fill_from(self, file: _ShardFile, pieces: Iterable[_Piece]) -> None:
        ordered = []
        for piece in pieces:
            if piece.is_plain:
                piece.view = memory(piece.target)
                ordered.append(piece)
            else:
                ordered += piece.halves()
        for piece in ordered:
            piece.offset = file.locate(piece)
        ordered.sort(key=lambda piece: piece.offset)
        batches = list(batched(ordered, lambda piece: piece.staged, _STAGE))
        for number, batch in enumerate(batches):
            following = batches[number + 1][0].offset if number + 1 < len(batches) else None
            staged = [piece for piece in batch if piece.view is None]
            values = self._take_stage(staged)
            for piece, value in zip(staged, values, strict=True):
                piece.view = memory(value)
            file.read(batch, following)
            for piece, value in zip(staged, values, strict=True):
                source = value.as_strided(piece.target.shape, piece.strides)
                piece.target.copy_(source, non_blocking=is_remote(piece.target))
            self._copies = begun({p.target.device for p in staged if is_remote(p.target)})

    def _take_stage(self, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        """Return memory for pieces in the staging buffer."""
        finish(self._copies)
        self._copies = []
        sizes = [piece.staged for piece in pieces]
        pinned = any(is_remote(piece.target) for piece in pieces)
        if self._stage.numel() < sum(sizes) or (pinned and not self._stage.is_pinned()):
            self._stage = host_memory(max(sum(sizes), _STAGE), pinned=pinned)
        rooms = self._stage[: sum(sizes)].split(sizes)
        pairs = zip(rooms, pieces, strict=True)
        return [room[: piece.nbytes].view(piece.dtype) for room, piece in pairs]
