"""The bytes of shard files: written with checksums and early write-out, or linked where they are on disk; read by ranges."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

import torch

from ..errors import CheckpointError
from .failures import explain, naming
from .safetensors import CHUNK, DIGITS, ITEM_BYTES, MAX_HEADER, Entry, build_header, chunks_of, is_lazy, memory, resolve

_WRITE: Final = 8 << 20  # bytes of one write, after which the kernel is asked to begin writing out
_PIECE: Final = 16 << 20  # bytes of a copy where a tensor is not in plain memory
_MAX_VECTORS: Final = 512
_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE


@dataclass(frozen=True, slots=True)
class WriteItem:
    """An entry of a file to be, and the tensor that holds it from element ``offset`` on."""

    entry: Entry
    tensor: torch.Tensor
    offset: int

    def pieces(self) -> Iterator[torch.Tensor]:
        """Its elements, as ``pieces`` gives them."""
        return pieces(self.tensor, self.offset, self.offset + self.entry.count)


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
        with naming(path):
            yield fd
            os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def _arranged(items: Sequence[WriteItem]) -> list[WriteItem]:
    """In the order of a file: wide elements first, so that all are aligned."""
    return sorted(items, key=lambda item: -ITEM_BYTES[item.entry.dtype])


def _header(items: Sequence[WriteItem], checksums: str) -> bytes:
    return build_header([item.entry for item in items], {"accel": "1", "xxh3": checksums})


def write(directory: str, name: str, items: Sequence[WriteItem]) -> Written:
    """Write and fsync a new file of ``items``. A file that could not be written is removed.

    Raises:
        OSError: it cannot be written.
    """
    items = _arranged(items)
    size = sum(item.entry.nbytes for item in items)
    blank = "0" * (DIGITS * chunks_of(size))  # the checksums are known last, and as long
    header = _header(items, blank)
    path = os.path.join(directory, name)
    with new_file(path) as fd:
        reserve(fd, len(header) + size)
        stream = _Stream(fd, len(header))
        for item in items:
            _write_item(stream, item)
        stream.close()
        header = header.replace(blank.encode(), "".join(stream.checksums).encode(), 1)
        if os.pwrite(fd, header, 0) != len(header):
            raise OSError(errno.ENOSPC, "the header was written only in part")
    return Written(name, len(header) + size, checksums_of(header))


def _write_item(stream: _Stream, item: WriteItem) -> None:
    storage = None if is_lazy(item.tensor) else item.tensor.untyped_storage().data_ptr()
    for piece in item.pieces():
        stream.add(memory(piece))
        if piece.untyped_storage().data_ptr() != storage:
            stream.flush()  # a copy, of which there shall be one at a time


# -- Unchanged tensors: a file of an earlier save of this process gets a second name, and is not written again ---------

_REMEMBERED: Final = 16


@dataclass(frozen=True, slots=True)
class _FileState:
    """A file that this process wrote; were it written to since, its inode or time would tell."""

    path: str
    size: int
    inode: tuple[int, int]
    modified: int


def _look(path: str) -> _FileState:
    status = os.lstat(path)
    return _FileState(path, status.st_size, (status.st_dev, status.st_ino), status.st_mtime_ns)


@final
class EarlierFiles:
    """Files of earlier saves, by a checksum of their headers, which hold the checksums of all that is in them."""

    def __init__(self) -> None:
        self._files: dict[str, _FileState] = {}

    def remember(self, directory: str, written: Written) -> None:
        """Note a file that can be linked next time."""
        key = checksum("".join(written.header).encode())
        self._files.pop(key, None)
        self._files[key] = _look(os.path.join(directory, written.name))
        while len(self._files) > _REMEMBERED:
            self._files.pop(next(iter(self._files)))

    def link(self, directory: str, name: str, items: Sequence[WriteItem]) -> Written | None:
        """Give a file of an earlier save that holds just these items a second name; None if there is none."""
        if not items or not self._files:
            return None
        header = checksums_of(_header(_arranged(items), _data_checksums(items)))
        file = self._files.get(checksum("".join(header).encode()))
        # Where it is gone, was changed, or cannot be linked from there, the tensors are written again.
        with contextlib.suppress(OSError):
            if file is not None and _look(file.path) == file:
                path = os.path.join(directory, name)
                os.link(file.path, path, follow_symlinks=False)
                if os.lstat(path).st_size == file.size:
                    return Written(name, file.size, header)
                os.unlink(path)
        return None


earlier_files: Final = EarlierFiles()


def _data_checksums(items: Sequence[WriteItem]) -> str:
    """The checksums that a file of these items would carry."""
    stream = _Hashing()
    for item in _arranged(items):
        for piece in item.pieces():
            stream.add(memory(piece))
    stream.close()
    return "".join(stream.checksums)


class _Hashing(_Stream):
    """The checksums alone."""

    def __init__(self) -> None:
        super().__init__(-1, 0)

    def add(self, data: memoryview) -> None:
        self._checksum(data)


# -- Reading -----------------------------------------------------------------------------------------------------------


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


def read_header(fd: int, path: str) -> bytearray:
    """The first bytes of a safetensors file up to its data; none where it has not as many as they say.

    Raises:
        CheckpointError: it cannot be read.
    """
    with naming(path):
        size, length = os.fstat(fd).st_size, 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    content = bytearray(length if length <= min(size, MAX_HEADER + 8) else 0)
    if content:
        read_into(fd, path, [memoryview(content)], 0)
    return content


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
