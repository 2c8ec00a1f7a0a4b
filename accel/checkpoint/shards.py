"""The bytes of shard files: written with checksums and started write-out, read by ranges."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from ..errors import CheckpointError
from .dtypes import STORED, element_bytes, is_lazy, memory, resolve
from .together import explain, of

# -- the header of a safetensors file ----------------------------------------------------------------------------------
# The header of a shard file: a valid safetensors header that also carries the checksums of the data. Pure.

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


_WRITE: Final = 8 << 20  # bytes of one write, after which the kernel is asked to begin writing out
_PIECE: Final = 16 << 20  # bytes of a copy where a tensor is not in plain memory
_MAX_VECTORS: Final = 512
_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE


@dataclass(frozen=True, slots=True)
class Source:
    """An entry, and the tensor that holds it from element ``offset`` on."""

    entry: Entry
    tensor: torch.Tensor
    offset: int


@dataclass(frozen=True, slots=True)
class Written:
    """What the record says of a file: its name, its size, and the checksums of its header's chunks."""

    name: str
    size: int
    header: tuple[str, ...]


@cache
def _hashing() -> Any:
    import xxhash

    return xxhash


def checksum(*data: Any) -> str:
    """XXH3-64 of some bytes, which may come in parts, as 16 hexadecimal digits."""
    return checksum_of(data)


def checksum_of(parts: Iterable[Any]) -> str:
    """The same of parts that need not be there at once."""
    state = _hashing().xxh3_64()
    for part in parts:
        state.update(part)
    digest: str = state.hexdigest()
    return digest


def checksums_of(data: bytes | memoryview) -> tuple[str, ...]:
    """Of each chunk."""
    view = memoryview(data)
    return tuple(checksum(view[at : at + CHUNK]) for at in range(0, len(view), CHUNK))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def reserve(fd: int, size: int) -> None:
    """Take the space at once, where the file system can; one that is full says so before anything is written."""
    if not hasattr(_libc(), "fallocate") or not size:
        return
    if _libc().fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) != 0:
        number = ctypes.get_errno()
        if number in _FULL:
            raise OSError(number, os.strerror(number))


_FULL: Final = frozenset({errno.EFBIG, errno.ENOSPC, errno.EDQUOT})


def _begin_write_out(fd: int, offset: int, size: int) -> None:
    # Waiting for the disk only at the end would leave it idle until then.
    if hasattr(_libc(), "sync_file_range"):
        _libc().sync_file_range(fd, ctypes.c_longlong(offset), ctypes.c_longlong(size), _START_WRITING)


def pieces(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Elements ``start`` to ``stop`` in row-major order, as flat contiguous CPU tensors; copies are small."""
    if start >= stop:
        return
    size = tensor.element_size()
    step = max(1, _PIECE // size)
    if tensor.is_contiguous() and not is_lazy(tensor):
        flat = tensor.view(-1)
        if tensor.device.type == "cpu":
            yield flat[start:stop]
            return
        for at in range(start, stop, step):
            yield flat[at : min(at + step, stop)].cpu()
    elif tensor.numel() <= step:
        # reshape() of one dimension is a view, which may skip elements.
        yield resolve(tensor).reshape(-1)[start:stop].contiguous().cpu()
    else:
        row = tensor.numel() // tensor.shape[0]
        rows = max(1, step // row)
        for at in range(start // row, -(-stop // row), rows):
            block = tensor[at : at + rows] if rows > 1 else tensor[at]
            first = at * row
            yield from pieces(block, max(start - first, 0), min(stop - first, block.numel()))


class _Stream:
    """Bytes on their way into a file, hashed by chunk."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd = fd
        self._offset = offset
        self._pending: list[memoryview] = []
        self._size = 0
        self._hash = _hashing().xxh3_64()
        self._room = CHUNK
        self.checksums: list[str] = []

    def add(self, data: memoryview) -> None:
        """Take bytes, which must stay until ``flush``."""
        for at in range(0, len(data), _WRITE):
            part = data[at : at + _WRITE]
            self._checksum(part)
            self._pending.append(part)
            self._size += len(part)
            if self._size >= _WRITE or len(self._pending) == _MAX_VECTORS:
                self.flush()

    def _checksum(self, part: memoryview) -> None:
        while len(part) >= self._room:
            self._hash.update(part[: self._room])
            self.checksums.append(self._hash.hexdigest())
            self._hash.reset()
            part, self._room = part[self._room :], CHUNK
        if len(part):
            self._hash.update(part)
            self._room -= len(part)

    def flush(self) -> None:
        """Write what is pending."""
        begin, pending = self._offset, self._pending
        while pending:
            count = os.pwritev(self._fd, pending, self._offset)
            self._offset += count
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]
        if self._size:
            _begin_write_out(self._fd, begin, self._size)
        self._size = 0

    def close(self) -> None:
        """Write the rest; the last chunk ends here."""
        self.flush()
        if self._room < CHUNK:
            self.checksums.append(self._hash.hexdigest())


@contextlib.contextmanager
def new_file(path: str, flags: int = os.O_EXCL) -> Iterator[int]:
    """Context: a new file, which is durable afterwards, and removed after an error.

    Raises:
        OSError: it cannot be made or written; names it.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
    try:
        with of(path):
            yield fd
            os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def write(directory: str, name: str, sources: Sequence[Source]) -> Written:
    """Write and fsync a new file of ``sources``. A file that could not be written is removed.

    Raises:
        OSError: it cannot be written.
    """
    sources = [sources[i] for i in arrange([s.entry for s in sources])]
    entries = [s.entry for s in sources]
    size = sum(entry.nbytes for entry in entries)
    length = len(build(entries, "0" * (16 * chunks_of(size))))
    path = os.path.join(directory, name)
    with new_file(path) as fd:
        reserve(fd, length + size)
        stream = _Stream(fd, length)
        for source in sources:
            _stream_source(stream, source)
        stream.close()
        header = build(entries, "".join(stream.checksums))
        if os.pwrite(fd, header, 0) != len(header):
            raise OSError(errno.ENOSPC, "the header was written only in part")
    return Written(name, length + size, checksums_of(header))


def _stream_source(stream: _Stream, source: Source) -> None:
    for piece in pieces(source.tensor, source.offset, source.offset + source.entry.count):
        stream.add(memory(piece))
        if is_lazy(source.tensor) or piece.untyped_storage().data_ptr() != source.tensor.untyped_storage().data_ptr():
            stream.flush()  # a copy, of which there shall be one at a time


def data_checksums(sources: Sequence[Source]) -> str:
    """The checksums that a file of these sources would carry."""
    stream = _Hashing()
    for i in arrange([s.entry for s in sources]):
        source = sources[i]
        for piece in pieces(source.tensor, source.offset, source.offset + source.entry.count):
            stream.add(memory(piece))
    stream.close()
    return "".join(stream.checksums)


class _Hashing(_Stream):
    """The checksums alone."""

    def __init__(self) -> None:
        super().__init__(-1, 0)

    def add(self, data: memoryview) -> None:
        self._checksum(data)


def unreadable(error: OSError) -> str:
    """What to say of a file of a checkpoint that cannot be read."""
    missing = error.errno in (errno.ENOENT, errno.ELOOP)
    return f"{explain(error)}{'; the checkpoint is not complete, load another one' if missing else ''}"


def open_file(path: str, size: int | None) -> int:
    """Open a regular file for reading, not through a link.

    Raises:
        CheckpointError: it is missing, another kind of file, or of another size than the record says.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(unreadable(error)) from error
    status = os.fstat(fd)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a regular file"
    elif size is not None and status.st_size != size:
        problem = f"has {status.st_size} bytes, and {size} were written; it was cut or changed, load another checkpoint"
    if problem:
        os.close(fd)
        raise CheckpointError(f"{path}: {problem}")
    return fd


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Write all of it."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def read_into(fd: int, path: str, views: list[memoryview], offset: int) -> None:
    """Fill ``views`` with the bytes from ``offset`` on.

    Raises:
        CheckpointError: the file ends before, or cannot be read.
    """
    at = 0
    while at < len(views):
        try:
            count = os.preadv(fd, views[at : at + _MAX_VECTORS], offset)
        except OSError as error:
            error.filename = path
            raise CheckpointError(unreadable(error)) from error
        if count == 0:
            raise CheckpointError(f"{path}: ends at byte {offset}, in the middle of a tensor; load another checkpoint")
        offset += count
        while at < len(views) and count >= len(views[at]):
            count -= len(views[at])
            at += 1
        if count:  # the rest of a view that was filled in part
            views = [views[at][count:], *views[at + 1 :]]
            at = 0


def read_whole(path: str, limit: int, kind: str) -> bytes:
    """A small file.

    Raises:
        CheckpointError: it is missing, or too large for ``kind`` (a record, say).
    """
    fd = open_file(path, None)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes are too many for {kind}")
        content = bytearray(size)
        read_into(fd, path, [memoryview(content)] if size else [], 0)
    finally:
        os.close(fd)
    return bytes(content)
