"""Reading parts of tensors out of shard files, with or without comparing their checksums on the way."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, TypeVar, final

import torch

from ..errors import CheckpointError, is_url
from ..process import running
from ..process.transfer import begun, finish, host_memory, is_remote
from ..shard import Grid, Shard, divided, in_box, shape_of
from .layout import entry_of
from .record import NAME, Record, Stored
from .safetensors import BY_NAME, CHUNK, ITEM_BYTES, Entry, Header, is_lazy, memory, parse_header
from .shards import batched, checksum_of, checksums_of
from .steps import parsing
from .storage import File, storage_of

# -- Threads for what Python waits for outside of itself: to read, hash, copy, as many as this rank's share of the cores

T = TypeVar("T")
_MOST: Final = 8  # each has a buffer of one chunk, and a rank takes at most 64 MiB for a load


def share() -> int:
    """How many threads a rank may use, so that the ranks of a host do not take each other's cores."""
    process = running()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(_MOST, cores // (1 if process is None else process.place.local_world_size)))


@final
class WorkerThreads:
    """Do many pieces of work. The threads start with the first that has several pieces, and end with the object."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()

    def each(self, act: Callable[[T], object], items: Sequence[T], threads: int = 0) -> None:
        """Do ``act`` for all items; ``threads`` at a time, or as many as this rank's share of the cores.

        Raises what the first item, in their order, did that failed; what had not begun is not done.
        """
        threads = threads or share()
        # A program that is at its end, in a function of atexit's, gets no more threads.
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
            # Nobody may write to the caller's memory, or read from its file, once the caller goes on.
            for future in futures:
                future.cancel()
            wait(futures)

    @property
    def buffer(self) -> memoryview:
        """Memory for one chunk, of the thread that asks."""
        found: memoryview | None = getattr(self._own, "buffer", None)
        if found is None:
            found = self._own.buffer = memoryview(bytearray(CHUNK))
        return found


_ADVICE: Final = (
    "load another checkpoint (accel.latest), or copy this one again from where it is whole"
)


@dataclass(slots=True)
class _Piece:
    """Bytes that are wanted of one chunk."""

    offset: int  # of the first of them in the file
    nbytes: int
    #: Where they belong; None where ``tensor`` is no plain memory of ``dtype``, until there is room.
    view: memoryview | None
    tensor: torch.Tensor  # what they are elements of
    first: int  # the first of these elements
    dtype: torch.dtype  # in the file


#: Elements of a tensor's line, the first and how many; how what is wanted lies among them (None: it is all), where it belongs.
_Strip = tuple[int, int, torch.Tensor | None, torch.Tensor]
_STAGE: Final = 16 << 20  # bytes of a buffer on the way to what is no plain memory
_ALIGN: Final = 64


@final
class _Staging:
    """Memory on the way to tensors of another device, layout or dtype: two buffers, one of which is read into while the other's
    copies to a device go on."""

    def __init__(self) -> None:
        self._buffers = [host_memory(0, pinned=False)] * 2
        self._copies: list[list[Any]] = [[], []]
        self._turn = 0

    def take(self, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        """Room for them, in the buffer whose turn it is."""
        self._turn = 1 - self._turn
        finish(self._copies[self._turn])
        sizes = [-(-piece.nbytes // _ALIGN) * _ALIGN for piece in pieces]
        buffer, pinned = self._buffers[self._turn], any(is_remote(piece.tensor) for piece in pieces)
        if buffer.numel() < sum(sizes) or (pinned and not buffer.is_pinned()):
            buffer = self._buffers[self._turn] = host_memory(max(sum(sizes), _STAGE), pinned=pinned)
        room = buffer[: sum(sizes)].split(sizes)
        return [
            part[: piece.nbytes].view(piece.dtype) for part, piece in zip(room, pieces, strict=True)
        ]

    def put(self, pieces: Sequence[_Piece], values: Sequence[torch.Tensor]) -> None:
        """Copy what was read to where it belongs."""
        for piece, value in zip(pieces, values, strict=True):
            _put(piece.tensor, piece.first, value)
        self._copies[self._turn] = begun(
            {piece.tensor.device for piece in pieces if is_remote(piece.tensor)}
        )

    def finish(self) -> None:
        """Wait for all copies: what was filled may be used on any stream."""
        for copies in self._copies:
            finish(copies)


def _place(piece: _Piece) -> memoryview:
    assert piece.view is not None
    return piece.view


def _read_in_steps(
    opened: File, offset: int, step: int, steps: Iterable[list[memoryview]]
) -> Iterator[memoryview]:
    """The memory of each step once it is filled, with the bytes from ``offset`` on."""
    for number, views in enumerate(steps):
        opened.fill([(offset + number * step, views)])
        yield from views


def _put(tensor: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """Write elements from ``first`` on, in row-major order; from pinned memory to a device without waiting for it."""
    if values.dtype is not tensor.dtype:
        values = values.to(tensor.device, non_blocking=is_remote(tensor))  # it is converted there
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    row = tensor.numel() // len(tensor)
    while values.numel():
        at, within = divmod(first, row)
        count = len(values) // row * row
        if within or not count:
            count = min(row - within, len(values))
            _put(tensor[at], within, values[:count])
        else:
            rows = tensor[at : at + count // row]
            rows.copy_(values[:count].view(rows.shape), non_blocking=is_remote(rows))
        first, values = first + count, values[count:]


@final
class Reader:
    """The files of one checkpoint, with what its record says of them.

    Compares the checksum of each chunk that it reads. ``headers`` are those of files that another library wrote, which have no
    checksums.
    """

    def __init__(
        self, directory: str, record: Record, *, headers: Sequence[Header] | None = None
    ) -> None:
        self._directory = directory
        self._record = record
        self._has_checksums = headers is None
        self._headers = dict(enumerate(headers or ()))
        self._threads = WorkerThreads()
        self._staging = _Staging()

    def _path(self, file: int) -> str:
        name = self._record.files[file].name  # another library's is a whole path
        return name if is_url(name) else os.path.join(self._directory, name)

    def header(self, file: int) -> Header:
        """A file's header, whose checksums are the record's; raises where the file is missing, cut or changed."""
        if file not in self._headers:
            path, written = self._path(file), self._record.files[file]
            for tried in itertools.count(1):
                with storage_of(path).open(path, written.size) as opened:
                    content = opened.read_header()
                if checksums_of(memoryview(content)) == written.header:
                    break
                if tried == opened.tries:
                    raise CheckpointError(
                        f"{path}: its header is damaged, or it is of another save; {_ADVICE}"
                    )
            with parsing(f"{path}: its header is not as {NAME} needs it"):
                self._headers[file] = parse_header(bytes(content), written.size)
        return self._headers[file]

    def locate(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Where elements of a tensor's line are: (file, byte in it, first element, number of elements), if files have them."""
        stored: Stored = self._record.tensors[name]
        size, grid = (
            ITEM_BYTES[stored.dtype],
            Grid(stored.shape, stored.cuts) if stored.cuts else None,
        )
        for file, first, count in stored.overlaps(start, stop):
            entry = Entry(name, stored.dtype, stored.shape, first, count)
            entry = entry if grid is None else entry_of(entry, grid)
            key, begin = self.header(file).locate(entry)
            if begin is None or (grid is not None and entry.start + count > math.prod(entry.shape)):
                raise CheckpointError(
                    f"{self._path(file)}: does not hold {key!r} as {NAME} says; {_ADVICE}"
                )
            low, high = max(start, first), min(stop, first + count)
            yield file, begin + (low - first) * size, low, high - low

    def _strips(self, wanted: Shard) -> Iterator[_Strip]:
        """What is read for a part of a tensor: itself, or where that is in rows, what covers some of them."""
        stored, tensor = self._record.tensors[wanted.name], wanted.tensor
        if not stored.cuts and not wanted.box:
            yield wanted.start, tensor.numel(), None, tensor
            return
        grid, most = Grid(stored.shape, stored.cuts), _STAGE // ITEM_BYTES[stored.dtype]
        flat = (
            tensor.view(-1)
            if tensor.is_contiguous()
            else torch.empty(tensor.numel(), dtype=torch.uint8, device="meta")
        )
        for own in divided(wanted.box or grid.whole, wanted.start, wanted.start + len(flat)):
            sizes = shape_of(own)
            place, flat = flat[: math.prod(sizes)].view(sizes), flat[math.prod(sizes) :]
            for block in grid.blocks(own):
                lying = torch.empty(shape_of(block), dtype=torch.uint8, device="meta")[
                    in_box(own, block)
                ]
                yield from _halved(lying, place[in_box(block, own)], most, grid.first(block))

    def check_headers(self, wanted: Shard) -> None:
        """Raise unless the files that hold a part of a tensor are there, with the headers that the record describes."""
        for first, span, *_ in self._strips(wanted):
            for _ in self.locate(wanted.name, first, first + span):
                pass

    def verify(self, file: int, chunks: Sequence[int]) -> None:
        """Compare the checksums of chunks of a file; raises for the first that is damaged, with a tensor that is in it."""
        self._read_chunks(file, {chunk: [] for chunk in chunks})

    def _read_chunks(self, file: int, chunks: Mapping[int, list[_Piece]]) -> None:
        """Read what is wanted of chunks; one of which nothing is wanted is compared with its checksum."""
        path = self._path(file)

        def staged_of(number: int) -> int:
            return sum(piece.nbytes for piece in chunks[number] if piece.view is None)

        with storage_of(path).open(path, self._record.files[file].size) as opened:
            for numbers in batched(
                sorted(chunks), staged_of, _STAGE
            ):  # each chunk whole, to be read once
                staged = [
                    piece for number in numbers for piece in chunks[number] if piece.view is None
                ]
                values = self._staging.take(staged) if staged else []
                for piece, value in zip(staged, values, strict=True):
                    piece.view = memory(value)
                self._threads.each(
                    lambda number: self._read_chunk(opened, file, number, chunks[number]),
                    numbers,
                    opened.in_flight,
                )
                if staged:
                    self._staging.put(staged, values)

    def _read_chunk(self, opened: File, file: int, chunk: int, wanted: list[_Piece]) -> None:
        """Read what is wanted into its places; where checksums are compared, all of it."""
        begin = self.header(file).size + chunk * CHUNK
        once: list[_Piece] = []
        twice: list[_Piece] = []
        at = begin
        for piece in sorted(wanted, key=attrgetter("offset")):
            (twice if piece.offset < at else once).append(piece)
            at = max(at, piece.offset + piece.nbytes)
        if self._has_checksums:
            self._compare_chunk(opened, file, chunk, once)
        else:
            ranges: list[tuple[int, list[memoryview]]] = []
            at = -1
            for piece in once:
                if piece.offset > at:
                    ranges.append((piece.offset, []))
                ranges[-1][1].append(_place(piece))
                at = piece.offset + piece.nbytes
            opened.fill(ranges)
        if twice:
            self._read_chunk(opened, file, chunk, twice)

    def _compare_chunk(self, opened: File, file: int, chunk: int, wanted: Sequence[_Piece]) -> None:
        """Read a whole chunk, what is not wanted into this thread's buffer; raises where its checksum is another."""
        header, step = self.header(file), opened.step
        begin = header.size + chunk * CHUNK
        end = min(begin + CHUNK, self._record.files[file].size)
        # Hashed at each step, while it is in the caches of the core that has read it.
        steps: list[list[memoryview]] = [[] for _ in range(-(-(end - begin) // step))]

        def add(low: int, high: int, view: memoryview | None) -> None:
            # Nothing between two pieces is no part: it would ask for this thread's buffer.
            for number in range(low // step, -(-high // step) if low < high else 0):
                a, b = max(low, number * step), min(high, (number + 1) * step)
                part = (
                    self._threads.buffer[a % step : a % step + b - a]
                    if view is None
                    else view[a - low : b - low]
                )
                steps[number].append(part)

        at = 0
        for piece in wanted:
            offset = piece.offset - begin
            add(at, offset, None)
            at = offset + piece.nbytes
            add(offset, at, _place(piece))
        add(at, end - begin, None)
        if all(
            checksum_of(_read_in_steps(opened, begin, step, steps)) != header.checksums[chunk]
            for _ in range(opened.tries)
        ):
            inside = header.inside(begin, end)
            raise CheckpointError(
                f"{opened.path} is damaged between bytes {begin} and {end}, in {', '.join(inside[:3])}"
                f"{', ...' if len(inside) > 3 else ''}; {_ADVICE}"
            )

    def fill(self, wanted: Iterable[Shard]) -> None:
        """Read parts of tensors into memory of any device, layout and dtype; each chunk once, but of what lies in other boxes."""
        files: dict[int, dict[int, list[_Piece]]] = {}
        rooms: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        size = 0
        for one in wanted:
            stored, own = self._record.tensors[one.name], one.tensor
            if (one.box or stored.cuts) and not own.is_contiguous():
                one = replace(
                    one, tensor=torch.empty(own.shape, dtype=own.dtype, device=own.device)
                )
            for first, span, strip, into in self._strips(one):
                if strip is not None:
                    if size + span * ITEM_BYTES[stored.dtype] > _STAGE:
                        self._take(files, rooms)
                        files, rooms, size = {}, [], 0
                    room = torch.empty(span, dtype=BY_NAME[stored.dtype], device=own.device)
                    rooms.append((room, strip, into))
                    size += (into := room).nbytes
                self._plan(one.name, first, into, files)
            if one.tensor is not own:
                rooms.append((one.tensor, one.tensor, own))
        self._take(files, rooms)
        self._staging.finish()

    def _take(
        self,
        files: dict[int, dict[int, list[_Piece]]],
        rooms: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> None:
        """Read what was planned, and copy what is wanted of the rooms that it went into."""
        for file in sorted(files):
            self._read_chunks(file, files[file])
        for room, strip, into in rooms:
            into.copy_(room.as_strided(strip.shape, strip.stride()))

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Whole tensors, new and on the CPU."""
        stored = {name: self._record.tensors[name] for name in names}
        flat = [self._room(name, 0, s.numel, BY_NAME[s.dtype]) for name, s in stored.items()]
        self.fill(flat)
        return {one.name: one.tensor.view(one.shape) for one in flat}

    def in_turn(
        self, ranges: Iterable[tuple[str, int, int, torch.dtype]]
    ) -> Iterator[torch.Tensor]:
        """Elements of tensors, each a new flat tensor on the CPU; small ones are read together.

        ``ranges``: name, first element, number of elements, and dtype.
        """
        for batch in batched(ranges, lambda one: one[2] * one[3].itemsize, _STAGE):
            yield from self._filled([self._room(*one) for one in batch])

    def _room(self, name: str, start: int, count: int, dtype: torch.dtype) -> Shard:
        blank = Shard(
            name,
            self._record.tensors[name].shape,
            start,
            torch.empty(count, dtype=torch.uint8, device="meta"),
        )
        self.check_headers(blank)  # all of it is in the files: so much memory may be taken
        return replace(blank, tensor=torch.empty(count, dtype=dtype, device="cpu"))

    def _filled(self, wanted: Sequence[Shard]) -> Iterator[torch.Tensor]:
        self.fill(wanted)
        return (one.tensor for one in wanted)

    def _plan(
        self, name: str, start: int, tensor: torch.Tensor, files: dict[int, dict[int, list[_Piece]]]
    ) -> None:
        """Find the file and the chunk of each element of a tensor's line, from ``start`` on."""
        dtype = BY_NAME[self._record.tensors[name].dtype]
        plain = (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and tensor.dtype is dtype
            and not is_lazy(tensor)
        )
        view, item = memory(tensor) if plain else None, dtype.itemsize
        for file, offset, first, count in self.locate(name, start, start + tensor.numel()):
            base, chunks, at = self.header(file).size, files.setdefault(file, {}), first - start
            while count:
                number = (offset - base) // CHUNK
                # At least one: other libraries' files, which have no checksums, may have elements over the end of a chunk.
                n = min(max(1, (base + (number + 1) * CHUNK - offset) // item), count)
                place = None if view is None else view[at * item : (at + n) * item]
                chunks.setdefault(number, []).append(
                    _Piece(offset, n * item, place, tensor, at, dtype)
                )
                offset, at, count = offset + n * item, at + n, count - n


def _halved(lying: torch.Tensor, into: torch.Tensor, most: int, base: int) -> Iterator[_Strip]:
    """Views of elements where they lie and where they belong, in parts that span at most so many, or are read as they are."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(lying.shape, lying.stride(), strict=True))
    alike = span == lying.numel() and into.is_contiguous()
    if alike or span <= most:
        yield base + int(lying.storage_offset()), span, None if alike else lying, into
        return
    wide = next(d for d, n in enumerate(lying.shape) if n > 1)
    for halves in zip(lying.chunk(2, wide), into.chunk(2, wide), strict=True):
        yield from _halved(*halves, most, base)
