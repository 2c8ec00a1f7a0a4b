"""Read tensors out of shard files: each byte once, in chunks whose checksums are compared.

What lies in plain host memory is read into its place. What belongs to a device, has another dtype
or is a box of columns goes through one staging buffer.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, final

import torch
import xxhash

from ..errors import CheckpointError, is_url
from ..process import running
from ..process.transfer import begun, finish, host_memory, is_remote
from ..shard import Box, Shard, divided, expanded, intersection, relative, shape_of, slices
from . import old_format
from .record import OTHER, Record, Stored
from .shards import BY_NAME, ITEM_BYTES, batched, is_lazy, key_of, memory, parse_header
from .steps import parsing
from .storage import CHUNK, File, storage_of

T = TypeVar("T")

# -- threads ---------------------------------------------------------------------------------------

#: Each thread has a buffer of one chunk.
_MOST_THREADS: Final = 8


def share() -> int:
    """Return the number of threads for this rank, so that a node's ranks share its cores."""
    process = running()
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    ranks = 1 if process is None else process.place.local_world_size
    return max(1, min(_MOST_THREADS, cores // ranks))


@final
class WorkerThreads:
    """Threads that start with the first work for several of them and end with the object."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()

    def each(self, act: Callable[[T], object], items: Sequence[T], threads: int = 0) -> None:
        """Call ``act`` for all items. Raises the error of the first item that failed."""
        threads = threads or share()
        # At the end of the program no thread can start.
        if threads == 1 or len(items) < 2 or not threading.main_thread().is_alive():
            for item in items:
                act(item)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, "accel.read")
        futures = [self._pool.submit(act, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            # The caller's memory and file must not be used once it goes on.
            for future in futures:
                future.cancel()
            wait(futures)

    @property
    def buffer(self) -> memoryview:
        """Memory for one chunk, of the calling thread."""
        found: memoryview | None = getattr(self._own, "buffer", None)
        if found is None:
            found = self._own.buffer = memoryview(bytearray(CHUNK))
        return found


# -- the elements of a shard in files --------------------------------------------------------------

#: Bytes of the staging buffer.
_STAGE: Final = 16 << 20
_ALIGN: Final = 64
#: Headers that are not read again. Each may have very many entries.
_LAYOUTS: Final = 16


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


@dataclass(slots=True)
class _Layout:
    """The header of a file, and its checksums."""

    size: int
    entries: Mapping[str, dict[str, Any]]
    #: The offset of the first chunk.
    base: int
    #: Of each chunk. None: the file has none.
    checksums: Sequence[str] | None
    #: Chunks that were read already.
    kept: dict[int, memoryview]

    def locate(self, piece: _Piece, path: str) -> int:
        """Return the offset of a piece in the file."""
        begin, end = self.entries.get(piece.key, {}).get("data_offsets", (0, 0))
        offset = int(begin) + piece.start * piece.dtype.itemsize
        if offset + piece.nbytes > end:
            raise CheckpointError(f"{path} does not hold {piece.key!r} as the record says. {OTHER}")
        return self.size + offset


@final
class Reader:
    """The files of one checkpoint."""

    def __init__(self, directory: str, record: Record) -> None:
        self._directory = directory
        self._record = record
        self._threads = WorkerThreads()
        self._stage = host_memory(0, pinned=False)
        self._copies: list[Any] = []
        #: The headers of the last files, without chunks.
        self._layouts: dict[int, _Layout] = {}

    def fill(self, shards: Iterable[Shard]) -> None:
        """Read shards, each named as its tensor in the record, into memory of any device."""
        files: dict[int, list[_Piece]] = {}
        for shard in shards:
            if shard.tensor.numel():
                for file, piece in _pieces_of(shard, self._record.tensors[shard.name]):
                    files.setdefault(file, []).append(piece)
        for file in sorted(files):
            self._fill_from(file, files[file])
        finish(self._copies)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return full tensors, new and on the CPU."""
        found = {}
        for name in names:
            stored = self._record.tensors[name]
            dtype = BY_NAME[stored.dtype]
            found[name] = torch.empty(stored.shape, dtype=dtype, device="cpu")
        self.fill(Shard(name, tuple(t.shape), 0, t) for name, t in found.items())
        return found

    def chunks(self, file: int) -> int:
        """Return the number of chunks of a file."""
        written = self._record.files[file]
        if self._record.version == 3:
            return len(written.checksums)
        with storage_of(self._path(file)).open(self._path(file), written.size) as opened:
            return len(self._layout(opened, file).checksums or ())

    def verify(self, file: int, numbers: Sequence[int]) -> None:
        """Compare chunks of a file with their checksums."""
        path, written = self._path(file), self._record.files[file]
        with storage_of(path).open(path, written.size) as opened:
            layout = _Layout(0, {}, 0, written.checksums, {})
            if self._record.version != 3:
                layout = self._layout(opened, file)
            self._threads.each(
                lambda number: self._read_chunk(opened, layout, number, []),
                numbers,
                opened.in_flight,
            )

    def _path(self, file: int) -> str:
        # The files of other libraries have full paths.
        name = self._record.files[file].name
        return name if is_url(name) else os.path.join(self._directory, name)

    def _layout(self, opened: File, file: int) -> _Layout:
        """Return the header of a file."""
        if file in self._layouts:
            return replace(self._layouts[file], kept={})
        written, version = self._record.files[file], self._record.version
        if version == 3:
            layout = _Layout(0, {}, 0, written.checksums, {})
            first = layout.kept[0] = self._load(opened, layout, 0)
            layout.size = 8 + int.from_bytes(first[:8], "little")
            for number in range(1, -(-layout.size // CHUNK)):
                layout.kept[number] = self._load(opened, layout, number)
            header = b"".join(layout.kept.values())[: layout.size]
        else:
            length = 8 + int.from_bytes(opened.read(0, min(8, opened.size)), "little")
            header = bytes(opened.read(0, min(length, opened.size)))
            layout = _Layout(length, {}, length, None, {})
            if version:
                layout.checksums = old_format.data_checksums(header, written, opened.path)
        with parsing(f"{opened.path} has a damaged header"):
            layout.entries = parse_header(header)
        if len(self._layouts) == _LAYOUTS:
            self._layouts.clear()
        self._layouts[file] = replace(layout, kept={})
        return layout

    def _fill_from(self, file: int, pieces: list[_Piece]) -> None:
        path = self._path(file)
        with storage_of(path).open(path, self._record.files[file].size) as opened:
            try:
                layout = self._layout(opened, file)
            except _DamagedChunkError as error:
                raise error.naming([piece.key for piece in pieces]) from None
            plain = [piece for piece in pieces if piece.is_plain]
            staged = [part for p in pieces if not p.is_plain for part in p.halves()]
            for piece in [*plain, *staged]:
                piece.offset = layout.locate(piece, path)
            for piece in plain:
                piece.view = memory(piece.target)
            ordered = sorted([*plain, *staged], key=lambda piece: piece.offset)
            sizes = {id(piece): -(-piece.nbytes // _ALIGN) * _ALIGN for piece in staged}
            batches = list(batched(ordered, lambda piece: sizes.get(id(piece), 0), _STAGE))
            for number, batch in enumerate(batches):
                following = batches[number + 1][0].offset if number + 1 < len(batches) else -1
                self._fill_batch(opened, layout, batch, following)

    def _fill_batch(
        self, opened: File, layout: _Layout, pieces: Sequence[_Piece], following: int
    ) -> None:
        """Read pieces that fit into the staging buffer together."""
        staged = [piece for piece in pieces if piece.view is None]
        values = self._take_stage(staged)
        for piece, value in zip(staged, values, strict=True):
            piece.view = memory(value)
        segments: dict[int, list[tuple[int, memoryview]]] = {}
        for piece in pieces:
            view, at = piece.view, piece.offset
            while view:
                number = (at - layout.base) // CHUNK
                part = view[: layout.base + (number + 1) * CHUNK - at]
                segments.setdefault(number, []).append((at, part))
                view, at = view[len(part) :], at + len(part)
        # The next batch may begin in the last chunk of this one.
        last = max(segments)
        shared = following >= 0 and (following - layout.base) // CHUNK <= last
        if shared and layout.checksums is not None and last not in layout.kept:
            layout.kept[last] = self._load(opened, layout, last)
        self._threads.each(
            lambda number: self._read_chunk(opened, layout, number, segments[number]),
            sorted(segments),
            opened.in_flight,
        )
        for number in [number for number in layout.kept if number < last]:
            del layout.kept[number]
        for piece, value in zip(staged, values, strict=True):
            source = value.as_strided(piece.target.shape, piece.strides)
            piece.target.copy_(source, non_blocking=is_remote(piece.target))
        self._copies = begun({p.target.device for p in staged if is_remote(p.target)})

    def _take_stage(self, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        """Return memory for pieces in the staging buffer."""
        finish(self._copies)
        self._copies = []
        sizes = [-(-piece.nbytes // _ALIGN) * _ALIGN for piece in pieces]
        pinned = any(is_remote(piece.target) for piece in pieces)
        if self._stage.numel() < sum(sizes) or (pinned and not self._stage.is_pinned()):
            self._stage = host_memory(max(sum(sizes), _STAGE), pinned=pinned)
        rooms = self._stage[: sum(sizes)].split(sizes)
        pairs = zip(rooms, pieces, strict=True)
        return [room[: piece.nbytes].view(piece.dtype) for room, piece in pairs]

    def _read_chunk(
        self, opened: File, layout: _Layout, number: int, wanted: list[tuple[int, memoryview]]
    ) -> None:
        """Read a chunk into the wanted views, by their offsets, and compare its checksum."""
        begin = layout.base + number * CHUNK
        end = min(begin + CHUNK, opened.size)
        if layout.checksums is None:
            for offset, view in wanted:
                opened.fill(offset, [view])
            return
        kept = layout.kept.get(number)
        views = _tiles(begin, end, wanted, self._threads.buffer)
        if kept is None and views is not None:
            self._compare(opened, layout, number, views)
            return
        if kept is None:
            kept = self._threads.buffer[: end - begin]
            self._compare(opened, layout, number, [kept])
        for offset, view in wanted:
            view[:] = kept[offset - begin : offset - begin + len(view)]

    def _load(self, opened: File, layout: _Layout, number: int) -> memoryview:
        """Return a chunk in new memory."""
        content = bytearray(min(CHUNK, opened.size - layout.base - number * CHUNK))
        self._compare(opened, layout, number, [memoryview(content)])
        return memoryview(content)

    def _compare(
        self, opened: File, layout: _Layout, number: int, views: Sequence[memoryview]
    ) -> None:
        """Read a whole chunk into views. A wrong one may be read again."""
        assert layout.checksums is not None
        begin = layout.base + number * CHUNK
        steps = list(batched(_cut(views, opened.step), len, opened.step))
        for _ in range(opened.tries):
            offset, digest = begin, xxhash.xxh3_64()
            for step in steps:
                opened.fill(offset, step)
                for view in step:
                    digest.update(view)
                    offset += len(view)
            if digest.hexdigest() == layout.checksums[number]:
                return
        inside = []
        for key, entry in layout.entries.items():
            first, last = (layout.size + offset for offset in entry["data_offsets"])
            if first < begin + CHUNK and last > begin:
                inside.append(key)
        raise _DamagedChunkError(opened.path, begin, min(begin + CHUNK, opened.size), inside)


def _cut(views: Iterable[memoryview], most: int) -> Iterator[memoryview]:
    for view in views:
        for at in range(0, len(view), most):
            yield view[at : at + most]


def _tiles(
    begin: int, end: int, wanted: Sequence[tuple[int, memoryview]], scratch: memoryview
) -> list[memoryview] | None:
    """Return views that cover a chunk, scratch memory between the wanted ones. None: they overlap."""
    views, at = [], begin
    for offset, view in sorted(wanted, key=lambda one: one[0]):
        if offset < at:
            return None
        if offset > at:
            views.append(scratch[at - begin : offset - begin])
        views.append(view)
        at = offset + len(view)
    if at < end:
        views.append(scratch[at - begin : end - begin])
    return views


class _DamagedChunkError(CheckpointError):
    """A chunk has a wrong checksum."""

    def __init__(self, path: str, begin: int, end: int, tensors: Sequence[str]) -> None:
        self.place = path, begin, end
        more = ", ..." if len(tensors) > 3 else ""
        names = f", in {', '.join(tensors[:3])}{more}" if tensors else ""
        super().__init__(f"{path} is damaged between bytes {begin} and {end}{names}. {OTHER}")

    def naming(self, tensors: Sequence[str]) -> _DamagedChunkError:
        """Return the error with the names of tensors."""
        return _DamagedChunkError(*self.place, list(dict.fromkeys(tensors)))
