"""Reading ranges of tensors out of shard files, with or without comparing their checksums on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from operator import itemgetter
from typing import Final, TypeVar, final

import torch

from ..errors import CheckpointError
from ..process import running
from .failures import parsing
from .record import NAME, Record, Stored
from .safetensors import BY_NAME, CHUNK, ITEM_BYTES, Entry, Header, chunks_of, is_lazy, memory, parse_header
from .shards import checksum_of, checksums_of, open_file, read_header, read_into

# -- Threads that read and hash, as many as this rank's share of the host's cores --------------------------------------

T = TypeVar("T")
_MOST: Final = 8  # each has a buffer of one chunk, and a rank takes at most 64 MiB for a load


def share() -> int:
    """How many threads a rank may use, so that the ranks of a host do not take each other's cores."""
    process = running()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, cores // (1 if process is None else process.place.local_world_size)))


@final
class ReaderThreads:
    """Do many pieces of work. The threads start with the first that has several pieces, and end with the object."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()

    def each(self, act: Callable[[T], object], items: Sequence[T]) -> None:
        """Do ``act`` for all items.

        Raises:
            Exception: that of the first item, in their order, that failed; what had not begun is not done.
        """
        threads = share()
        if threads == 1 or len(items) < 2:
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


_STAGE: Final = 16 << 20  # bytes of a copy on the way to what is not plain memory
_ADVICE: Final = "load another checkpoint (accel.latest), or copy this one again from where it is whole"


#: A byte of a file, and the memory that the bytes from there on belong into.
_Wanted = tuple[int, memoryview]


@final
class Reader:
    """The files of one checkpoint.

    Args:
        directory: of the checkpoint.
        record: what it holds.
        stream: compare the checksums of all chunks that are read.
        headers: of the files, where another library wrote them, without checksums.
    """

    def __init__(
        self, directory: str, record: Record, *, stream: bool, headers: Sequence[Header] | None = None
    ) -> None:
        self._directory = directory
        self._record = record
        self._stream = stream and headers is None
        self._headers = dict(enumerate(headers or ()))
        self._threads = ReaderThreads()

    def _path(self, file: int) -> str:
        return os.path.join(self._directory, self._record.files[file].name)

    def header(self, file: int) -> Header:
        """A file's header, whose checksums are the record's; raises where the file is missing, cut or changed."""
        if file not in self._headers:
            path, written = self._path(file), self._record.files[file]
            with open_file(path, written.size) as fd:
                content = read_header(fd, path)
            if checksums_of(memoryview(content)) != written.header:
                raise CheckpointError(f"{path}: its header is damaged, or it is of another save; {_ADVICE}")
            with parsing(f"{path}: its header is not as {NAME} needs it"):
                self._headers[file] = parse_header(bytes(content), written.size, checked=True)
        return self._headers[file]

    def locate(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Where elements of a tensor are: (file, byte in it, first element, number of elements), if the files have them."""
        stored: Stored = self._record.tensors[name]
        size = ITEM_BYTES[stored.dtype]
        for file, first, count in stored.overlaps(start, stop):
            key, begin = self.header(file).locate(Entry(name, stored.dtype, stored.shape, first, count))
            if begin is None:
                raise CheckpointError(f"{self._path(file)}: does not hold {key!r} as {NAME} says; {_ADVICE}")
            low, high = max(start, first), min(stop, first + count)
            yield file, begin + (low - first) * size, low, high - low

    def chunks(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The chunks that elements of a tensor are in: (file, first chunk, chunk after the last)."""
        size = ITEM_BYTES[self._record.tensors[name].dtype]
        for file, offset, _, count in self.locate(name, start, stop):
            begin = offset - self.header(file).size
            yield file, begin // CHUNK, chunks_of(begin + count * size)

    def verify(self, file: int, chunks: Sequence[int]) -> None:
        """Compare the checksums of chunks of a file; raises for the first that is damaged, with a tensor that is in it."""
        self._read_chunks(file, {chunk: [] for chunk in chunks})

    def _read_chunks(self, file: int, chunks: Mapping[int, list[_Wanted]]) -> None:
        """Read what is wanted of chunks; one of which nothing is wanted is compared with its checksum."""
        with open_file(self._path(file), self._record.files[file].size) as fd:
            self._threads.each(lambda chunk: self._read_chunk(fd, file, chunk, chunks[chunk]), sorted(chunks))

    def _read_chunk(self, fd: int, file: int, chunk: int, wanted: list[_Wanted]) -> None:
        """Read what is wanted into its places; where checksums are compared, all else into this thread's buffer."""
        header, path = self.header(file), self._path(file)
        begin = header.size + chunk * CHUNK
        end = min(begin + CHUNK, self._record.files[file].size)
        compare = self._stream or not wanted
        views, twice, at = [], [], begin
        for offset, into in sorted(wanted, key=itemgetter(0)):
            if offset < at:
                twice.append((offset, into))
                continue
            if compare:
                views.append(self._threads.buffer[at - begin : offset - begin])
            elif offset > at:
                read_into(fd, path, views, begin)
                views, begin = [], offset
            views.append(into)
            at = offset + len(into)
        views += [self._threads.buffer[at - begin : end - begin]] if compare else []
        read_into(fd, path, views, begin)
        if compare and checksum_of(views) != header.checksums[chunk]:
            inside = header.inside(begin, end)
            raise CheckpointError(
                f"{path} is damaged between bytes {begin} and {end}, in {', '.join(inside[:3])}"
                f"{', ...' if len(inside) > 3 else ''}; {_ADVICE}"
            )
        if twice:
            self._read_chunk(fd, file, chunk, twice)

    def fill(self, wanted: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Read elements of tensors, from the given one on, into tensors of any device, layout and dtype."""
        by_file: dict[int, dict[int, list[_Wanted]]] = {}
        rest = []
        for name, start, tensor in wanted:
            dtype = BY_NAME[self._record.tensors[name].dtype]
            if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype is dtype and not is_lazy(tensor):
                self._plan(name, start, tensor, by_file)
            else:
                rest.append((name, start, tensor))
        for file in sorted(by_file):
            self._read_chunks(file, by_file[file])
        for name, start, tensor in rest:
            self._fill_staged(name, start, tensor)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, new and on the CPU."""
        stored = self._record.tensors[name]
        for _ in self.locate(name, 0, stored.numel):
            pass  # all of it is in the files: so much memory may be taken
        tensor = torch.empty(stored.shape, dtype=BY_NAME[stored.dtype], device="cpu")
        self.fill([(name, 0, tensor)])
        return tensor

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors of one shape and dtype have the same bytes; in little memory."""
        stored = self._record.tensors[one]
        step, dtype = max(1, _STAGE // ITEM_BYTES[stored.dtype]), BY_NAME[stored.dtype]
        for at in range(0, stored.numel, step):
            a, b = (torch.empty(min(step, stored.numel - at), dtype=dtype, device="cpu") for _ in range(2))
            self.fill([(one, at, a), (other, at, b)])
            if memory(a) != memory(b):
                return False
        return True

    def _plan(self, name: str, start: int, tensor: torch.Tensor, by_file: dict[int, dict[int, list[_Wanted]]]) -> None:
        """Find the file and the chunk of each element."""
        view, at = memory(tensor), 0
        for file, offset, _, count in self.locate(name, start, start + tensor.numel()):
            base, chunks = self.header(file).size, by_file.setdefault(file, {})
            end = offset + count * tensor.element_size()
            while offset < end:
                chunk = (offset - base) // CHUNK
                size = min(base + (chunk + 1) * CHUNK, end) - offset
                chunks.setdefault(chunk, []).append((offset, view[at : at + size]))
                offset, at = offset + size, at + size

    def _fill_staged(self, name: str, start: int, tensor: torch.Tensor) -> None:
        dtype = BY_NAME[self._record.tensors[name].dtype]
        step = max(1, _STAGE // dtype.itemsize) if tensor.is_contiguous() else max(1, tensor.numel())
        for at in range(0, tensor.numel(), step):
            stage = torch.empty(min(step, tensor.numel() - at), dtype=dtype, device="cpu")
            self.fill([(name, start + at, stage)])
            if tensor.is_contiguous():
                tensor.view(-1)[at : at + step].copy_(stage)
            else:
                tensor.copy_(stage.view(tensor.shape))
